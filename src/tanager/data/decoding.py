"""Decode an encoded image to pixels of one shape. No other file opens images."""

import contextlib
import io
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np


if TYPE_CHECKING:
    from PIL.Image import Image


# Without a list Pillow tries every format it knows, and starts Ghostscript for one.
_FORMATS = ("PNG", "JPEG")
LARGEST = 1 << 26
"""Most pixels of an image: a few kilobytes can unpack to any number of them."""
_DEEP = ("I", "F")


@contextlib.contextmanager
def open_image(content: bytes | str | os.PathLike[str]) -> "Iterator[Image]":
    """Open one image, as bytes or a file; nothing but mode and size is decoded.

    Raises:
        Exception: the image is neither PNG nor JPEG, is too large or damaged, or cannot
            be read. Pillow raises nearly anything.
    """
    from PIL import Image, UnidentifiedImageError

    source = io.BytesIO(content) if isinstance(content, bytes) else content
    try:
        image = Image.open(source, formats=_FORMATS)
    except UnidentifiedImageError as error:
        raise ValueError("it is not a PNG or JPEG image: convert it to one") from error
    with image:
        width, height = image.size
        if width * height > LARGEST:
            raise ValueError(
                f"it has {width} × {height} pixels; at most {LARGEST:,} are decoded"
            )
        yield image


def decode_image(
    content: bytes | str | os.PathLike[str],
    shape: tuple[int, int, int],
    exact: bool = False,
) -> np.ndarray:
    """Decode one PNG or JPEG image.

    The content decides the format, not the name: ImageNet has a PNG named .JPEG. As
    torchvision does for ImageNet, every picture of 8 bits becomes RGB (grey where C is
    1): grey is repeated, CMYK and palettes are converted, and transparency is dropped,
    which shows the colours beneath it. The orientation in EXIF is ignored. The shorter
    side is scaled, the middle is kept; `exact` refuses an image of another size or
    number of channels. More than 8 bits per channel are refused.
    """
    from PIL import Image, ImageOps

    height, width, channels = shape
    mode = "L" if channels == 1 else "RGB"
    with open_image(content) as image:
        if exact and (image.mode, image.size) != (mode, (width, height)):
            raise ValueError(
                f"it is an {image.mode} image of {image.size[1]} × {image.size[0]}, "
                f"and must be {mode}, {height} × {width}"
            )
        if image.mode.startswith(_DEEP):
            raise ValueError(f"it has mode {image.mode}, more than 8 bits per channel")
        # Pillow warns where a palette with transparency becomes RGB at once.
        alpha = image.mode == "P" and "transparency" in image.info
        picture = (image.convert("RGBA") if alpha else image).convert(mode)
    if picture.size != (width, height):
        method = Image.Resampling.BICUBIC
        picture = ImageOps.fit(picture, (width, height), method=method)
    return np.asarray(picture).reshape(shape)
