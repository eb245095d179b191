"""What `clipped_grad` returns, and whether it is still what it was."""

from collections.abc import Iterable
from typing import Any, NamedTuple, Self

import jax
import numpy as np
from jax.tree_util import GetAttrKey
from jaxtyping import Array, Float, PyTree


MARK = np.uint32(0x7A4A6E72)
"""The leaf that is there to be left alone."""


class _Fields(NamedTuple):
    sum: PyTree
    norms: PyTree[Float[Array, " b"]]
    losses: Float[Array, " b"]


@jax.tree_util.register_pytree_with_keys_class
class ClippedGradient(_Fields):
    """What `clipped_grad` returns for one physical batch of B rows.

    As a pytree it has one leaf more, a number that arithmetic on all leaves changes:
    the noise of `gaussian_noise` is for the sum as it was.

    Attributes:
        sum: pytree like `params` (None where a leaf is not a float array): the sum of
            clipped gradients, float32 or wider. Private until noise is added.
        norms: float32[B] (or wider), norms before clipping, rounded up;
            0 in masked rows; a pytree of them where `clip_norm` is one. Private.
        losses: float32[B] (or wider); 0 in masked rows. Private.
        mark: that number; None if nothing was clipped.
    """

    mark: Any = None

    def marked(self) -> Self:
        """Return the same as what clipping gave; copies by other ways have no mark."""
        return self.tree_unflatten(None, (*self, jax.device_put(MARK)))

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
