"""What all sources that decode on access have in common."""

import abc
import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import numpy as np

from tanager import _validate as validate
from tanager._reading import reason, refuse_file
from tanager.data.formats import Report, decode_images
from tanager.data.source import (
    ArraySource,
    UnreadableExample,
    check_index,
    whole_indices,
)


_ENDS = 1 << 16  # bytes of a file's beginning and end that identify it


class StreamedImages(abc.ABC):
    """Labelled images that are read and decoded when they are asked for.

    An example is ``{"image": uint8[H, W, C], "label": int32[]}``. Files are opened by
    the process that reads them, at the first example it reads: a source can be pickled
    into any number of processes, and several threads can read it. In memory it holds
    its listing: names, labels and the like, a few dozen bytes for each example.

    Attributes:
        shape: (H, W, C) of every image.
        tells_labels: whether `labels` costs little; else it reads every example.
    """

    tells_labels: ClassVar[bool] = True

    def __init__(self, shape: tuple[int, int, int]):
        self.shape = shape
        self._opened: dict[Any, Any] = {}

    @abc.abstractmethod
    def __len__(self) -> int: ...

    @property
    @abc.abstractmethod
    def labels(self) -> np.ndarray:
        """All labels, int32[N], without decoding an image; not to be written to."""

    @abc.abstractmethod
    def identity(self) -> bytes:
        """See `tanager.data.StreamedSource`."""

    @abc.abstractmethod
    def _read(self, index: int) -> tuple[np.ndarray, int]:
        """Return image and label, or raise whatever goes wrong."""

    @abc.abstractmethod
    def _place(self, index: int) -> tuple[Path, str]:
        """Return an example's file, and words for where it is in it."""

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        check_index(index, len(self))
        try:
            image, label = self._read(index)
        except MemoryError:
            raise
        except Exception as error:  # Pillow's decoders raise nearly anything
            self._unreadable(index, error)
        return {"image": image, "label": np.asarray(label, np.int32)}

    def gather(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Return the examples at `indices`, stacked, each read in turn."""
        chosen = whole_indices(indices, len(self))
        images = np.empty((len(chosen), *self.shape), np.uint8)
        labels = np.empty(len(chosen), np.int32)
        for row, index in enumerate(chosen):
            example = self[int(index)]
            images[row], labels[row] = example["image"], example["label"]
        return {"image": images, "label": labels}

    def refuse(self, index: int, rule: str, remedy: str) -> NoReturn:
        """Raise an error that names an example's file and place in it."""
        file, place = self._place(index)
        refuse_file(file, f"{place}{rule}", remedy)

    def _unreadable(self, index: int, error: Exception) -> NoReturn:
        file, place = self._place(index)
        rule = f"{place}cannot be read as an image ({reason(error)})"
        message = validate.message("path", str(file), rule, "replace it")
        raise UnreadableExample(message, index) from error

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": {}}


class Relabelled:
    """The examples of a source, under other labels.

    Args:
        source: the examples.
        numbers: int32[classes], the new label for each of the source's.
    """

    def __init__(self, source: StreamedImages, numbers: np.ndarray):
        self._source = source
        self._numbers = numbers

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return self._renamed(self._source[index])

    def gather(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Return the examples at `indices`, stacked."""
        return self._renamed(self._source.gather(indices))

    @property
    def labels(self) -> np.ndarray:
        """The new labels, int32[N]."""
        return self._numbers[self._source.labels]

    def identity(self) -> bytes:
        """See `tanager.data.StreamedSource`."""
        return digest(b"relabelled", self._source.identity(), self._numbers)

    def _renamed(self, examples: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        labels = np.asarray(self._numbers[examples["label"]])
        return {"image": examples["image"], "label": labels}


def into_memory(source: StreamedImages, report: Report) -> ArraySource:
    """Decode all of a source, in a pool of threads.

    Raises:
        UnreadableExample: an example cannot be read.
    """
    labels = np.empty(len(source), np.int32)

    def image(index: int) -> np.ndarray:
        example = source[index]
        labels[index] = example["label"]
        return example["image"]

    images = decode_images(len(source), image, source.shape, report)
    return ArraySource({"image": images, "label": labels})


def locate(index: int, ends: np.ndarray) -> tuple[int, int]:
    """Return the part that an index falls into, and its position there.

    Args:
        index: over all parts, one after another.
        ends: int64[parts], the index after the last of each.
    """
    part = int(np.searchsorted(ends, index, "right"))
    return part, index - int(ends[part - 1] if part else 0)


def digest(*parts: bytes | np.ndarray | Iterable[object]) -> bytes:
    """Return 32 bytes that tell these parts from all others."""
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

    The end of a parquet, Arrow or ArrayRecord file tells where all its parts are.

    Raises:
        OSError: a file cannot be read.
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
