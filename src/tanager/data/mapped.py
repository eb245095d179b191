"""Decoded images in npy and npz files, memory-mapped.

Either ``SPLIT_images.npy`` with ``SPLIT_labels.npy``, or ``SPLIT.npz`` with arrays
``images`` and ``labels``: uint8[N, H, W, C] and integers from 0. Or ImageNet-32 as it
is distributed: ``train_data_batch_1.npz`` … ``_10.npz`` and ``val_data.npz``, with
``data``, uint8[N, 3072] of three planes each, and ``labels`` from 1 to 1000.

An array that lies in its npz as it is, is mapped where it lies. A compressed one is
copied out, once, into tanager's cache, in a folder that only its owner can read.
"""

import dataclasses
import math
import os
import shutil
import struct
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tanager import _cache, _npy
from tanager._reading import AGAIN, reading, refuse_file
from tanager.data.formats import check_labels, same_count
from tanager.data.streamed import StreamedImages, digest, locate, of_files


_SHAPE = (32, 32, 3)
_IMAGENET_CLASSES = 1000
_BATCHES = tuple(f"train_data_batch_{number}.npz" for number in range(1, 11))
_VALIDATION = ("val_data.npz",)
_LOCAL_HEADER = 30  # bytes of it, and where it tells two lengths
_LENGTHS = slice(26, 30)
_SPARE = 4096  # bytes of labels more than the images need, to say how many there are


@dataclasses.dataclass(frozen=True)
class Stored:
    """An array in a file: where it begins, and its header's content.

    Attributes:
        file: an npy or npz file.
        offset: of the first number, in bytes.
        shape: of the array.
        dtype: of the array.
    """

    file: Path
    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype

    def mapped(self) -> np.ndarray:
        """Return the array, mapped; it cannot be written to."""
        return np.memmap(self.file, self.dtype, "r", self.offset, self.shape)


class MappedSource(StreamedImages):
    """The rows of one or more arrays of images, in their order.

    Args:
        images: uint8[N, H, W, C] each; or uint8[N, C · H · W], planes of `shape`.
        labels: int32[N], of all of them.
        origins: the file of each, which messages name and which identify the source.
        shape: (H, W, C) of every image.

    Raises:
        ValueError: an array does not have this dtype or shape.
    """

    def __init__(
        self,
        images: Sequence[Stored],
        labels: np.ndarray,
        origins: Sequence[Path],
        shape: tuple[int, int, int],
    ):
        super().__init__(shape)
        for stored, file in zip(images, origins, strict=True):
            rows = stored.shape[1:]
            if not math.prod(stored.shape):
                refuse_file(file, "has no images", AGAIN)
            if stored.dtype != np.uint8 or rows not in (shape, (math.prod(shape),)):
                found = f"{stored.dtype}{list(stored.shape)}"
                wanted = ", ".join(map(str, shape))
                refuse_file(
                    file, f"has images as {found}", f"they must be uint8[N, {wanted}]"
                )
        self._images = tuple(images)
        self._labels = labels
        self._origins = tuple(origins)
        self._ends = np.cumsum([stored.shape[0] for stored in images])

    def __len__(self) -> int:
        return len(self._labels)

    @property
    def labels(self) -> np.ndarray:
        """See `StreamedImages.labels`."""
        return self._labels

    def identity(self) -> bytes:
        """Return a digest of the files' names, sizes, ends, and of the labels."""
        return digest(b"mapped", of_files(self._origins), self._labels, self.shape)

    def _read(self, index: int) -> tuple[np.ndarray, int]:
        part, row = locate(index, self._ends)
        if part not in self._opened:
            self._opened[part] = self._images[part].mapped()
        image = np.array(self._opened[part][row])
        if image.ndim == 1:
            height, width, channels = self.shape
            planes = image.reshape(channels, height, width)
            image = np.ascontiguousarray(planes.transpose(1, 2, 0))
        return image, int(self._labels[index])

    def _place(self, index: int) -> tuple[Path, str]:
        part, row = locate(index, self._ends)
        return self._origins[part], f"row {row} "


def find_mapped(
    folder: Path, tests: Sequence[str]
) -> tuple[MappedSource, MappedSource] | None:
    """Return the training and test images of a folder of such files; None without.

    Args:
        folder: where to look.
        tests: names the test split may have; the first that is there is taken.

    Raises:
        ValueError: a file is missing, damaged, or does not hold what it should.
    """
    if has_imagenet_32(folder):
        train, test = (_imagenet_32(folder, names) for names in (_BATCHES, _VALIDATION))
        return train, test
    train = _pair(folder, "train")
    if train is None:
        return None
    for name in tests:
        if test := _pair(folder, name):
            return train, test
    return refuse_file(
        folder,
        "has training images, but none to test on",
        f"it needs {tests[0]}.npz, or {tests[0]}_images.npy and {tests[0]}_labels.npy",
    )


