"""Augmentation: random views of one image, in JAX.

Every function is pure and takes ONE image; `vmap` makes a batch of them. Shapes are
static, so that a jitted training step contains its augmentation.

With augmentation multiplicity K the gradients of K views of an example are averaged
before they are clipped, so that the views share one unit of privacy: Unlocking
High-Accuracy DP Image Classification, equation (4); crops and flips as in its
appendix C.2 (4 pixels of "mirror" padding for CIFAR).
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int, PRNGKeyArray, Shaped, UInt8

from tanager import _validate as validate


def standardise(
    image: UInt8[Array, "h w c"], mean: Sequence[float], std: Sequence[float]
) -> Float32[Array, "h w c"]:
    """Return (image / 255 − mean) / std, per channel.

    Args:
        image: uint8[H, W, C].
        mean: C numbers on the 0..1 scale. They must be public: computed from the
            private images, they would leak them.
        std: C positive numbers on the 0..1 scale, public likewise.

    Returns:
        float32[H, W, C].

    Raises:
        ValueError: `mean` or `std` does not have one number per channel.
    """
    channels = image.shape[-1]
    for name, numbers in (("mean", mean), ("std", std)):
        if len(numbers) != channels:
            validate.refuse(
                name, tuple(numbers), f"must have {channels} numbers, one per channel"
            )
    for deviation in std:
        validate.positive(std=deviation)
    # One multiply-add per pixel; the constants are rounded once, from float64.
    scale = 1 / (255 * np.asarray(std, np.float64))
    shift = -np.asarray(mean, np.float64) / np.asarray(std, np.float64)
    return image.astype(jnp.float32) * _row(scale) + _row(shift)


def random_crop(
    key: PRNGKeyArray, image: Shaped[Array, "h w c"], padding: int
) -> Shaped[Array, "h w c"]:
    """Return the image moved by up to `padding` pixels each way, edges mirrored.

    The same as padding by `padding` pixels on each edge (``numpy.pad`` with
    ``mode="reflect"``, which does not repeat the edge pixel) and cropping to the first
    size at one of the (2·padding + 1)² positions, each equally likely. No padded copy
    is made: the rows and columns to read are computed, and read once.

    Args:
        key: one random key.
        image: [H, W, C], of any dtype.
        padding: pixels, from 0 to min(H, W) − 1.

    Returns:
        [H, W, C], of the image's dtype.

    Raises:
        ValueError: `padding` is negative, or not smaller than the image.
    """
    validate.whole(padding=padding, at_least=0)
    height, width, _ = image.shape
    if padding >= min(height, width):
        validate.refuse(
            "padding",
            padding,
            f"must be smaller than the image, {height} × {width}",
            "a mirror shows each pixel once",
        )
    moves = jax.random.randint(key, (2,), -padding, padding + 1)
    rows, columns = _mirrored(moves[0], height), _mirrored(moves[1], width)
    return image[rows[:, None], columns[None, :]]


def random_flip(
    key: PRNGKeyArray, image: Shaped[Array, "h w c"]
) -> Shaped[Array, "h w c"]:
    """Return the image or its left-right mirror image, each with probability 1/2."""
    return jnp.where(jax.random.bernoulli(key), image[:, ::-1], image)


@dataclasses.dataclass(frozen=True)
class Augmentation:
    """A random crop and then a random flip: the augmentation of both papers for CIFAR.

    Called with one key and one image, it returns one view of the same shape and dtype.

    Attributes:
        crop_padding: as `random_crop`; 0 for no crop.
        flip: whether to flip at random. Leave it out where left and right differ in
            meaning, as in digits.

    Raises:
        ValueError: `crop_padding` is not a whole number of at least 0.
    """

    crop_padding: int = 4
    flip: bool = True

    def __post_init__(self):
        validate.whole(crop_padding=self.crop_padding, at_least=0)

    def __call__(
        self, key: PRNGKeyArray, image: Shaped[Array, "h w c"]
    ) -> Shaped[Array, "h w c"]:
        """Return one view of `image`."""
        crop_key, flip_key = jax.random.split(key)
        if self.crop_padding:
            image = random_crop(crop_key, image, self.crop_padding)
        if self.flip:
            image = random_flip(flip_key, image)
        return image


def views(
    augment: Callable[[PRNGKeyArray, Any], Any],
    key: PRNGKeyArray,
    example: Any,
    multiplicity: int,
) -> Any:
    """Return K independent views of one example.

    Args:
        augment: from a key and an example (a pytree, or an image alone) to one view,
            such as `Augmentation`.
        key: one random key.
        example: a pytree of arrays.
        multiplicity: K, at least 1. Without augmentation (the papers' K = 0) use the
            example itself.

    Returns:
        The example's pytree, each leaf with a leading axis of K.

    Raises:
        ValueError: `multiplicity` is not a whole number of at least 1.

    References:
        Unlocking High-Accuracy DP Image Classification, equation (4).
    """
    validate.whole(
        multiplicity=multiplicity,
        at_least=1,
        remedy="without augmentation, use the example itself",
    )
    keys = jax.random.split(key, multiplicity)
    return jax.vmap(augment, in_axes=(0, None))(keys, example)


def _row(numbers: np.ndarray) -> Float32[Array, "1 1 c"]:
    return jnp.asarray(numbers, jnp.float32)[None, None, :]


def _mirrored(move: Int[Array, ""], size: int) -> Int[Array, " {size}"]:
    """The positions `move` … `move` + size − 1, folded back into 0 … size − 1."""
    last = size - 1
    return last - jnp.abs(last - jnp.abs(jnp.arange(size) + move))
