"""Crops and flips: views made of the image's own pixels, moved and never mixed."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, PRNGKeyArray, Shaped

from tanager import _validate as validate


def random_crop(
    key: PRNGKeyArray,
    image: Shaped[Array, "height width c"],
    padding: int,
    size: tuple[int, int] | None = None,
) -> Shaped[Array, "h w c"]:
    """Return a part of the image, with up to `padding` mirrored pixels around it.

    The same as padding by `padding` pixels on each edge (``numpy.pad`` with
    ``mode="reflect"``, which does not repeat the edge pixel) and cropping to `size` at
    one of all positions, each equally likely. No padded copy is made: the rows and
    columns to read are computed, and read once.

    Args:
        key: one random key.
        image: [H, W, C], of any dtype.
        padding: pixels, from 0 to min(H, W) − 1.
        size: (h, w), at most (H, W); None for (H, W).

    Returns:
        [h, w, C], of the image's dtype.

    Raises:
        ValueError: `padding` is negative, or not smaller than the image, or `size` is
            larger than the image.
    """
    height, width, _ = image.shape
    validate.whole(padding=padding, at_least=0)
    check_padding("padding", padding, (height, width))
    rows, columns = (height, width) if size is None else size
    if rows > height or columns > width:
        validate.refuse(
            "size", size, f"must be at most that of the image, {height} × {width}"
        )
    most = np.array([height - rows, width - columns]) + padding
    moves = jax.random.randint(key, (2,), -padding, most + 1)
    row = _mirrored(moves[0], rows, height)
    column = _mirrored(moves[1], columns, width)
    return image[row[:, None], column[None, :]]


def random_flip(
    key: PRNGKeyArray, image: Shaped[Array, "h w c"]
) -> Shaped[Array, "h w c"]:
    """Return the image or its left-right mirror image, each with probability 1/2."""
    return jnp.where(jax.random.bernoulli(key), image[:, ::-1], image)


def middle(
    image: Shaped[Array, "height width c"], size: tuple[int, int]
) -> Shaped[Array, "h w c"]:
    """Return the middle of the image; an odd pixel is cut at the bottom or right."""
    top, left = (image.shape[0] - size[0]) // 2, (image.shape[1] - size[1]) // 2
    return image[top : top + size[0], left : left + size[1]]


def check_padding(name: str, padding: int, size: tuple[int, ...]) -> None:
    """Refuse a padding, named `name` in the message, as large as the image."""
    if padding >= min(size[:2]):
        validate.refuse(
            name,
            padding,
            f"must be smaller than the image, {size[0]} × {size[1]}",
            "a mirror shows each pixel once",
        )


def _mirrored(move: Int[Array, ""], count: int, size: int) -> Int[Array, " {count}"]:
    """The positions `move` … `move` + count − 1, folded back into 0 … size − 1."""
    last = size - 1
    return last - jnp.abs(last - jnp.abs(jnp.arange(count) + move))
