"""Clipping with one backward pass: keep (x, dy) at every tap, take norms, add up.

    forward, backward to the perturbations   (x, dy) at every tap, for every example
    squared norms, cell by cell              ‖g_i‖²
    c_i = min(1, C/‖g_i‖)
    Σ c_i·g_i, cell by cell                  of gradients kept, or formed once more

Gradients formed once more are those of (x, dy), and c multiplies them afterwards: what
rounds in them is bounded example by example, and their norms count it.

There is one backward pass: a second one for the sum (ghost clipping) might round
otherwise than the first, and the norms of the first would not bound it. c_i is not
multiplied into the cotangent of the loss either: what cancels, rounds, overflows or is
not linear in a backward pass would leave another gradient.

References:
    Goodfellow 2015, arXiv:1510.01799 (norms from x and dy); Li et al. 2022,
    arXiv:2110.05679 (ghost); Bu et al. 2022, arXiv:2205.10683 (mixed ghost); Bu et al.
    2023, arXiv:2210.00038 (book-keeping).
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PyTree

from tanager.clipping.analysis.dtypes import accumulation_dtype, widen
from tanager.clipping.analysis.jaxprs import aval
from tanager.clipping.analysis.taps import Program, float_results
from tanager.clipping.rules.base import Seen
from tanager.clipping.rules.factors import norms_of, weights_of
from tanager.clipping.rules.groups import KEPT, Cell, Method, Remembered


def clip(
    program: Program,
    cells: Sequence[Cell],
    methods: Sequence[Method],
    params: PyTree,
    batch: PyTree,
    mask: Bool[Array, " b"],
    clip_norm: float,
) -> tuple[PyTree, Float[Array, " b"], Float[Array, " b"]]:
    """Return the sum of clipped gradients, their norms before clipping, the losses.

    Args:
        program: the loss taken apart.
        cells: of the program.
        methods: one for each cell.
        params: pytree of float arrays.
        batch: pytree of arrays with leading axis ``b``.
        mask: which rows are examples; the others contribute exact zeros.
        clip_norm: the clipping norm C (`Plan.target`).
    """
    leaves, tree = jax.tree.flatten(params)
    constants = program.evaluate_prologue(leaves)
    losses, taps, backward = _forward(program, constants, jax.tree.leaves(batch))
    seen = _seen(taps, backward(jnp.ones_like(losses)), constants)

    squares: list[Array] = []
    held: list[Remembered] = []
    for cell, method in zip(cells, methods, strict=True):
        keep = method.total == KEPT
        square, remembered = cell.squares(
            method.norm, _at(cell, seen), leaves, keep=keep
        )
        squares.append(square)
        held.append(remembered)
    norms = norms_of(squares, mask.shape[0])
    weights = weights_of(norms, mask, clip_norm)

    by_leaf: dict[int, Array] = {}
    for cell, method, remembered in zip(cells, methods, held, strict=True):
        sums = cell.total(method.total, _at(cell, seen), remembered, weights)
        for leaf, total in sums.items():
            before = by_leaf.get(leaf)
            by_leaf[leaf] = total if before is None else before + total
    totals = [
        widen(by_leaf[number]) if number in by_leaf else _zeros(leaf)
        for number, leaf in enumerate(leaves)
    ]
    return jax.tree.unflatten(tree, totals), norms, losses


def _forward(
    program: Program, constants: dict[jex.Var, Any], batch: Sequence[Array]
) -> tuple[Array, list, Callable[[Array], list]]:
    """Run all examples forward; return losses, (x, y) of each tap, and the pull-back.

    The pull-back takes one cotangent for each loss and gives dy of each tap.
    """
    zeros = [
        [jnp.zeros(aval(v).shape, aval(v).dtype) for v in float_results(tap)]
        for tap in program.taps
    ]
    rows = batch[0].shape[0]

    def every(perturbations):
        def one(perturbations, example):
            return program.evaluate_body(constants, perturbations, example)

        return jax.vmap(one)(perturbations, batch)

    many = jax.tree.map(lambda zero: jnp.broadcast_to(zero, (rows, *zero.shape)), zeros)
    losses, pull, taps = jax.vjp(every, many, has_aux=True)
    return losses, taps, lambda cotangents: pull(cotangents)[0]


def _seen(taps: list, gradients: list, constants: dict[jex.Var, Any]) -> list[Seen]:
    return [
        Seen(data, results, own, constants)
        for (data, results), own in zip(taps, gradients, strict=True)
    ]


def _at(cell: Cell, seen: Sequence[Seen]) -> list[Seen]:
    return [seen[use.tap] for use in cell.uses]


def _zeros(leaf: Array) -> Array:
    return jnp.zeros(leaf.shape, accumulation_dtype(leaf.dtype))
