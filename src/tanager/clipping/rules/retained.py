"""Per-example gradients: formed for norms, retained or dropped, and summed.

A clipped sum is of gradients retained since their norms were taken, or of gradients
formed again. They are added in blocks of 16 rows, one after the other, and the blocks
by a tree: `analysis.rounding` bounds what that rounds.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from tanager.clipping.analysis.rounding import BLOCK, levels, pairwise, row_steps, tree
from tanager.clipping.rules.base import Formation, TapValues
from tanager.clipping.rules.factors import ClipFactors, by_row


class RetainedGradients(NamedTuple):
    """Per-example gradients `[b, *own]` in order, and `to_param` of a `Formation`."""

    chunks: Sequence[Array]
    to_param: Callable[[Array], Array]


def form(
    formation: Formation,
    seen: TapValues,
    chunk: int,
    norms: Callable[[Array], Any],
    *,
    retain: bool,
) -> tuple[list, RetainedGradients | None]:
    """Form gradients chunk by chunk; return what `norms` finds, and them to retain."""
    loop = _looped_rows(seen.rows, chunk)
    most, starts = seen.part(0, loop), range(loop, seen.rows, chunk)
    if retain:
        chunks = [_in_a_loop(formation.form, most, chunk)] if loop else []
        chunks += [formation.form(seen.part(start, chunk)) for start in starts]
        return [norms(gradients) for gradients in chunks], RetainedGradients(
            chunks, formation.to_param
        )

    def forgotten(at: TapValues) -> Any:
        return norms(formation.form(at.exactly()))

    found = [_in_a_loop(forgotten, most, chunk)] if loop else []
    for start in starts:
        at = seen.part(start, chunk)
        if found:
            # Each chunk waits for the one before: gradients of all need not be held.
            gradients, found[-1] = jax.lax.optimization_barrier(
                (list(at.gradients), found[-1])
            )
            at = at.with_gradients(gradients)
        found.append(forgotten(at))
    return found, None


def _looped_rows(rows: int, chunk: int) -> int:
    """Return how many rows are taken in a loop, which compiles once for all of them."""
    return rows // chunk * chunk if rows >= 2 * chunk else 0


def _in_a_loop(function: Callable, seen: TapValues, chunk: int) -> Any:
    """Return a function of all rows, applied chunk by chunk."""

    def one(at: tuple[Sequence[Array], Sequence[Array]]) -> Any:
        return function(replace(seen, data=at[0], results=[], gradients=at[1]))

    cut = functools.partial(_chunks, rows=seen.rows, chunk=chunk)
    every = jax.tree.map(cut, (list(seen.data), list(seen.gradients)))
    found = jax.lax.map(one, every)
    return jax.tree.map(lambda each: each.reshape(-1, *each.shape[2:]), found)


def _chunks(values: Array, rows: int, chunk: int) -> Array:
    return values[:rows].reshape(-1, chunk, *values.shape[1:])


def weighted_sum(retained: RetainedGradients, factors: ClipFactors) -> Array:
    """Return Σ_i c_i·g_i at the anchor, exact zeros for rows not counted."""
    chunks = retained.chunks
    if max(chunk.shape[0] for chunk in chunks) <= BLOCK:
        every = [gradient for chunk in chunks for gradient in chunk]
        starts = range(0, len(every), BLOCK)
        parts = [_in_order(every[n : n + BLOCK], factors, n) for n in starts]
    else:
        parts, start = [], 0
        for chunk in chunks:
            parts.append(_in_blocks(chunk, factors, start))
            start += chunk.shape[0]
    return retained.to_param(tree(parts))


def retained_steps(rows: int, chunk: int) -> float:
    """Return the steps of `weighted_sum` (`rounding.row_steps`)."""
    loop = _looped_rows(rows, chunk)
    longest = loop or min(chunk, rows)
    if longest <= BLOCK:
        return row_steps(rows)
    chunks = bool(loop) - (loop - rows) // chunk
    return row_steps(longest) + 1 + levels(chunks)


def _in_order(gradients: Sequence[Array], factors: ClipFactors, start: int) -> Array:
    own = slice(start, start + len(gradients))
    return _add(tuple(gradients), factors.values[own], factors.counted[own])


@jax.jit  # traced once for gradients of one shape
def _add(gradients: tuple[Array, ...], values: Array, counted: Array) -> Array:
    # `where` and not a product with 0, since 0·NaN is NaN.
    parts = [
        jnp.where(row, gradient * value.astype(gradient.dtype), 0)
        for gradient, value, row in zip(gradients, values, counted, strict=True)
    ]
    return sum(parts[1:], parts[0])


def _in_blocks(chunk: Array, factors: ClipFactors, start: int) -> Array:
    """Add the rows of one array: the j-th of all blocks at once."""
    rows = chunk.shape[0]
    blocks = rows // BLOCK
    last = blocks * BLOCK
    rest = [_in_order(list(chunk[last:]), factors, start + last)] if last < rows else []
    if not blocks:
        return rest[0]
    own = slice(start, start + last)
    values = factors.values[own].reshape(blocks, BLOCK).astype(chunk.dtype)
    counted = factors.counted[own].reshape(blocks, BLOCK)
    whole = chunk[:last].reshape(blocks, BLOCK, *chunk.shape[1:])
    parts = []
    for number in range(BLOCK):
        each = whole[:, number]
        value, row = by_row(values[:, number], each), by_row(counted[:, number], each)
        parts.append(jnp.where(row, each * value, 0))
    return tree([pairwise(sum(parts[1:], parts[0]), 0), *rest])


def formed_sum(
    formation: Formation, seen: TapValues, factors: ClipFactors, chunk: int
) -> Array:
    """Return Σ_i c_i·g_i at the anchor from gradients that are formed and dropped.

    Each is formed as for its norm, and c multiplies it afterwards: what rounds in one
    example's gradient is then bounded by its own terms, whatever the other rows are.
    """
    # Not before the norms are known, nor from the gradients that norms came from.
    gradients, values = jax.lax.optimization_barrier(
        (list(seen.gradients), factors.values)
    )
    seen, factors = seen.with_gradients(gradients), factors._replace(values=values)
    chunk = 1 << (min(chunk, BLOCK).bit_length() - 1)  # a power of two
    blocks: list[tuple[int, Array]] = []  # how many blocks each is the sum of
    for start in range(0, seen.rows, BLOCK):
        at, own = seen.part(start, BLOCK), slice(start, start + BLOCK)
        if blocks:
            before = blocks[-1][1]
            at = at.with_gradients(
                [_after(before, dy, start, at.rows) for dy in gradients]
            )
        counted = ClipFactors(factors.values[own], factors.counted[own])
        blocks.append((1, _block(formation, at, counted, chunk)))
        while len(blocks) > 1 and blocks[-1][0] == blocks[-2][0]:
            (count, one), (_, other) = blocks[-2:]
            blocks[-2:] = [(2 * count, one + other)]
    total = blocks[-1][1]
    for _, part in reversed(blocks[:-1]):
        total = part + total
    return formation.to_param(total)


def _block(
    formation: Formation, seen: TapValues, factors: ClipFactors, chunk: int
) -> Array:
    """Add the gradients of a block in order."""

    def part(at: TapValues, factors: ClipFactors) -> Array:
        return _in_order(list(formation.form(at)), factors, 0)

    def step(total: Array, at: tuple[list, list, ClipFactors]) -> tuple[Array, None]:
        own = replace(seen, data=at[0], results=[], gradients=at[1])
        return total + part(own, at[2]), None

    loop = seen.rows // chunk * chunk
    like = jax.eval_shape(lambda: part(seen.part(0, chunk), factors))
    total = jnp.zeros(like.shape, like.dtype)
    if loop:
        every = (list(seen.data), list(seen.gradients), factors)
        cut = functools.partial(_chunks, rows=loop, chunk=chunk)
        total, _ = jax.lax.scan(step, total, jax.tree.map(cut, every))
    if loop < seen.rows:
        rest = ClipFactors(factors.values[loop:], factors.counted[loop:])
        total += part(seen.part(loop, chunk), rest)
    return total


def _after(before: Array, dy: Array, start: int, rows: int) -> Array:
    """Return some rows of dy, which are available only after another value.

    Where they start depends on it: XLA on CPU drops barriers before it orders
    operations, and would hold all gradients until it adds them up in one loop.
    """
    zero = jnp.minimum(jnp.sum(before.reshape(-1)[:2] >= 0, dtype=jnp.int32), 0)
    return jax.lax.dynamic_slice_in_dim(dy, start + zero, rows)
