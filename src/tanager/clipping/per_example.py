"""Clipping by instantiating every per-example gradient: `vmap(grad)`.

The slow, obviously right strategy: memory grows with the physical batch times the
number of parameters. It is the oracle every other strategy is tested against.
"""

from typing import Any

import jax
from jaxtyping import Array, Bool, Float, PyTree

from tanager.clipping.analysis import links
from tanager.clipping.analysis.dtypes import widen
from tanager.clipping.analysis.layouts import safe_to_split
from tanager.clipping.analysis.rounding import squares
from tanager.clipping.rules.factors import clip_factors, norms_of
from tanager.clipping.rules.retained import RetainedGradients, weighted_sum


def per_example(
    loss: Any, params: PyTree, batch: PyTree, mask: Bool[Array, " b"], clip_norm: float
) -> tuple[PyTree, Float[Array, " b"], Float[Array, " b"]]:
    """Return the sum of clipped gradients, their norms, the losses."""
    # XLA may compute a batch of convolutions as one with zeros between: 0·NaN is NaN.
    # Products keep rows apart. A second way to compute only such batches would round
    # the other rows differently, and so tell that the row was there.
    every = safe_to_split(jax.vmap(jax.value_and_grad(loss), (None, 0)))
    losses, gradients = every(params, batch)
    gradients = jax.tree.map(widen, gradients)
    found = [squares(leaf) for leaf in jax.tree.leaves(gradients)]
    norms = norms_of(found, mask.shape[0])
    factors = clip_factors(norms, mask, clip_norm)

    def clipped_sum(leaf: Array) -> Array:
        return weighted_sum(RetainedGradients([leaf], links.same), factors)

    return jax.tree.map(clipped_sum, gradients), norms, losses
