"""Taps: the places in a loss where parameters meet data.

`read_loss` traces ``loss(params, example)`` for one example and sorts its equations.
Those that no example reaches, the prologue (casts, transposes, weight standardisation,
products of parameters), are evaluated once per batch. Where a parameter-only value w
enters an equation y = f(x, w) with data, there is a tap:

    prologue        w = standardise(W)
    tap             y = conv(x, w)            keep x, perturb y
    body            loss = ...y...

One backward pass with respect to zero perturbations of every y gives dy = ∂loss/∂y for
each example and computes no weight gradient. From (x, dy) each strategy finds the norm
of an example's gradient and the sum of clipped gradients.

A use of w is followed back through its links (`links`) to its anchor:
a leaf of the parameters, or the first value that is not a leaf moved, cast and scaled.
Leaves that share an anchor, and the anchors they share, form a unit. The squared norm
of an example's gradient is the sum over units; within one there may be cross terms.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from tanager.clipping.analysis import jaxprs
from tanager.clipping.analysis.dtypes import widen
from tanager.clipping.analysis.jaxprs import Origin, is_float
from tanager.clipping.analysis.links import Constants, Link, link
from tanager.clipping.analysis.recognise import Standardisation, recognise
from tanager.clipping.analysis.refusals import refuse_ill_defined


@dataclass(frozen=True, eq=False)
class Use:
    """One operand of a tap that carries parameters: links lead to it from an anchor."""

    tap: int
    position: int
    anchor: jex.Var
    links: tuple[Link, ...]


@dataclass(frozen=True, eq=False)
class Tap:
    """An equation of the body in which parameters meet data (operands at `data`)."""

    number: int
    equation: jex.JaxprEqn
    data: tuple[int, ...]
    uses: tuple[Use, ...] = ()


@dataclass(frozen=True, eq=False)
class Unit:
    """Leaves and anchors that share parameters: norms of different units just add.

    Its kind is ``"leaf"`` if the one anchor is the one leaf, ``"standardised"`` if it
    is known in what `form` that is standardised (perhaps with a gain), else
    ``"general"``.
    """

    leaves: tuple[int, ...]
    anchors: tuple[jex.Var, ...]
    uses: tuple[Use, ...]
    kind: str
    form: Standardisation | None = None


@dataclass(eq=False)
class Program:
    """A loss taken apart, see the module.

    The first `leaves` arguments of `jaxpr` are the parameters, the others are those of
    one example. The units together hold every leaf that a gradient of the loss reaches:
    that of the other leaves is 0. `aux` are the equations that only auxiliary results
    need, which have no taps, and `aux_tree` is the structure of those results.
    """

    jaxpr: jex.ClosedJaxpr
    leaves: int
    prologue: list[jex.JaxprEqn]
    body: list[jex.JaxprEqn]
    taps: list[Tap]
    units: list[Unit]
    aux: list[jex.JaxprEqn]
    aux_tree: Any = None

    @property
    def needs_definition(self) -> bool:
        """Whether a derivative in it depends on which operands have one.

        Taps change that: of a tap's operands only parameters have a derivative, and in
        the pass through the body all but them. Such a loss is clipped by `vmap` of its
        gradient.
        """
        return any(jaxprs.asks_what_varies(tap.equation) for tap in self.taps)

    @property
    def parameters(self) -> list[jex.Var]:
        """The variables of the parameter leaves."""
        return self.jaxpr.jaxpr.invars[: self.leaves]

    def evaluate_prologue(self, leaves: Sequence[Array]) -> dict[jex.Var, Any]:
        """Return every value that no example reaches, by variable."""
        return jaxprs.walk(self.prologue, self._given(leaves), jaxprs.evaluate)

    def _given(self, leaves: Sequence[Array]) -> dict[jex.Var, Any]:
        variables = (*self.jaxpr.jaxpr.constvars, *self.parameters)
        return dict(zip(variables, (*self.jaxpr.consts, *leaves), strict=True))

    def _anchors_of(self, unit: Unit, leaves: Sequence[Array]) -> list[Array]:
        """Return a unit's anchors from all leaves, in float32 or wider throughout."""
        needed = _needed(self.prologue, unit.anchors)
        values = jaxprs.walk(needed, self._given(leaves), jaxprs.evaluate_wide)
        return [values[anchor] for anchor in unit.anchors]

    def pull_back(
        self, unit: Unit, leaves: Sequence[Array], gradients: Sequence[Array]
    ) -> list[Array]:
        """Carry gradients of a unit's anchors back to its leaves, in float32."""
        wide = [widen(leaf) for leaf in leaves]

        def anchors(own):
            every = list(wide)
            for number, leaf in zip(unit.leaves, own, strict=True):
                every[number] = leaf
            return self._anchors_of(unit, every)

        own = [wide[number] for number in unit.leaves]
        values, transpose = jax.vjp(anchors, own)
        pairs = zip(gradients, values, strict=True)
        return transpose([gradient.astype(v.dtype) for gradient, v in pairs])[0]

    def evaluate_body(
        self,
        constants: dict[jex.Var, Any],
        perturbations: Sequence[Sequence[Array]],
        example: Sequence[Array],
    ) -> tuple[list[Array], list[tuple[list[Any], list[Any]]]]:
        """Return loss and auxiliary results of one example, and each tap's (x, y).

        Each float result of each tap is shifted by its perturbation.
        """
        met, taps = [], {id(tap.equation): tap for tap in self.taps}

        def rule(equation: jex.JaxprEqn, operands: list[Any]) -> list[Any]:
            tap = taps.get(id(equation))
            if tap is None and _convolves_data(equation, constants):
                shared = constants.__contains__
                return jaxprs.evaluate_apart(equation, operands, shared)
            results = jaxprs.evaluate(equation, operands)
            if tap is None:
                return results
            met.append(([operands[n] for n in tap.data], results))
            shifts = iter(perturbations[tap.number])
            return [y + next(shifts) if is_float(y) else y for y in results]

        inputs = self.jaxpr.jaxpr.invars[self.leaves :]
        values = constants | dict(zip(inputs, example, strict=True))
        values = jaxprs.walk([*self.body, *self.aux], values, rule)
        return [jaxprs.read(values, atom) for atom in self.jaxpr.jaxpr.outvars], met


