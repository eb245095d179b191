"""Clipping with one backward pass: hold (x, dy) of every tap, take norms, add up.

    forward, backward to the perturbations   (x, dy) at every tap, for every example
    squared norms, group by group            ‖g_i‖²
    c_i = min(1, C/‖g_i‖), or another style of `rules.factors`
    Σ c_i·g_i, group by group                of gradients retained, or formed again

Gradients formed again are those of (x, dy), and c multiplies them afterwards: what
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

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PyTree

from tanager.clipping.analysis.dtypes import as_stored, widen
from tanager.clipping.analysis.jaxprs import aval
from tanager.clipping.analysis.layouts import safe_to_split
from tanager.clipping.analysis.taps import Program, float_results
from tanager.clipping.rules.base import TapValues
from tanager.clipping.rules.factors import Limit
from tanager.clipping.rules.groups import RETAINED, Method, NormGroup


def clip(
    program: Program,
    groups: Sequence[NormGroup],
    methods: Sequence[Method],
    params: PyTree,
    batch: PyTree,
    mask: Bool[Array, " b"],
    limit: Limit,
) -> tuple[PyTree, list[Float[Array, " b"]], list[Array]]:
    """Return the sum of clipped examples, their norms by part, losses and aux."""
    leaves, tree = jax.tree.flatten(params)
    results, seen = tap_values(program, leaves, jax.tree.leaves(batch))
    totals, norms = clip_at_taps(groups, methods, seen, mask, limit)
    sums = [
        widen(totals[number]) if number in totals else jnp.zeros_like(widen(leaf))
        for number, leaf in enumerate(leaves)
    ]
    return jax.tree.unflatten(tree, sums), norms, results


def clip_at_taps(
    groups: Sequence[NormGroup],
    methods: Sequence[Method],
    seen: Sequence[TapValues],
    mask: Bool[Array, " b"],
    limit: Limit,
) -> tuple[dict[int, Array], list[Float[Array, " b"]]]:
    """Return sums of clipped gradients, by number of the leaf, and norms by part."""
    own = [[seen[use.tap] for use in group.uses] for group in groups]

    found = [
        group.squares(method.norm, at, retain=method.total == RETAINED)
        for group, method, at in zip(groups, methods, own, strict=True)
    ]
    pairs = zip(groups, found, strict=True)
    squares = [(group.leaves[0], squares) for group, (squares, _) in pairs]
    norms = limit.norms_of(squares, mask.shape[0])
    factors = limit.factors(norms, mask)

    totals: dict[int, Array] = {}
    for group, method, at, (_, held) in zip(groups, methods, own, found, strict=True):
        part = factors[limit.part(group.leaves[0])]
        for leaf, total in group.total(method.total, at, held, part).items():
            totals[leaf] = totals[leaf] + total if leaf in totals else total
    return totals, norms


def tap_values(
    program: Program, leaves: Sequence[Array], batch: Sequence[Array]
) -> tuple[list[Array], list[TapValues]]:
    """Run forward and backward; return losses, aux and (x, y, dy) of all taps."""
    constants = program.evaluate_prologue(leaves)
    zeros = [
        [jnp.zeros(aval(v).shape, aval(v).dtype) for v in float_results(tap)]
        for tap in program.taps
    ]
    rows = batch[0].shape[0]

    def every(perturbations):
        def one(perturbations, example):
            (loss, *aux), met = program.evaluate_body(constants, perturbations, example)
            return loss, (aux, met)

        return jax.vmap(one)(perturbations, batch)

    many = jax.tree.map(lambda zero: jnp.broadcast_to(zero, (rows, *zero.shape)), zeros)

    def both(many):
        losses, pull, (aux, met) = jax.vjp(every, many, has_aux=True)
        return losses, aux, met, *pull(jnp.ones_like(losses))

    # XLA may compute a batch of convolutions of data with data as one large one with
    # zeros between, and 0·NaN is NaN. Products keep rows apart.
    both = safe_to_split(both) if program.convolves_data else both
    losses, aux, met, gradients = both(many)
    return [losses, *aux], [
        TapValues([*map(as_stored, data)], results, [*map(as_stored, own)], constants)
        for (data, results), own in zip(met, gradients, strict=True)
    ]
