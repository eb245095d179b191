"""What is known of the values between a weight and its kernel, as algebra.

Of a weight W and the units along one of its axes, a value is one of these, or unknown:

| value | is |
|---|---|
| `Linear` | (entry·W + mean·mean(W) + one)·gain, times a function of s in `steps` |
| `Square` | (entry·W + mean·mean(W))², entry by entry |
| `Sum` | spread·‖W − mean(W)‖² + mean·‖mean(W)‖² + one, by unit |

s is ‖W − mean(W)‖² where `centred`, else ‖W‖². Functions return None for what is none
of them.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import jax.extend.core as jex
import jax.numpy as jnp
from jaxtyping import Array


Steps = tuple[tuple, ...]
Axes = tuple[tuple[int, ...], ...]
"""For each axis of a value, the axes of W that it runs along; none where it is even."""

STEPS: dict[str, Callable[..., Array]] = {
    "affine": lambda s, factor, more: factor * s + more,
    "larger": jnp.maximum,
    "root": jnp.sqrt,
    "over": lambda s: 1 / s,
}

_ROUNDING = 1e-6
"""Numbers that a loss computes in float32 are this precise."""


@dataclass(frozen=True)
class Linear:
    """See the module."""

    axes: Axes
    entry: float = 0.0
    mean: float = 0.0
    one: float = 0.0
    gain: jex.Var | None = None
    steps: Steps = ()
    centred: bool = False

    @property
    def scales(self) -> bool:
        """Whether W enters as s alone, if at all."""
        return self.entry == 0 and self.mean == 0

    @property
    def number(self) -> float | None:
        """Its value, where nothing enters."""
        plain = self.scales and self.gain is None and not self.steps
        return self.one if plain else None

    @property
    def degree(self) -> int:
        """How it grows with √s: by 2, 1 or −1; 0 where it is no positive size."""
        names = [step[0] for step in self.steps]
        if not names or self.gain is not None or not self.scales or self.one <= 0:
            return 0
        return -1 if "over" in names else 1 if "root" in names else 2

    def times(self, number: float) -> "Linear":
        """Return it times a number."""
        entry, mean, one = (number * x for x in (self.entry, self.mean, self.one))
        return replace(self, entry=entry, mean=mean, one=one)

    def then(self, *steps: tuple) -> "Linear":
        """Return a size after further steps."""
        own = (("affine", self.one, 0.0),) if self.one != 1 else ()
        return replace(self, one=1.0, steps=(*self.steps, *own, *steps))


@dataclass(frozen=True)
class Square:
    """See the module."""

    axes: Axes
    entry: float
    mean: float


@dataclass(frozen=True)
class Sum:
    """See the module."""

    axes: Axes
    spread: float
    mean: float
    one: float = 0.0

    def times(self, number: float) -> "Sum":
        """Return it times a number."""
        spread, mean, one = (number * x for x in (self.spread, self.mean, self.one))
        return replace(self, spread=spread, mean=mean, one=one)


Value = Linear | Square | Sum | None


def near(one: float, other: float, size: float) -> bool:
    """Whether two numbers are the same but for rounding."""
    return abs(one - other) <= _ROUNDING * abs(size)


def negative(value: Value) -> Value:
    """Return −value."""
    return None if value is None or isinstance(value, Square) else value.times(-1)


def add(one: Value, other: Value) -> Value:
    """Return the sum of two values."""
    one, other = _together(one, other)
    if isinstance(one, Linear) and one.number is not None:
        one, other = other, one
    more = other.number if isinstance(other, Linear) else None
    if isinstance(one, Sum) and more is not None:
        return replace(one, one=one.one + more)
    if isinstance(one, Sum) and isinstance(other, Sum):
        spread, mean = one.spread + other.spread, one.mean + other.mean
        return Sum(one.axes, spread, mean, one.one + other.one)
    if not isinstance(one, Linear) or not isinstance(other, Linear):
        return None
    if more is not None and one.degree > 0:
        return one.then(("affine", 1.0, more)) if more >= 0 else None
    alike = one.gain is other.gain and one.steps == other.steps
    if not alike or one.centred != other.centred:
        return None
    entry, mean = one.entry + other.entry, one.mean + other.mean
    return replace(one, entry=entry, mean=mean, one=one.one + other.one)


def multiply(one: Value, other: Value) -> Value:
    """Return the product of two values, of which one scales."""
    one, other = _together(one, other)
    if not (isinstance(other, Linear) and other.scales):
        one, other = other, one
    if not isinstance(other, Linear) or not other.scales:
        return None
    if isinstance(one, Sum):
        return None if other.number is None else one.times(other.number)
    if not isinstance(one, Linear):
        return None
    if (one.gain and other.gain) or (one.steps and other.steps):
        return None
    return replace(
        one.times(other.one),
        gain=one.gain or other.gain,
        steps=one.steps or other.steps,
        centred=one.centred or other.centred,
    )


def over(value: Value) -> Value:
    """Return 1/value."""
    if not isinstance(value, Linear):
        return None
    if value.number is not None:
        return replace(value, one=1 / value.number) if value.number else None
    return value.then(("over",)) if value.degree == 1 else None


def square(value: Value, fan_in: int) -> Value:
    """Return value²."""
    if not isinstance(value, Linear) or value.one or value.gain or value.steps:
        return None
    if value.entry:
        return Square(value.axes, value.entry, value.mean)
    return Sum(value.axes, 0.0, value.mean**2 / fan_in)


def total(value: Value, axes: Axes, fan_in: int) -> Value:
    """Return the sum of a value over the fan-in, which leaves these axes."""
    if isinstance(value, Square):
        return Sum(axes, value.entry**2, (value.entry + value.mean) ** 2)
    if not isinstance(value, Linear) or value.gain or value.steps or value.one:
        return None
    return Linear(axes, mean=fan_in * (value.entry + value.mean))


def size(value: Value) -> Linear | None:
    """Return what is a positive function of s alone, as one."""
    if isinstance(value, Linear):
        return value if value.degree > 0 else None
    if not isinstance(value, Sum) or value.spread <= 0 or value.one < 0:
        return None
    centred = near(value.mean, 0.0, value.spread)
    if not centred and not near(value.mean, value.spread, value.spread):
        return None
    steps = (("affine", value.spread, value.one),)
    return Linear(value.axes, one=1.0, steps=steps, centred=centred)


def root(value: Value) -> Value:
    """Return √value."""
    own = size(value)
    return own.then(("root",)) if own and own.degree == 2 else None


def larger(one: Value, other: Value) -> Value:
    """Return the larger of a size and a number."""
    one, other = _together(one, other)
    if isinstance(one, Linear) and one.number is not None:
        one, other = other, one
    least = other.number if isinstance(other, Linear) else None
    own = size(one)
    if own is None or least is None or least < 0:
        return None
    return own.then(("larger", least))


def _together(one: Value, other: Value) -> tuple[Value, Value]:
    """Return two values that meet, on the axes of both; None if those disagree."""
    if one is None or other is None:
        return None, None
    axes = one.axes or other.axes
    if one.axes and other.axes:
        if len(one.axes) != len(other.axes):
            return None, None
        pairs = [*zip(one.axes, other.axes, strict=True)]
        if any(a and b and a != b for a, b in pairs):
            return None, None
        axes = tuple(a or b for a, b in pairs)
    return replace(one, axes=axes), replace(other, axes=axes)