def _convolves_data(equation: jex.JaxprEqn, constants: dict[jex.Var, Any]) -> bool:
    """Whether images may meet kernels that are no parameters: data meets data."""
    if not jaxprs.convolves(equation) or not any(map(is_float, equation.outvars)):
        return False
    if equation.primitive.name == "conv_general_dilated":
        return not constants.keys() & set(equation.invars)
    return equation.primitive.name != "while"


def float_results(tap: Tap) -> list[jex.Var]:
    """Return the results of a tap that are perturbed."""
    return [variable for variable in tap.equation.outvars if is_float(variable)]


def read_loss(
    loss: Callable, params: PyTree, example: PyTree, has_aux: bool = False
) -> Program:
    """Trace the loss of one example, perhaps (loss, aux), and find its taps."""
    leaves, params_tree = jax.tree.flatten(params)
    inputs, example_tree = jax.tree.flatten(example)

    def flat(*values):
        return loss(
            jax.tree.unflatten(params_tree, values[: len(leaves)]),
            jax.tree.unflatten(example_tree, values[len(leaves) :]),
        )

    def flat_with_data(*values):
        result, *aux = flat(*values) if has_aux else (flat(*values),)
        return result + _zero_of_data(values[len(leaves) :], result), *aux

    origins = [Origin.PARAMETER] * len(leaves) + [Origin.DATA] * len(inputs)
    for function in (flat, flat_with_data):
        traced = jax.make_jaxpr(function, return_shape=True)
        closed, shapes = traced(*leaves, *inputs)
        opened = jaxprs.open_calls(closed, origins)
        refuse_ill_defined(opened.jaxpr)
        program = _sort(opened, len(leaves))
        program.aux_tree = jax.tree.structure(shapes[1] if has_aux else ())
        if program.body:
            break
    return program


