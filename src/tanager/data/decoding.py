"""Decode an encoded image to pixels of one shape. No other file opens images.

Every image becomes 8 bits per channel by the rule `CONVERSION`, whatever else is in the
data: nothing is measured from other images.

==================  ==================================================================
grey, black/white   stays; repeated where three channels are wanted
16-bit grey         value >> 8
RGB                 stays
palette, CMYK, …    becomes RGB as Pillow converts it
transparency        is dropped, which shows the colours beneath it
EXIF orientation    is applied: the image is turned upright
several frames      the first one is read
DICOM               see `tanager.data.dicom`
32-bit, float       refused: they have no public range
==================  ==================================================================
"""

import contextlib
import io
import logging
import os
import re
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from tanager.data import dicom


if TYPE_CHECKING:
    from PIL.Image import Image


CONVERSION = "upright-8-bit"
"""The name of the rule above: recorded by runs, so that a new rule has a new name."""
SUFFIXES = (
    *(".png", ".jpg", ".jpeg", ".jfif", ".jpe", ".webp"),
    *(".tif", ".tiff", ".bmp", ".gif", ".dcm", ".dicom"),
)
"""Endings of files of images, in lower case."""
# Without a list Pillow tries every format it knows, and starts Ghostscript for one.
_FORMATS = ("PNG", "JPEG", "WEBP", "TIFF", "BMP", "GIF")
LARGEST = 1 << 26
"""Most pixels of an image: a few kilobytes can unpack to any number of them."""
# Their warnings and logs tell which image was read, and what is written in it.
_SILENT = re.compile(r"(PIL|pydicom)\b")
_SIXTEEN_BITS = "I;16"
_GREY = ("1", "L", "LA")
_ORIENTATION, _ON_ITS_SIDE = 0x0112, (5, 6, 7, 8)
_TURNS = {
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}
"""What turns an image upright, by its orientation in EXIF."""


@contextlib.contextmanager
def open_image(content: bytes | str | os.PathLike[str]) -> "Iterator[Image]":
    """Open one image, as bytes or a file; nothing but mode and size is decoded.

    Raises:
        Exception: the image is in no format that is read, is too large or damaged, or
            cannot be read. Pillow raises nearly anything.
    """
    from PIL import Image, UnidentifiedImageError

    _silence()
    if dicom.is_dicom(content):  # first: its preamble may be a TIFF, of other pixels
        yield dicom.open_dicom(content, LARGEST)
        return
    source = io.BytesIO(content) if isinstance(content, bytes) else content
    try:
        image = Image.open(source, formats=_FORMATS)
    except UnidentifiedImageError as error:
        rule = "it is not a PNG, JPEG, WebP, TIFF, BMP, GIF or DICOM image: convert it"
        whole = isinstance(content, bytes)
        empty = not content if whole else not os.stat(content).st_size
        raise ValueError("it is empty" if empty else rule) from error
    with image:
        width, height = image.size
        if width * height > LARGEST:
            raise ValueError(
                f"it has {width} × {height} pixels; at most {LARGEST:,} are decoded"
            )
        yield image


def _silence() -> None:
    """Let no library warn of an image, whatever warnings others asked for since."""
    logging.getLogger("PIL").setLevel(logging.CRITICAL)
    # `catch_warnings` is of all threads, and would undo what another one set meanwhile.
    if ("ignore", None, Warning, _SILENT, 0) not in warnings.filters[:1]:
        warnings.filterwarnings("ignore", module=_SILENT.pattern)


def is_grey(image: "Image") -> bool:
    """Return whether an image that was opened has no colours."""
    return image.mode in _GREY or image.mode.startswith(_SIXTEEN_BITS)


def upright_size(image: "Image") -> tuple[int, int]:
    """Return (height, width) of an image that was opened, once it is upright."""
    width, height = image.size
    return (width, height) if _orientation(image) in _ON_ITS_SIDE else (height, width)


def decode_image(
    content: bytes | str | os.PathLike[str],
    shape: tuple[int, int, int],
    exact: bool = False,
) -> np.ndarray:
    """Decode one image as uint8[H, W, C], C being 1 or 3.

    The content decides the format, not the name: ImageNet has a PNG named .JPEG. The
    shorter side is scaled, the middle is kept; `exact` refuses an image of another size
    or number of channels.
    """
    height, width, channels = shape
    mode = "L" if channels == 1 else "RGB"
    with open_image(content) as image:
        if exact and (image.mode, upright_size(image)) != (mode, (height, width)):
            raise ValueError(
                f"it is an {image.mode} image of {image.size[1]} × {image.size[0]}, "
                f"and must be {mode}, {height} × {width}"
            )
        return resized(_converted(image, mode), shape)


def resized(image: "Image | np.ndarray", shape: tuple[int, int, int]) -> np.ndarray:
    """Return the middle of an image as uint8[H, W, C], its shorter side scaled.

    An array is uint8[h, w, c], c being 1 or 3.
    """
    from PIL import Image, ImageOps

    height, width, channels = shape
    if isinstance(image, np.ndarray):
        mode = "L" if channels == 1 else "RGB"
        grey = image.shape[-1] == 1
        image = Image.fromarray(image[..., 0] if grey else image).convert(mode)
    if image.size != (width, height):
        method = Image.Resampling.BICUBIC
        image = ImageOps.fit(image, (width, height), method=method)
    return np.asarray(image).reshape(shape)


def _converted(image: "Image", mode: str) -> "Image":
    from PIL import Image

    if image.mode.startswith(_SIXTEEN_BITS):
        values = np.asarray(image).astype(np.uint16) >> 8
        picture = Image.fromarray(values.astype(np.uint8))
    elif image.mode.startswith(("I", "F")):
        raise ValueError(
            f"it has mode {image.mode}, whose values have no public range: convert it "
            "to 8 or 16 bits"
        )
    else:
        # Pillow warns where a palette with transparency becomes RGB at once.
        alpha = image.mode == "P" and "transparency" in image.info
        picture = image.convert("RGBA") if alpha else image
    picture = picture.convert(mode)
    turn = _TURNS.get(_orientation(image))
    return picture if turn is None else picture.transpose(Image.Transpose[turn])


def _orientation(image: "Image") -> int:
    """Return the orientation of EXIF; 1 where there is none, or a damaged one.

    Pillow turns TIFF itself. A PNG may have it after its pixels: there it is ignored,
    because all of the file would be decoded to find it.
    """
    late = image.format == "PNG" and "exif" not in image.info
    if late or image.format == "TIFF":
        return 1
    try:
        return image.getexif().get(_ORIENTATION, 1)
    except Exception:  # Pillow raises nearly anything.
        return 1
