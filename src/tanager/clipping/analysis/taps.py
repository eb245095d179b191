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
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from tanager.clipping.analysis import jaxprs, scans
from tanager.clipping.analysis.dtypes import widen
from tanager.clipping.analysis.jaxprs import aval, is_float
from tanager.clipping.analysis.links import Constants, Link, link
from tanager.clipping.analysis.opening import Origin, open_calls, parts_of, zero_of_data
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
    """An equation of the body in which parameters meet data (operands at `data`).

    Within the step of a scan, the equation is that for `all_steps` at once.
    """

    number: int
    equation: jex.JaxprEqn
    data: tuple[int, ...]
    uses: tuple[Use, ...] = ()
    all_steps: scans.Stacked | None = None

    @property
    def met_at(self) -> jex.JaxprEqn:
        """The equation of the loss."""
        return self.equation if self.all_steps is None else self.all_steps.step

    @property
    def met(self) -> list[Any]:
        """The variables of the loss for the operands at `data`."""
        if self.all_steps is not None:
            return self.all_steps.moving
        return [self.equation.invars[position] for position in self.data]


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
        met: dict[int, tuple[list[Any], list[Any]]] = {}
        rule = self._rule(constants, perturbations, met)
        inputs = self.jaxpr.jaxpr.invars[self.leaves :]
        values = constants | dict(zip(inputs, example, strict=True))
        values = jaxprs.walk([*self.body, *self.aux], values, rule)
        outputs = [jaxprs.read(values, atom) for atom in self.jaxpr.jaxpr.outvars]
        return outputs, [met[tap.number] for tap in self.taps]

    def _rule(
        self,
        shared: Container[jex.Var],
        perturbations: Sequence[Sequence[Array]],
        met: dict[int, tuple[list[Any], list[Any]]],
    ) -> jaxprs.Evaluation:
        """Return the rule that perturbs taps, and writes down what was met there.

        Args:
            shared: the variables that all rows have in common.
            perturbations: of each tap.
            met: where each tap's (x, y) are written, by number.
        """
        taps = {id(tap.met_at): tap for tap in self.taps}
        scanned = {id(tap.all_steps.scan) for tap in self.taps if tap.all_steps}

        def rule(equation: jex.JaxprEqn, operands: list[Any]) -> list[Any]:
            if id(equation) in scanned:
                return self._scan(equation, operands, shared, perturbations, met)
            tap = taps.get(id(equation))
            if tap is None and _convolves_data(equation, shared):
                return jaxprs.evaluate_apart(equation, operands, shared.__contains__)
            results = jaxprs.evaluate(equation, operands)
            if tap is None:
                return results
            atoms = equation.invars
            xs = [operands[atoms.index(variable)] for variable in tap.met]
            met[tap.number] = xs, results
            shifts = iter(perturbations[tap.number])
            return [y + next(shifts) if is_float(y) else y for y in results]

        return rule

    def _scan(
        self,
        scan: jex.JaxprEqn,
        operands: Sequence[Any],
        shared: Container[jex.Var],
        perturbations: Sequence[Sequence[Array]],
        met: dict[int, tuple[list[Any], list[Any]]],
    ) -> list[Any]:
        """Evaluate a scan that has taps in its step; write (x, y) of all steps."""
        within = {
            tap.number: tap.all_steps
            for tap in self.taps
            if tap.all_steps is not None and tap.all_steps.scan is scan
        }
        steps = scan.params["length"]
        shifts = {
            number: [each.ys.unstack(shift, steps) for shift in perturbations[number]]
            for number, each in within.items()
        }
        body, consts = jaxprs.body_of(scan)
        own, given = parts_of(scan, body.invars), parts_of(scan, operands)
        atoms = parts_of(scan, scan.invars).consts
        pairs = zip(own.consts, atoms, strict=True)
        common = {v for v, a in pairs if isinstance(a, jex.Literal) or a in shared}
        common.update(body.constvars)

        def step(carry: list[Any], moving: Any) -> tuple[list[Any], Any]:
            slices, shift = moving
            seen: dict[int, tuple[list[Any], list[Any]]] = {}
            shifted = [shift.get(number, ()) for number in range(len(self.taps))]
            rule = self._rule(common, shifted, seen)
            arguments = [*given.consts, *carry, *slices]
            results = jaxprs.interpret(body, consts, arguments, rule)
            return results[: len(carry)], (results[len(carry) :], seen)

        start, slices = (
            [jnp.asarray(x, aval(v).dtype) for x, v in zip(*pair, strict=True)]
            for pair in ((given.carry, own.carry), (given.stacked, own.stacked))
        )
        back = scan.params["reverse"]
        last, (results, seen) = jax.lax.scan(
            step, start, (slices, shifts), length=steps, reverse=back
        )
        for number, (xs, ys) in seen.items():
            each = within[number]
            met[number] = [each.xs.stack(x) for x in xs], [each.ys.stack(y) for y in ys]
        return [*last, *results]


