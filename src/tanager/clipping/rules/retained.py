"""Weighted sums of per-example gradients, kept from the norms or formed again.

Gradients are added in blocks of 16 rows, one after the other, and the blocks by a tree:
`analysis.rounding` bounds what that rounds.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from tanager.clipping.analysis.rounding import BLOCK, levels, pairwise, row_steps, tree
from tanager.clipping.rules.base import Formation, Seen
from tanager.clipping.rules.factors import Weights, by_row


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
    if max(chunk.shape[0] for chunk in kept.chunks) <= BLOCK:
        every = [gradient for chunk in kept.chunks for gradient in chunk]
        starts = range(0, len(every), BLOCK)
        blocks = [_in_order(every[n : n + BLOCK], weights, n) for n in starts]
        return kept.home(tree(blocks))
    parts, start = [], 0
    for chunk in kept.chunks:
        parts.append(_in_blocks(chunk, weights, start))
        start += chunk.shape[0]
    return kept.home(tree(parts))


def kept_steps(rows: int, group: int) -> float:
    """Return the steps of `weighted_sum` (`rounding.row_steps`).

    Args:
        rows: R.
        group: how many rows a chunk holds.
    """
    if group <= BLOCK:
        return row_steps(rows)
    return row_steps(min(group, rows)) + 1 + levels(-(-rows // group))


def _in_order(gradients: Sequence[Array], weights: Weights, start: int) -> Array:
    own = slice(start, start + len(gradients))
    return _add(tuple(gradients), weights.factors[own], weights.counted[own])


@jax.jit  # traced once for gradients of one shape
def _add(gradients: tuple[Array, ...], factors: Array, counted: Array) -> Array:
    # `where` and not a product with 0, since 0·NaN is NaN.
    parts = [
        jnp.where(row, gradient * factor.astype(gradient.dtype), 0)
        for gradient, factor, row in zip(gradients, factors, counted, strict=True)
    ]
    return sum(parts[1:], parts[0])


def _in_blocks(chunk: Array, weights: Weights, start: int) -> Array:
    """Add the rows of one array: the j-th of all blocks at once."""
    rows = chunk.shape[0]
    blocks = rows // BLOCK
    last = blocks * BLOCK
    rest = [_in_order(list(chunk[last:]), weights, start + last)] if last < rows else []
    if not blocks:
        return rest[0]
    own = slice(start, start + last)
    factors = weights.factors[own].reshape(blocks, BLOCK).astype(chunk.dtype)
    counted = weights.counted[own].reshape(blocks, BLOCK)
    whole = chunk[:last].reshape(blocks, BLOCK, *chunk.shape[1:])
    parts = []
    for number in range(BLOCK):
        each = whole[:, number]
        factor, row = by_row(factors[:, number], each), by_row(counted[:, number], each)
        parts.append(jnp.where(row, each * factor, 0))
    return tree([pairwise(sum(parts[1:], parts[0]), 0), *rest])


def formed_sum(formation: Formation, seen: Seen, weights: Weights, group: int) -> Array:
    """Return Σ_i c_i·g_i at the anchor from gradients that are formed and dropped.

    Each is formed as for its norm, and c multiplies it afterwards: what rounds in one
    example's gradient is then bounded by its own terms, whatever the other rows are.

    Args:
        formation: how.
        seen: (x, dy).
        weights: c.
        group: how many gradients are held at a time.
    """
    # Not before the norms are known, nor from the gradients that norms came from.
    gradients, factors = jax.lax.optimization_barrier(
        (list(seen.gradients), weights.factors)
    )
    seen = seen.with_gradients(gradients)
    group = _power_of_two(min(group, BLOCK))
    blocks: list[tuple[int, Array]] = []  # how many blocks each is the sum of
    block: Array | None = None
    for start in range(0, seen.rows, group):
        at = seen.part(start, group)
        if block is not None or blocks:
            before = blocks[-1][1] if block is None else block
            at = at.with_gradients(
                [_after(before, dy, start, at.rows) for dy in gradients]
            )
        formed = list(formation.form(at))
        part = _in_order(formed, weights._replace(factors=factors), start)
        block = part if block is None else block + part
        if (start + group) % BLOCK == 0 or start + group >= seen.rows:
            blocks.append((1, block))
            block = None
        while len(blocks) > 1 and blocks[-1][0] == blocks[-2][0]:
            (count, one), (_, other) = blocks[-2:]
            blocks[-2:] = [(2 * count, one + other)]
    total = blocks[-1][1]
    for _, part in reversed(blocks[:-1]):
        total = part + total
    return formation.home(total)


def _after(before: Array, dy: Array, start: int, rows: int) -> Array:
    """Return some rows of dy, which are not to be had before another value is.

    Where they start depends on it: XLA on CPU drops barriers before it orders
    operations, and would hold all gradients until it adds them up in one loop.
    """
    zero = jnp.minimum(jnp.sum(before.reshape(-1)[:2] >= 0, dtype=jnp.int32), 0)
    return jax.lax.dynamic_slice_in_dim(dy, start + zero, rows)


def _power_of_two(most: int) -> int:
    return 1 << (max(most, 1).bit_length() - 1)
