"""What `clipped_grad` returns, and whether it is still what it was."""

from collections.abc import Iterable
from typing import Any, NamedTuple, Self

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.tree_util import GetAttrKey
from jaxtyping import Array, ArrayLike, Bool, Float, PyTree


_MARK = np.array([-7654.321, 0.4142135, 1.5e-20], np.float32)
"""Rounding, clipping, signs and thresholds change one of these, as arithmetic does all.
"""


CHANGED = (
    "total must be a sum as noise.grid or clipped_grad gave it, but it was scaled or "
    "added to since, or clipped to a larger norm than the noise is for: give the noise "
    "grad_fn.sensitivity (or sensitivity_at, of the largest norm of a call; that of an "
    "AdaptiveClip is its own), put gaussian_noise first in optax.chain, add physical "
    "batches by noise.grid.add, and scale what comes out"
)

_UNMARKED = (
    "sums has no mark of clipped_grad, as copies by _replace have none: give what "
    "clipped_grad returned, or its .sum, which is not checked"
)


class _Fields(NamedTuple):
    sum: PyTree
    norms: PyTree[Float[Array, " b"]]
    losses: Float[Array, " b"]


@jax.tree_util.register_pytree_with_keys_class
class ClippedGradient(_Fields):
    """What `clipped_grad` returns for one physical batch of B rows.

    As a pytree it has one leaf more, a mark that arithmetic on all leaves changes. With
    it, `noise.grid.add` sees whether the sum is still what the noise is for.

    Attributes:
        sum: pytree like `params` (None where a leaf is not a float array): the sum of
            clipped gradients, float32 or wider. Private until noise is added.
        norms: float32[B] (or wider), norms before clipping, rounded up;
            0 in masked rows; a pytree of them where `clip_norm` is one. Private.
        losses: float32[B] (or wider); 0 in masked rows. Private.
        mark: float32[4]: three constants, and how far one example moves `sum`; None if
            nothing was clipped.
    """

    mark: Any = None

    def __repr__(self) -> str:
        """Return dtypes and shapes: the numbers are private."""
        return f"ClippedGradient({eqx.tree_pformat(self._asdict())})"

    @jax.transfer_guard("allow")
    def marked(self, sensitivity: ArrayLike) -> Self:
        """Return the same as what clipping gave; copies by other ways have no mark."""
        own = lax.stop_gradient(jnp.asarray(sensitivity, jnp.float32))
        mark = jnp.append(_MARK, own)
        return self.tree_unflatten(None, (*self, mark))

    def require_mark(self) -> Array:
        """Return the mark; refuse what has none, or one that arithmetic changed."""
        if self.mark is None:
            raise ValueError(_UNMARKED)
        if (self.mark.shape, self.mark.dtype) != ((4,), jnp.dtype(jnp.float32)):
            raise ValueError(CHANGED)
        return self.mark

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], None]:
        """Return the leaves and their names, as `jax.tree_util` asks."""
        leaves = zip((*self._fields, "mark"), (*self, self.mark), strict=True)
        return [(GetAttrKey(name), leaf) for name, leaf in leaves], None

    @classmethod
    def tree_unflatten(cls, _: None, leaves: Iterable[Any]) -> Self:
        """Return one with these leaves."""
        *fields, mark = leaves
        made = cls(*fields)
        made.mark = mark
        return made


def fits(mark: Float[Array, "4"], sensitivity: float) -> Bool[Array, ""]:
    """Return whether a sum is as it was clipped, and moves by no more than that."""
    # Rounded to float32, a sensitivity can be that much larger.
    most = sensitivity * (1 + 2.0**-22)
    return jnp.all(mark[:-1] == _MARK) & (mark[-1] <= most)
