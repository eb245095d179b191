"""Read one image, whatever holds it.

==================  ==================================================================
path, bytes         a file in any format that `tanager.data.decoding` reads
Pillow's image      of any mode with 8 or 16 bits per channel
array               uint8 `[H, W]`, or `[H, W, C]` with C of 1, 3 or 4: grey, RGB, RGBA
==================  ==================================================================

Images and arrays become a PNG file in memory, so that the one decoder, which the
training images went through, decides on modes and sizes.
"""

import io
import os
from typing import Any

import numpy as np

from tanager import _validate as validate
from tanager._reading import reading
from tanager.data.decoding import decode_image


_CHANNELS = (1, 3, 4)
_OF_PNG = ("1", "L", "LA", "P", "RGB", "RGBA")
_WITHOUT_RANGE = ("I", "F")
_REMEDY = "give a file, a Pillow image, or uint8 [height, width, 1, 3 or 4]"


def read_image(image: Any, shape: tuple[int, int, int]) -> np.ndarray:
    """Return an image as uint8[H, W, C] of one shape, as `decode_image` makes it."""
    name = image if isinstance(image, str | os.PathLike) else "in memory"
    if not isinstance(image, str | os.PathLike | bytes):
        is_pillow = hasattr(image, "getexif") and hasattr(image, "mode")
        array = None if is_pillow else _checked(image)
        if array is not None and array.shape == shape:
            return array
        image = _as_png(image if array is None else array)
    with reading(name, "cannot be read as an image", "replace it", "image"):
        return decode_image(image, shape)


def _checked(image: Any) -> np.ndarray:
    """Return an array of one image; refuse all others."""
    if isinstance(image, np.ma.MaskedArray):
        validate.refuse_type("image", image, "must not be masked", "fill it")
    array = np.asarray(image)
    whole = array.ndim == 2 or (array.ndim == 3 and array.shape[-1] in _CHANNELS)
    if whole and array.size and array.dtype == np.uint8:
        return array[..., None] if array.ndim == 2 else array
    remedy = _REMEDY
    if array.ndim == 3 and not whole and array.shape[0] in _CHANNELS:
        remedy = "it looks like [channels, height, width]: give np.moveaxis(x, 0, -1)"
    elif whole and array.dtype.kind == "f":
        remedy = "of values from 0 to 1 give np.round(255 * x).astype(np.uint8)"
    rule = "must be an image of uint8 [height, width] or [height, width, channels]"
    if not array.ndim:
        validate.refuse_type("image", image, rule, remedy)
    return validate.refuse("image", array, rule, remedy)


def _as_png(image: Any) -> bytes:
    from PIL import Image

    if isinstance(image, np.ndarray):
        image = Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image)
    if image.mode in _WITHOUT_RANGE:
        rule = f"has mode {image.mode}, whose values have no public range"
        validate.refuse("image", "Pillow's", rule, "convert it to 8 or 16 bits")
    if image.mode.startswith("I;16"):  # `convert` would clip big-endian values
        kept = Image.fromarray(np.asarray(image).astype(np.uint16))
    else:
        kept = image if image.mode in _OF_PNG else image.convert("RGB")
    buffer = io.BytesIO()
    kept.save(buffer, "PNG", compress_level=0, exif=image.getexif() or b"")
    return buffer.getvalue()
