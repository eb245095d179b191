"""Read an image of a DICOM file, by pydicom (the extra ``[dicom]``).

Values become grey by the file's own numbers: rescaled (slope and intercept), then by
its first window (center and width, linear: DICOM PS3.3, C.11.2.1.2.1), or else from the
least to the largest value that its stored bits can hold. MONOCHROME1 is inverted. RGB
and YBR images become RGB. Lookup tables are not applied. Of several frames the first
one is read. No message holds a value of the file: patients' names are in it.
"""

import io
import os
import threading
from typing import TYPE_CHECKING, Any

import numpy as np


if TYPE_CHECKING:
    from PIL.Image import Image


_PREAMBLE, _MARK = 128, b"DICM"
_LOCK = threading.Lock()  # pydicom's settings are of all threads


def is_dicom(content: bytes | str | os.PathLike[str]) -> bool:
    """Return whether bytes or a file begin as DICOM does, which says it after 128."""
    head = content
    if not isinstance(head, bytes):
        with open(head, "rb") as stream:
            head = stream.read(_PREAMBLE + len(_MARK))
    return head[_PREAMBLE : _PREAMBLE + len(_MARK)] == _MARK


def open_dicom(content: bytes | str | os.PathLike[str], largest: int) -> "Image":
    """Return the first frame as an image of mode L or RGB, of at most `largest` pixels.

    Raises:
        ValueError: pydicom is not installed, the file is damaged, or holds no image of
            such a kind.
    """
    try:
        from pydicom import config, dcmread
        from pydicom.pixels.utils import pixel_array
    except ImportError as error:
        raise ValueError(
            "it is a DICOM image, which pydicom reads: pip install 'tanager-dp[dicom]'"
        ) from error
    from PIL import Image

    source = io.BytesIO(content) if isinstance(content, bytes) else content
    pixels = None
    try:
        # Its warnings would print values of the file.
        with _LOCK, config.disable_value_validation():
            data = dcmread(source)
            fits = 0 < int(data.Rows) * int(data.Columns) <= largest
            kind = str(data.PhotometricInterpretation)
            if fits and kind in _KINDS:
                pixels = _KINDS[kind](data, pixel_array(data, index=0))
    except Exception as error:  # It raises nearly anything, with values of the file.
        raise ValueError(
            f"pydicom cannot decode it ({type(error).__name__}): it may need pip "
            "install pylibjpeg pylibjpeg-libjpeg pylibjpeg-openjpeg; or convert it to "
            "PNG"
        ) from None
    if pixels is None:
        rule = "it has a palette" if fits else "it has too many pixels, or none"
        raise ValueError(f"{rule}: convert it to PNG")
    return Image.fromarray(pixels)


def _colours(data: Any, values: np.ndarray) -> np.ndarray:
    return (values >> 8 * (values.dtype.itemsize - 1)).astype(np.uint8)


def _grey(data: Any, values: np.ndarray) -> np.ndarray:
    """Return values as uint8, by the rescaling and the window of their file."""
    slope = float(data.get("RescaleSlope", 1) or 1)
    intercept = float(data.get("RescaleIntercept", 0) or 0)
    numbers = values.astype(np.float64) * slope + intercept
    center, width = (_first(data.get(f"Window{name}")) for name in ("Center", "Width"))
    if center is None or width is None or width < 1:
        levels = 2 ** int(data.BitsStored)
        least = -levels // 2 if int(data.PixelRepresentation) else 0
        ends = [value * slope + intercept for value in (least, least + levels - 1)]
        share = (numbers - min(ends)) / (max(ends) - min(ends))
    elif width == 1:
        share = (numbers > center - 0.5).astype(np.float64)
    else:
        share = (numbers - (center - 0.5)) / (width - 1) + 0.5
    return np.rint(255 * np.clip(share, 0, 1)).astype(np.uint8)


def _inverted(data: Any, values: np.ndarray) -> np.ndarray:
    return 255 - _grey(data, values)


def _first(value: Any) -> float | None:
    """Return a number, or the first of several."""
    if value is None or value == "":
        return None
    return float(value) if isinstance(value, int | float | str) else float(value[0])


_KINDS = {"MONOCHROME1": _inverted, "MONOCHROME2": _grey, "RGB": _colours}
_KINDS |= dict.fromkeys(
    ("YBR_FULL", "YBR_FULL_422", "YBR_ICT", "YBR_RCT", "YBR_PARTIAL_420"), _colours
)
"""How pixels become uint8, by the photometric interpretation; pydicom makes RGB."""
