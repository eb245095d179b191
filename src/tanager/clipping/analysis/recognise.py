"""Weights that are standardised or normalised, recognised by what is computed.

The equations between a parameter W and the kernel are read as algebra (`sizes`), in
whatever order and words they are written. Per output unit, with s = ‖v‖²:

    Ŵ = k·gain·v·φ(s),  v = W − mean(W)    standardisation
                        v = W              weight norm, or a gain alone

φ(s) is 1, or 1/ℓ with ℓ made of s in steps: times a positive number, plus one that is
not negative, the larger of two, and one root. −2·s·φ'/φ then lies between 0 and 1.

This is proof and not trial: what is not known makes nothing known. Privacy does not
rest on it: norms and sums are of one linear map, whose numbers are computed once
(`standardise.parts_of`).
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float

from tanager.clipping.analysis import sizes
from tanager.clipping.analysis.jaxprs import aval
from tanager.clipping.analysis.links import Fixed
from tanager.clipping.analysis.sizes import Linear, Steps, Value, near


class Standardisation(NamedTuple):
    """How an anchor is made of a weight and perhaps a gain, see the module.

    `order` are the weight's axes in the anchor's order, `unit` is the axis of the
    anchor along which output units lie.
    """

    weight: jex.Var
    gain: jex.Var | None
    order: tuple[int, ...]
    unit: int
    centred: bool
    number: float
    steps: Steps

    def size(self, spread: Float[Array, " o"]) -> Float[Array, " o"]:
        """Return k·φ(s)."""
        if not self.steps:
            return jnp.full_like(spread, self.number)
        for name, *numbers in self.steps:
            spread = sizes.STEPS[name](spread, *numbers)
        return self.number * spread


def recognise(
    equations: Sequence[jex.JaxprEqn],
    anchor: jex.Var,
    leaves: Sequence[jex.Var],
    constants: Fixed,
) -> Standardisation | None:
    """Return how an anchor is made of its leaves, None where that is not known."""
    weight, *gain = sorted(leaves, key=lambda leaf: -aval(leaf).size)
    shape = aval(weight).shape
    if len(gain) > 1 or aval(weight).size != aval(anchor).size or len(shape) < 2:
        return None
    known: dict[jex.Var, Any] = {}
    for unit in reversed(range(len(shape))):
        reader = _Reader(shape, unit, constants, known)
        reader.values[weight] = Linear(tuple((n,) for n in range(len(shape))), 1.0)
        for leaf in gain:
            reader.values[leaf] = reader.gain(leaf)
        for equation in equations:
            reader.read(equation)
        form = reader.form(reader.values.get(anchor), weight)
        if form and {form.weight, form.gain} - {None} == set(leaves):
            return form
    return None


class _Reader:
    """Values of the equations, for units along one axis of the weight."""

    def __init__(self, shape: Sequence[int], unit: int, constants: Fixed, known: dict):
        self.values: dict[jex.Var, Value] = {}
        self._shape, self._unit = shape, unit
        self._constants, self._known = constants, known
        self.fan_in = math.prod(n for axis, n in enumerate(shape) if axis != unit)
        self._within = self._long(n for n in range(len(shape)) if n != unit)

    def _long(self, axes: Iterable[int]) -> set[int]:
        return {axis for axis in axes if self._shape[axis] > 1}

    def gain(self, leaf: jex.Var) -> Value:
        """Return the value of a leaf, if it is one number for each unit."""
        count, shape = self._shape[self._unit], aval(leaf).shape
        if count == 1 or math.prod(shape) != count or count not in shape:
            return None
        axes = tuple((self._unit,) if n == count else () for n in shape)
        return Linear(axes, one=1.0, gain=leaf)

    def form(self, value: Value, weight: jex.Var) -> Standardisation | None:
        """Return what a value is, if it is what is looked for."""
        if not isinstance(value, Linear) or not value.entry or value.one:
            return None
        order = sum(value.axes, ())
        every = sorted(order) == [*range(len(self._shape))]
        if not every or len(value.axes) != len(order):
            return None
        centred = near(value.mean, -value.entry, value.entry)
        if not centred and not near(value.mean, 0.0, value.entry):
            return None
        if value.steps and (value.centred != centred or value.steps[-1] != ("over",)):
            return None
        where = weight, value.gain, order, order.index(self._unit)
        return Standardisation(*where, centred, value.entry, value.steps)

    def read(self, equation: jex.JaxprEqn) -> None:
        """Find the results of one equation."""
        rule = _RULES.get(equation.primitive.name)
        (result, *more) = equation.outvars
        real = jnp.issubdtype(aval(result).dtype, jnp.floating)
        if rule is None or more or not real or result in self._constants:
            return
        values = [self._value(atom) for atom in equation.invars]
        if rule is _choose or all(value is not None for value in values):
            self.values[result] = rule(self, equation, *values)

    def _value(self, atom: Any) -> Value:
        if isinstance(atom, jex.Var) and atom not in self._constants:
            return self.values.get(atom)
        number = self._number(atom)
        return None if number is None else Linear(((),) * aval(atom).ndim, one=number)

    def _number(self, atom: Any) -> float | None:
        """Return the number that a constant is, if it is finite, real and one alone."""
        if isinstance(atom, jex.Literal):
            value = atom.val
        else:
            if atom not in self._known:
                self._known[atom] = self._constant(atom)
            value = self._known[atom]
        if value is None or np.size(value) != 1 or np.iscomplexobj(value):
            return None
        number = float(np.asarray(value).reshape(()))
        return number if math.isfinite(number) else None

    def _constant(self, atom: jex.Var) -> Any:
        if aval(atom).size != 1 or jnp.issubdtype(
            aval(atom).dtype, jax.dtypes.extended
        ):
            return None
        with jax.ensure_compile_time_eval():
            value = self._constants[atom]()
        return None if isinstance(value, Tracer) else value

    def total(self, equation: jex.JaxprEqn, value: Value) -> Value:
        """Return a sum, if it is over the fan-in and nothing else."""
        axes, before = equation.params["axes"], _shapes(equation)[0]
        if value is None or math.prod(before[axis] for axis in axes) != self.fan_in:
            return None
        left = tuple(own for n, own in enumerate(value.axes) if n not in axes)
        over = self._long(n for axis in axes for n in value.axes[axis])
        if over != self._within or self._long(sum(left, ())) - {self._unit}:
            return None
        return sizes.total(value, left, self.fan_in)

    def reshape(self, equation: jex.JaxprEqn, value: Value) -> Value:
        """Return a value whose axes are joined or split."""
        before, after = _shapes(equation)
        if value is None or equation.params.get("dimensions"):
            return None
        pairs = zip(value.axes, before, strict=True)
        if any(not own and size > 1 for own, size in pairs):
            return None
        left = [axis for own in value.axes for axis in own if self._shape[axis] > 1]
        axes = []
        for size in after:
            own: list[int] = []
            while left and math.prod(self._shape[n] for n in own) < size:
                own.append(left.pop(0))
            if math.prod(self._shape[n] for n in own) != size:
                return None
            axes.append(tuple(own))
        return replace(value, axes=tuple(axes))


def _shapes(equation: jex.JaxprEqn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return aval(equation.invars[0]).shape, aval(equation.outvars[0]).shape


def _same(reader: _Reader, equation: jex.JaxprEqn, value: Value) -> Value:
    return value


def _multiply(
    reader: _Reader, equation: jex.JaxprEqn, one: Value, other: Value
) -> Value:
    if one == other and not (isinstance(one, Linear) and one.scales):
        return sizes.square(one, reader.fan_in)
    return sizes.multiply(one, other)


def _power(
    reader: _Reader, equation: jex.JaxprEqn, value: Value, *other: Value
) -> Value:
    power = equation.params.get("y")
    if other:
        power = other[0].number if isinstance(other[0], Linear) else None
    if power == 2:
        return sizes.square(value, reader.fan_in)
    if power in (0.5, -0.5):
        value = sizes.root(value)
    if power in (-1, -0.5):
        value = sizes.over(value)
    return value if power in (0.5, -0.5, -1, 1) else None


def _choose(
    reader: _Reader, equation: jex.JaxprEqn, which: Value, *values: Value
) -> Value:
    number = which.number if isinstance(which, Linear) else None
    return None if number is None else values[int(number)]


def _broadcast(reader: _Reader, equation: jex.JaxprEqn, value: Value) -> Value:
    before, after = _shapes(equation)
    if value is None:
        return None
    axes: list[tuple[int, ...]] = [()] * len(after)
    place = equation.params["broadcast_dimensions"]
    for own, size, target in zip(value.axes, before, place, strict=True):
        if own and size != after[target]:
            return None
        axes[target] = own
    return replace(value, axes=tuple(axes))


def _transpose(reader: _Reader, equation: jex.JaxprEqn, value: Value) -> Value:
    order = equation.params["permutation"]
    return value and replace(value, axes=tuple(value.axes[n] for n in order))


def _plainly(function: Callable[..., Value]) -> Callable[..., Value]:
    return lambda reader, equation, *values: function(*values)


_RULES: dict[str, Callable[..., Value]] = {
    "add": _plainly(sizes.add),
    "add_any": _plainly(sizes.add),
    "broadcast_in_dim": _broadcast,
    "convert_element_type": _same,
    "copy": _same,
    "copy_p": _same,
    "div": _plainly(lambda one, other: sizes.multiply(one, sizes.over(other))),
    "integer_pow": _power,
    "max": _plainly(sizes.larger),
    "mul": _multiply,
    "neg": _plainly(sizes.negative),
    "pow": _power,
    "reduce_sum": _Reader.total,
    "reshape": _Reader.reshape,
    "rsqrt": _plainly(lambda value: sizes.over(sizes.root(value))),
    "select_n": _choose,
    "sqrt": _plainly(sizes.root),
    "square": lambda reader, _, value: sizes.square(value, reader.fan_in),
    "squeeze": _Reader.reshape,
    "sub": _plainly(lambda one, other: sizes.add(one, sizes.negative(other))),
    "transpose": _transpose,
}
