"""File formats of the benchmark data sets, each read into arrays.

Every reader returns one split's images, uint8[N, H, W, C], and labels, int32[N], and
checks what it reads: a message names the file, the row and the remedy. Nothing is left
out silently, because the number of examples is part of the privacy guarantee.
"""

import concurrent.futures
import gzip
import io
import math
import pickle
import struct
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from tanager import _validate as validate


Arrays = tuple[np.ndarray, np.ndarray]
Progress = Callable[[int, int], None]
Report = Callable[[int], None]

_PART = 256  # images per task of the thread pool
_AGAIN = "get the file again"


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


def parquet_rows(file: Path) -> int:
    """Return how many rows a parquet file has, from its footer alone."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.read_metadata(file).num_rows
    except (pa.ArrowException, OSError) as error:
        refuse_file(file, f"is not a parquet file ({error})", _AGAIN)


def read_parquet(
    file: Path,
    image_columns: Sequence[str],
    label_columns: Sequence[str],
    shape: tuple[int, int, int],
    classes: int,
    report: Report,
) -> Arrays:
    """Read a parquet file of encoded images, as the Hugging Face Hub has them.

    Args:
        file: the parquet file.
        image_columns: names the image column may have; it holds encoded images (PNG,
            JPEG), alone or as a struct with a field ``bytes``.
        label_columns: names the label column may have; it holds integers.
        shape: (H, W, C) that every image must have; C = 1 is grey, 3 is RGB.
        classes: labels must be from 0 to `classes` − 1.
        report: as in `decode_images`.

    Raises:
        ValueError: the file is corrupt, a column is missing or of another type, an
            image cannot be decoded or has another shape, a label is out of range.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        names = pq.read_schema(file).names
        image_column = _present(file, names, image_columns)
        label_column = _present(file, names, label_columns)
        table = pq.read_table(file, columns=[image_column, label_column])
    except (pa.ArrowException, OSError) as error:
        refuse_file(file, f"is not a parquet file that can be read ({error})", _AGAIN)
    label_values = table[label_column]
    if not pa.types.is_integer(label_values.type):
        refuse_file(
            file,
            f"column {label_column!r} holds {label_values.type}",
            "labels must be integers",
        )
    if label_values.null_count:
        row = label_values.is_null().to_pylist().index(True)
        refuse_file(file, f"row {row} has no label")
    labels = check_labels(file, label_values.to_numpy(), classes)
    encoded = _encoded_images(file, image_column, table[image_column])

    def decode(row: int) -> np.ndarray:
        return _decode_row(file, row, encoded[row], shape)

    return decode_images(len(encoded), decode, shape, report), labels


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
        refuse_file(file, f"cannot be read as a batch of arrays ({error})", _AGAIN)
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
    _same_count(file, len(images), labels)
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
    _same_count(label_file, len(images), labels)
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


def _present(file: Path, names: Sequence[str], wanted: Sequence[str]) -> str:
    for name in wanted:
        if name in names:
            return name
    choices = " or ".join(map(repr, wanted))
    refuse_file(file, f"has no column {choices}", f"its columns are {list(names)}")


def _encoded_images(file: Path, name: str, column: Any) -> list[bytes | None]:
    import pyarrow as pa

    if pa.types.is_struct(column.type) and "bytes" in column.type.names:
        column = column.flatten()[column.type.get_field_index("bytes")]
    if not (pa.types.is_binary(column.type) or pa.types.is_large_binary(column.type)):
        refuse_file(
            file,
            f"column {name!r} holds {column.type}",
            "it must hold encoded images, as {bytes, path} or as binary",
        )
    return column.to_pylist()


def _decode_row(
    file: Path, row: int, encoded: bytes | None, shape: tuple[int, int, int]
) -> np.ndarray:
    from PIL import Image

    if encoded is None:
        refuse_file(file, f"row {row} has no image bytes", "it may only hold a path")
    try:
        with Image.open(io.BytesIO(encoded)) as image:
            pixels = np.asarray(image)
    except Exception as error:  # Pillow's decoders raise nearly anything
        refuse_file(file, f"row {row}: cannot decode the image ({error})", _AGAIN)
    height, width, channels = shape
    mode = "L" if channels == 1 else "RGB"
    if image.mode != mode or image.size != (width, height):
        found = f"{image.mode} image of {image.size[1]} × {image.size[0]}"
        refuse_file(
            file, f"row {row} has an {found}", f"must be {mode}, {_size_text(shape)}"
        )
    return pixels.reshape(shape)


def _read_idx_array(file: Path, dimensions: int) -> np.ndarray:
    try:
        content = file.read_bytes()
        if file.suffix == ".gz":
            content = gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        refuse_file(file, f"cannot be read ({error})", _AGAIN)
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
            _AGAIN,
        )
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape)


def _same_count(file: Path, images: int, labels: np.ndarray) -> None:
    if labels.shape != (images,):
        refuse_file(file, f"has labels {list(labels.shape)} for {images} images")


def _size_text(shape: tuple[int, int, int]) -> str:
    return f"{shape[0]} × {shape[1]}"
