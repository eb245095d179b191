"""Parts of one image: cropped, mirrored, and resized, all inside a jitted step.

A crop moves pixels and never mixes them. A box of any size is drawn, and the image
inside it is resampled by separable linear interpolation. The box may be traced: what is
static is the number of source rows that an output row can need, so a resampling is that
many gathers of rows, weighted and summed, and the same again for columns.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, PRNGKeyArray, Real, Shaped

from tanager import _validate as validate


Image = Shaped[Array, "height width c"]
View = Shaped[Array, "h w c"]
Range = tuple[float, float]
PADDING_MODES = ("reflect", "symmetric")
"""How edges are mirrored; symmetric repeats the pixel at the edge."""
FIXED_VIEWS = ("crop", "resize")
"""How `fixed_view` makes an image smaller."""
_TRIES = 10  # of torchvision's RandomResizedCrop
_DISTORTED_TRIES = 100  # of TensorFlow's sample_distorted_bounding_box


def random_crop(
    key: PRNGKeyArray,
    image: Image,
    padding: int,
    size: tuple[int, int],
    mode: str = "reflect",
) -> View:
    """Return a part of the image, with up to `padding` mirrored pixels around it.

    The same as padding by `padding` pixels on each edge (by ``numpy.pad`` with that
    `mode`, one of `PADDING_MODES`) and cropping to `size` at one of all positions, each
    equally likely. No padded copy is made: the rows and columns to read are computed,
    and read once. `padding` is smaller than the image, and `size` is not larger.
    """
    height, width, _ = image.shape
    most = np.array([height - size[0], width - size[1]]) + padding
    moves = jax.random.randint(key, (2,), -padding, most + 1)
    row = _mirrored(moves[0], size[0], height, mode)
    column = _mirrored(moves[1], size[1], width, mode)
    return image[row[:, None], column[None, :]]


def random_flip(key: PRNGKeyArray, image: View) -> View:
    """Return the image or its left-right mirror image, each with probability 1/2."""
    return jnp.where(jax.random.bernoulli(key), image[:, ::-1], image)


def middle(image: Image, size: tuple[int, int]) -> View:
    """Return the middle of the image; an odd pixel is cut at the bottom or right."""
    top, left = (image.shape[0] - size[0]) // 2, (image.shape[1] - size[1]) // 2
    return image[top : top + size[0], left : left + size[1]]


def fixed_view(image: Image, size: tuple[int, int], by: str) -> View:
    """Return what is evaluated of an image: its middle, or all of it, resized.

    `by` is one of `FIXED_VIEWS`. An image of that size is not changed.
    """
    if size == image.shape[:2]:
        return image
    return middle(image, size) if by == "crop" else resize(image, size)


class Box(NamedTuple):
    """A part of an image, in whole pixels; all int32 scalars."""

    top: Int[Array, ""]
    left: Int[Array, ""]
    height: Int[Array, ""]
    width: Int[Array, ""]


def random_box(
    key: PRNGKeyArray, height: int, width: int, area: Range, aspect: Range
) -> Box:
    """Draw a box as torchvision's ``RandomResizedCrop`` does.

    Its share of the image's area is uniform in `area` and its aspect ratio (width over
    height) log-uniform in `aspect`; both sides are rounded, and its place is uniform
    among all in the image. A box that does not fit is drawn again, up to ten times in
    all; then it is the largest one in the middle with an aspect ratio in `aspect`.
    """
    # One call for all numbers: each is slow to compile.
    draws = jax.random.uniform(key, (2, 1 + _TRIES), jnp.float32)
    (row, column), (share, shape) = draws[:, 0], draws[:, 1:]
    pixels = height * width * (area[0] + (area[1] - area[0]) * share)
    low, high = math.log(aspect[0]), math.log(aspect[1])
    ratio = jnp.exp(low + (high - low) * shape)
    heights = jnp.round(jnp.sqrt(pixels / ratio)).astype(jnp.int32)
    widths = jnp.round(jnp.sqrt(pixels * ratio)).astype(jnp.int32)
    fits = (heights > 0) & (heights <= height) & (widths > 0) & (widths <= width)
    first, any_fits = jnp.argmax(fits), jnp.any(fits)

    whole = width / height
    middle_height = round(width / aspect[0]) if whole < aspect[0] else height
    middle_width = round(height * aspect[1]) if whole > aspect[1] else width
    rows = jnp.where(any_fits, heights[first], middle_height)
    columns = jnp.where(any_fits, widths[first], middle_width)
    top = jnp.where(any_fits, _whole(row, height - rows + 1), (height - rows) // 2)
    left = jnp.where(
        any_fits, _whole(column, width - columns + 1), (width - columns) // 2
    )
    return Box(top, left, rows, columns)


def distorted_box(
    key: PRNGKeyArray, height: int, width: int, area: Range, aspect: Range
) -> Box:
    """Draw a box as TensorFlow's ``sample_distorted_bounding_box`` does.

    The aspect ratio (width over height) is uniform; given it, the height is uniform
    among the whole numbers with which the area is within bounds and the box fits; a
    box whose rounded area is out of bounds is made one row taller or less tall. Its
    place is uniform, except that it never touches the last row or column unless it
    has all of them: so it is in the reference. A box that does not fit is drawn
    again, up to a hundred times in all; then it is the whole image.
    """
    draws = jax.random.uniform(key, (2, 1 + _DISTORTED_TRIES), jnp.float32)
    (row, column), (shape, size) = draws[:, 0], draws[:, 1:]
    ratio = aspect[0] + (aspect[1] - aspect[0]) * shape
    least, most = (share * height * width for share in area)

    def columns_of(rows: Array) -> Array:
        return _rounded(rows.astype(ratio.dtype) * ratio)

    low, high = (_rounded(jnp.sqrt(pixels / ratio)) for pixels in (least, most))
    widest = ((width + 0.5 - 1e-7) / ratio).astype(jnp.int32)
    widest -= (columns_of(widest) > width).astype(jnp.int32)
    high = jnp.where(columns_of(high) > width, widest, high)
    high = jnp.minimum(high, height)
    low = jnp.minimum(low, high)
    rows = low + _whole(size, high - low + 1)
    fewest, greatest = math.ceil(least), math.floor(most)
    rows += (rows * columns_of(rows) < fewest).astype(jnp.int32)
    rows -= (rows * columns_of(rows) > greatest).astype(jnp.int32)
    columns = columns_of(rows)
    pixels = rows * columns
    fits = (pixels >= fewest) & (pixels <= greatest) & (rows > 0) & (columns > 0)
    fits &= (rows <= height) & (columns <= width)
    first, any_fits = jnp.argmax(fits), jnp.any(fits)
    rows = jnp.where(any_fits, rows[first], height)
    columns = jnp.where(any_fits, columns[first], width)
    top = _whole(row, jnp.maximum(height - rows, 1))
    left = _whole(column, jnp.maximum(width - columns, 1))
    return Box(top, left, rows, columns)


def resized_crop(
    image: Image, box: Box, size: tuple[int, int], antialias: bool
) -> View:
    """Return what is inside a box, resized by linear interpolation.

    The same as cutting the box out and resizing it alone: nothing outside it counts.
    Centres of pixels are aligned. Where the box is larger than `size`, `antialias`
    widens the interpolating triangle by their ratio, as Pillow does (and torchvision,
    for images from Pillow always); without it every output pixel is interpolated
    between its two neighbours each way, as ``tf.image.resize`` does by default.

    The image is uint8 or float, and so is the result: computed in float32 or wider,
    uint8 rounded to nearest once, at the end.
    """
    dtype = working_dtype(image.dtype)
    rows, row_weights = _taps(box.top, box.height, image.shape[0], size[0], antialias)
    columns, column_weights = _taps(
        box.left, box.width, image.shape[1], size[1], antialias
    )
    narrow = mixed(image, 1, columns, column_weights.astype(dtype))
    whole = mixed(narrow, 0, rows, row_weights.astype(dtype))
    return rounded_to(whole, image.dtype)


def resize(image: Image, size: tuple[int, int]) -> View:
    """Return the whole image resized, as `resized_crop` with `antialias`."""
    height, width, _ = image.shape
    box = Box(*(jnp.int32(number) for number in (0, 0, height, width)))
    return resized_crop(image, box, size, antialias=True)


def mixed(
    image: Image,
    axis: int,
    positions: Int[Array, "taps n"],
    weights: Real[Array, "taps n"],
) -> Real[Array, "h w c"]:
    """Return n rows (axis 0) or columns (1), each a weighted sum of the image's.

    `positions` says which of the image's rows, or columns, go into each of the new.
    """
    shape = list(image.shape)
    shape[axis] = positions.shape[1]
    weights = jnp.expand_dims(weights, (2, 3) if axis == 0 else (1, 3))

    def add(tap: Array, total: Array) -> Array:
        taken = jnp.take(image, positions[tap], axis, mode="clip")
        return total + weights[tap] * taken.astype(weights.dtype)

    # A loop, because what it gives is then computed once. XLA would compute a sum
    # again for every tap of the other axis, and for every use of the result.
    return lax.fori_loop(0, len(positions), add, jnp.zeros(shape, weights.dtype))


def rounded_to(pixels: Float[Array, "h w c"], dtype: np.dtype) -> View:
    """Return pixels in `dtype`; if it is uint8, rounded to nearest, halves up.

    Halves are common where sides have small common multiples. Which side of a half a
    sum of floats falls on depends on how it was compiled, so what is just below goes
    up too.
    """
    if dtype == jnp.uint8:
        pixels = jnp.floor(pixels + (0.5 + 2**-10))
    return pixels.astype(dtype)


def working_dtype(dtype: np.dtype) -> np.dtype:
    """Return what pixels of uint8 or float are computed in: float32 or wider."""
    if dtype != jnp.uint8 and not jnp.issubdtype(dtype, jnp.floating):
        validate.refuse("image", str(dtype), "must have pixels of uint8 or float")
    return jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)


def _taps(
    start: Int[Array, ""],
    length: Int[Array, ""],
    available: int,
    size: int,
    antialias: bool,
) -> tuple[Int[Array, "taps {size}"], Float[Array, "taps {size}"]]:
    """For each of `size` output positions, the source positions and their weights."""
    scale = length.astype(jnp.float32) / size
    reach = jnp.maximum(scale, 1.0) if antialias else jnp.float32(1)
    largest = max(available / size, 1.0) if antialias else 1.0
    # An open interval of length 2·reach holds at most this many whole numbers.
    count = math.ceil(2 * largest)
    centre = (jnp.arange(size, dtype=jnp.float32) + 0.5) * scale - 0.5
    first = jnp.floor(centre - reach).astype(jnp.int32) + 1
    positions = first[None, :] + jnp.arange(count, dtype=jnp.int32)[:, None]
    distance = jnp.abs(positions.astype(jnp.float32) - centre[None, :])
    weights = jnp.maximum(1 - distance / reach, 0.0)
    weights = jnp.where((positions >= 0) & (positions < length), weights, 0.0)
    weights /= jnp.sum(weights, axis=0, keepdims=True)
    return start + jnp.clip(positions, 0, length - 1), weights


def _whole(uniform: Float[Array, "*n"], count: Int[Array, "*n"]) -> Int[Array, "*n"]:
    """From a uniform number in [0, 1) to a whole one in 0 … count − 1."""
    number = jnp.floor(uniform * count.astype(uniform.dtype)).astype(jnp.int32)
    return jnp.minimum(number, count - 1)


def _rounded(numbers: Float[Array, " n"]) -> Int[Array, " n"]:
    return jnp.round(numbers).astype(jnp.int32)


def _mirrored(
    move: Int[Array, ""], count: int, size: int, mode: str
) -> Int[Array, " {count}"]:
    """The positions `move` … `move` + count − 1, folded back into 0 … size − 1."""
    positions, last = jnp.arange(count) + move, size - 1
    if mode == "reflect":
        return last - jnp.abs(last - jnp.abs(positions))
    before = jnp.where(positions < 0, -1 - positions, positions)
    return jnp.where(before > last, 2 * last + 1 - before, before)
