"""A folder of images: one sub-folder per class.

Either ``train/<class>/*`` with ``test/<class>/*`` (or another of `TRAINS` and `TESTS`,
in lower or upper case), or ``<class>/*`` alone, which is split here: a hash of a file's
name decides whether it is a test image; about a fifth are. Other files and its class do
not matter. So two folders that differ in one training image have the same test images.

Where each class folder has a folder for each person, ``<class>/<person>/*``, whole
persons are split, by a hash of their folders' names.

Images are told by the endings in `tanager.data.decoding.SUFFIXES`, in lower or upper
case, and DICOM files by their content. All other files are counted.
"""

import contextlib
import dataclasses
import hashlib
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from tanager._reading import refuse_file
from tanager._text import clean
from tanager.data.layout import Record, counted, described, looked, walked
from tanager.data.streamed import EncodedImages, digest


HELD_OUT = 5
"""One in this many is for testing, where there are no test images."""
_CHOICE = b"split 157"  # any would do
TRAINS = ("train", "training")
"""Names that a folder of training images may have, in lower or upper case."""
TESTS = ("test", "testing", "val", "valid", "validation")
"""Names a folder of test images may have; the first that has class folders is taken."""
PARTS = (*TRAINS, *TESTS)


@dataclasses.dataclass(frozen=True)
class Listing:
    """The files of one split, in order of class and name; none has been opened.

    All file names are in one string of bytes, `names`: a million paths would take 200
    MiB. `ends` says where each of them ends. They are relative to `root`, or to the
    class folders in it if `nested`.
    """

    root: Path
    classes: tuple[str, ...]
    names: bytes
    ends: np.ndarray
    labels: np.ndarray
    nested: bool = True

    def owners(self) -> np.ndarray:
        """Return the name of the first folder in each file's name."""
        starts = [0, *self.ends[:-1]]
        names = [self.names[a:b] for a, b in zip(starts, self.ends, strict=True)]
        return np.array([os.fsdecode(name.partition(b"/")[0]) for name in names])

    def name(self, index: int) -> str:
        """Return the relative path of one file."""
        start = self.ends[index - 1] if index else 0
        return os.fsdecode(self.names[start : self.ends[index]])

    def file(self, index: int) -> str:
        """Return the path of one file."""
        folder = self.classes[self.labels[index]] if self.nested else ""
        return os.path.join(self.root, folder, self.name(index))

    def __len__(self) -> int:
        return len(self.labels)


class FolderSource(EncodedImages):
    """The images of a listing, decoded on access as `tanager.data.decoding` says.

    Attributes:
        class_names: names of the labels, where an image has any number of them.
        table: the file that the labels are from, if not names of folders or files.
    """

    class_names: tuple[str, ...] = ()
    table: Path | None = None

    def __init__(
        self, listing: Listing, shape: tuple[int, int, int], exact: bool = False
    ):
        super().__init__(shape, listing.labels, exact)
        self.listing = listing

    def _files(self) -> bytes:
        # A file that is no longer there has size −1.
        sizes = np.fromiter(map(self._size, range(len(self))), np.int64, len(self))
        listing = self.listing
        parts = (listing.names, listing.ends, listing.labels, sizes)
        return digest(listing.classes, *parts)

    def _size(self, index: int) -> int:
        try:
            return os.stat(self.listing.file(index)).st_size
        except OSError:
            return -1

    def content(self, index: int) -> str:
        """Return the path of an image."""
        return self.listing.file(index)

    def place(self, index: int) -> tuple[Path, str]:
        """Return the file of an image."""
        return Path(self.listing.file(index)), ""

    def label_place(self, index: int) -> tuple[Path, str]:
        """Return the table of the labels, if there is one, else an image's file."""
        file, place = self.place(index)
        return (self.table, f"row of {file} ") if self.table else (file, place)


