"""Clipping by instantiating every per-example gradient: `vmap(grad)`.

The slow, obviously right strategy: memory grows with the physical batch times the
number of parameters. It is the oracle every other strategy is tested against.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PyTree

from tanager.clipping.precision import widen


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
    value_and_grad = jax.value_and_grad(loss)

    def found(losses, gradients):
        gradients = jax.tree.map(widen, gradients)
        return losses, gradients, _norms(gradients, mask.shape[0])

    together = found(*jax.vmap(value_and_grad, in_axes=(None, 0))(params, batch))
    # XLA may compute a batch of small convolutions as one large one with zeros between,
    # and 0·NaN is NaN: with such a row, every example is computed for itself.
    losses, gradients, norms = jax.lax.cond(
        jnp.all(jnp.isfinite(together[2])),
        lambda: together,
        lambda: found(*jax.lax.map(lambda one: value_and_grad(params, one), batch)),
    )
    counted = mask & jnp.isfinite(norms)
    # A zero norm gives the factor 1; `where` and not a product, since 0·NaN is NaN.
    factors = jnp.minimum(1.0, clip_norm / jnp.where(norms > 0, norms, clip_norm))

    def clipped_sum(leaf: Array) -> Array:
        shape = (-1,) + (1,) * (leaf.ndim - 1)
        scaled = leaf * factors.astype(leaf.dtype).reshape(shape)
        return jnp.sum(jnp.where(counted.reshape(shape), scaled, 0), axis=0)

    return jax.tree.map(clipped_sum, gradients), norms, losses


def _norms(gradients: PyTree, rows: int) -> Float[Array, " b"]:
    leaves = jax.tree.leaves(gradients)
    squares = [jnp.sum(jnp.square(leaf.reshape(rows, -1)), axis=1) for leaf in leaves]
    # Mixed float32 and float64 leaves: the norm is as wide as the widest.
    widest = max((s.dtype for s in squares), key=lambda dtype: dtype.itemsize)
    return jnp.sqrt(sum((s.astype(widest) for s in squares), jnp.zeros(rows, widest)))
