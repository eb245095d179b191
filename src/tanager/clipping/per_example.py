"""Clipping by instantiating every per-example gradient: `vmap(grad)`.

The slow, obviously right strategy: memory grows with the physical batch times the
number of parameters. It is the oracle every other strategy is tested against.
"""

from collections.abc import Callable

import jax
from jaxtyping import Array, Bool, Float, PyTree

from tanager.clipping.analysis import links
from tanager.clipping.analysis.dtypes import widen
from tanager.clipping.analysis.layouts import safe_to_split
from tanager.clipping.analysis.rounding import squares
from tanager.clipping.rules.factors import Limit
from tanager.clipping.rules.retained import RetainedGradients, weighted_sum


def per_example(
    gradients_of: Callable[[PyTree, PyTree], tuple[tuple[Array, PyTree], PyTree]],
    params: PyTree,
    batch: PyTree,
    mask: Bool[Array, " b"],
    limit: Limit,
) -> tuple[PyTree, list[Float[Array, " b"]], tuple[Array, PyTree]]:
    """Return the sum of clipped gradients, their norms by part, losses and aux.

    `gradients_of` returns those of all rows: ((losses, aux), gradients).
    """
    # XLA may compute a batch of convolutions as one with zeros between: 0·NaN is NaN.
    # Products keep rows apart. A second way to compute only such batches would round
    # the other rows differently, and so tell that the row was there.
    results, gradients = safe_to_split(gradients_of)(params, batch)
    leaves, tree = jax.tree.flatten(jax.tree.map(widen, gradients))
    found = [(number, squares(leaf)) for number, leaf in enumerate(leaves)]
    norms = limit.norms_of(found, mask.shape[0])
    factors = limit.factors(norms, mask)
    sums = [
        weighted_sum(RetainedGradients([leaf], links.same), factors[limit.part(number)])
        for number, leaf in enumerate(leaves)
    ]
    return jax.tree.unflatten(tree, sums), norms, results
