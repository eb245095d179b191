"""Resize position embeddings to another grid of patches."""

import math

import jax
import numpy as np

from tanager.models.vit import VisionTransformer


def fit_positions(positions: np.ndarray, model: VisionTransformer) -> np.ndarray:
    """Return position embeddings for the grid of a model.

    Bicubic (Keys's kernel with a = −1/2), antialiased for a coarser grid, as in timm's
    `resample_abs_pos_embed`. The embedding of the class token is not changed.

    Args:
        positions: ``[1 + patches, width]`` of a square grid, the class token first.
        model: its image and patch size give the grid.

    Returns:
        float32 ``[1 + patches, width]``; the same array if the number is the same.

    Raises:
        ValueError: the patches are not a square grid.

    References:
        Dosovitskiy et al. 2021, section 3.2: 2D interpolation of the embeddings when
        fine-tuning at another resolution.
    """
    patch = model.patches.weight.shape[0]
    height, width = (side // patch for side in model.image_shape[:2])
    count = len(positions) - 1
    if count == height * width:
        return positions
    side = math.isqrt(max(count, 0))
    if side * side != count or not count:
        raise ValueError(f"{count} patches are not a square grid")
    grid = np.float32(positions[1:]).reshape(side, side, -1)
    resized = jax.image.resize(grid, (height, width, grid.shape[-1]), "cubic")
    rows = np.asarray(resized).reshape(height * width, -1)
    return np.concatenate([np.float32(positions[:1]), rows])