def has_imagenet_32(folder: Path) -> bool:
    """Whether these are the files of ImageNet-32, whose labels count from 1."""
    return (folder / _BATCHES[0]).is_file()


def _imagenet_32(folder: Path, names: Sequence[str]) -> MappedSource:
    files = [folder / name for name in names]
    images = [_stored(file, "data") for file in files]
    labels = [
        _labels(file, "labels", stored.shape[0], 1, _IMAGENET_CLASSES)
        for file, stored in zip(files, images, strict=True)
    ]
    return MappedSource(images, np.concatenate(labels), files, _SHAPE)


def _pair(folder: Path, split: str) -> MappedSource | None:
    whole = folder / f"{split}.npz"
    image_file, label_file = (
        folder / f"{split}_{kind}.npy" for kind in ("images", "labels")
    )
    if whole.is_file():
        file = label_file = whole
        images, member = _stored(whole, "images"), "labels"
    elif image_file.is_file():
        file, images, member = image_file, _stored(image_file), None
    else:
        return None
    if len(images.shape) != 4:
        refuse_file(
            file,
            f"has images as {images.dtype}{list(images.shape)}",
            "they must be uint8[N, H, W, C]",
        )
    count, height, width, channels = images.shape
    labels = _labels(label_file, member, count, 0, np.iinfo(np.int32).max)
    return MappedSource([images], labels, [file], (height, width, channels))


def _labels(
    file: Path, member: str | None, count: int, first: int, classes: int
) -> np.ndarray:
    most = 8 * count + _SPARE
    with reading(file, "has no labels that can be read"):
        if member is None:
            with open(file, "rb") as stream:
                labels = _npy.read_array(stream, min(most, file.stat().st_size))
        else:
            with zipfile.ZipFile(file) as archive:
                info = _npy.members(archive, file.stat().st_size)[f"{member}.npy"]
                with archive.open(info) as stream:
                    labels = _npy.read_array(stream, min(most, info.file_size))
    same_count(file, count, labels)
    # Wide enough that label 0, where they count from 1, becomes −1 and is refused.
    wide = labels.astype(np.int64) if labels.dtype.kind in "iu" else labels
    return check_labels(file, wide - first, classes)


def _stored(file: Path, member: str | None = None) -> Stored:
    """Find an array in an npy file, or a member of an npz file."""
    with reading(file, "has no images that can be read"):
        place, start, end = _place(file, member)
        with open(place, "rb") as stream:
            stream.seek(start)
            header = _npy.read_header(stream)
            offset = stream.tell()
    if header.by_columns or header.dtype.hasobject:
        refuse_file(
            file,
            "has images in Fortran's order, or as objects",
            "save them with numpy.save(file, numpy.ascontiguousarray(images))",
        )
    if offset + header.nbytes > end:
        refuse_file(file, "is truncated", AGAIN)
    return Stored(place, offset, header.shape, header.dtype)


def _place(file: Path, member: str | None) -> tuple[Path, int, int]:
    """Return the file in which an array lies as it is, where it begins and ends."""
    if member is None:
        return file, 0, file.stat().st_size
    name = f"{member}.npy"
    with zipfile.ZipFile(file) as archive:
        info = _npy.members(archive, file.stat().st_size)[name]
        if info.compress_type != zipfile.ZIP_STORED:
            copy = _extracted(file, archive, info)
            return copy, 0, copy.stat().st_size
    with open(file, "rb") as stream:
        stream.seek(info.header_offset)
        # The lengths in the directory at the end of the file can be others.
        lengths = struct.unpack("<HH", stream.read(_LOCAL_HEADER)[_LENGTHS])
    start = info.header_offset + _LOCAL_HEADER + sum(lengths)
    return file, start, min(start + info.file_size, file.stat().st_size)


def _extracted(file: Path, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> Path:
    """Copy a compressed member into the cache, where it was not copied before."""
    folder = _cache.private_folder("extracted")
    content = digest(of_files([file]), info.filename.encode())
    copy = folder / f"{content.hex()[:32]}.npy"
    if not copy.exists():
        free = shutil.disk_usage(folder).free
        if info.file_size > free:
            refuse_file(
                file,
                f"needs {info.file_size:,} bytes in {folder}, and {free:,} are free",
                "make room there, or set TANAGER_CACHE_DIR to another folder",
            )
        handle, part = tempfile.mkstemp(dir=folder)
        try:
            with open(handle, "wb") as to, archive.open(info) as content:
                shutil.copyfileobj(content, to, 1 << 20)
                to.flush()
                os.fsync(to.fileno())
            os.replace(part, copy)
        except BaseException:
            Path(part).unlink(missing_ok=True)
            raise
    return copy
