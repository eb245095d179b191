"""Find the images of a data set, whatever their layout, and open them.

Looked for in this order, in a folder and in the folder in it that holds everything;
nothing is decoded yet:

=============  =====================================================================
parquet        ``train*.parquet``, ``*-train*.parquet`` or ``train/*.parquet``
Arrow          the same, ``.arrow``, ``.feather`` or ``.ipc``; what `save_to_disk` of
               Hugging Face's `datasets` writes (its state.json names the files)
npy            ``train_images.npy``, uint8[N, H, W, C], and ``train_labels.npy``
npz            one file with ``train_images`` and ``train_labels``, as MedMNIST's
labels         images in any folders, and one CSV file beside the folders; or one of
               training and one of test images
class folders  ``train/<class>/*`` and ``test/<class>/*``; or ``<class>/*`` alone
=============  =====================================================================

All but parquet and npz can be read one image at a time. docs/scale.md shows how to
convert other formats.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np

from tanager import _validate as validate
from tanager._reading import refuse_file
from tanager._text import clean
from tanager.data import labelled, mapped
from tanager.data.folder import (
    TRAINS,
    FolderSource,
    has_classes,
    list_folder,
    refuse_shared,
    split_folder,
)
from tanager.data.labels import alike, number_labels
from tanager.data.layout import Layout, Record, described, looked, outermost, walked
from tanager.data.shards import ENDINGS, all_shards, find_shards, note_unread, tabled
from tanager.data.streamed import EncodedImages, Progress, StreamedImages, common_shape
from tanager.data.tables import (
    IMAGE_COLUMNS,
    LABEL_COLUMNS,
    Columns,
    TableSource,
    parquet_rows,
)


WANTED = (
    "train/<class>/* and test/<class>/*, train*.parquet, *-train*.arrow, "
    "train_images.npy"
)
"""The training files that are looked for, in words."""
OWN = (
    "train/<class>/*.png and test/<class>/*.png (or .jpg, .tif, …), <class>/*.png "
    "alone, images with one labels.csv (--labels FILE), files named by their class "
    "(--labels-from-name), train*.parquet, train*.arrow, train_images.npy, or an .npz "
    "file"
)
"""What a folder of one's own may hold, in words."""
LARGEST_IN_MEMORY = 4 << 30
"""Most bytes of decoded images that `load` takes into memory by default."""


