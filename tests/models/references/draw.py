"""Weights and images that two frameworks can draw alike, from NumPy alone.

A tensor is drawn from its name in the other library and its shape there, so that no
weights need to be stored: a reference holds only what came out. The bits are those of
PCG64, whose stream NumPy promises never to change, seeded with the CRC-32 of the name.
"""

import hashlib
import math
import zlib
from collections.abc import Mapping, Sequence

import numpy as np


EVERY = 48
"""One feature in this many is kept."""


def uniform(name: str, shape: Sequence[int]) -> np.ndarray:
    """Return float32 numbers, uniform in [−1, 1)."""
    bits = np.random.PCG64(zlib.crc32(name.encode())).random_raw(math.prod(shape))
    return ((bits >> 11) * 2.0**-52 - 1).astype(np.float32).reshape(shape)


def tensor(name: str, shape: Sequence[int], *, conv_scale: float = 1.0) -> np.ndarray:
    """Return the float32 tensor of a model.

    No scale or gain is 1 and no bias 0, so that nothing hides there.

    Args:
        name: in the other library, as in ``state_dict``.
        shape: in the other library: [out, in, ...] for kernels.
        conv_scale: times all kernels but the head's: a small one shows the eps of
            weight standardisation.
    """
    numbers = uniform(name, shape)
    if name.endswith("bias") or (len(shape) > 1 and shape[0] == 1):
        return np.float32(0.3) * numbers  # biases and embeddings [1, ...]
    if len(shape) <= 1 or name.endswith("gain"):
        return np.asarray(1 + np.float32(0.3) * numbers)
    is_head = name.startswith(("fc.", "head."))
    scale = math.sqrt(3 / math.prod(shape[1:])) * (1 if is_head else conv_scale)
    return np.float32(scale) * numbers


def image(shape: Sequence[int]) -> np.ndarray:
    """Return a float32 image [channels, height, width] of variance 1."""
    return np.float32(math.sqrt(3)) * uniform("image", shape)


def fingerprint(shapes: Mapping[str, Sequence[int]]) -> str:
    """Return a digest of names and shapes."""
    lines = [f"{name} {list(shape)}" for name, shape in sorted(shapes.items())]
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=16).hexdigest()
