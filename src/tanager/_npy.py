"""Read NumPy's npy and npz files without trusting their headers.

NumPy's own reader allocates as much as a header claims, warns, and may unpickle. Here a
small file needs little memory, whatever its header claims.
"""

import math
import re
import zipfile
from collections.abc import Iterator
from typing import IO, NamedTuple

import numpy as np


_MAGIC = b"\x93NUMPY"
_LONGEST_HEADER = 10_000
_FIELDS = (
    r"'descr'\s*:\s*'(?P<descr>[<>|=]?[biufcSUVO]\d{0,4})'",
    r"'fortran_order'\s*:\s*(?P<order>True|False)",
    r"'shape'\s*:\s*\((?P<shape>(?:\d{1,19}L?\s*,\s*)*(?:\d{1,19}L?)?)\s*\)",
)
_HEADER = re.compile(rf"\s*\{{\s*(?:(?:{'|'.join(_FIELDS)})\s*,?\s*){{3}}\}}\s*")
_ENCRYPTED = 1
_LARGEST_RATIO = 1100  # Deflate makes of nothing but zeros 1032 times less.


class ObjectsError(ValueError):
    """An array of Python objects: reading it would run a pickle."""


class Header(NamedTuple):
    """The header of an npy file; `by_columns` is Fortran order."""

    shape: tuple[int, ...]
    by_columns: bool
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the array, according to the header."""
        return math.prod(self.shape) * self.dtype.itemsize


def read_header(stream: IO[bytes]) -> Header:
    """Read the header of an npy file; the numbers come next.

    Raises:
        ValueError: it is not an npy file, or has structured records.
    """
    start = stream.read(8)
    wide = start[6:7] in (b"\x02", b"\x03")
    if start[:6] != _MAGIC or (not wide and start[6:7] != b"\x01"):
        raise ValueError("it is not an npy file")
    length = int.from_bytes(stream.read(4 if wide else 2), "little")
    if length > _LONGEST_HEADER:
        raise ValueError(f"it has a header of {length:,} bytes, so it is damaged")
    text = stream.read(length).decode("latin-1")
    found = _HEADER.fullmatch(text)
    if found is None or None in found.groups():
        raise ValueError(f"it has a header of no plain array: {text:.100}")
    numbers = re.findall(r"\d+", found["shape"])
    return Header(
        tuple(map(int, numbers)), found["order"] == "True", np.dtype(found["descr"])
    )


def read_array(stream: IO[bytes], size: int) -> np.ndarray:
    """Return the array of an npy file of `size` bytes.

    Raises:
        ObjectsError: it holds Python objects.
        ValueError: it is not an npy file, or is smaller than its header says.
    """
    header = read_header(stream)
    if header.dtype.hasobject:
        raise ObjectsError("it holds Python objects, which only a pickle can")
    if header.nbytes > size:
        raise ValueError(
            f"its header says {header.nbytes:,} bytes, and it has {size:,}"
        )
    content = stream.read(header.nbytes)
    if len(content) < header.nbytes:
        raise ValueError("it is cut short")
    numbers = np.frombuffer(content, header.dtype)
    return numbers.reshape(header.shape, order="F" if header.by_columns else "C")


def members(archive: zipfile.ZipFile, size: int) -> dict[str, zipfile.ZipInfo]:
    """Return the members of an npz file of `size` bytes, by name.

    Raises:
        ValueError: it unpacks to more than a file of this size can hold, has a name
            twice, or is encrypted.
    """
    found = {info.filename: info for info in archive.infolist()}
    if len(found) < len(archive.infolist()):
        raise ValueError("it has a name twice")
    if any(info.flag_bits & _ENCRYPTED for info in found.values()):
        raise ValueError("it is encrypted: save it without a password")
    total = sum(info.file_size for info in found.values())
    if total > _LARGEST_RATIO * size:
        raise ValueError(f"it unpacks {size:,} bytes to {total:,}, so it is damaged")
    return found


def arrays(archive: zipfile.ZipFile, size: int) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the arrays of an npz file by name, without ``.npy``.

    Raises:
        ValueError: as `members` and `read_array`; the message names the array.
    """
    for name, info in members(archive, size).items():
        try:
            with archive.open(info) as stream:
                array = read_array(stream, info.file_size)
        except ObjectsError:
            raise
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        yield name.removesuffix(".npy"), array
