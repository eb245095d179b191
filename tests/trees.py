"""How far apart two trees of arrays are."""

from typing import Any

import jax
import numpy as np


def distance(one: Any, other: Any) -> float:
    """Return the Euclidean distance of two trees with equally many leaves."""
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    squares = [
        np.sum((np.asarray(a, np.float64) - np.asarray(b, np.float64)) ** 2)
        for a, b in pairs
    ]
    return float(np.sqrt(sum(squares)))
