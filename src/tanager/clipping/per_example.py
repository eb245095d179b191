"""Clipping by instantiating every per-example gradient: `vmap(grad)`.

The slow, obviously right strategy: memory grows with the physical batch times the
number of parameters. It is the oracle every other strategy is tested against.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PyTree

from tanager.clipping import links
from tanager.clipping.factors import norms_of, weights_of
from tanager.clipping.kept import Kept, weighted_sum
from tanager.clipping.precision import widen
from tanager.clipping.rounding import squares


def per_example(
    loss: Any, params: PyTree, batch: PyTree, mask: Bool[Array, " b"], clip_norm: float
) -> tuple[PyTree, Float[Array, " b"], Float[Array, " b"]]:
    """Return the sum of clipped gradients, their norms before clipping, the losses.

    Args:
        loss: scalar loss of ``(params, example)``.
        params: pytree whose leaves are all inexact arrays (or None).
        batch: pytree of arrays with leading axis ``b``.
        mask: which rows are examples; the others contribute exact zeros.
        clip_norm: the clipping norm C.
    """
    rows = mask.shape[0]
    value_and_grad = jax.value_and_grad(loss)

    def together() -> tuple[Array, PyTree, Array]:
        losses, gradients = jax.vmap(value_and_grad, (None, 0))(params, batch)
        return _with_norms(losses, gradients, rows)

    def apart() -> tuple[Array, PyTree, Array]:
        found = jax.lax.map(lambda example: value_and_grad(params, example), batch)
        return _with_norms(found[0], found[1], rows)

    found = together()
    # XLA may compute a batch of small convolutions as one large one with zeros between,
    # and 0·NaN is NaN: with such a row, every example is computed for itself.
    losses, gradients, norms = jax.lax.cond(
        jnp.all(jnp.isfinite(found[2])),
        lambda: found,
        apart,
    )
    weights = weights_of(norms, mask, clip_norm)

    def clipped_sum(leaf: Array) -> Array:
        return weighted_sum(Kept([leaf], links.same), weights)

    return jax.tree.map(clipped_sum, gradients), norms, losses


def _with_norms(
    losses: Array, gradients: PyTree, rows: int
) -> tuple[Array, PyTree, Float[Array, " b"]]:
    gradients = jax.tree.map(widen, gradients)
    found = [squares(leaf) for leaf in jax.tree.leaves(gradients)]
    return losses, gradients, norms_of(found, rows)
