"""Position embeddings learned on one grid of patches, for another."""

import math

import jax
import numpy as np

from tanager.models.vit import VisionTransformer


def fit_positions(positions: np.ndarray, model: VisionTransformer) -> np.ndarray:
    """Return position embeddings for the grid of a model.

    Bicubic (Keys's kernel with a = −1/2), widened against aliasing where the grid gets
    coarser: what timm's `resample_abs_pos_embed` does. The class token's stays.

    Args:
        positions: ``[1 + patches, width]`` of a square grid, the class token's first.
        model: whose image and patch say what grid is wanted.

    Returns:
        float32 ``[1 + patches, width]``; the same array where as many are wanted.

    Raises:
        ValueError: the patches make no square.

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
        raise ValueError(f"{count} patches make no square grid")
    grid = np.float32(positions[1:]).reshape(side, side, -1)
    resized = jax.image.resize(grid, (height, width, grid.shape[-1]), "cubic")
    rows = np.asarray(resized).reshape(height * width, -1)
    return np.concatenate([np.float32(positions[:1]), rows])
