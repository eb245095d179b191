"""Weights and images drawn by name: the same wherever NumPy runs.

A tensor depends on its name and shape alone, so that two libraries can be given the
same weights without a file in between. Nothing is 0 or 1 that a mistake could hide
behind: gains scatter around 1, biases around 0, skip gains around 0.7.
"""

import hashlib
import math
import zlib
from collections.abc import Mapping, Sequence

import numpy as np


def tensor(name: str, shape: Sequence[int]) -> np.ndarray:
    """Return a float32 weight of the given name; its first axis holds the outputs."""
    generator = np.random.default_rng(zlib.crc32(name.encode()))
    normal = generator.standard_normal(tuple(shape), np.float32)
    kind = name.rsplit(".", 1)[-1]
    if kind == "weight":
        return normal / np.float32(math.sqrt(math.prod(shape[1:])))
    centre, spread = {
        "gain": (1.0, 0.2),
        "bias": (0.0, 0.1),
        "skipinit_gain": (0.7, 0.1),
    }[kind]
    return np.asarray(centre + spread * normal, np.float32)


def image(height: int, width: int) -> np.ndarray:
    """Return a float32 image [height, width, 3] whose pixels are not independent."""
    pixels = np.random.default_rng(0).standard_normal((height, width, 3), np.float32)
    return np.cumsum(pixels, axis=1) / np.float32(math.sqrt(width))


def fingerprint(shapes: Mapping[str, Sequence[int]]) -> str:
    """Return a digest of names and shapes."""
    lines = [f"{name} {list(shape)}" for name, shape in sorted(shapes.items())]
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=16).hexdigest()
