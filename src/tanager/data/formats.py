"""File formats of the benchmark data sets, each read into arrays.

Every reader returns one split's images, uint8[N, H, W, C], and labels, int32[N], and
checks what it reads: a message names the file, the row and the remedy. Nothing is left
out silently, because the number of examples is part of the privacy guarantee.
"""

import concurrent.futures
import gzip
import math
import pickle
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from tanager import _validate as validate


Arrays = tuple[np.ndarray, np.ndarray]
Progress = Callable[[int, int], None]
Report = Callable[[int], None]

_PART = 256  # images per task of the thread pool
AGAIN = "get the file again"
"""The remedy for a file that was damaged on its way."""


def refuse_file(file: Path, rule: str, remedy: str = "") -> NoReturn:
    """Raise the one message about a file: which, what is wrong, what to do."""
    validate.refuse("path", str(file), rule, remedy)


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


def read_python_batch(
    file: Path, label_key: str, shape: tuple[int, int, int], classes: int
) -> Arrays:
    """Read a "python version" batch file of CIFAR-10 or CIFAR-100.

    The file is a pickle, and a pickle may run any code when it is read. It is read here
    with nothing but NumPy's arrays and Python's own containers, numbers and strings
    within reach; a file that asks for anything else is refused.

    Args:
        file: such as ``data_batch_1``.
        label_key: such as ``labels`` (CIFAR-10) or ``fine_labels`` (CIFAR-100).
        shape: (H, W, C); the rows of the file hold C planes of H × W pixels.
        classes: labels must be from 0 to `classes` − 1.

    Raises:
        ValueError: the file asks for more than arrays, is corrupt, or does not hold
            such images and labels.
    """
    try:
        with open(file, "rb") as stream:
            content = _ArraysOnly(stream, encoding="bytes").load()
    except Exception as error:  # a corrupt pickle can raise nearly anything
        refuse_file(file, f"cannot be read as a batch of arrays ({error})", AGAIN)
    if not isinstance(content, dict):
        refuse_file(file, "is not a CIFAR batch", "its pickle must hold a dict")
    keys = {
        key.decode(errors="replace") if isinstance(key, bytes) else key: value
        for key, value in content.items()
    }
    for name in ("data", label_key):
        if name not in keys:
            refuse_file(file, f"has no {name!r}", f"it has {sorted(map(str, keys))}")
    rows, labels = keys["data"], np.asarray(keys[label_key])
    height, width, channels = shape
    if not (
        isinstance(rows, np.ndarray)
        and rows.dtype == np.uint8
        and rows.ndim == 2
        and rows.shape[1] == math.prod(shape)
    ):
        array = isinstance(rows, np.ndarray)
        found = f"{rows.dtype}{list(rows.shape)}" if array else type(rows).__name__
        refuse_file(
            file, f"has images as {found}", f"they must be uint8[N, {math.prod(shape)}]"
        )
    planes = rows.reshape(-1, channels, height, width)
    images = np.ascontiguousarray(planes.transpose(0, 2, 3, 1))
    same_count(file, len(images), labels)
    return images, check_labels(file, labels, classes)


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


def check_labels(file: Path, labels: np.ndarray, classes: int) -> np.ndarray:
    """Return `labels` as int32[N], after checking that they are classes.

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
            f"row {row} has label {labels[row]}",
            f"labels must be from 0 to {classes - 1}",
        )
    return labels.astype(np.int32)


def same_count(file: Path, images: int, labels: np.ndarray) -> None:
    """Refuse a file unless it has one row of labels, one for each of `images`."""
    if labels.shape != (images,):
        refuse_file(file, f"has labels {list(labels.shape)} for {images} images")


# What an array of numbers needs, under the names of NumPy 1 and 2.
_RECONSTRUCT = np.empty(0).__reduce__()[0]
_ALLOWED = {
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("numpy.core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy._core.multiarray", "_reconstruct"): _RECONSTRUCT,
}


class _ArraysOnly(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(
                f"it asks for {module}.{name}, and only arrays are read"
            )
        return _ALLOWED[module, name]


def _read_idx_array(file: Path, dimensions: int) -> np.ndarray:
    try:
        content = file.read_bytes()
        if file.suffix == ".gz":
            content = gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        refuse_file(file, f"cannot be read ({error})", AGAIN)
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
