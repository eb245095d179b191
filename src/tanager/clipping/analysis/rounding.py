"""How far float arithmetic moves norms and sums, and what is set aside for it.

u is half the distance from 1 to the next number: 2⁻²⁴ in float32. A sum of products
of which each passes through at most n roundings is wrong by γ(n)·Σ|terms| at most,
γ(n) = n·u/(1 − n·u), in whatever order it is added, with fused multiply-adds or
without. `gamma` is that number, and "steps" everywhere in clipping is n.

Two promises follow from it:

- A norm is an upper bound. Every method adds to its square what rounding can have
  taken from it, γ(n) times the terms, which Cauchy and Schwarz bound.
- A sum moves by at most (1 + `ALLOWANCE`)·C. Adding m vectors of norm ≤ C in any
  order, each addition rounds a partial sum: their sizes add up to m(m + 1)/2 at most.
  So blocks of m rows and a tree over the blocks err by D·u·R·C for R rows, with

      D = 1 + (m + 1)/2 + ⌈log₂(R/m)⌉                       (`row_steps`)

  the 1 for c·g. Two physical batches that differ in one row are both wrong by that,
  hence `float_error`. Where it exceeds the allowance, examples are clipped to a little
  less than C (`target`).

Sums over many numbers are made in stages, for which n is the sum of the stages'
lengths and not their product. XLA merges two reductions that follow each other, but
not across a maximum with 0, which changes no sum of squares, nor across additions.

References:
    Higham 2002, Accuracy and Stability of Numerical Algorithms, sections 3.1 and 4.2.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from tanager.clipping.analysis.dtypes import widen


ALLOWANCE = 2.0**-11
"""The part of C by which rounding may let one example move the sum further."""

BLOCK = 16
"""Gradients that are added in order, before a tree takes over."""

PRODUCT_ROWS = 64
"""Rows that one product of matrices, or one scatter, adds up."""

CANCELLATION = 4.0
"""A standardised weight's gradient counts as at least this part (one fourth) of what
it is before standardisation takes its mean and its projection away. The sum is made
before, so its rounding is relative to that.
"""

_LONGEST = 4096
"""Numbers that one reduction adds up."""

_RUN = 8


def unit(dtype: Any) -> float:
    """Return u: the largest relative error of one rounding."""
    return float(jnp.finfo(dtype).eps) / 2


def gamma(steps: float, dtype: Any, *, product: bool = False) -> float:
    """Return γ(steps), infinite where nothing can be said.

    Products of matrices keep up to two bits less on an accelerator.
    """
    loose = 4 if product and jax.default_backend() != "cpu" else 1
    error = steps * loose * unit(dtype)
    return error / (1 - error) if error < 0.5 else math.inf


def square(values: Array) -> Array:
    """Return squares of the numbers as they are.

    XLA computes (x·c)² as x²·c² where c is a constant, and c² can vanish.
    """
    return values * lax.optimization_barrier(values)


def root(squares: Array) -> Array:
    """Return square roots, whose derivative at 0 is 0: what is there is not clipped."""
    positive = squares > 0
    return jnp.where(positive, jnp.sqrt(jnp.where(positive, squares, 1)), squares)


def squares(chunk: Float[Array, "b *own"]) -> Float[Array, " b"]:
    """Return an upper bound of each row's squared norm.

    Too large by a relative γ of the steps, which is less than 10⁻³ for any gradient of
    less than 4096³ numbers.
    """
    # XLA on a CPU would copy what has axes of length 1.
    chunk = chunk.reshape(chunk.shape[0], *(n for n in chunk.shape[1:] if n != 1))
    total = square(widen(chunk))
    if chunk.size == 0:
        return jnp.zeros(chunk.shape[0], total.dtype)
    axes = range(1, total.ndim)
    longest = max(axes, key=lambda axis: total.shape[axis], default=0)
    steps = 2
    # XLA on a CPU is fast where axes are reduced as they lie: a reshape between the
    # square and the sum costs ten times as much as the sum.
    while total.ndim > 1:
        while total.shape[longest] > _LONGEST:
            total = _halve(total, longest)
            steps += 1
        steps += total.shape[longest] - 1
        total = jnp.maximum(jnp.sum(total, longest), 0)
        longest = total.ndim - 1
        rest = math.prod(total.shape[1:])
        if total.ndim > 2 and rest <= _LONGEST:
            steps += rest - 1
            total = jnp.sum(total, tuple(range(1, total.ndim)))
    return total * (1 + gamma(steps, total.dtype))


def _halve(values: Array, axis: int) -> Array:
    """Add the second half of an axis to the first."""
    size = values.shape[axis]
    half = size // 2
    total = lax.slice_in_dim(values, 0, half, axis=axis)
    total += lax.slice_in_dim(values, half, 2 * half, axis=axis)
    if size % 2:
        odd = lax.slice_in_dim(values, 2 * half, size, axis=axis)
        total = jnp.concatenate([total, odd], axis)
    return total


def pairwise(values: Array, axis: int) -> Array:
    """Return the sum over an axis, halved again and again."""
    axis %= values.ndim
    while values.shape[axis] > 1:
        values = _halve(values, axis)
    return jnp.squeeze(values, axis)


def levels(count: int) -> int:
    """Return how often `pairwise` halves."""
    return math.ceil(math.log2(max(count, 1)))


def sum_of_runs(values: Float[Array, "n o"]) -> Float[Array, " o"]:
    """Return the sum over the first axis, in runs of eight where they fit, then halved.

    Quicker to compile than `pairwise` alone.
    """
    size = values.shape[0]
    if size % _RUN == 0 and size > _RUN:
        values = jnp.sum(values.reshape(size // _RUN, _RUN, -1), axis=1)
    return pairwise(values, 0)


def run_steps(size: int) -> int:
    """Return the steps of `sum_of_runs`."""
    if size % _RUN == 0 and size > _RUN:
        return _RUN - 1 + levels(size // _RUN)
    return levels(size)


def tree(parts: Sequence[Array]) -> Array:
    """Return the sum of arrays, pairs first, then pairs of pairs."""
    parts = list(parts)
    while len(parts) > 1:
        pairs = zip(parts[::2], parts[1::2], strict=False)
        parts = [a + b for a, b in pairs] + parts[len(parts) & ~1 :]
    return parts[0]


def row_steps(rows: int, block: int = BLOCK) -> float:
    """Return D, see the module: the error of a sum of rows, over u·R·C."""
    own = min(rows, block)
    return 1 + (own + 1) / 2 + levels(-(-rows // block))


def product_steps(rows: int) -> float:
    """Return the steps of a sum by products over `PRODUCT_ROWS` rows each."""
    loose = 4 if jax.default_backend() != "cpu" else 1
    return loose * (row_steps(rows, PRODUCT_ROWS) + 1)


@dataclass(frozen=True)
class FloatError:
    """The parts of a sensitivity that float arithmetic makes.

    Of R = `rows` examples whose sum takes D = `steps`, rounding moves the sum by
    `sum`·C when one row is masked, whatever the other rows are; `allowance`·C is
    allowed for. Examples are clipped to `target`·C: less than C where `sum` exceeds the
    allowance.
    """

    rows: int
    steps: float
    sum: float
    allowance: float
    target: float

    def __str__(self) -> str:
        return (
            f"rounding moves the sum by {self.sum:.2g} C at most, {self.allowance:.2g} "
            f"C are allowed for; examples are clipped to {self.target:.6g} C"
        )


def float_error(
    steps: float, rows: int, clip_norm: float, numbers: int, dtype: Any
) -> FloatError:
    """Return what rounding can do to a sum of clipped gradients of `numbers` entries.

    `steps` is D of the parameter where it is largest: the errors of different
    parameters add up in the 2-norm, as the gradients do (Minkowski).
    """
    # 2⁻¹⁰ for terms of second order; 16·u for c, the norm's root, and C as a float.
    error = (2 * steps * rows * (1 + 2.0**-10) + 16) * unit(dtype)
    error += numbers * float(jnp.finfo(dtype).tiny) / clip_norm**2
    part = min(1.0, (1 + ALLOWANCE) / (1 + error))
    return FloatError(rows, steps, error, ALLOWANCE, part)
