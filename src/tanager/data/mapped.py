"""Decoded images in npy files, memory-mapped, or in an npz file, in memory."""

import zipfile
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tanager import _npy
from tanager._reading import AGAIN, reading, refuse_file
from tanager.data.decoding import resized
from tanager.data.streamed import StreamedImages, of_files


_LABEL = 400  # bytes at most, of text too
_SPARE = 4096  # bytes of labels beyond the images', so that a message can count them


class Array(NamedTuple):
    """An npy file, or an array of an npz file by its name."""

    file: Path
    name: str | None = None

    def read(self, most: int | None = None) -> np.ndarray:
        """Return the array; refuse one of more than `most` bytes."""
        size = self.file.stat().st_size
        if self.name is None:
            with open(self.file, "rb") as stream:
                return _npy.read_array(
                    stream, size if most is None else min(size, most)
                )
        with zipfile.ZipFile(self.file) as archive:
            info = _npy.members(archive, size)[f"{self.name}.npy"]
            with archive.open(info) as stream:
                return _npy.read_array(stream, info.file_size)


def arrays_of(file: Path) -> dict[str, Array]:
    """Return the arrays of an npz file by name."""
    with reading(file, "is not an npz file"), zipfile.ZipFile(file) as archive:
        names = _npy.members(archive, file.stat().st_size)
    return {(n := name.removesuffix(".npy")): Array(file, n) for name in names}


class MappedSource(StreamedImages):
    """The rows of an array uint8[N, H, W, C] or uint8[N, H, W], with their labels.

    The array is an npy file, which is memory-mapped, or an array of an npz file, which
    is taken into memory. `values` are the labels as they are there, N or N × 1. A
    file that is damaged or of another dtype or shape is refused.

    Args:
        images: an npy file, or an npz file and the name of its array.
        labels: likewise.
    """

    def __init__(self, images: Array, labels: Array):
        self._array, self._labels = images, labels.file
        with reading(images.file, "has no images that can be read"):
            pixels = self._pixels()
        with reading(labels.file, "has no labels that can be read"):
            values = labels.read(_LABEL * len(pixels) + _SPARE)
        if values.shape == (len(pixels), 1):
            values = values[:, 0]
        if values.shape != (len(pixels),):
            found = f"has labels {list(values.shape)} for {len(pixels)} images"
            refuse_file(labels.file, found, "give one label for each image")
        super().__init__(pixels.shape[1:], np.zeros(len(pixels), np.int32))
        self.values = values
        if images.name is not None:  # It was unpacked.
            self._opened[0] = pixels

    def _pixels(self) -> np.ndarray:
        file, name = self._array
        if name is None:
            return _mapped(file)
        images = self._array.read()
        _check(file, _npy.Header(images.shape, False, images.dtype))
        return images.reshape(_with_channels(images.shape))

    def _files(self) -> bytes:
        return of_files([self._array.file])

    def _read(self, index: int) -> np.ndarray:
        if 0 not in self._opened:
            self._opened[0] = self._pixels()
        pixels = np.array(self._opened[0][index])
        return pixels if pixels.shape == self.shape else resized(pixels, self.shape)

    def place(self, index: int) -> tuple[Path, str]:
        """Return the file and the row of an image."""
        return self._array.file, f"row {index} "

    def label_place(self, index: int) -> tuple[Path, str]:
        """Return the file and the row of a label."""
        return self._labels, f"row {index} "


def _mapped(file: Path) -> np.ndarray:
    with open(file, "rb") as stream:
        header = _npy.read_header(stream)
        start, end = stream.tell(), file.stat().st_size
    _check(file, header)
    if start + header.nbytes > end:
        refuse_file(file, "is truncated", AGAIN)
    return np.memmap(file, np.uint8, "r", start, _with_channels(header.shape))


def _check(file: Path, header: _npy.Header) -> None:
    shape = header.shape
    found = f"has images as {header.dtype}{list(shape)}"
    if len(shape) == 4 and shape[1] in (1, 3) and shape[3] not in (1, 3):
        remedy = "save numpy.moveaxis(images, 1, -1), made contiguous"
        refuse_file(file, f"{found}, channels first (NCHW)", remedy)
    read = len(shape) > 2 and shape[3:] in ((), (1,), (3,), (4,))
    if header.dtype != np.uint8 or not read:
        rule = "they must be uint8[N, H, W] or uint8[N, H, W, C], of 1, 3 or 4 channels"
        refuse_file(file, found, rule)
    if header.by_columns:
        remedy = "save them with numpy.save(file, numpy.ascontiguousarray(images))"
        refuse_file(file, "has images in Fortran order", remedy)
    if not header.nbytes:
        refuse_file(file, "has no images", AGAIN)


def _with_channels(shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape if len(shape) == 4 else (*shape, 1)