def _zero_of_data(example: Sequence[Any], result: Any) -> Array:
    """A zero that counts as data, whatever the example holds."""
    numbers = [x for x in example if jnp.issubdtype(x.dtype, np.number)]
    first = jnp.ravel((numbers or example)[0])[:1]
    return jnp.any(first < first).astype(jnp.result_type(result))


class _Live(NamedTuple):
    """A value of parameters alone: the equation that made it, the leaves it is of."""

    equation: jex.JaxprEqn | None
    leaves: set[jex.Var]


def _sort(closed: jex.ClosedJaxpr, leaves: int) -> Program:
    jaxpr = closed.jaxpr
    origins: dict[Any, Origin] = dict.fromkeys(jaxpr.constvars, Origin.CONSTANT)
    origins.update(dict.fromkeys(jaxpr.invars[:leaves], Origin.PARAMETER))
    origins.update(dict.fromkeys(jaxpr.invars[leaves:], Origin.DATA))
    live = {leaf: _Live(None, {leaf}) for leaf in jaxpr.invars[:leaves]}
    prologue, body, taps = [], [], []
    constants: dict[jex.Var, Callable[[], Any]] = {}

    def hold(variables: Sequence[jex.Var]) -> None:
        for own in variables:
            constants[own] = functools.partial(_constant, closed, prologue, own)

    hold(jaxpr.constvars)
    of_loss = _needed(jaxpr.eqns, jaxpr.outvars[:1], effects=True)
    for equation in of_loss:
        atoms = jaxprs.variables(equation)
        origin = max((origins[atom] for atom in atoms), default=Origin.CONSTANT)
        origins.update(dict.fromkeys(equation.outvars, origin))
        if origin != Origin.DATA:
            prologue.append(equation)
            if origin == Origin.CONSTANT:
                hold(equation.outvars)
            if equation.primitive.name != "stop_gradient" and live.keys() & set(atoms):
                roots = set().union(*(live[a].leaves for a in atoms if a in live))
                own = _Live(equation, roots)
                live.update(dict.fromkeys(filter(is_float, equation.outvars), own))
            continue
        body.append(equation)
    reached = _reached(body, jaxpr.outvars[:1])
    for equation in body:
        meet = live.keys() & set(jaxprs.variables(equation))
        if (
            meet
            and equation.primitive.name not in _FLAT
            and reached & set(equation.outvars)
        ):
            taps.append(_tap(len(taps), equation, origins, live, constants))
    units = _units([use for tap in taps for use in tap.uses], jaxpr.invars, live)
    units = [_recognised(unit, prologue, jaxpr.invars, constants) for unit in units]
    others = _needed(jaxpr.eqns, jaxpr.outvars)
    aux = [each for each in others if not any(each is one for one in of_loss)]
    return Program(closed, leaves, prologue, body, taps, units, aux)


_FLAT = {"ceil", "floor", "round", "sign", "stop_gradient", "while"}
"""No gradient passes these; of a while loop, `check_loss` had refused it."""


def _reached(equations: Sequence[jex.JaxprEqn], results: Sequence[Any]) -> set[Any]:
    """Return the variables that a gradient of the results may reach."""
    reached = {v for v in results if isinstance(v, jex.Var) and is_float(v)}
    for equation in reversed(equations):
        own = [v for v in equation.outvars if v in reached]
        if not own or equation.primitive.name in _FLAT:
            continue
        entered = equation.invars
        if equation.primitive.name in jaxprs.OPENED:
            within, _ = jaxprs.body_of(equation)
            pairs = zip(equation.outvars, within.outvars, strict=True)
            inner = _reached(within.eqns, [v for out, v in pairs if out in own])
            pairs = zip(equation.invars, within.invars, strict=True)
            entered = [atom for atom, v in pairs if v in inner]
        reached.update(a for a in entered if isinstance(a, jex.Var) and is_float(a))
    return reached


