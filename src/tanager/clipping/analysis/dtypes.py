"""The precision of norms, sums and losses, whatever the precision of the model."""

import jax.numpy as jnp
from jaxtyping import Array, DTypeLike


def accumulation_dtype(dtype: DTypeLike) -> jnp.dtype:
    """Return float64 for float64, float32 for anything narrower; complex stays."""
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return jnp.dtype(dtype)
    return jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)


def widen(leaf: Array) -> Array:
    """Return `leaf` in its accumulation dtype."""
    return leaf.astype(accumulation_dtype(leaf.dtype))