def part_of(name: str) -> str:
    """Return the word of a name that is one of `TRAINS` or `TESTS`; "" if none is."""
    words = re.findall("[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)
    return next((word.lower() for word in words if word.lower() in PARTS), "")


def places_of(files: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the folders of each file, without train, test, and those around all."""
    parts = [_besides_half(file) for file in files]
    while all(part[:1] == parts[0][:1] != () for part in parts):
        parts = [part[1:] for part in parts]
    return parts


def half_of(file: str) -> str:
    """Return the first folder of a file that is named train or test, in lower case."""
    parts = [part.lower() for part in Path(file).parent.parts]
    return next((part for part in parts if part in PARTS), "")


def _besides_half(file: str) -> tuple[str, ...]:
    """Return the folders of a file without the first that is named train or test."""
    parts, half = Path(file).parent.parts, half_of(file)
    at = [part.lower() for part in parts].index(half) if half else len(parts)
    return parts[:at] + parts[at + 1 :]


def has_classes(path: Path, names: Sequence[str] = ()) -> bool:
    """Return whether there is such a folder, with folders in it (some of `names`)."""
    found = set(looked(path)[2]) if path.is_dir() else set()
    return bool(found.intersection(names) if names else found)


def split_folder(path: Path, names: Sequence[str]) -> Path | None:
    """Return the first of `names`, in lower or upper case, that has class folders."""
    below = {name.lower(): path / name for name in looked(path)[2]}
    return next((below[n] for n in names if n in below and has_classes(below[n])), None)


def list_folder(
    path: Path,
    tests: Sequence[str] = TESTS,
    grouped: bool = False,
    record: Record | None = None,
    hold_out: bool = True,
) -> tuple[Listing, Listing]:
    """List the training and test files of a folder; split it if it is not.

    `grouped` lists the files in the folders of persons in each class folder. Files that
    are not images, and folders that are not read, go on `record`. Without `hold_out`, a
    folder that is not split gives one listing twice.
    """
    record = Record() if record is None else record
    halves = [split_folder(path, names) for names in (TRAINS, tests)]
    train, test = halves
    if train is not None and test is not None:
        _other_entries(path, (train.name, test.name), record)
        for half in (train, test):
            _other_entries(half, (), record)
        found = [_class_files(half, grouped, record) for half in (train, test)]
        names = sorted({*found[0], *found[1]})
        parts = [[(n, half.get(n, [])) for n in names] for half in found]
        return _listing(train, parts[0]), _listing(test, parts[1])
    if there := train or test:
        missing = "train" if train is None else " or ".join(tests)
        rule = f"has class folders in {there.name}, but none in {missing}"
        remedy = "it needs both, each of class folders, or class folders alone"
        refuse_file(path, rule, f"{remedy}: {described(path)}")
    _other_entries(path, (), record)
    found = _class_files(path, grouped, record)
    parts = {part_of(name) for name in found}
    if "" not in parts and parts.intersection(TRAINS) and parts.intersection(tests):
        names = ", ".join(found)
        rule = f"has training and test images ({names}), but no class folders"
        remedy = "make a folder for each class in them, or give --labels FILE (a CSV "
        remedy += "file) or --labels-from-name; if they are classes, rename them"
        refuse_file(path, rule, remedy)
    if not hold_out:
        every = _listing(path, found.items())
        return every, every
    record.split = "by person" if grouped else "by name"
    first, second = _split(path, found, grouped)
    return _listing(path, first.items()), _listing(path, second.items())


def _other_entries(path: Path, used: Sequence[str], record: Record) -> None:
    """Put on record what lies beside the folders that are read."""
    images, others, folders = looked(path)
    for name in others:
        record.skip(name)
    if images:
        record.notes.append(
            f"not read: {counted(len(images), 'image')} beside the folders in "
            f"{clean(path.name)}, in none of them"
        )
    for name in folders:
        if used and name not in used:
            record.notes.append(
                f"the folder {clean(name)} is not read: the training images are those "
                f"in {used[0]}, the test images those in {used[1]}"
            )


def _class_names(folder: Path) -> list[str]:
    """Return the names of classes; refuse one that would spoil the run's files."""
    names = looked(folder)[2]
    for name in names:
        if clean(name) != name:
            rule = "is a class whose name is not UTF-8, or has control characters"
            remedy = "rename it: its name is written into the run's files"
            refuse_file(folder / name, rule, remedy)
    return names


def _class_files(folder: Path, grouped: bool, record: Record) -> dict[str, list[str]]:
    """Return the images of each class that has any, by its name."""
    found = {}
    for name in _class_names(folder):
        files, others, below = looked(folder / name)
        for other in others:
            record.skip(other)
        deeper = [] if grouped else _deeper(folder / name, below)
        if grouped:
            if files:
                remedy = "with groups='folder' (--groups folder), each class folder "
                remedy += "has a folder for each person"
                image = folder / name / files[0]
                refuse_file(image, "is in no person's folder", remedy)
            files = [
                f"{person}/{file}"
                for person in below
                for file in _images_of_person(folder / name / person, record)
            ]
        elif deeper and not files:
            first = deeper[0].relative_to(folder / name)
            rule = f"is a class whose images are in folders, such as {first}"
            remedy = "if each folder is one person, give groups='folder' (--groups "
            remedy += f"folder); if each is one class, give {folder / name} as the "
            remedy += "data; else move the images up into the class folder"
            refuse_file(folder / name, rule, remedy)
        elif deeper:
            record.notes.append(
                f"not read: {counted(len(deeper), 'image')} in folders of the class "
                f"folder {clean(name)}; move them up into it"
            )
        if files:
            found[name] = files
        else:
            record.notes.append(f"the folder {clean(name)} has no images: no class")
    if not found:
        remedy = f"make one folder of images each: {described(folder)}"
        refuse_file(folder, "has no class folders with images", remedy)
    return found


def _deeper(folder: Path, below: Iterable[str]) -> list[Path]:
    """Return the images in the folders of a folder."""
    return [
        place / image
        for name in below
        for place, images, _ in walked(folder / name)
        for image in images
    ]


def _images_of_person(folder: Path, record: Record) -> list[str]:
    """Return the images of a person; refuse to leave any out, or the whole person."""
    files, others, below = looked(folder)
    for other in others:
        record.skip(other)
    if deeper := _deeper(folder, below):
        rule = "is too deep: images in folders of a person's folder are not read"
        refuse_file(deeper[0], rule, f"move it into {folder}")
    if not files:
        remedy = f"put images in it, or move it elsewhere: {described(folder)}"
        refuse_file(folder, "is a person's folder without images", remedy)
    return files


def held_out_by_name(
    source: object, owners: np.ndarray | None
) -> tuple[str, np.ndarray | None]:
    """Choose about a fifth of the images, or of their owners, each by its name alone.

    Where folders that are not classes hold images of one name, their paths decide.
    Return how (see `Record.split`), and which; None if neither has a name.
    """
    how = "by number" if owners is None else "by person"
    if owners is not None:
        names, numbers = np.unique(owners, return_inverse=True)
        held = np.array([_held_out(str(name)) for name in names])[numbers]
    elif isinstance(source, FolderSource):
        paths = [source.listing.name(index) for index in range(len(source))]
        names, how = [os.path.basename(path) for path in paths], "by name"
        if len({*names}) < len(names):
            names, how = paths, "by path"
        held = np.array([*map(_held_out, names)])
    else:
        return how, None
    if isinstance(source, FolderSource):
        files = np.array([*map(source.content, range(len(source)))])
        refuse_shared(files[~held], files[held])
    return how, held


def refuse_shared(train: Iterable[str], test: Iterable[str]) -> None:
    """Refuse files of test images that links make training images too.

    Copies are found later (`source.warn_of_copies`). One file may hold both, under one
    name.

    Raises:
        UnreadableFile: there are some; the message names the first.
    """
    tests = {identity: file for file in test if (identity := _identity(file))}
    pairs = [(tests[i], file) for file in train if (i := _identity(file)) in tests]
    if pairs := [(file, other) for file, other in pairs if _are_one(file, other)]:
        file, other = pairs[0]
        rule = f"is for testing, and by a link the same file as {other}, which is for "
        rule += f"training ({counted(len(pairs), 'such file')})"
        remedy = "remove the links: test images must be others, because accuracy on "
        remedy += "them is published without noise"
        refuse_file(file, rule, remedy)


def _are_one(file: str, other: str) -> bool:
    """Return whether two files of one number, which some systems repeat, are one."""
    linked = os.path.realpath(file) == os.path.realpath(other)
    return file != other and (linked or os.stat(file).st_nlink > 1)


def _identity(file: str) -> tuple[int, int] | None:
    with contextlib.suppress(OSError):  # Reading it says what is wrong.
        found = os.stat(file)
        return found.st_dev, found.st_ino
    return None


def _held_out(name: str) -> bool:
    encoded = name.encode(errors="surrogateescape")
    word = hashlib.blake2b(encoded, digest_size=8, person=_CHOICE).digest()
    return int.from_bytes(word, "big") < 2**64 // HELD_OUT


def _split(
    path: Path, classes: dict[str, list[str]], grouped: bool
) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Return the training and the test images of each class."""
    what = "persons" if grouped else "images"
    remedy = f"add {what}, or make train and test folders"
    train, test = {}, {}
    for name, files in classes.items():
        # Of a person's image, PERSON/IMAGE, the person's name decides.
        tested = {file for file in files if _held_out(file.partition("/")[0])}
        train[name], test[name] = sorted({*files} - tested), sorted(tested)
    if few := [name for name in classes if not train[name]]:
        such = f", one of {len(few)} such classes" * (len(few) > 1)
        rule = f"is a class of too few {what}{such}: their names send all of them to "
        refuse_file(path / few[0], f"{rule}the test set", remedy)
    if not any(test.values()):
        rule = f"has too few {what}: their names send none of them to the test set"
        refuse_file(path, rule, remedy)
    return train, test


def _listing(root: Path, classes: Iterable[tuple[str, Sequence[str]]]) -> Listing:
    found, names, lengths, counts = [], bytearray(), [], []
    for name, files in classes:
        encoded = [os.fsencode(file) for file in files]
        found.append(name)
        names += b"".join(encoded)
        lengths.append(np.fromiter(map(len, encoded), np.int64, len(encoded)))
        counts.append(len(files))
    ends = np.cumsum(np.concatenate(lengths))
    labels = np.repeat(np.arange(len(found), dtype=np.int32), counts)
    return Listing(root, tuple(found), bytes(names), ends, labels)


def list_files(root: Path, files: Sequence[str]) -> Listing:
    """Return a listing of files that are not in class folders, without labels."""
    return dataclasses.replace(_listing(root, [("", files)]), classes=(), nested=False)
