"""Per-example gradients that are kept, and their weighted sum."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from tanager.clipping.factors import Weights, by_row
from tanager.clipping.rules import product


_FEW = 16
"""So many gradients are added up by one loop, which takes long to compile for more."""


class Kept(NamedTuple):
    """Per-example gradients that together hold every example in order.

    Attributes:
        chunks: `[b, *own]` each.
        home: of their `Formation`.
    """

    chunks: Sequence[Array]
    home: Callable[[Array], Array]


def weighted_sum(kept: Kept, weights: Weights) -> Array:
    """Return Σ_i c_i·g_i at the anchor, exact zeros for rows not counted."""
    parts, start = [], 0
    for chunk in kept.chunks:
        rows = slice(start, start + chunk.shape[0])
        start = rows.stop
        own = weights.factors[rows], weights.counted[rows]
        parts.append(_weigh(chunk, *own, weights.finite))
    return kept.home(sum(parts[1:], parts[0]))


def _weigh(chunk: Array, factors: Array, counted: Array, finite: Array) -> Array:
    factors = jnp.where(counted, factors, 0).astype(chunk.dtype)
    if chunk.shape[0] <= _FEW:
        return _one_by_one(chunk, factors, counted)

    def add(chunk: Array) -> Array:
        # A product of matrices: XLA's reduction over a leading axis is slow on CPU.
        flat = product("b,bn->n", factors, chunk.reshape(chunk.shape[0], -1))
        return flat.reshape(chunk.shape[1:])

    def clean(chunk: Array) -> Array:
        return add(jnp.where(by_row(counted, chunk), chunk, 0))

    # 0·NaN is NaN; where there is none, a pass over memory is saved.
    return jax.lax.cond(finite, add, clean, chunk)


@jax.jit  # traced once for gradients of one shape
def _one_by_one(chunk: Array, factors: Array, counted: Array) -> Array:
    parts = [
        jnp.where(row, gradient * factor, 0)
        for gradient, factor, row in zip(chunk, factors, counted, strict=True)
    ]
    return sum(parts[1:], parts[0])
