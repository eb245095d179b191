"""Read an image of a DICOM file, by pydicom (the extra ``[dicom]``).

Values become grey by the file's own numbers: by its modality table, or else rescaled
(slope and intercept); then by its first VOI table, or else its first window (DICOM
PS3.3, C.11.1 and C.11.2), or else from the least to the largest value that its stored
bits can hold. MONOCHROME1 is inverted. RGB, YBR and palette images become RGB. Of
several frames the first one is read. No message holds a value of the file: patients'
names are in it.
"""

import io
import logging
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
    data = pixels = None
    # Its warnings would print values of the file. `open_image` filters the others.
    config.logger.setLevel(logging.CRITICAL)
    quiet = np.errstate(all="ignore")
    try:
        with _LOCK, config.disable_value_validation(), quiet:
            data = dcmread(source)
            fits = 0 < int(data.Rows) * int(data.Columns) <= largest
            kind = str(data.PhotometricInterpretation)
            if fits and kind in _KINDS:
                pixels = _KINDS[kind](data, pixel_array(data, index=0))
    except Exception as error:  # It raises nearly anything, with values of the file.
        raise ValueError(_undecoded(data, type(error).__name__)) from None
    if pixels is None:
        rule = (
            "its photometric interpretation is not read"
            if fits
            else "it has too many pixels, or none"
        )
        raise ValueError(f"{rule}: convert it to PNG")
    return Image.fromarray(pixels)


def _undecoded(data: Any, error: str) -> str:
    """Say why an image was not decoded, and what mends it; no value is printed."""
    if data is not None and not any(name in data for name in _PIXELS):
        return "it is a DICOM file without pixel data, so no image: move it elsewhere"
    rule = f"pydicom cannot decode it ({error})"
    syntax = getattr(getattr(data, "file_meta", None), "TransferSyntaxUID", None)
    if syntax is None or not getattr(syntax, "is_compressed", False):
        return f"{rule}: convert it to PNG"
    return (
        f"{rule}: its compression may need pip install pylibjpeg pylibjpeg-libjpeg "
        "pylibjpeg-openjpeg; or convert it to PNG"
    )


def _palette(data: Any, values: np.ndarray) -> np.ndarray:
    """Return the colours that the tables of a file have for its values, as uint8."""
    from pydicom.pixels.processing import apply_color_lut

    entries, first, bits = data.RedPaletteColorLookupTableDescriptor
    entries = entries or 1 << 16
    names = [
        f"{c}PaletteColorLookupTableData" for c in ("Red", "Green", "Blue", "Alpha")
    ]
    tables = {name: table for name in names if (table := data.get(name))}
    if not tables and entries > 1 << bits:
        raise ValueError("pydicom counts entries in as many bits as one of them has")
    for name, table in tables.items():
        if len(table) < 2 * entries:
            bits = 8
            wide = np.frombuffer(table, np.uint8)[:entries].astype(np.uint16)
            setattr(data, name, wide.tobytes())
    values = np.clip(values.astype(np.int64), first, first + entries - 1)
    return (apply_color_lut(values, data)[..., :3] >> (bits - 8)).astype(np.uint8)


def _grey(data: Any, values: np.ndarray) -> np.ndarray:
    """Return values as uint8, by the tables, rescaling and window of their file."""
    from pydicom.pixels.processing import apply_modality_lut, apply_voi, apply_windowing

    _flatten(data)
    levels = 1 << int(data.BitsStored)
    ends = np.arange(2) * (levels - 1)
    ends -= levels // 2 if int(data.PixelRepresentation) else 0
    values = values.astype(np.int64)
    if data.get("ModalityLUTSequence"):
        data.RescaleSlope, data.RescaleIntercept = 1, 0
        values, greatest = _in_table(values, data.ModalityLUTSequence[0])
        values, ends = apply_modality_lut(values, data), np.array([0, greatest])
    else:
        data.RescaleSlope = data.get("RescaleSlope") or 1
        data.RescaleIntercept = data.get("RescaleIntercept") or 0
        values, ends = apply_modality_lut(values, data), apply_modality_lut(ends, data)
    low, high = min(ends), max(ends)
    if data.get("VOILUTSequence"):
        whole = np.rint(values).astype(np.int64)
        values, high = _in_table(whole, data.VOILUTSequence[0])
        values, low = apply_voi(values, data), 0
    elif _has_window(data):
        low, high = apply_windowing(np.array([-np.inf, np.inf]), data)
        values = apply_windowing(values, data)
    share = (values.astype(np.float64) - low) / (high - low)
    return np.rint(255 * np.clip(share, 0, 1)).astype(np.uint8)


def _flatten(data: Any) -> None:
    """Bring what an enhanced file says of all frames, or of the first one, on top."""
    for groups in ("SharedFunctionalGroups", "PerFrameFunctionalGroups"):
        for group in list(data.get(f"{groups}Sequence") or ())[:1]:
            for name in ("PixelValueTransformation", "FrameVOILUT"):
                for item in list(group.get(f"{name}Sequence") or ())[:1]:
                    data.update(item)


def _in_table(values: np.ndarray, table: Any) -> tuple[np.ndarray, int]:
    """Return values that a table has entries for, and the greatest that one can be.

    The entries get 16 bits, because pydicom counts in as many bits as they have.
    """
    entries, first, bits = table.LUTDescriptor
    table.LUTDescriptor = [entries, first, 16]
    return np.clip(values, first, first + (entries or 1 << 16) - 1), (1 << bits) - 1


def _has_window(data: Any) -> bool:
    """Return whether the first window of a file has a center, and a width in range."""
    if not data.get("VOILUTFunction"):
        data.VOILUTFunction = "LINEAR"
    center, width = (_first(data.get(f"Window{name}")) for name in ("Center", "Width"))
    if center is None or width is None:
        return False
    return width >= 1 or (width > 0 and data.VOILUTFunction.upper() != "LINEAR")


def _first(value: Any) -> float | None:
    """Return a number, or the first of several."""
    if value is None or value == "":
        return None
    return float(value) if isinstance(value, int | float | str) else float(value[0])


_PIXELS = ("PixelData", "FloatPixelData", "DoubleFloatPixelData")
_YBR = ("YBR_FULL", "YBR_FULL_422", "YBR_ICT", "YBR_RCT", "YBR_PARTIAL_420")
_KINDS = {
    "MONOCHROME1": lambda data, values: 255 - _grey(data, values),
    "MONOCHROME2": _grey,
    "PALETTE COLOR": _palette,
    **dict.fromkeys(
        ("RGB", *_YBR),
        lambda _, values: (values >> 8 * (values.dtype.itemsize - 1)).astype(np.uint8),
    ),
}
"""How pixels become uint8, by the photometric interpretation; pydicom makes RGB."""
