"""A folder of images: one sub-folder per class.

Either ``train/<class>/*`` with ``test/<class>/*`` (or ``val``, or ``validation``), or
``<class>/*`` alone, which is split here: the files of each class are sorted by a hash
of their relative path, and every fifth is a test example. The split depends on the
paths alone. It counts as public, and the guarantee covers the training examples. A new
file can move another one across the split; to avoid that, make the two folders.

Where each class folder has a folder for each person, ``<class>/<person>/*``, whole
persons are split, by a hash of their folders' names.

Files are chosen by their ending: png, jpg or jpeg, in lower or upper case.
"""

import dataclasses
import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from tanager._reading import reading, refuse_file
from tanager._text import clean
from tanager.data.decoding import decode_image, open_image
from tanager.data.streamed import StreamedImages, digest


_SUFFIXES = (".png", ".jpg", ".jpeg")
_GREY = ("1", "L")
_EVERY = 5  # one in five is a test example
TESTS = ("test", "val", "validation")
"""Names a folder of test images may have; the first that has class folders is taken."""


@dataclasses.dataclass(frozen=True)
class Listing:
    """The files of one split, in order of class and name; none has been opened.

    All file names are in one string of bytes, `names`: a million paths would take 200
    MiB. `ends` says where each of them ends, and `root` is above the class folders.
    """

    root: Path
    classes: tuple[str, ...]
    names: bytes
    ends: np.ndarray
    labels: np.ndarray

    def owners(self) -> np.ndarray:
        """Return the name of the folder in the class folder that each file is in."""
        starts = [0, *self.ends[:-1]]
        names = [self.names[a:b] for a, b in zip(starts, self.ends, strict=True)]
        return np.array([os.fsdecode(name.partition(b"/")[0]) for name in names])

    def file(self, index: int) -> str:
        """Return the path of one file."""
        start = self.ends[index - 1] if index else 0
        name = os.fsdecode(self.names[start : self.ends[index]])
        return os.path.join(self.root, self.classes[self.labels[index]], name)

    def __len__(self) -> int:
        return len(self.labels)


class FolderSource(StreamedImages):
    """The images of a listing, decoded on access as `tanager.data.decoding` says."""

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

    def _read(self, index: int) -> np.ndarray:
        return decode_image(self.listing.file(index), self.shape, self._exact)

    def _place(self, index: int) -> tuple[Path, str]:
        return Path(self.listing.file(index)), ""


def has_classes(path: Path, names: Sequence[str] = ()) -> bool:
    """Return whether there is such a folder, with folders in it (some of `names`)."""
    found = set(_class_names(path)) if path.is_dir() else set()
    return bool(found.intersection(names) if names else found)


def list_folder(
    path: Path, tests: Sequence[str] = TESTS, grouped: bool = False
) -> tuple[Listing, Listing]:
    """List the training and test files of a folder; split it if it is not.

    `grouped` lists the files in the folders of persons in each class folder.
    """
    test = next((name for name in tests if has_classes(path / name)), None)
    if (path / "train").is_dir() != (test is not None):
        found, other = (test, "'train'") if test else ("train", repr(tests[0]))
        refuse_file(
            path,
            f"has a folder {found!r} but none named {other}",
            f"it needs both (train and {' or '.join(tests)}), each of class folders, "
            "or class folders alone",
        )
    if test is not None:
        halves = [
            _listing(path / half, _class_files(path / half, grouped))
            for half in ("train", test)
        ]
        if odd := sorted(set(halves[0].classes) ^ set(halves[1].classes)):
            refuse_file(
                path, f"has class {odd[0]!r} in only one of train and {test}", "add it"
            )
        return halves[0], halves[1]
    found = dict(_class_files(path, grouped))
    parts = _split_persons(path, found) if grouped else _split(path, found)
    train, test = (
        _listing(path, [(name, part[half]) for name, part in parts.items()])
        for half in (0, 1)
    )
    return train, test


