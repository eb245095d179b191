"""Windows that slide over ONE image `[H, W, C]`: padding, convolution and pooling.

The leading axis of 1 that XLA's convolution asks for is added around that one operation
only, so that `vmap` turns it into one batched convolution and nothing else carries a
spare axis.
"""

import functools
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from tanager import _validate as validate
from tanager.clipping.analysis.dtypes import accumulation_dtype


Padding = str | int | tuple[tuple[int, int], tuple[int, int]]
"""Padding of an image: pixels for all four sides, ``((top, bottom), (left, right))``,
or a name.

``"VALID"``: none. ``"SAME"``: the result has ceil(side/stride) pixels; an odd pixel is
added at the bottom and on the right (TensorFlow, JAX). ``"SYMMETRIC"``:
(kernel_size − 1)//2 on all four sides for every stride (PyTorch's networks).
"""

PADDINGS = ("SAME", "VALID", "SYMMETRIC")


def check_padding(padding: Padding) -> None:
    """Refuse an unknown name, or a number of pixels below 0."""
    if isinstance(padding, str):
        validate.one_of(PADDINGS, padding=padding)
    elif isinstance(padding, int):
        validate.whole(padding=padding, at_least=0)


def edges(
    padding: Padding, image: Array, window: int, stride: int
) -> Sequence[tuple[int, int]]:
    """Return ``(top, bottom), (left, right)`` in pixels."""
    if padding == "SYMMETRIC":
        padding = (window - 1) // 2
    if isinstance(padding, int):
        return ((padding, padding), (padding, padding))
    if isinstance(padding, str):
        sides = image.shape[:2]
        return lax.padtype_to_pads(sides, (window,) * 2, (stride,) * 2, padding)
    return padding


_LARGEST_SUM = 5
"""Side of the largest depthwise kernels that are summed by hand.

For 7×7 (8 × 56 × 56 × 96 on two cores) a clipped step takes 946 ms so, by XLA 545, and
compiles in 11 s instead of 3.
"""


def convolve(
    image: Float[Array, "h w i"],
    weight: Float[Array, "kh kw fan_in o"],
    bias: Float[Array, " o"] | None = None,
    *,
    stride: int = 1,
    padding: Padding = "SAME",
    groups: int = 1,
) -> Float[Array, "h2 w2 o"]:
    """Convolve one image, in its dtype; the arguments are those of `layers.Conv`."""
    depthwise = groups == image.shape[-1] == weight.shape[-1] > 1
    if depthwise and weight.shape[0] <= _LARGEST_SUM:
        output = _depthwise(image, weight, stride, padding)
    else:
        output = lax.conv_general_dilated(
            jnp.expand_dims(image, 0),
            weight.astype(image.dtype),
            window_strides=(stride, stride),
            padding=edges(padding, image, weight.shape[0], stride),
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=groups,
        )
        output = jnp.squeeze(output, 0)
    if bias is None:
        return output
    return output + bias.astype(image.dtype)[None, None, :]


def _depthwise(
    image: Float[Array, "h w c"],
    weight: Float[Array, "kh kw 1 c"],
    stride: int,
    padding: Padding,
) -> Float[Array, "h2 w2 c"]:
    """Convolve each channel with its own kernel, as a sum of shifted products.

    XLA fuses them into one loop; its own convolution takes a CPU 13 to 70 times as long
    for the shapes of EfficientNet.
    """
    rows, columns = weight.shape[:2]
    around = edges(padding, image, rows, stride)
    wide = accumulation_dtype(image.dtype)
    padded = jnp.pad(image.astype(wide), (*around, (0, 0)))
    bottom, right = padded.shape[0] - rows, padded.shape[1] - columns
    parts = [
        padded[row : bottom + row + 1 : stride, column : right + column + 1 : stride]
        * weight[row, column].astype(wide)[None]
        for row in range(rows)
        for column in range(columns)
    ]
    return functools.reduce(jnp.add, parts).astype(image.dtype)


def max_pool(
    image: Float[Array, "h w c"], window: int, *, stride: int, padding: Padding = "SAME"
) -> Float[Array, "h2 w2 c"]:
    """Take each channel's maximum over square windows of one image.

    Maxima of shifted slices, first of rows, then of columns: the gradient of XLA's own
    pooling is slow on a CPU.
    Padding has the value −∞.
    """
    validate.whole(window=window, stride=stride, at_least=1)
    check_padding(padding)
    sides = edges(padding, image, window, stride)
    around = [(low, high, 0) for low, high in (*sides, (0, 0))]
    padded = lax.pad(image, jnp.asarray(-jnp.inf, image.dtype), around)
    if min(padded.shape[:2]) < window:
        rule = f"must hold a window of {window} pixels"
        validate.refuse("image shape", image.shape, rule)
    for axis in (0, 1):
        last = (padded.shape[axis] - window) // stride * stride
        parts = [
            lax.slice_in_dim(padded, start, start + last + 1, stride, axis)
            for start in range(window)
        ]
        padded = functools.reduce(jnp.maximum, parts)
    return padded


def halve(image: Float[Array, "h w c"]) -> Float[Array, "h2 w2 c"]:
    """Return the mean of each 2×2 pixels; at an odd edge, of the pixels there."""
    height, width, channels = image.shape
    rows, columns = -(-height // 2), -(-width // 2)
    image = jnp.pad(image, ((0, height % 2), (0, width % 2), (0, 0)))
    sums = jnp.sum(image.reshape(rows, 2, columns, 2, channels), axis=(1, 3))
    share = np.full((rows, columns, 1), 0.25)
    share[-1] *= 1 + height % 2
    share[:, -1] *= 1 + width % 2
    return sums * jnp.asarray(share, image.dtype)
