"""Sums of clipped gradients in whole numbers: nothing is lost, whatever the order.

Sums of physical batches are rounded to a public grid and added as whole numbers, so
that a logical batch has one sum, however many physical batches, devices and hosts made
it up, and in whatever order. Added in float32, one example of norm 0.97 C could move it
by 9 C, where sums sit at a power of two and every later addition rounds the other way.

A whole number is held in two int32 (JAX has no int64 by default): high·2¹⁶ + low, with
low from −2¹⁵ to 2¹⁵ − 1. That is 48 bits, which no sum of 2³⁴/√d examples exceeds.
"""

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, PyTree, UInt32

from tanager import _validate as validate
from tanager.clipping.analysis.dtypes import accumulation_dtype
from tanager.clipping.gradient import ClippedGradient, fits
from tanager.compiling import jit


_FINENESS = 2.0**-12
"""The most that rounding to the grid moves the sum of a physical batch, as a part of
the sensitivity."""
SAME_PYTREE = (
    "make GaussianNoise of the same pytree (an NNX module and its state are two), with "
    "None in place of what is not trained"
)
_HALF, _BITS = 2**15, 16
_LARGEST = 2.0**46


class Whole(NamedTuple):
    """A pytree of whole numbers, high·2¹⁶ + low, in int32: units of a `grid`."""

    high: PyTree
    low: PyTree
    grid: PyTree = None  # a `Grid` or None: as a pytree, for the types of Optax


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Grid:
    """The public grid on which a run adds up and releases sums.

    `spacing` is g, a power of two, in the units of the sum; a sum has d `coordinates`,
    and one example moves that of a physical batch by a `sensitivity` at most.
    """

    spacing: float
    coordinates: int
    sensitivity: float

    @classmethod
    def of(cls, sensitivity: float, params: PyTree) -> "Grid":
        """Return the coarsest grid whose rounding costs at most 2⁻¹² of a sensitivity.

        The sensitivity is how far one example moves the sum of a physical batch.
        `params` are arrays or shapes like those of the sums.
        """
        validate.positive(sensitivity=sensitivity)
        coordinates = sum(math.prod(np.shape(x)) for x in jax.tree.leaves(params))
        most = _FINENESS * sensitivity / math.sqrt(max(coordinates, 1))
        return cls(2.0 ** math.floor(math.log2(most)), coordinates, sensitivity)

    @property
    def rounding(self) -> float:
        """How much farther apart two sums can be once both are rounded: g·√d."""
        return self.spacing * math.sqrt(self.coordinates)

    def require_room(self, examples: float, sensitivity: float) -> None:
        """Refuse a batch whose sum could be larger than whole numbers are here.

        The expected batch has that many examples, and may be twice as large. Each adds
        at most a sensitivity to a coordinate. The sum must not exceed 2⁴⁶ units.
        """
        most = _LARGEST * self.spacing / (sensitivity + self.rounding)
        if 2 * examples > most:
            validate.refuse(
                "batch_size",
                examples,
                f"must be at most {most / 2:,.0f} with {self.coordinates:,} parameters",
                "sums are added in 48 bits; take smaller batches and more steps",
            )

    def shapes(self, params: PyTree) -> Whole:
        """Return the shapes and dtypes of a sum of gradients of `params`."""
        each = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(np.shape(leaf), jnp.int32), params
        )
        return Whole(each, each, self)

    @jax.transfer_guard("allow")
    def zeros(self, params: PyTree) -> Whole:
        """Return the sum of no examples, shaped like `params`."""
        return jax.tree.map(jnp.zeros_like, self.shapes(params))

    def add(self, total: Whole, sums: PyTree) -> Whole:
        """Add the sums of a physical batch, in float32 or wider, to those before.

        Args:
            total: from `noise.zeros`, or an earlier call.
            sums: what `clipped_grad` returned. If it was scaled since, or clipped to a
                larger norm than the noise is for, the total is spoiled, and the noise
                refuses it. Its `sum` alone is not checked.

        Raises:
            ValueError: `total` is not a sum on this grid, or of other arrays.
        """
        mark = None
        if isinstance(sums, ClippedGradient):
            mark, sums = sums.require_mark(), sums.sum
        if not isinstance(total, Whole):
            remedy = "begin with noise.zeros()"
            validate.refuse_type("total", total, "must be a sum", remedy)
        self.require(total)
        if not _alike(sums, total.high):
            rule = "must be arrays like those of the total"
            remedy = "give what clipped_grad returned (with has_aux, the first of two)"
            validate.refuse_type("sums", sums, rule, f"{remedy}, and {SAME_PYTREE}")
        return _adding(self)(total, sums, mark)

    def require(self, total: Whole) -> None:
        """Refuse a sum on another grid, whose units and sensitivity may be others."""
        if total.grid != self:
            rule = f"must be a sum on this grid, {self}"
            remedy = "begin with zeros() of the noise, and add by its grid.add"
            own = f"a sum on {total.grid or 'no grid'}"
            validate.refuse("total", own, rule, remedy)

    def round(self, sums: PyTree) -> Whole:
        """Return sums, float32 or wider, as the nearest whole numbers of spacings."""
        for leaf in jax.tree.leaves(sums):
            if jnp.finfo(leaf.dtype).bits < 32:
                rule = "must be float32 or wider"
                remedy = "clipped_grad returns such sums; do not cast them before"
                validate.refuse("total", str(leaf.dtype), rule, f"{remedy} the noise")

        def high(leaf: Array) -> Array:
            return jnp.round(self._units(leaf) * 2.0**-_BITS).astype(jnp.int32)

        def low(leaf: Array, high: Array) -> Array:
            # Exact: the two are within 2¹⁵ of each other.
            rest = self._units(leaf) - high.astype(leaf.dtype) * 2.0**_BITS
            return jnp.round(rest).astype(jnp.int32)

        tops = jax.tree.map(high, sums)
        return self.carried(Whole(tops, jax.tree.map(low, sums, tops)))

    def _units(self, leaf: Array) -> Array:
        # A power of two scales exactly. What is too large moves the sum less.
        units = jnp.nan_to_num(leaf * (1 / self.spacing))
        return jnp.clip(units, -_LARGEST, _LARGEST)

    def plus(self, one: Whole, other: Whole) -> Whole:
        """Return the sums of whole numbers."""
        high = jax.tree.map(jnp.add, one.high, other.high)
        low = jax.tree.map(jnp.add, one.low, other.low)
        return self.carried(Whole(high, low))

    def carried(self, whole: Whole) -> Whole:
        """Return the limb-by-limb sum of at most 2¹⁵ others, with `low` in range."""
        carry = jax.tree.map(lambda low: (low + _HALF) >> _BITS, whole.low)
        return Whole(
            jax.tree.map(jnp.add, whole.high, carry),
            jax.tree.map(lambda low, carry: low - (carry << _BITS), whole.low, carry),
            self,
        )

    def holds(self, whole: Whole) -> Bool[Array, ""]:
        """Return whether `low` is in its range, as in all that `add` did not spoil."""
        ranges = [
            jnp.all((low >= -_HALF) & (low < _HALF))
            for low in jax.tree.leaves(whole.low)
        ]
        return jnp.all(jnp.array(ranges))

    def floats(self, whole: Whole, like: PyTree) -> PyTree:
        """Return floats in the units of the sum, of the dtypes of `like` or float32."""

        def one(high: Array, low: Array, like: Array) -> Array:
            dtype = accumulation_dtype(like.dtype)
            units = high.astype(dtype) * 2.0**_BITS + low.astype(dtype)
            return units * self.spacing

        return jax.tree.map(one, whole.high, whole.low, like)


