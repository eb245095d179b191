"""Exponential moving average of the parameters: costs no privacy, gains accuracy."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree


def warm_decay(step: Int[Array, ""], decay: float) -> Float[Array, ""]:
    """Return min(decay, (1 + t)/(10 + t)), where t updates came before this one.

    References:
        Unlocking paper, appendix C.3, after Tan and Le 2019.
    """
    t = step.astype(jnp.float32)
    return jnp.minimum(decay, (1 + t) / (10 + t))


def update(
    average: PyTree, params: PyTree, step: Int[Array, ""], decay: float
) -> PyTree:
    """Return the average after one more update to `params`."""
    kept = warm_decay(step, decay)

    def mix(old: Array, new: Array) -> Array:
        return old + (1 - kept).astype(old.dtype) * (new.astype(old.dtype) - old)

    return jax.tree.map(mix, average, params)
