"""Where images and labels are, and a record of how they were read.

What is not read is counted and named, never dropped in silence: N is part of the
guarantee.
"""

import collections
import dataclasses
import os
import re
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args

from tanager import _validate as validate
from tanager._reading import refuse_file
from tanager.data import dicom
from tanager.data.decoding import CONVERSION, SUFFIXES


DEFAULT_SIDE = 32
"""Pixels per side of images that differ in size, unless another size is given."""
Uncertain = Literal["refuse", "absent", "present"]
# As hidden files are: what macOS, Synology, Linux and Windows put beside other files.
_IGNORED = {"__MACOSX", "@eaDir", "lost+found", "$RECYCLE.BIN"}
_IGNORED |= {"System Volume Information"}
_ENDING = re.compile(r"\.[A-Za-z0-9]{0,4}[A-Za-z][A-Za-z0-9]{0,4}$")
_MOST_NAMED = 5  # endings, or folders, in one message


@dataclasses.dataclass(frozen=True)
class Layout:
    """Say where the labels are, if folders and columns do not show it.

    `load` takes one in place of a path.

    Attributes:
        path: the folder or file with the data.
        labels: CSV file with one row for each image, its path relative to this file or
            to the folder.
        image_column: column with the images, or their paths. Default: the column that
            names the images.
        label_column: column with the labels. Default: label or a similar name, else the
            only other column.
        labels_from_name: a file's class is the beginning of its name, up to the first
            digit or one of ``_ - . (``: cat in ``cat_01.png``.
        default_side: pixels per side that images are resized to if they differ in size
            and no size is given.
        multi_label: an image has any number of labels, in a CSV file of one of the
            forms in `tanager.data.label_sets`.
        uncertain: what a label of −1 counts as, if it is not how 0 is written: "absent"
            or "present"; "refuse" reads no such file.
        hold_out: without test images, hold out about a fifth for testing. With False,
            all images are test images, and training images too.

    Raises:
        ValueError: labels come from two places, `default_side` is below 1, or
            `uncertain` is another word.
    """

    path: str | os.PathLike[str]
    labels: str | os.PathLike[str] | None = None
    image_column: str | None = None
    label_column: str | None = None
    labels_from_name: bool = False
    default_side: int = DEFAULT_SIDE
    multi_label: bool = False
    uncertain: Uncertain = "refuse"
    hold_out: bool = True

    def __post_init__(self):
        validate.one_of(get_args(Uncertain), uncertain=self.uncertain)
        validate.whole(default_side=self.default_side, at_least=1)
        if self.uncertain != "refuse" and not self.multi_label:
            rule = "is for any number of labels: add multi_label, or leave this out"
            validate.refuse("uncertain", self.uncertain, rule)
        if self.labels_from_name and self.labels is not None:
            rule = "must be left out with labels_from_name"
            validate.refuse("labels", str(self.labels), rule, "leave out one of them")
        if self.labels_from_name and self.multi_label:
            rule = "must be left out with labels_from_name, which gives one class"
            validate.refuse("multi_label", True, rule, "leave out one of them")
        for name in ("image_column", "label_column"):
            if self.labels_from_name and (value := getattr(self, name)) is not None:
                rule = "must be left out with labels_from_name, which reads no table"
                validate.refuse(name, value, rule, "leave out one of them")


def refuse_one_class(layout: Layout) -> NoReturn:
    """Refuse images of one class; name the file or folder that gives the classes."""
    if layout.labels is not None:
        remedy = "two classes or more are needed, in the column --label-column"
        validate.refuse("labels", str(layout.labels), "has one class only", remedy)
    remedy = "two classes or more are needed: see --labels and --labels-from-name"
    if layout.labels_from_name:
        remedy = "two classes or more are needed, as in cat_01.png and dog_01.png"
    validate.refuse("path", str(layout.path), "has one class only", remedy)