def _needed(
    equations: Sequence[jex.JaxprEqn], results: Sequence[Any], effects: bool = False
) -> list[jex.JaxprEqn]:
    """Return the equations that results depend on, and those with effects if asked."""
    wanted = {atom for atom in results if isinstance(atom, jex.Var)}
    needed = []
    for equation in reversed(equations):
        if (effects and equation.effects) or wanted & set(equation.outvars):
            needed.append(equation)
            wanted.update(jaxprs.variables(equation))
    return needed[::-1]


def _constant(
    closed: jex.ClosedJaxpr, prologue: Sequence[jex.JaxprEqn], variable: jex.Var
) -> Any:
    """Return the value of a variable that neither examples nor parameters reach."""
    given = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    needed = _needed(prologue, [variable])
    return jaxprs.walk(needed, given, jaxprs.evaluate)[variable]


def _tap(
    number: int,
    equation: jex.JaxprEqn,
    origins: dict,
    live: dict[jex.Var, _Live],
    constants: Constants,
) -> Tap:
    data, uses = [], []
    for position, atom in enumerate(equation.invars):
        if isinstance(atom, jex.Literal) or atom in equation.invars[:position]:
            continue
        if origins[atom] == Origin.DATA:
            data.append(position)
        elif atom in live:
            uses.append(Use(number, position, *_chain(atom, live, constants)))
    return Tap(number, equation, tuple(data), tuple(uses))


def _chain(
    variable: jex.Var, live: dict[jex.Var, _Live], constants: Constants
) -> tuple[jex.Var, tuple[Link, ...]]:
    """Follow links back from a variable to its anchor."""
    links: list[Link] = []
    while (equation := live[variable].equation) is not None:
        operand = next(v for v in jaxprs.variables(equation) if v in live)
        result = equation.outvars.index(variable)
        step = link(equation, result, operand, constants)
        if step is None:
            break
        links.append(step)
        variable = operand
    return variable, tuple(reversed(links))


def _units(
    uses: list[Use], leaves: Sequence[jex.Var], live: dict[jex.Var, _Live]
) -> list[Unit]:
    order: dict[jex.Var, None] = dict.fromkeys(use.anchor for use in uses)
    parts: list[tuple[set[jex.Var], set[jex.Var]]] = []  # anchors and their leaves
    for anchor in order:
        own = live[anchor].leaves
        shared = [part for part in parts if part[1] & own]
        parts = [part for part in parts if part not in shared]
        anchors = {anchor}.union(*(part[0] for part in shared))
        parts.append((anchors, own.union(*(part[1] for part in shared))))
    units = []
    for anchors, origin in parts:
        ordered = tuple(anchor for anchor in order if anchor in anchors)
        numbers = tuple(n for n, leaf in enumerate(leaves) if leaf in origin)
        own = tuple(use for use in uses if use.anchor in anchors)
        units.append(Unit(numbers, ordered, own, _kind(ordered, live)))
    return sorted(units, key=lambda unit: list(order).index(unit.anchors[0]))


def _kind(anchors: tuple[jex.Var, ...], live: dict[jex.Var, _Live]) -> str:
    one = len(anchors) == 1 and live[anchors[0]].equation is None
    return "leaf" if one else "general"


def _recognised(
    unit: Unit,
    prologue: Sequence[jex.JaxprEqn],
    leaves: Sequence[jex.Var],
    constants: Constants,
) -> Unit:
    if unit.kind == "leaf" or len(unit.anchors) != 1:
        return unit
    (anchor,) = unit.anchors
    equations, own = _needed(prologue, [anchor]), [leaves[n] for n in unit.leaves]
    form = recognise(equations, anchor, own, constants)
    return replace(unit, kind="standardised", form=form) if form else unit