@functools.cache
def _adding(grid: Grid) -> jit:
    """Return what adds sums on a grid: compiled, in a thirteenth of the time."""

    def add(total: Whole, sums: PyTree, mark: Array | None) -> Whole:
        made, right = grid.plus(total, grid.round(sums)), grid.holds(total)
        if mark is not None:
            right &= fits(mark, grid.sensitivity)
        spoiled = jnp.int32(-(2**31))
        return made._replace(
            low=jax.tree.map(lambda low: jnp.where(right, low, spoiled), made.low)
        )

    return jit(add)


def checksum(whole: Whole) -> UInt32[Array, "4"]:
    """Return a 128-bit checksum of whole numbers, however they are placed. Private."""
    primes = np.array([0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F], np.uint32)
    total = jnp.zeros(4, jnp.uint32)
    for number, leaf in enumerate(jax.tree.leaves(whole)):
        # Not as one row of numbers, for which devices would have to gather the leaf.
        place = jnp.full(leaf.shape, number << 16, jnp.uint32)
        for axis in range(leaf.ndim):
            along = lax.broadcasted_iota(jnp.uint32, leaf.shape, axis)
            stride = math.prod(leaf.shape[axis + 1 :])
            place = place + along * np.uint32(stride % 2**32)
        for index, prime in enumerate(primes):
            mixed = (leaf.astype(jnp.uint32) + place * prime) * primes[0]
            mixed = (mixed ^ (mixed >> 15)) * prime
            mixed = jnp.sum(mixed ^ (mixed >> 13), dtype=jnp.uint32)
            total = total.at[index].add(mixed)
    return total


def halves(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return int64 numbers below 2⁴⁷ as (high, low), int32."""
    low = ((numbers + _HALF) & (2 * _HALF - 1)) - _HALF
    return ((numbers - low) >> _BITS).astype(np.int32), low.astype(np.int32)


def _alike(one: PyTree, other: PyTree) -> bool:
    leaves, structures = zip(*map(jax.tree.flatten, (one, other)), strict=True)
    shapes = [[np.shape(leaf) for leaf in each] for each in leaves]
    return structures[0] == structures[1] and shapes[0] == shapes[1]
