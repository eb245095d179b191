"""What all sources that decode on access have in common."""

import abc
import concurrent.futures
import copy
import hashlib
import itertools
import os
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from tanager import _validate as validate
from tanager._reading import UnreadableFile, reading, reason
from tanager.data.decoding import decode_image, is_grey, open_image, upright_size
from tanager.data.source import (
    ArraySource,
    UnreadableExample,
    check_index,
    whole_indices,
)


Progress = Callable[[int, int], None]
_ENDS = 1 << 16  # bytes of a file's beginning and end that identify it
_NAMED = 5  # files that cannot be opened, beside the first
_PART = 256  # images per task of the thread pool
_SMALL = 2e-4  # seconds of an image below which threads only wait for one another


class StreamedImages(abc.ABC):
    """Labelled images that are read and decoded when they are asked for.

    An example is ``{"image": uint8[H, W, C], "label": int32[]}``, or int32[K] of 0 and
    1 with any number of labels an example. A process opens the
    files when it reads its first example, so that a source can be pickled into any
    number of processes. Several threads can read it. It holds names and labels in
    memory, a few dozen bytes for each example.

    Attributes:
        shape: (H, W, C) of every image.
        labels: int32[N], or int32[N, K]; not to be written to.
        values: [N] the labels as they are in the files, before classes are numbered.
        owners: [N] whose each image is, whole numbers or texts; None if unknown.
    """

    owners: np.ndarray | None = None
    values: np.ndarray

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
    def place(self, index: int) -> tuple[Path, str]:
        """Return an example's file, and words for where it is in it."""

    def label_place(self, index: int) -> tuple[Path, str]:
        """Return a label's file, and words for where it is in it."""
        return self.place(index)

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
            file, place = self.place(index)
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


class EncodedImages(StreamedImages):
    """Images that are decoded to one shape as `tanager.data.decoding` says."""

    @abc.abstractmethod
    def content(self, index: int) -> bytes | str:
        """Return an encoded image, or its path."""

    def _read(self, index: int) -> np.ndarray:
        return decode_image(self.content(index), self.shape, self._exact)


class UnreadableImages(UnreadableFile):
    """Images that cannot be read, found when all were opened or decoded."""


def common_shape(
    sources: Sequence[EncodedImages], progress: Progress | None = None
) -> tuple[tuple[int, int] | None, int]:
    """Open every image; return the (H, W) that all have, and the number of channels.

    If all are grey they have one channel, otherwise three. (H, W) is None if they
    differ in size. `progress` is called with (opened, all) now and then.

    Raises:
        UnreadableFile: some cannot be opened; the message names them.
    """
    sizes, channels, broken = set(), 1, []
    done, total = 0, sum(map(len, sources))
    for source in sources:
        for index in range(len(source)):
            file, place = source.place(index)
            rule = f"{place}cannot be read as an image"
            try:
                with (
                    reading(file, rule, "replace it"),
                    open_image(source.content(index)) as image,
                ):
                    sizes.add(upright_size(image))
                    channels = channels if is_grey(image) else 3
            except UnreadableFile as error:
                broken.append((_name(source, index), error))
            done += 1
            if progress is not None and (done % _PART == 0 or done == total):
                progress(done, total)
    _refuse_all(broken)
    return (sizes.pop() if len(sizes) == 1 else None), channels


def _name(source: StreamedImages, index: int) -> str:
    file, place = source.place(index)
    return f"{file} {place}".strip()


def _refuse_all(broken: Sequence[tuple[str, UnreadableFile]]) -> None:
    """Name all images that cannot be read in one message, or the first and how many."""
    if not broken:
        return
    (_, first), *others = broken
    names = [name for name, _ in others[:_NAMED]]
    names += [f"and {len(others) - _NAMED} more"] * (len(others) > _NAMED)
    more = f". Nor can {len(others)} more: {', '.join(names)}" if others else ""
    raise UnreadableImages(f"{first}{more}") from first


def into_memory(
    sources: Sequence[StreamedImages], progress: Progress | None = None
) -> list[ArraySource]:
    """Decode all of some sources, in a pool of threads; in one where images are small.

    The first images are timed. This thread calls `progress` with (decoded, all).
    """
    images = [np.empty((len(each), *each.shape), np.uint8) for each in sources]
    broken: dict[tuple[int, int], tuple[str, UnreadableFile]] = {}

    def decode_part(number: int, start: int) -> int:
        source = sources[number]
        stop = min(start + _PART, len(source))
        for index in range(start, stop):
            try:
                images[number][index] = source.image(index)
            except UnreadableFile as error:
                broken[number, index] = _name(source, index), error
        return stop - start

    first, *others = [
        (number, start)
        for number, source in enumerate(sources)
        for start in range(0, len(source), _PART)
    ]
    began = time.perf_counter()
    done, total = decode_part(*first), sum(map(len, sources))
    small = time.perf_counter() - began < _SMALL * done
    with concurrent.futures.ThreadPoolExecutor(1 if small else None) as pool:
        parts = pool.map(decode_part, *zip(*others, strict=True))
        for count in itertools.accumulate(parts, initial=done):
            if progress is not None:
                progress(count, total)
    _refuse_all([broken[place] for place in sorted(broken)])
    return [
        ArraySource({"image": decoded, "label": np.array(source.labels)})
        for decoded, source in zip(images, sources, strict=True)
    ]


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
