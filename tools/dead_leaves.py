"""Draw the constants of `tanager.models.dead_leaves` from a seed, in about a minute.

python tools/dead_leaves.py src/tanager/models/dead_leaves.npz
"""

import sys
from collections.abc import Sequence

import jax
import numpy as np

from tanager.models import dead_leaves


SIDE = 32
SMALLEST, LARGEST = 3.0, 60.0
"""Radii of leaves in pixels: their density falls as the cube, as in photographs."""
AXES = np.float32([[1, 1, 1], [1, 0, -1], [1, -2, 1]])
AXES /= np.linalg.norm(AXES, axis=1, keepdims=True)
DEVIATIONS = np.float32([0.40, 0.12, 0.06])
"""Of lightness and of two colours, much less, as in photographs."""
MEAN, DEVIATION = 0.5, 0.25
PATCHES = 200_000
PATCH_FLOOR, FLOOR = 0.1, 0.002
"""Added to eigenvalues before whitening: a share of their mean, or of the largest."""


def draw(count: int, rng: np.random.Generator) -> np.ndarray:
    """Return images of dead leaves, float32 ``[count, 32, 32, 3]``, about 0 to 1."""
    rows, columns = np.mgrid[:SIDE, :SIDE].astype(np.float32)
    images = np.full((count, SIDE, SIDE, 3), 0.5, np.float32)
    for image in images:
        free = np.ones((SIDE, SIDE), bool)
        for _ in range(400):
            near, far = SMALLEST**-2, LARGEST**-2
            radius = (near + rng.random() * (far - near)) ** -0.5
            down, across = rng.uniform(-radius, SIDE + radius, 2)
            turn, narrow = rng.uniform(0, np.pi), rng.uniform(0.4, 1)
            y, x = rows - down, columns - across
            long = np.cos(turn) * x + np.sin(turn) * y
            short = np.cos(turn) * y - np.sin(turn) * x
            if rng.random() < 0.5:
                leaf = (long / radius) ** 2 + (short / (radius * narrow)) ** 2 < 1
            else:
                leaf = (abs(long) < radius) & (abs(short) < radius * narrow)
            leaf &= free
            if leaf.any():
                colour = 0.5 + (rng.standard_normal(3) * DEVIATIONS) @ AXES
                slope = rng.standard_normal(2) * 0.15 / max(radius, 4)
                shade = slope[0] * long + slope[1] * short
                image[leaf] = (colour + shade[..., None])[leaf]
                free &= ~leaf
            if not free.any():
                break
    for axis in (1, 2):
        edges = [(0, 0)] * 4
        edges[axis] = (1, 1)
        padded = np.pad(images, edges, mode="edge")
        before, here, after = (
            np.take(padded, np.arange(SIDE) + step, axis) for step in range(3)
        )
        images = np.float32(0.7) * here + np.float32(0.15) * (before + after)
    return np.clip(images, 0, 1)


def patches(images: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """Return random patches, each of mean 0 and about variance 1, ``[count, 108]``."""
    which = rng.integers(len(images), size=count)
    views = np.lib.stride_tricks.sliding_window_view(
        images, (dead_leaves.SIDE, dead_leaves.SIDE), axis=(1, 2)
    )
    tops, lefts = rng.integers(views.shape[1], size=(2, count))
    found = np.moveaxis(views[which, tops, lefts], 1, -1).reshape(count, -1)
    found = found - found.mean(1, keepdims=True)
    return found / np.sqrt(found.var(1, keepdims=True) + dead_leaves.FLOOR)


def filters(images: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """Return random patches of images as filters, float16 ``[6, 6, 3, count]``.

    A filter's answer is the product of two whitened patches, its own of norm 1.
    """
    many = patches(images, PATCHES, rng)
    values, vectors = np.linalg.eigh(many.T @ many / len(many))
    by = vectors / np.sqrt(values + PATCH_FLOOR * values.mean()) @ vectors.T
    own = patches(images, 2 * count, rng)
    own = own[(own**2).mean(1) > 0.01][:count] @ by  # without flat ones
    own = own / np.linalg.norm(own, axis=1, keepdims=True) @ by
    own = own - own.mean(1, keepdims=True)
    found = own.reshape(count, dead_leaves.SIDE, dead_leaves.SIDE, 3)
    return np.moveaxis(found, 0, -1).astype(np.float16)


def made(
    count: int, components: int, images: int, rng: np.random.Generator
) -> dict[str, np.ndarray]:
    """Return the constants: `count` filters, `components` of each quarter."""
    leaves = (draw(images, rng) - np.float32(MEAN)) / np.float32(DEVIATION)
    kernels = filters(leaves, count, rng)
    answer = jax.jit(
        jax.vmap(lambda image: dead_leaves.pooled(image, np.float32(kernels)))
    )
    # Both an image and its mirror image, whose mean a network may see.
    answers = np.concatenate(
        [
            np.asarray((answer(part) + answer(part[:, :, ::-1])) / 2, np.float64)
            for part in np.array_split(leaves, -(-images // 50))
        ]
    )
    mean, deviation = answers.mean((0, 1)), answers.std((0, 1)) + 1e-4
    values = (answers - mean) / deviation
    values /= np.linalg.norm(values, axis=(1, 2), keepdims=True)
    values = values.reshape(-1, 2 * count)
    sizes, vectors = np.linalg.eigh(values.T @ values / len(values))
    sizes, vectors = sizes[::-1], vectors[:, ::-1]
    whitening = vectors / np.sqrt(np.maximum(sizes, 0) + FLOOR * sizes[0])
    return {
        "filters": kernels,
        "mean": mean.astype(np.float32),
        "deviation": deviation.astype(np.float32),
        "whitening": whitening[:, :components].astype(np.float16),
    }


def main(arguments: Sequence[str]) -> None:
    """Write the file that is given."""
    (path,) = arguments
    rng = np.random.default_rng(0)
    np.savez_compressed(path, **made(800, 800, 4000, rng))


if __name__ == "__main__":
    main(sys.argv[1:])
