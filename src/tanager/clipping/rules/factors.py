"""From squared norms to what each example counts for in the sum."""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from tanager.clipping.analysis.rounding import gamma


class ClipFactors(NamedTuple):
    """What each example counts for in the sum.

    The values are c_i = min(1, C/‖g_i‖), with ‖g_i‖ bounded from above. Examples are
    counted that are no padding and have a finite norm.
    """

    values: Float[Array, " b"]
    counted: Bool[Array, " b"]


def clip_factors(
    norms: Float[Array, " b"], mask: Bool[Array, " b"], clip_norm: float
) -> ClipFactors:
    """Return what examples with these gradient norms count for."""
    # A zero norm gives the factor 1; `where` and not a product, since 0·NaN is NaN.
    values = jnp.minimum(1.0, clip_norm / jnp.where(norms > 0, norms, clip_norm))
    return ClipFactors(values, mask & jnp.isfinite(norms))


def norms_of(squares: Sequence[Float[Array, " b"]], rows: int) -> Float[Array, " b"]:
    """Return the root of a sum of squared norms, rounded up, in the widest dtype."""
    dtypes = [square.dtype for square in squares] or [jnp.dtype(jnp.float32)]
    widest = max(dtypes, key=lambda dtype: dtype.itemsize)
    zero = jnp.zeros(rows, widest)
    total = sum((square.astype(widest) for square in squares), zero)
    # The root has no derivative at zero, where the factor does not change.
    root = jnp.sqrt(jnp.where(total > 0, total, 1))
    norms = jnp.where(total > 0, root, total)
    return norms * (1 + gamma(len(squares) / 2 + 2, widest))


def by_row(values: Array, like: Array) -> Array:
    """Return one value for each row, shaped to be broadcast over `like`."""
    return values.reshape((-1,) + (1,) * (like.ndim - 1))
