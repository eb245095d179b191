"""Decoded images in npy files, memory-mapped."""

from pathlib import Path

import numpy as np

from tanager import _npy
from tanager._reading import AGAIN, reading, refuse_file
from tanager.data.streamed import StreamedImages, check_labels, of_files


_SPARE = 4096  # bytes of labels beyond the images', so that a message can count them


class MappedSource(StreamedImages):
    """The rows of an npy file, uint8[N, H, W, C], which is memory-mapped.

    Another holds the labels, integers[N] from 0 to `classes` − 1. A file that is
    damaged or of another dtype or shape is refused.
    """

    def __init__(self, file: Path, label_file: Path, classes: int | None = None):
        with reading(file, "has no images that can be read"):
            images = _mapped(file)
        with (
            reading(label_file, "has no labels that can be read"),
            open(label_file, "rb") as stream,
        ):
            size = min(label_file.stat().st_size, 8 * len(images) + _SPARE)
            labels = _npy.read_array(stream, size)
        if labels.shape != (len(images),):
            found = f"has labels {list(labels.shape)} for {len(images)} images"
            refuse_file(label_file, found)
        labels = check_labels(label_file, labels, classes)
        super().__init__(images.shape[1:], labels)
        self._file = file

    def _files(self) -> bytes:
        return of_files([self._file])

    def _read(self, index: int) -> np.ndarray:
        if 0 not in self._opened:
            self._opened[0] = _mapped(self._file)
        return np.array(self._opened[0][index])

    def _place(self, index: int) -> tuple[Path, str]:
        return self._file, f"row {index} "


def _mapped(file: Path) -> np.ndarray:
    with open(file, "rb") as stream:
        header = _npy.read_header(stream)
        start, end = stream.tell(), file.stat().st_size
    if header.dtype != np.uint8 or len(header.shape) != 4:
        found = f"{header.dtype}{list(header.shape)}"
        refuse_file(file, f"has images as {found}", "they must be uint8[N, H, W, C]")
    if header.by_columns:
        refuse_file(
            file,
            "has images in Fortran order",
            "save them with numpy.save(file, numpy.ascontiguousarray(images))",
        )
    if not header.nbytes:
        refuse_file(file, "has no images", AGAIN)
    if start + header.nbytes > end:
        refuse_file(file, "is truncated", AGAIN)
    return np.memmap(file, np.uint8, "r", start, header.shape)
