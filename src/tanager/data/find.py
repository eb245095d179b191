"""Find the images in a folder, whatever their format, and open them.

Looked for in this order; nothing is decoded yet:

=============  =====================================================================
class folders  ``train/<class>/*`` and ``val/<class>/*``
parquet        ``train*.parquet``, ``*-train*.parquet`` or ``train/*.parquet``
Arrow          ``train*.arrow``, ``*-train*.arrow`` or ``train/*.arrow``
npy            ``train_images.npy``, uint8[N, H, W, C], and ``train_labels.npy``
=============  =====================================================================

All but parquet can be read one image at a time. docs/scale.md shows how to convert
other formats.
"""

import dataclasses
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tanager import _validate as validate
from tanager._reading import refuse_file
from tanager.data.folder import FolderSource, common_shape, has_classes, list_folder
from tanager.data.mapped import MappedSource
from tanager.data.streamed import StreamedImages
from tanager.data.tables import LABEL_COLUMNS, TableSource, parquet_rows


WANTED = (
    "train/<class>/* and val/<class>/*, train*.parquet, *-train*.arrow, "
    "train_images.npy"
)
"""The training files that are looked for, in words."""
LARGEST_IN_MEMORY = 4 << 30
"""Most bytes of decoded images that `load` takes into memory by default."""
_NUMBERS = re.compile(r"-(\d{5})-of-(\d{5})")


class Found(NamedTuple):
    """What a folder holds: training images, test images, names of the classes.

    The test images are the training images again if no others were wanted.
    """

    train: StreamedImages
    test: StreamedImages
    classes: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Wanted:
    """What is looked for.

    Attributes:
        tests: names the test split may have; the first that is there is taken.
        shape: (H, W, C) to decode to, if it is known.
        classes: names of the classes, if they are known: images of another shape than
            `shape` are then refused instead of resized.
        label_columns: names that the label column of a table may have.
        stream: as `datasets.load`.
        tested: False where files with test images need not be there.
        groups: where the owners of images are: "folder" or a column's name.
    """

    tests: Sequence[str]
    shape: tuple[int, int, int] | None = None
    classes: tuple[str, ...] = ()
    label_columns: tuple[str, ...] = LABEL_COLUMNS
    stream: bool | None = None
    tested: bool = True
    groups: str | None = None

    def needed_shape(self) -> tuple[int, int, int]:
        """Return `shape`; refuse None."""
        if self.shape is None:
            validate.refuse(
                "image_size",
                None,
                "is needed for images that are decoded as they are used",
                "resize all with image_size=256 (--image-size 256), for example",
            )
        return self.shape

    def streams(self, examples: int, shape: tuple[int, ...]) -> bool:
        """Return whether to read images as they are needed: by size by default."""
        if self.stream is None:
            return examples * math.prod(shape) > LARGEST_IN_MEMORY
        return self.stream


def find_images(name: str, path: Path, wanted: Wanted) -> Found:
    """Open the images of a folder, or of the folders in it, whatever their format.

    A folder with the data set's name in its own is looked through first.
    """
    own = name == "folder"  # The folders below are its classes.
    below = [] if own else [entry for entry in path.iterdir() if entry.is_dir()]
    below.sort(key=lambda entry: (name not in entry.name, entry))
    for folder in (path, *below):
        for read in (_parquet, _arrow, _npy):
            if found := read(folder, wanted):
                return found
        if own or has_classes(folder / "train", wanted.classes):
            return _class_folders(folder, wanted, grey=own)
    return refuse_file(
        path, f"has no files of {name}, nor has a folder in it", f"looked for {WANTED}"
    )


def _class_folders(folder: Path, wanted: Wanted, grey: bool) -> Found:
    if wanted.groups not in (None, "folder"):
        rule = f"must be 'folder', because {folder} has class folders"
        validate.refuse("groups", wanted.groups, rule)
    train, test = list_folder(folder, wanted.tests, wanted.groups is not None)
    exact = bool(wanted.classes)
    if exact and (odd := sorted({*train.classes} ^ {*wanted.classes})):
        refuse_file(
            folder / "train",
            f"has class {odd[0]!r} too many or too few",
            f"name the folders {', '.join(wanted.classes)}",
        )
    halves = (train, test) if wanted.tested else (train,)
    shape = wanted.shape
    if shape is None:
        shape = common_shape(halves, None)
    elif grey and not wanted.streams(sum(map(len, halves)), shape):
        shape = common_shape(halves, shape[0])
    if not (grey or exact):
        shape = (*shape[:2], 3)
    first, second = (FolderSource(half, shape, exact) for half in (train, test))
    if wanted.groups is not None:
        first.owners, second.owners = train.owners(), test.owners()
    return Found(first, second, train.classes)