@dataclasses.dataclass
class Record:
    """How files were read: for people as `notes`, for config.json as `to_json`.

    Attributes:
        layout: in words.
        size: "given", "as they are" or "default".
        split: where the test images come from: "given" by the files, or held out
            "by name" of the image, "by path" if several share a name (in folders
            that are not classes), "by person", or "by number".
        not_read: how many files are not images, by ending.
        notes: one sentence each.
    """

    layout: str = ""
    size: str = "given"
    split: str = "given"
    not_read: collections.Counter[str] = dataclasses.field(
        default_factory=collections.Counter
    )
    notes: list[str] = dataclasses.field(default_factory=list)

    def skip(self, name: str) -> None:
        """Count a file that is not read."""
        self.not_read[ending(name) or "no ending"] += 1

    def warn(self) -> None:
        """Warn of everything that a person should know about how files were read."""
        notes = list(dict.fromkeys(self.notes))
        if total := self.not_read.total():
            are = "files are not images" if total > 1 else "file is not an image"
            notes.insert(0, f"{total} {are}, and not read: {_most(self.not_read)}")
        for note in notes:
            warnings.warn(note, stacklevel=3)

    def to_json(self) -> dict[str, Any]:
        """Return what config.json records."""
        return {
            "layout": self.layout,
            "conversion": CONVERSION,
            "size": self.size,
            "split": self.split,
            "not_read": dict(self.not_read.most_common()),
        }


def ending(name: str) -> str:
    """Return the ending of a file's name in lower case, such as ``.txt``; else "".

    It has letters: the last part of 1.2.840.10008 is no ending.
    """
    found = _ENDING.search(name)
    return found[0].lower() if found else ""


def looked(folder: str | os.PathLike[str]) -> tuple[list[str], list[str], list[str]]:
    """Return the names of images, of other files and of folders, each sorted.

    Hidden ones are left out, and folders that systems make, such as ``__MACOSX``. DICOM
    files need no ending.
    """
    images, others, folders = [], [], []
    with os.scandir(folder) as entries:
        for entry in entries:
            name = entry.name
            if name.startswith(".") or name in _IGNORED:
                continue
            if name.lower().endswith(SUFFIXES):
                images.append(name)
            elif entry.is_dir():
                folders.append(name)
            elif not ending(name) and entry.is_file() and dicom.is_dicom(entry.path):
                images.append(name)
            else:
                others.append(name)
    return sorted(images), sorted(others), sorted(folders)


def walked(
    folder: Path, above: tuple[str, ...] = ()
) -> Iterator[tuple[Path, list[str], list[str]]]:
    """Yield (folder, images, other files) of a folder and of all folders in it.

    `above` has the real paths of the folders that it was reached by.

    Raises:
        UnreadableFile: a link leads back to a folder that was entered before.
    """
    above = _entered(folder, above)
    images, others, folders = looked(folder)
    yield folder, images, others
    for name in folders:
        yield from walked(folder / name, above)


def _entered(folder: Path, above: tuple[str, ...]) -> tuple[str, ...]:
    """Return the real paths of a folder and of those above; refuse a loop of links."""
    if not above or folder.is_symlink():
        real = os.path.realpath(folder)
    else:
        real = os.path.join(above[-1], folder.name)
    if real in above:
        rule = f"is reached by links that lead in a circle, back to {real}"
        refuse_file(folder, rule, "remove the link")
    return *above, real


def outermost(path: Path) -> list[Path]:
    """Return a folder, and the folder in it that holds everything, if there is one.

    That is its only folder, without images beside it or right in it, and so on down.
    """
    folders, above = [path], ()
    while True:
        above = _entered(folders[-1], above)
        images, _, below = looked(folders[-1])
        if images or len(below) != 1 or looked(folders[-1] / below[0])[0]:
            return folders
        folders.append(folders[-1] / below[0])


def counted(number: int, what: str) -> str:
    """Return a number of things in words: 1 image, 2 images."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def described(folder: Path) -> str:
    """Return what is in a folder and in those below, in words."""
    below = looked(folder)[2]
    endings = collections.Counter(
        ending(name) or "no ending"
        for _, images, others in walked(folder)
        for name in (*images, *others)
    )
    names = ", ".join(below[:_MOST_NAMED]) + (", …" * (len(below) > _MOST_NAMED))
    folders = f"{counted(len(below), 'folder')} ({names})" if below else "no folders"
    files = f"files {_most(endings)}" if endings else "no files"
    return f"found {folders} and {files}"


def near_column(given: str, names: Sequence[str]) -> str | None:
    """Return the name of a column that is spelt most like `given`; None without."""
    of_lower = {name.lower(): name for name in names}
    near = validate.nearest(given.lower(), of_lower)
    return of_lower[near] if near else None


def _most(endings: collections.Counter[str]) -> str:
    shown = endings.most_common(_MOST_NAMED)
    rest = endings.total() - sum(count for _, count in shown)
    words = [f"{name} {count}" for name, count in shown]
    return ", ".join(words + [f"others {rest}"] * bool(rest))
