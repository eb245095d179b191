"""All views that a random crop may give, by NumPy, and how evenly they are drawn."""

from typing import Any

import jax
import numpy as np
from scipy import stats


FALSE_ALARM = 1e-6


def picture(height=6, width=6, channels=3, dtype=np.uint8):
    """An image with all pixels different: so are its views while 2·padding + 1 < width.

    (Beyond that, a crop can be another crop's mirror image.)
    """
    pixels = np.arange(height * width * channels).reshape(height, width, channels)
    return pixels.astype(dtype)


def legal_crops(image, padding, size=None, mode: Any = "reflect"):
    """All crops of the padded image, in order."""
    height, width = size or image.shape[:2]
    edges = ((padding, padding), (padding, padding), (0, 0))
    padded = np.pad(image, edges, mode=mode)
    rows = range(padded.shape[0] - height + 1)
    columns = range(padded.shape[1] - width + 1)
    return [padded[i : i + height, j : j + width] for i in rows for j in columns]


def which(produced, legal):
    """The position of every produced view among the legal ones, all different."""
    table = {view.tobytes(): position for position, view in enumerate(legal)}
    assert len(table) == len(legal)
    return np.array([table[np.ascontiguousarray(v).tobytes()] for v in produced])


def keys(count, seed=0):
    return jax.random.split(jax.random.key(seed), count)


def uniform_p(positions, choices):
    return stats.chisquare(np.bincount(positions, minlength=choices)).pvalue
