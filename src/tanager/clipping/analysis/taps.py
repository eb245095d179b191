"""Taps: the places in a loss where parameters meet data.

`reading` traces ``loss(params, example)`` for one example and sorts its equations.
Those that no example reaches, the prologue (casts, transposes, weight standardisation,
products of parameters), are evaluated once per batch. Where a parameter-only value w
enters an equation y = f(x, w) with data, there is a tap:

    prologue        w = standardise(W)
    tap             y = conv(x, w)            keep x, perturb y
    body            loss = ...y...

One backward pass with respect to zero perturbations of every y gives dy = ∂loss/∂y for
each example and computes no weight gradient. From (x, dy) each strategy finds the norm
of an example's gradient and the sum of clipped gradients.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jaxtyping import Array

from tanager.clipping.analysis import jaxprs, scans
from tanager.clipping.analysis.dtypes import widen
from tanager.clipping.analysis.jaxprs import aval, is_float
from tanager.clipping.analysis.links import Link
from tanager.clipping.analysis.opening import parts_of
from tanager.clipping.analysis.recognise import Standardisation


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
        """Whether `vmap` of its gradient must clip it.

        A derivative in it may depend on which operands have one (``symbolic_zeros``),
        or be missing without the others: of a tap's operands only parameters have one,
        and in the pass through the body all but them. Or it passes a mutable reference,
        where no equation shows its way.
        """
        every = jaxprs.every_equation(tap.equation for tap in self.taps)
        return (
            jaxprs.has_references(self.jaxpr.jaxpr)
            or any(each.params.get("symbolic_zeros") is True for each in every)
            or any(map(_fails_apart, self.taps))
        )

    @functools.cached_property
    def convolves_data(self) -> bool:
        """Whether images may meet kernels that are no parameters: data meets data."""
        shared = {*self.parameters, *self.jaxpr.jaxpr.constvars}
        shared.update(v for each in self.prologue for v in each.outvars)
        return any(_convolves_data(each, shared) for each in self.body)

    @functools.cached_property
    def activations(self) -> float:
        """Bytes of the taps' inputs and outputs for one example."""
        held = set()
        for tap in self.taps:
            inputs = (tap.equation.invars[number] for number in tap.data)
            held.update(inputs, tap.equation.outvars)
        return float(sum(aval(v).size * aval(v).dtype.itemsize for v in held))

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

    def pull_back(
        self, unit: Unit, leaves: Sequence[Array], gradients: Sequence[Array]
    ) -> list[Array]:
        """Carry gradients of a unit's anchors back to its leaves, in float32."""
        wide = [widen(leaf) for leaf in leaves]
        needed = needed_for(self.prologue, unit.anchors)

        def anchors(own):
            every = list(wide)
            for number, leaf in zip(unit.leaves, own, strict=True):
                every[number] = leaf
            values = jaxprs.walk(needed, self._given(every), jaxprs.evaluate_wide)
            return [values[anchor] for anchor in unit.anchors]

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
        rule = self._rule(perturbations, met)
        inputs = self.jaxpr.jaxpr.invars[self.leaves :]
        values = constants | dict(zip(inputs, example, strict=True))
        values = jaxprs.walk([*self.body, *self.aux], values, rule)
        outputs = [jaxprs.read(values, atom) for atom in self.jaxpr.jaxpr.outvars]
        return outputs, [met[tap.number] for tap in self.taps]

    def _rule(
        self,
        perturbations: Sequence[Sequence[Array]],
        met: dict[int, tuple[list[Any], list[Any]]],
    ) -> jaxprs.Evaluation:
        """Return the rule that perturbs taps, and writes their (x, y) into `met`."""
        taps = {id(tap.met_at): tap for tap in self.taps}
        scanned = {id(tap.all_steps.scan) for tap in self.taps if tap.all_steps}

        def rule(equation: jex.JaxprEqn, operands: list[Any]) -> list[Any]:
            if id(equation) in scanned:
                return self._scan(equation, operands, perturbations, met)
            tap = taps.get(id(equation))
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

        def step(carry: list[Any], moving: Any) -> tuple[list[Any], Any]:
            slices, shift = moving
            seen: dict[int, tuple[list[Any], list[Any]]] = {}
            shifted = [shift.get(number, ()) for number in range(len(self.taps))]
            rule = self._rule(shifted, seen)
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


def _fails_apart(tap: Tap) -> bool:
    """Whether JAX has no derivative in one operand of a tap without the others."""
    equation = tap.equation
    if equation.primitive.name != "custom_linear_solve":
        return equation.primitive.name == "pad"
    lengths = equation.params["const_lengths"]
    inverse = range(lengths.matvec, sum(lengths))
    return any(use.position in inverse for use in tap.uses)


def _convolves_data(equation: jex.JaxprEqn, shared: set[jex.Var]) -> bool:
    """Whether in it images may meet kernels that each row has for itself.

    `shared` are the variables that all rows have in common.
    """
    if equation.primitive.name == "conv_general_dilated":
        return not any(v in shared for v in jaxprs.variables(equation))
    for inner in jaxprs.jaxprs_in(equation):
        known = {*inner.constvars, *_shared_within(equation, inner, shared)}
        for each in inner.eqns:
            if _convolves_data(each, known):
                return True
            if all(v in known for v in jaxprs.variables(each)):
                known.update(each.outvars)
    return False


def _shared_within(
    equation: jex.JaxprEqn, inner: Any, shared: set[jex.Var]
) -> list[jex.Var]:
    """Return the arguments of a jaxpr in an equation that all rows have in common.

    None of a branch, which gives every row all operands, nor what a loop carries.
    """
    name, given = equation.primitive.name, equation.invars
    if name == "while" or len(inner.invars) != len(given):
        return []
    own = list(inner.invars)
    if name == "scan":
        own, given = (
            [*part.consts, *part.stacked]
            for part in (parts_of(equation, own), parts_of(equation, given))
        )
    pairs = zip(own, given, strict=True)
    return [v for v, a in pairs if isinstance(a, jex.Literal) or a in shared]


def float_results(tap: Tap) -> list[jex.Var]:
    """Return the results of a tap that are perturbed."""
    return [variable for variable in tap.equation.outvars if is_float(variable)]


def needed_for(
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