def _convolves_data(equation: jex.JaxprEqn, shared: Container[jex.Var]) -> bool:
    """Whether images may meet kernels that are no parameters: data meets data."""
    if not jaxprs.convolves(equation) or not any(map(is_float, equation.outvars)):
        return False
    if equation.primitive.name == "conv_general_dilated":
        return not any(v in shared for v in jaxprs.variables(equation))
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
        return result + zero_of_data(values[len(leaves) :], result), *aux

    origins = [Origin.PARAMETER] * len(leaves) + [Origin.DATA] * len(inputs)
    for function in (flat, flat_with_data):
        traced = jax.make_jaxpr(function, return_shape=True)
        closed, shapes = traced(*leaves, *inputs)
        opened = open_calls(closed, origins)
        refuse_ill_defined(opened.jaxpr)
        program = _sort(opened, len(leaves))
        program.aux_tree = jax.tree.structure(shapes[1] if has_aux else ())
        if program.body:
            break
    return program


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

    def sort(equation: jex.JaxprEqn) -> None:
        atoms = jaxprs.variables(equation)
        origin = max((origins[atom] for atom in atoms), default=Origin.CONSTANT)
        origins.update(dict.fromkeys(equation.outvars, origin))
        if origin == Origin.DATA:
            body.append(equation)
            return
        prologue.append(equation)
        if origin == Origin.CONSTANT:
            hold(equation.outvars)
        if equation.primitive.name != "stop_gradient" and live.keys() & set(atoms):
            roots = set().union(*(live[a].leaves for a in atoms if a in live))
            own = _Live(equation, roots)
            live.update(dict.fromkeys(filter(is_float, equation.outvars), own))

    hold(jaxpr.constvars)
    of_loss = _needed(jaxpr.eqns, jaxpr.outvars[:1], effects=True)
    for equation in of_loss:
        sort(equation)
    reached = _reached(body, jaxpr.outvars[:1])
    for equation in body:
        meet = live.keys() & set(jaxprs.variables(equation))
        if not meet or not reached & set(equation.outvars):
            continue
        for each in _stacked(equation, origins, live):
            if each is not None:
                for made in each.links:
                    sort(made)
                origins.update(dict.fromkeys(each.data, Origin.DATA))
            one = equation if each is None else each.equation
            if one.primitive.name not in _FLAT:
                taps.append(_tap(len(taps), one, origins, live, constants, each))
    units = _units([use for tap in taps for use in tap.uses], jaxpr.invars, live)
    units = [_recognised(unit, prologue, jaxpr.invars, constants) for unit in units]
    others = _needed(jaxpr.eqns, jaxpr.outvars)
    aux = [each for each in others if not any(each is one for one in of_loss)]
    return Program(closed, leaves, prologue, body, taps, units, aux)


def _stacked(
    equation: jex.JaxprEqn, origins: dict, live: dict[jex.Var, _Live]
) -> list[scans.Stacked | None]:
    """Return the equations of a scan's step in which parameters meet data.

    [None] stands for the equation itself, if it is no scan, or one in which parameters
    are carried, sliced, or made of others.
    """
    if equation.primitive.name != "scan" or not equation.params["length"]:
        return [None]
    step, _ = jaxprs.body_of(equation)
    own, given = (parts_of(equation, v) for v in (step.invars, equation.invars))
    moving = [v for v in (*given.carry, *given.stacked) if isinstance(v, jex.Var)]
    if any(v in live for v in moving) or step.constvars:
        return [None]
    outside, entering = {}, set()
    for inner, atom in zip(own.consts, given.consts, strict=True):
        if isinstance(atom, jex.Literal) or origins[atom] != Origin.DATA:
            outside[inner] = atom
            if isinstance(atom, jex.Var) and atom in live:
                entering.add(inner)
    found: list[scans.Stacked | None] = []
    for each in step.eqns:
        atoms = jaxprs.variables(each)
        if not entering & set(atoms):
            continue
        if all(v in outside for v in atoms):
            return [None]
        found.append(scans.stacked(equation, each, outside))
    return found


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
    all_steps: scans.Stacked | None,
) -> Tap:
    data, uses = [], []
    for position, atom in enumerate(equation.invars):
        if isinstance(atom, jex.Literal) or atom in equation.invars[:position]:
            continue
        if origins[atom] == Origin.DATA:
            data.append(position)
        elif atom in live:
            uses.append(Use(number, position, *_chain(atom, live, constants)))
    return Tap(number, equation, tuple(data), tuple(uses), all_steps)


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
