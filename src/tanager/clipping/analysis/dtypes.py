"""The precision of norms, sums and losses, whatever the precision of the model."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, DTypeLike


def accumulation_dtype(dtype: DTypeLike) -> jnp.dtype:
    """Return float64 for float64, float32 for anything narrower; complex stays."""
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return jnp.dtype(dtype)
    return jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)


def widen(leaf: Array) -> Array:
    """Return `leaf` in its accumulation dtype."""
    return leaf.astype(accumulation_dtype(leaf.dtype))


def as_stored(value: Array) -> Array:
    """Return a value with the digits of its dtype, whoever reads it.

    XLA computes bfloat16, and floats of 8 bits, in a wider float, and leaves out the
    rounding between two operations where it sees both. Behind a branch or a loop it
    sees one: a norm and a sum there would be of different gradients.
    """
    if not jnp.issubdtype(value.dtype, jnp.floating):
        return value
    if value.dtype == jnp.bfloat16:  # of other dtypes, this would lose small numbers
        return lax.reduce_precision(widen(value), 8, 7).astype(value.dtype)
    return widen(value) if value.dtype.itemsize == 1 else value
