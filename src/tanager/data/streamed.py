"""What all sources that decode on access have in common."""

import abc
import concurrent.futures
import copy
import hashlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Self

import numpy as np

from tanager import _validate as validate
from tanager._reading import AGAIN, reason, refuse_file
from tanager.data.source import (
    ArraySource,
    UnreadableExample,
    check_index,
    whole_indices,
)


Report = Callable[[int], None]
_ENDS = 1 << 16  # bytes of a file's beginning and end that identify it
_PART = 256  # images per task of the thread pool


class StreamedImages(abc.ABC):
    """Labelled images that are read and decoded when they are asked for.

    An example is ``{"image": uint8[H, W, C], "label": int32[]}``. A process opens the
    files when it reads its first example, so that a source can be pickled into any
    number of processes. Several threads can read it. It holds names and labels in
    memory, a few dozen bytes for each example.

    Attributes:
        shape: (H, W, C) of every image.
        labels: int32[N]; not to be written to.
        owners: [N] whose each image is, whole numbers or texts; None if unknown.
    """

    owners: np.ndarray | None = None

    def __init__(
        self, shape: tuple[int, int, int], labels: np.ndarray, exact: bool = False
    ):
        self.shape = shape
        self.labels = labels
        self._exact = exact  # whether images of another shape are refused
        self._opened: dict[Any, Any] = {}

    @abc.abstractmethod
    def _files(self) -> bytes:
        """Return a digest of the files, which does not depend on the folder."""

    @abc.abstractmethod
    def _read(self, index: int) -> np.ndarray:
        """Return an image, or raise whatever goes wrong."""

    @abc.abstractmethod
    def _place(self, index: int) -> tuple[Path, str]:
        """Return an example's file, and words for where it is in it."""

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return {"image": self.image(index), "label": self.labels[index, ...]}

    def image(self, index: int) -> np.ndarray:
        """Return one image; an `UnreadableExample` names the file and the row."""
        check_index(index, len(self))
        try:
            return self._read(index)
        except MemoryError:
            raise
        except Exception as error:  # Pillow's decoders raise nearly anything
            file, place = self._place(index)
            rule = f"{place}cannot be read as an image ({reason(error)})"
            message = validate.message("path", str(file), rule, "replace it")
            raise UnreadableExample(message, index) from error

    def gather(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Return the examples at `indices`, stacked, each read in turn."""
        chosen = whole_indices(indices, len(self))
        images = np.empty((len(chosen), *self.shape), np.uint8)
        for row, index in enumerate(chosen):
            images[row] = self.image(int(index))
        return {"image": images, "label": self.labels[chosen]}

    def identity(self) -> bytes:
        """See `tanager.data.StreamedSource`."""
        kind = type(self).__name__.encode()
        return digest(kind, self._files(), self.labels, self.shape)

    def relabelled(self, labels: np.ndarray) -> Self:
        """Return a source of the same images with other labels, int32[N]."""
        other = copy.copy(self)
        other.labels = labels
        return other

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": {}}


def into_memory(source: StreamedImages, report: Report) -> ArraySource:
    """Decode all of a source, in a pool of threads.

    `report` is called in this thread, with the number of images since the last call.
    """
    images = np.empty((len(source), *source.shape), np.uint8)

    def decode_part(start: int) -> int:
        stop = min(start + _PART, len(source))
        for index in range(start, stop):
            images[index] = source.image(index)
        return stop - start

    with concurrent.futures.ThreadPoolExecutor() as pool:
        for done in pool.map(decode_part, range(0, len(source), _PART)):
            report(done)
    return ArraySource({"image": images, "label": np.array(source.labels)})


def check_labels(
    file: Path, labels: np.ndarray, classes: int | None = None
) -> np.ndarray:
    """Return labels as int32[N]; refuse all but integers from 0 to `classes` − 1."""
    if not len(labels):
        refuse_file(file, "has no rows", AGAIN)
    if labels.dtype.kind not in "iu":
        refuse_file(file, f"has labels of {labels.dtype}", "labels must be integers")
    most = np.iinfo(np.int32).max if classes is None else classes - 1
    wrong = np.flatnonzero((labels < 0) | (labels > most))
    if wrong.size:
        row = int(wrong[0])
        refuse_file(
            file, f"row {row} has label {labels[row]}", f"it must be from 0 to {most}"
        )
    return labels.astype(np.int32)


def digest(*parts: bytes | np.ndarray | Iterable[object]) -> bytes:
    """Return a hash of the parts, 32 bytes."""
    total = hashlib.blake2b(digest_size=32)
    for part in parts:
        if isinstance(part, np.ndarray):
            content = np.ascontiguousarray(part).tobytes()
        else:
            content = part if isinstance(part, bytes) else repr(tuple(part)).encode()
        total.update(len(content).to_bytes(8, "little") + content)
    return total.digest()


def of_files(files: Iterable[Path]) -> bytes:
    """Return a digest of the files' names, sizes, beginnings and ends.

    The end of a parquet or Arrow file lists where its parts begin.
    """
    found = []
    for file in files:
        with open(file, "rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            ends = b""
            for start in (0, max(0, size - _ENDS)):
                stream.seek(start)
                ends += stream.read(_ENDS)
        found.append((file.name, size, digest(ends)))
    return digest(found)
