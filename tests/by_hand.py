"""Clipped gradients of examples by NumPy, in float64: what strategies are held to."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np


def norms_of(found: Any) -> np.ndarray:
    """Return the norm of each example's gradient: examples are the first axis."""
    leaves = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(found)]
    return np.sqrt(sum(np.sum(g.reshape(len(g), -1) ** 2, axis=1) for g in leaves))


def clip(found: Any, clip_norm: float, mask: Any = True) -> tuple[Any, np.ndarray]:
    """Return the sum of per-example gradients, clipped, and their norms before it."""
    norms = norms_of(found)
    factors = np.where(norms > clip_norm, clip_norm / np.where(norms > 0, norms, 1), 1)
    factors = factors * mask
    return jax.tree.map(lambda g: np.tensordot(factors, g, axes=1), found), norms


def clipped(
    loss: Callable, params: Any, batch: Any, clip_norm: float
) -> tuple[Any, np.ndarray]:
    """Return `clip` of the gradients of a loss, which `vmap` forms in float32."""
    return clip(jax.jit(jax.vmap(jax.grad(loss), (None, 0)))(params, batch), clip_norm)