def find_shards(folder: Path, split: str, ending: str) -> list[Path]:
    """Return the files of a split, in order; an empty list if there are none.

    They are ``SPLIT.ENDING`` or ``SPLIT-00000-of-00008.ENDING`` and so on, with or
    without a prefix (``NAME-SPLIT.ENDING``); or else all files ``*.ENDING`` in a folder
    named SPLIT. Missing parts and a second set of files are refused.
    """
    wanted = f"{split}.{ending}"
    found: dict[str, list[Path]] = {}
    for file in sorted(folder.iterdir()):
        name = _NUMBERS.sub("", file.name)
        if name == wanted or name.endswith(f"-{wanted}"):
            found.setdefault(_set_of(file), []).append(file)
    if not found and (folder / split).is_dir():
        folder /= split
        for file in sorted(folder.glob(f"*.{ending}")):
            key = _set_of(file) if _NUMBERS.search(file.name) else ""
            found.setdefault(key, []).append(file)
    if len(found) > 1:
        first, second = list(found.values())[:2]
        refuse_file(
            folder,
            f"has more than one set of {split} files, such as {first[0].name} and "
            f"{second[0].name}",
            "leave only one of them there",
        )
    files = next(iter(found.values()), [])
    numbers = [match for file in files if (match := _NUMBERS.search(file.name))]
    if numbers:
        parts = int(numbers[0][2])
        if [int(match[1]) for match in numbers] != list(range(parts)):
            refuse_file(
                folder,
                f"has {len(numbers)} of the {parts} parts of {split}-*.{ending}",
                "get the missing parts",
            )
    return files


def _set_of(file: Path) -> str:
    return _NUMBERS.sub(lambda match: f"-of-{match[2]}", file.name)


def _parquet(folder: Path, wanted: Wanted) -> Found | None:
    splits = _splits(folder, wanted, "parquet")
    if splits is None:
        return None
    rows = sum(parquet_rows(file) for split in splits for file in split)
    size = sum(file.stat().st_size for split in splits for file in split)
    large = wanted.stream is None and size > LARGEST_IN_MEMORY
    if large or wanted.streams(rows, wanted.needed_shape()):
        refuse_file(
            folder,
            f"has {rows:,} images in parquet files, which cannot be read one by one",
            "convert the files to Arrow as docs/scale.md shows, or take all images "
            "into memory with stream=False (--stream False)",
        )
    return _tables(folder, wanted, splits)


def _arrow(folder: Path, wanted: Wanted) -> Found | None:
    splits = _splits(folder, wanted, "arrow")
    return _tables(folder, wanted, splits) if splits else None


def _tables(folder: Path, wanted: Wanted, splits: Sequence[list[Path]]) -> Found:
    sources = [
        TableSource(
            files,
            wanted.needed_shape(),
            label_columns=wanted.label_columns,
            classes=len(wanted.classes) or None,
            exact=bool(wanted.classes),
            owner_column=wanted.groups,
        )
        for files in splits
    ]
    names = sources[0].class_names
    if sources[-1].class_names != names:
        refuse_file(folder, "has training and test files with other names of classes")
    return _found(folder, wanted, sources, names or ())


def _npy(folder: Path, wanted: Wanted) -> Found | None:
    if not (folder / "train_images.npy").is_file():
        return None
    if wanted.groups is not None:
        rule = "must be left out for npy files, which name no owners"
        remedy = "use class folders, parquet or Arrow files"
        validate.refuse("groups", wanted.groups, rule, remedy)
    names = [n for n in wanted.tests if (folder / f"{n}_images.npy").is_file()]
    if wanted.tested and not names:
        refuse_file(
            folder,
            "has train_images.npy, but no images to test on",
            f"add {' or '.join(f'{name}_images.npy' for name in wanted.tests)}",
        )
    sources = []
    for name in ("train", *names[: wanted.tested]):
        files = (folder / f"{name}_{kind}.npy" for kind in ("images", "labels"))
        source = MappedSource(*files, classes=len(wanted.classes) or None)
        shape = sources[0].shape if sources else wanted.shape
        axes = 3 if sources or wanted.classes else 2
        if shape is not None and source.shape[:axes] != shape[:axes]:
            refuse_file(
                folder / f"{name}_images.npy",
                f"has images of {source.shape}, and not of {shape}",
                "decoded images are not resized: leave out image_size",
            )
        sources.append(source)
    return _found(folder, wanted, sources)


def _splits(folder: Path, wanted: Wanted, ending: str) -> list[list[Path]] | None:
    """Return the training files and, if they are wanted, the test files."""
    train = find_shards(folder, "train", ending)
    if not train:
        return None
    if not wanted.tested:
        return [train]
    for name in wanted.tests:
        if test := find_shards(folder, name, ending):
            return [train, test]
    return refuse_file(
        folder,
        f"has {train[0].name}, but no {ending} file to test on",
        f"looked for {' or '.join(f'{name}-*' for name in wanted.tests)}",
    )


def _found(
    folder: Path,
    wanted: Wanted,
    sources: Sequence[StreamedImages],
    names: tuple[str, ...] = (),
) -> Found:
    classes = wanted.classes or names
    if not classes:
        # Every class has a training example, so that a label is below their number.
        label = max(int(source.labels.max()) for source in sources)
        if label >= len(sources[0]):
            found = f"has label {label} and only {len(sources[0])} training examples"
            refuse_file(folder, found, "number the classes from 0, without gaps")
        classes = tuple(map(str, range(label + 1)))
    return Found(sources[0], sources[-1], classes)