def common_shape(
    listings: Sequence[Listing], image_size: int | None
) -> tuple[int, int, int]:
    """Open every file and return the shape (H, W, C) that all can be decoded to.

    If all are grey the images have one channel, otherwise three. H and W are
    `image_size`, or else the size of all images, which must then have one.
    """
    channels, like = 1, None
    for listing in listings:
        for index in range(len(listing)):
            file = Path(listing.file(index))
            with (
                reading(file, "cannot be read as an image", "replace it"),
                open_image(file) as image,
            ):
                width, height = image.size
                channels = channels if image.mode in _GREY else 3
            first, h, w = like = like or (file, height, width)
            if image_size is None and (h, w) != (height, width):
                side = min(h, w, height, width)
                refuse_file(
                    file,
                    f"is {height} × {width} and {first.name} is {h} × {w}",
                    f"resize them all with image_size={side} (--image-size {side})",
                )
    assert like is not None
    height, width = like[1:] if image_size is None else (image_size, image_size)
    return height, width, channels


def _class_names(folder: Path) -> list[str]:
    with os.scandir(folder) as entries:
        names = sorted(
            entry.name
            for entry in entries
            if not entry.name.startswith(".") and entry.is_dir()
        )
    for name in names:
        if clean(name) != name:
            refuse_file(
                folder / name,
                "is a class whose name is not UTF-8, or has control characters",
                "rename the folder: its name is written into the run's files",
            )
    return names


def _class_files(
    folder: Path, grouped: bool = False
) -> Iterator[tuple[str, list[str]]]:
    names = _class_names(folder)
    if not names:
        refuse_file(folder, "has no class folders", "make one folder of images each")
    for name in names:
        files = _images(folder / name)
        if grouped:
            if files:
                refuse_file(
                    folder / name / files[0],
                    "is in no person's folder",
                    "with groups='folder' (--groups folder), each class folder has a "
                    "folder for each person",
                )
            files = [
                f"{person}/{file}"
                for person in _class_names(folder / name)
                for file in _images_of_person(folder / name / person)
            ]
        if not files:
            refuse_file(
                folder / name,
                "is a class without images",
                f"put {', '.join(_SUFFIXES)} files in it, or remove it; if its folders "
                "are persons, give groups='folder' (--groups folder)",
            )
        yield name, files


def _images_of_person(folder: Path) -> list[str]:
    """Return the images of a person; refuse to leave any out, or the whole person."""
    files = _images(folder)
    for inner in _class_names(folder):
        for below, _, _ in os.walk(folder / inner):
            if deeper := _images(Path(below)):
                refuse_file(
                    Path(below, deeper[0]),
                    "is too deep: images in folders of a person's folder are not read",
                    f"move it into {folder}",
                )
    if not files:
        refuse_file(
            folder,
            "is a person's folder without images",
            f"put {', '.join(_SUFFIXES)} files in it, or remove it",
        )
    return files


def _images(folder: Path) -> list[str]:
    with os.scandir(folder) as entries:
        return sorted(
            entry.name
            for entry in entries
            if entry.name.lower().endswith(_SUFFIXES) and not entry.name.startswith(".")
        )


def _hash(name: str) -> bytes:
    encoded = name.encode(errors="surrogateescape")
    return hashlib.blake2b(encoded, digest_size=16).digest()


def _split(
    path: Path, classes: dict[str, list[str]]
) -> dict[str, tuple[list[str], list[str]]]:
    parts = {}
    for name, files in classes.items():
        if len(files) < 2:
            refuse_file(
                path / name,
                "is a class of one image, which cannot be split",
                "add images, or make train and test folders",
            )
        ordered = sorted(files, key=lambda file, name=name: _hash(f"{name}/{file}"))
        test = sorted(ordered[::_EVERY])
        parts[name] = sorted(set(files) - set(test)), test
    return parts


def _split_persons(
    path: Path, classes: dict[str, list[str]]
) -> dict[str, tuple[list[str], list[str]]]:
    persons = {file.partition("/")[0] for files in classes.values() for file in files}
    tested = {*sorted(persons, key=_hash)[::_EVERY]}
    parts = {}
    for name, files in classes.items():
        test = [file for file in files if file.partition("/")[0] in tested]
        train = [file for file in files if file.partition("/")[0] not in tested]
        if not (train and test):
            refuse_file(
                path / name,
                "is a class of too few persons, which cannot be split by person",
                "add persons, or make train and test folders",
            )
        parts[name] = train, test
    return parts


def _listing(root: Path, classes: Iterable[tuple[str, list[str]]]) -> Listing:
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