class Found(NamedTuple):
    """What a folder holds: training images, test images, names of the classes.

    The test images are None if a person's own folder has none, and the training images
    again if no others were wanted.
    """

    train: StreamedImages
    test: StreamedImages | None
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
        own: whether it is a person's own folder: it may lack test images, its images
            may differ in size, and stay grey if all are.
        layout: where images and labels are.
        record: of how files were read.
        progress: called with the number of images opened so far, and of all.
    """

    tests: Sequence[str]
    shape: tuple[int, int, int] | None = None
    classes: tuple[str, ...] = ()
    label_columns: tuple[str, ...] = LABEL_COLUMNS
    stream: bool | None = None
    tested: bool = True
    groups: str | None = None
    own: bool = False
    layout: Layout = dataclasses.field(default_factory=lambda: Layout(""))
    record: Record = dataclasses.field(default_factory=Record)
    progress: Progress | None = None

    def over(self, **changes: Any) -> Self:
        """Return a copy with changes, and a new record."""
        return dataclasses.replace(self, record=Record(), **changes)

    @property
    def columns(self) -> Columns:
        """The names that the columns of a table may have."""
        image, label = self.layout.image_column, self.layout.label_column
        return Columns(
            (image,) if image else IMAGE_COLUMNS,
            (label,) if label else self.label_columns,
            self.groups,
        )

    def streams(self, examples: int, shape: tuple[int, ...]) -> bool:
        """Return whether to read images as they are needed: by size by default."""
        if self.stream is None:
            return examples * math.prod(shape) > LARGEST_IN_MEMORY
        return self.stream


def find_images(name: str, path: Path, wanted: Wanted) -> Found:
    """Open the images of a folder, or of the folders in it, whatever their layout.

    A folder with the data set's name in its own is looked through first. Of a person's
    own folder, only the folder in it that holds everything is looked through, too, or
    the one with tables.
    """
    if wanted.own:
        folders = [path] if path.is_file() else tabled(outermost(path))
    else:
        below = [entry for entry in path.iterdir() if entry.is_dir()]
        folders = [path, *sorted(below, key=lambda f: (name not in f.name, f))]
    layouts = _LAYOUTS
    layout = wanted.layout
    if layout.labels is not None or layout.labels_from_name or layout.multi_label:
        layouts = {"labelled files": _labelled}
    for folder, (kind, read) in itertools.product(folders, layouts.items()):
        # The classes are in the folder that holds everything, not above it.
        if wanted.own and read is _class_folders and folder != folders[-1]:
            continue
        if found := read(folder, wanted):
            wanted.record.layout = kind
            if wanted.own:
                _look_beside(found, folders[: folders.index(folder) + 1], wanted)
            return found
    if layout.multi_label:
        rule = f"has no one CSV file of labels: {described(path)}"
        refuse_file(path, rule, "with --multi-label, name it with --labels FILE")
    if wanted.own and looked(path)[0]:
        rule = f"has images, but no class folders: {described(path)}"
        remedy = "make one folder for each class, or give --labels FILE (a CSV file) "
        remedy += (
            "or --labels-from-name, if names begin with the class, as in cat_01.png"
        )
        refuse_file(path, rule, remedy)
    if wanted.own:
        refuse_file(path, f"has no layout that is read: {described(path)}", OWN)
    rule = f"has no files of {name}, nor has a folder in it"
    return refuse_file(path, rule, f"looked for {WANTED}")


def _look_beside(found: Found, folders: Sequence[Path], wanted: Wanted) -> None:
    """Refuse test images that are training images; note what lies around the last."""
    *above, folder = folders
    if wanted.tested and found.test is not None:
        refuse_shared(_files(found.train), _files(found.test))
    if isinstance(found.train, FolderSource):
        for other in itertools.chain(*(looked(each)[1] for each in above)):
            wanted.record.skip(other)
    elif above:
        own = {
            place / name
            for place, images, others in walked(folder)
            for name in images + others
        }
        note_unread(folder.parent, own, wanted.record)


def _files(source: StreamedImages) -> Iterable[str]:
    """Return the files that the images of a source are in."""
    if isinstance(source, FolderSource):
        return map(source.content, range(len(source)))
    return {str(source.place(number)[0]) for number in range(len(source))}


def _parquet(folder: Path, wanted: Wanted) -> Found | None:
    splits = _splits(folder, wanted, "parquet")
    if not splits:
        return None
    files = [file for split in splits[: 1 + wanted.tested] for file in split]
    rows, size = sum(map(parquet_rows, files)), sum(f.stat().st_size for f in files)
    large = wanted.stream is None and size > LARGEST_IN_MEMORY
    if large or wanted.streams(rows, wanted.shape or (1, 1, 3)):
        rule = f"has {rows:,} images in parquet files, which cannot be read one by one"
        remedy = "convert the files to Arrow as docs/scale.md shows, or take all "
        remedy += "images into memory with stream=False (--stream False)"
        refuse_file(folder, rule, remedy)
    return _tables(folder, wanted, splits)


def _arrow(folder: Path, wanted: Wanted) -> Found | None:
    for kind in ENDINGS[1:]:
        if splits := _splits(folder, wanted, kind):
            return _tables(folder, wanted, splits)
    return None


def _tables(folder: Path, wanted: Wanted, splits: Sequence[list[Path]]) -> Found:
    shape, exact = wanted.shape or (1, 1, 3), bool(wanted.classes)
    sources = [
        TableSource(files, shape, wanted.columns, exact)
        for files in splits[: 1 + wanted.tested]
    ]
    names = sources[0].class_names
    if sources[-1].class_names != names:
        refuse_file(folder, "has training and test files with other names of classes")
    if wanted.own:
        note_unread(folder, {*itertools.chain(*splits)}, wanted.record)
    return _numbered(wanted, sources, names or (), alone=len(splits) == 1)


def _splits(folder: Path, wanted: Wanted, ending: str) -> list[list[Path]]:
    """Return the training files and the test files; only the first if need be."""
    if folder.is_file():
        return []
    trains = TRAINS if wanted.own else TRAINS[:1]
    train = _first_shards(folder, trains, ending)
    test = []
    if wanted.own or wanted.tested:
        test = _first_shards(folder, wanted.tests, ending)
    if wanted.own and not (train or test):
        train = all_shards(folder, ending)
    if test and train:
        return [train, test]
    if wanted.own or not (wanted.tested and train):
        return [train] if train else []
    looked_for = " or ".join(f"{name}-*" for name in wanted.tests)
    rule = f"has {train[0].name}, but no {ending} file to test on"
    return refuse_file(folder, rule, f"looked for {looked_for}")


def _first_shards(folder: Path, names: Sequence[str], ending: str) -> list[Path]:
    found = (find_shards(folder, name, ending) for name in names)
    return next(filter(None, found), [])


def _npy(folder: Path, wanted: Wanted) -> Found | None:
    if not (folder / "train_images.npy").is_file():
        return None
    arrays = {file.stem: mapped.Array(file) for file in folder.glob("*.npy")}
    return _arrays(folder, wanted, arrays, "{}.npy")


def _npz(folder: Path, wanted: Wanted) -> Found | None:
    files = [folder] if folder.is_file() else sorted(folder.glob("*.npz"))
    if not wanted.own or not files:
        return None
    if len(files) > 1:
        rule = f"has {len(files)} npz files, such as {files[0].name}"
        refuse_file(folder, rule, "give the path of one of them (--data FILE.npz)")
    return _arrays(files[0], wanted, mapped.arrays_of(files[0]), "{}")


def _arrays(
    place: Path, wanted: Wanted, arrays: dict[str, mapped.Array], form: str
) -> Found:
    """Open arrays, all of which are found by name."""
    if wanted.groups is not None:
        rule = "must be left out for npy and npz files, which name no owners"
        remedy = "use class folders, parquet or Arrow files"
        validate.refuse("groups", wanted.groups, rule, remedy)
    names = [n for n in wanted.tests if f"{n}_images" in arrays]
    if wanted.tested and not names and not wanted.own:
        rule = f"has {form.format('train_images')}, but no images to test on"
        missing = [form.format(f"{name}_images") for name in wanted.tests]
        refuse_file(place, rule, f"add {' or '.join(missing)}")
    sources = []
    for name in ("train", *names[: wanted.tested]):
        pair = [f"{name}_{kind}" for kind in ("images", "labels")]
        for each in pair:
            if each not in arrays:
                rule = f"has no {form.format(each)}"
                refuse_file(place, rule, f"it has {sorted(arrays)!r:.300}")
        sources.append(mapped.MappedSource(*(arrays[each] for each in pair)))
    first = sources[0].shape
    shape = wanted.shape or first
    for name, source in zip(("train", *names), sources, strict=False):
        if source.shape[:2] != (shape[:2] if wanted.classes else first[:2]):
            found = f"has {name}_images of {source.shape}, and not of "
            refuse_file(place, f"{found}{shape if wanted.classes else first}")
        source.shape = (*shape[:2], min(shape[2], source.shape[2]))
    known = [f"{name}_images" for name in ("train", *names[:1])]
    others = sorted(n for n in arrays if n.endswith("_images") and n not in known)
    if wanted.own and others:
        wanted.record.notes.append(f"not read: {clean(', '.join(others)):.300}")
    return _numbered(wanted, sources, alone=not names)


def _labelled(folder: Path, wanted: Wanted) -> Found | None:
    if not wanted.own or folder.is_file():
        return None
    layout, record = wanted.layout, wanted.record
    if layout.labels_from_name:
        found = labelled.from_names(folder, wanted.groups, record)
    else:
        found = labelled.from_tables(folder, layout, wanted.groups, record)
    if not found:
        return None
    alone = len(found) == 1
    names = found[0].class_names
    return _numbered(wanted, found[: 1 + wanted.tested], names, alone)


def _class_folders(folder: Path, wanted: Wanted) -> Found | None:
    if folder.is_file():
        return None
    train = split_folder(folder, TRAINS)
    if wanted.own:
        if not any(images for _, images, _ in walked(folder)) or not looked(folder)[2]:
            return None
    elif train is None or not has_classes(train, wanted.classes):
        return None
    if wanted.groups not in (None, "folder"):
        rule = f"must be 'folder', because {folder} has class folders"
        remedy = "for a column, name its table with labels (--labels FILE)"
        validate.refuse("groups", wanted.groups, rule, remedy)
    grouped = wanted.groups is not None
    train, test = list_folder(
        folder, wanted.tests, grouped, wanted.record, wanted.layout.hold_out
    )
    alone = test is train
    if not wanted.own:
        wanted.record.notes.clear()  # ImageNet's test images have no classes.
    exact = bool(wanted.classes)
    if exact and (odd := sorted({*train.classes} ^ {*wanted.classes})):
        rule = f"has class {odd[0]!r} too many or too few"
        remedy = f"name the folders {', '.join(wanted.classes)}"
        refuse_file(folder / "train", rule, remedy)
    shape = wanted.shape or (1, 1, 3)
    halves = [train] if alone else [train, test]
    sources = [FolderSource(half, shape, exact) for half in halves]
    if grouped:
        for source, half in zip(sources, halves, strict=True):
            source.owners = half.owners()
    return _sized(wanted, sources, train.classes, alone)


_LAYOUTS: dict[str, Callable[[Path, Wanted], Found | None]] = {
    "parquet files": _parquet,
    "Arrow files": _arrow,
    "npy files": _npy,
    "an npz file": _npz,
    "labelled files": _labelled,
    "class folders": _class_folders,
}
"""Each layout, and what reads it: None if it is not there."""


def _numbered(
    wanted: Wanted,
    sources: Sequence[StreamedImages],
    names: tuple[str, ...] = (),
    alone: bool = False,
) -> Found:
    """Number the classes of sources whose labels are only values so far."""
    classes = number_labels(sources, wanted.classes or names)
    return _sized(wanted, sources, classes, alone)


def _sized(
    wanted: Wanted,
    sources: Sequence[StreamedImages],
    classes: tuple[str, ...],
    alone: bool = False,
) -> Found:
    """Choose the shape that encoded images are decoded to.

    `alone` says that there are no test images.
    """
    if wanted.own:
        _note_alike(wanted, sources, classes)
    encoded = [each for each in sources if isinstance(each, EncodedImages)]
    encoded = encoded if wanted.tested else encoded[:1]
    if encoded:
        shape = _shape(wanted, encoded)
        for source in encoded:
            source.shape = shape
    test = sources[1] if wanted.tested and not alone else sources[0]
    return Found(sources[0], None if alone and wanted.own else test, classes)


def _note_alike(
    wanted: Wanted, sources: Sequence[StreamedImages], classes: Sequence[str]
) -> None:
    """Warn of classes and of persons that may be one; no person is named."""
    differ = "differ only in upper and lower case, or in how letters are encoded"
    if close := alike(classes):
        names = ", ".join(map(clean, close))
        note = f"classes {differ}: {names:.300}"
        wanted.record.notes.append(f"{note}; write them the same way if they are one")
    owners = [each.owners for each in sources if each.owners is not None]
    if owners and (close := alike([*map(str, np.unique(np.concatenate(owners)))])):
        wanted.record.notes.append(
            f"{len(close)} persons in {wanted.groups} have names that {differ}, and "
            "each counts as one; write them the same way if they are one"
        )


def _shape(wanted: Wanted, sources: Sequence[EncodedImages]) -> tuple[int, int, int]:
    if wanted.shape is not None:
        height, width, channels = wanted.shape
        in_memory = not wanted.streams(sum(map(len, sources)), wanted.shape)
        if wanted.own and in_memory and channels > 1:
            channels = common_shape(sources, wanted.progress)[1]
        return height, width, channels
    size, channels = common_shape(sources, wanted.progress)
    if size is None and not wanted.own:
        rule = "is needed for images that differ in size"
        remedy = "resize all with image_size=256 (--image-size 256), for example"
        validate.refuse("image_size", None, rule, remedy)
    wanted.record.size = "as they are" if size else "default"
    side = wanted.layout.default_side
    if size is None:
        wanted.record.notes.append(
            f"the images differ in size: each is resized to {side} × {side} pixels "
            "(image_size, --image-size, chooses another size)"
        )
    height, width = size or (side, side)
    return height, width, channels if wanted.own else 3
