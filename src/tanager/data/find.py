"""Finding images in a folder: in which format they are, and opening them.

Nothing is decoded yet. Looked for, in this order:

=============  ===============================================================
class folders  ``train/<class>/*`` and ``val/<class>/*``
parquet        ``train-*.parquet``: converted once, see `tanager.data.conversion`
Arrow          ``*-train-*.arrow``, as `datasets` caches it
ArrayRecord    ``*-train.array_record-*``, as TFDS writes it
npy, npz       see `tanager.data.mapped`
=============  ===============================================================
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from tanager import _validate as validate
from tanager._reading import reading, refuse_file
from tanager._text import clean
from tanager.data import columns
from tanager.data.array_record import ArrayRecordSource
from tanager.data.arrow import ArrowSource
from tanager.data.conversion import open_parquet
from tanager.data.folder import FolderSource, find_tests, list_halves
from tanager.data.formats import Progress, bounded_bytes
from tanager.data.mapped import find_mapped, has_imagenet_32
from tanager.data.shards import find_shards
from tanager.data.streamed import StreamedImages


WANTED = (
    "train/<class>/* and val/<class>/*, train-*.parquet, *-train-*.arrow, "
    "*-train.array_record-*, train.npz, train_images.npy, train_data_batch_1.npz"
)
"""In words, the training files that are looked for."""
_TFDS_CLASSES = "label.labels.txt"
_LARGEST_CLASSES = 1 << 24  # bytes of that file


@dataclasses.dataclass(frozen=True)
class Found:
    """What a folder holds.

    Attributes:
        train: the training images.
        test: the others.
        classes: names of the classes: of their folders, or as the files tell them;
            where they tell but numbers, the numbers.
    """

    train: StreamedImages
    test: StreamedImages
    classes: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Wanted:
    """What is looked for.

    Attributes:
        tests: names the test split may have; the first that is there is taken.
        image_size: pixels each way to decode to; None only where images are decoded
            already.
        classes: how many classes there are, where no file tells; None to read it from
            the labels.
        progress: called with the images converted so far and their total.
    """

    tests: Sequence[str]
    image_size: int | None
    classes: int | None = None
    progress: Progress | None = None

    def shape(self) -> tuple[int, int, int]:
        """Return (H, W, 3).

        Raises:
            ValueError: no size is given.
        """
        return needed_size(self.image_size), needed_size(self.image_size), 3


def needed_size(image_size: int | None) -> int:
    """Return `image_size`, which must be given.

    Raises:
        ValueError: it is None.
    """
    if image_size is None:
        validate.refuse(
            "image_size",
            None,
            "is needed for images that are decoded when they are asked for",
            "give the pixels each way that all are resized to, such as 256",
        )
    return image_size


def find_files(folder: Path, wanted: Wanted) -> Found | None:
    """Open the files of a folder that hold many images each; None if there are none.

    Raises:
        ValueError: a file is missing or damaged, or `image_size` is.
    """
    for read in (_parquet, _arrow, _array_record, _mapped):
        if found := read(folder, wanted):
            return found
    return None


def find_images(name: str, path: Path, wanted: Wanted) -> Found:
    """Open the images of a folder, or of the folders in it, whatever their format.

    Args:
        name: of the data set, for the message.
        path: the folder with the files, or the folder above it.
        wanted: what is looked for.

    Raises:
        ValueError: nothing was found; or as `find_files`, and `folder.list_halves`.
    """
    below = sorted(entry for entry in path.iterdir() if entry.is_dir())
    for folder in (path, *below):
        found = _class_folders(folder, wanted) or find_files(folder, wanted)
        if found:
            return found
    return refuse_file(
        path, f"has no files of {name}, nor has a folder in it", f"looked for {WANTED}"
    )


def _class_folders(folder: Path, wanted: Wanted) -> Found | None:
    if find_tests(folder, ("train",)) is None:
        return None
    shape = wanted.shape()
    train, test = list_halves(folder, wanted.tests)
    return Found(FolderSource(train, shape), FolderSource(test, shape), train.classes)


def _parquet(folder: Path, wanted: Wanted) -> Found | None:
    splits = _splits(folder, wanted, "parquet")
    if splits is None:
        return None
    labels = columns.LABEL_COLUMNS
    train, test = open_parquet(
        splits, wanted.shape(), labels, None, False, wanted.progress
    )
    return _of_columns(folder, train, test)


def _arrow(folder: Path, wanted: Wanted) -> Found | None:
    splits = _splits(folder, wanted, "arrow")
    if splits is None:
        return None
    train, test = (ArrowSource(files, wanted.shape()) for files in splits)
    return _of_columns(folder, train, test)


def _array_record(folder: Path, wanted: Wanted) -> Found | None:
    splits = _splits(folder, wanted, "array_record")
    if splits is None:
        return None
    classes, names = wanted.classes, ()
    if (folder / _TFDS_CLASSES).is_file():
        names = _tfds_classes(folder / _TFDS_CLASSES)
        classes = len(names)
    train, test = (
        ArrayRecordSource(files, wanted.shape(), classes=classes) for files in splits
    )
    if classes is None:
        names = _numbers(train, test)
    return Found(train, test, names or tuple(map(str, range(classes or 0))))


def _mapped(folder: Path, wanted: Wanted) -> Found | None:
    found = find_mapped(folder, wanted.tests)
    if found is None:
        return None
    train, test = found
    height, width, _ = train.shape
    if test.shape != train.shape:
        refuse_file(
            folder, f"has images of {train.shape} to train on and {test.shape} to test"
        )
    if wanted.image_size is not None and (height, width) != (wanted.image_size,) * 2:
        validate.refuse(
            "image_size",
            wanted.image_size,
            f"does not apply to {folder}, whose images are {height} × {width}",
            "leave it out",
        )
    return Found(train, test, _numbers(train, test, first=int(has_imagenet_32(folder))))


def _splits(folder: Path, wanted: Wanted, ending: str) -> list[list[Path]] | None:
    train = find_shards(folder, "train", ending)
    if not train:
        return None
    for name in wanted.tests:
        if test := find_shards(folder, name, ending):
            return [train, test]
    return refuse_file(
        folder,
        f"has {train[0].name}, but no {ending} file to test on",
        f"looked for {' or '.join(f'{name}-*' for name in wanted.tests)}",
    )


def _of_columns(folder: Path, train: ArrowSource, test: ArrowSource) -> Found:
    if train.class_names != test.class_names:
        refuse_file(folder, "has training and test files with other names of classes")
    return Found(train, test, train.class_names or _numbers(train, test))


def _tfds_classes(file: Path) -> tuple[str, ...]:
    content = bounded_bytes(file, _LARGEST_CLASSES)
    with reading(file, "is not a list of class names"):
        names = tuple(clean(name) for name in content.decode().split())
    if not names:
        refuse_file(file, "has no class names", "delete it, and classes are numbers")
    return names


def _numbers(
    train: StreamedImages, test: StreamedImages, first: int = 0
) -> tuple[str, ...]:
    """Return the numbers of the classes: as many as the highest label tells.

    Every class has a training example, so that a label is below their number.
    """
    for source in (train, test):
        top = int(source.labels.argmax())
        label = int(source.labels[top])
        if label >= len(train):
            source.refuse(
                top,
                f"has label {label}, and there are {len(train)} training examples for "
                "the classes up to it",
                "number the classes from 0, without gaps",
            )
    classes = 1 + max(int(source.labels.max()) for source in (train, test))
    return tuple(str(first + number) for number in range(classes))
