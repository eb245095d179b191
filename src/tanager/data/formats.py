"""File formats of the benchmark data sets, each read into arrays.

Every reader returns one split's images, uint8[N, H, W, C], and labels, int32[N], and
checks what it reads: a message names the file, the row and the remedy. Nothing is left
out silently, because the number of examples is part of the privacy guarantee.
"""

import concurrent.futures
import gzip
import math
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tanager._reading import AGAIN as AGAIN
from tanager._reading import reading
from tanager._reading import refuse_file as refuse_file


Arrays = tuple[np.ndarray, np.ndarray]
Progress = Callable[[int, int], None]
Report = Callable[[int], None]

_PART = 256  # images per task of the thread pool
LARGEST_IDX = 1 << 30
"""Bytes of an IDX file at most, unpacked: MNIST's largest has 47 million."""


def counter(progress: Progress | None, total: int) -> Report:
    """Return a report of images done that tells `progress` their sum and the total."""
    done = 0

    def report(more: int) -> None:
        nonlocal done
        done += more
        if progress is not None:
            progress(done, total)

    return report


def decode_images(
    count: int,
    decode: Callable[[int], np.ndarray],
    shape: tuple[int, ...],
    report: Report,
) -> np.ndarray:
    """Decode `count` images in a pool of threads, into one array.

    Args:
        count: how many images.
        decode: from an image's position to its pixels, uint8[H, W, C]; called from
            several threads.
        shape: (H, W, C).
        report: called with the number of images done since the last call, from the
            calling thread.
    """
    images = np.empty((count, *shape), np.uint8)

    def decode_part(start: int) -> int:
        stop = min(start + _PART, count)
        for position in range(start, stop):
            images[position] = decode(position)
        return stop - start

    with concurrent.futures.ThreadPoolExecutor() as pool:
        for done in pool.map(decode_part, range(0, count, _PART)):
            report(done)
    return images


def read_idx(
    image_file: Path, label_file: Path, shape: tuple[int, int, int], classes: int
) -> Arrays:
    """Read a pair of IDX files, MNIST's own format, plain or compressed (``.gz``).

    Args:
        image_file: such as ``train-images-idx3-ubyte``.
        label_file: such as ``train-labels-idx1-ubyte.gz``.
        shape: (H, W, 1).
        classes: labels must be from 0 to `classes` − 1.

    Raises:
        ValueError: a file is not IDX, holds less or more than its header says, or does
            not hold such images and labels.
    """
    images = _read_idx_array(image_file, dimensions=3)
    if images.shape[1:] != shape[:2]:
        found = f"{images.shape[1]} × {images.shape[2]}"
        refuse_file(
            image_file, f"has images of {found}", f"must be {_size_text(shape)}"
        )
    labels = _read_idx_array(label_file, dimensions=1)
    same_count(label_file, len(images), labels)
    return images[..., None], check_labels(label_file, labels, classes)


def check_labels(
    file: Path, labels: np.ndarray, classes: int, start: int = 0
) -> np.ndarray:
    """Return `labels` as int32[N], after checking that they are classes.

    Args:
        file: for the message.
        labels: what was read.
        classes: they must be from 0 to `classes` − 1.
        start: number of the first row.

    Raises:
        ValueError: they are not integers, or one is not from 0 to `classes` − 1.
    """
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        refuse_file(file, f"has labels of {labels.dtype}", "labels must be integers")
    wrong = np.flatnonzero((labels < 0) | (labels >= classes))
    if wrong.size:
        row = int(wrong[0])
        refuse_file(
            file,
            f"row {start + row} has label {labels[row]}",
            f"labels must be from 0 to {classes - 1}",
        )
    return labels.astype(np.int32)


def same_count(file: Path, images: int, labels: np.ndarray) -> None:
    """Refuse a file unless it has one row of labels, one for each of `images`."""
    if not images:
        refuse_file(file, "has no images", AGAIN)
    if labels.shape != (images,):
        refuse_file(file, f"has labels {list(labels.shape)} for {images} images")


def bounded_bytes(file: Path, most: int) -> bytes:
    """Return the content of a file, plain or compressed (``.gz``).

    Args:
        file: the file.
        most: bytes that it may have, unpacked.

    Raises:
        UnreadableFile: it cannot be read, or is larger.
    """
    opener = gzip.open if file.suffix == ".gz" else open
    with reading(file), opener(file, "rb") as stream:
        content = stream.read(most + 1)
    if len(content) > most:
        refuse_file(file, f"has more than {most:,} bytes, unpacked", "get another file")
    return content


def _read_idx_array(file: Path, dimensions: int) -> np.ndarray:
    content = bounded_bytes(file, LARGEST_IDX)
    header = 4 + 4 * dimensions
    if content[:4] != bytes([0, 0, 0x08, dimensions]) or len(content) < header:
        refuse_file(
            file,
            f"is not an IDX file of bytes in {dimensions} dimensions",
            f"it begins with {content[:4].hex() or 'nothing'}",
        )
    shape = struct.unpack(f">{dimensions}I", content[4:header])
    if len(content) != header + math.prod(shape):
        refuse_file(
            file,
            f"is truncated or damaged: {len(content)} bytes instead of "
            f"{header + math.prod(shape)}",
            AGAIN,
        )
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape)


def _size_text(shape: tuple[int, int, int]) -> str:
    return f"{shape[0]} × {shape[1]}"
