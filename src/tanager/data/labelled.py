"""Images in any folders, with labels in a CSV file or in the names of the files."""

import csv
import io
import os
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from tanager import _validate as validate
from tanager._cache import expanded
from tanager._reading import UnreadableFile, reading, refuse_file
from tanager.data.folder import TESTS, TRAINS, FolderSource, has_classes, list_files
from tanager.data.label_sets import USUAL, read_labels
from tanager.data.labels import MISSING, RENAME
from tanager.data.layout import (
    Layout,
    Record,
    counted,
    described,
    looked,
    near_column,
    walked,
)


TABLES = (".csv", ".tsv")
"""Endings of files of labels."""
IMAGE_NAMES = ("image", "file", "filename", "file_name", "path", "image_path", "img")
LABEL_NAMES = ("label", "labels", "class", "target", "category", "diagnosis")
"""Names that a column usually has, in lower or upper case."""
_HALVES = (*TRAINS, *TESTS)
_LARGEST = 1 << 30  # bytes of a CSV file
_BEGINNING = re.compile(r"[^\d_.(-]+")


def from_names(folder: Path, groups: str | None, record: Record) -> list[FolderSource]:
    """Return the images of a folder, by classes that their names begin with.

    They are training images and test images if they lie in folders named so, or else
    one source of all.
    """
    files = _files(folder, record)
    values = []
    for file in files:
        found = _BEGINNING.match(os.path.basename(file))
        if found is None or not found[0].strip():
            remedy = "names must begin with the class, as in cat_01.png"
            refuse_file(folder / file, "has a name that begins with no class", remedy)
        values.append(found[0].strip())
    owners, splits = _folders(folder, files, groups), _split_folders(folder, files)
    return _sources(folder, files, np.array(values), owners, splits, record)


def from_table(
    folder: Path, file: Path, layout: Layout, groups: str | None, record: Record
) -> list[FolderSource]:
    """Return the images of a folder that a CSV file has a label for.

    They are training images and test images if it has a column ``split``, or if they
    lie in folders named so, or else one source of all.
    """
    names, rows = _rows(file)
    files = _files(folder, record, besides=file)
    known = _known(folder, file, files)
    if any(_image_of(known, cell) is not None for cell in names):
        rule = "has no names of columns: its first line names an image"
        refuse_file(file, rule, "add a first line such as image,label", "labels")
    image = _image_column(file, names, rows.values(), known, layout.image_column)
    owner = names.index(groups) if groups in names else None
    if owner is not None and groups == "folder":
        rule = f"means a folder for each person, and {file.name} has a column 'folder'"
        validate.refuse("groups", groups, rule, "rename this column")
    if owner is None and groups not in (None, "folder"):
        rule = f"must be 'folder' or a column of {file.name}"
        validate.refuse("groups", groups, rule, _near(groups, names))
    split = next((n for n, name in enumerate(names) if name.lower() == "split"), None)
    others = [n for n in range(len(names)) if n not in (image, owner, split)]
    label = None
    if not layout.multi_label:
        label = _label_column(file, names, others, layout.label_column)
    filled = [column for column in (label, owner) if column is not None]
    row_of = _row_of_image(folder, file, rows, image, known, filled)
    if without := len(files) - len(row_of):
        images = counted(without, "image")
        record.notes.append(f"not read: {images} without a row in {file.name}")
    order = sorted(row_of)
    lines = [rows[row_of[each]] for each in order]
    owners = _folders(folder, order, groups)
    if owner is not None:
        owners = np.array([line[owner] for line in lines])
    classes: tuple[str, ...] = ()
    if label is None:
        column = _names_column(file, names, others, layout.label_column)
        classes, values = read_labels(
            file, names, lines, others, column, layout, record
        )
    else:
        values = np.array([line[label] for line in lines])
    if split is None:
        splits = _split_folders(folder, order)
    else:
        splits = [line[split].lower() for line in lines]
        found = {*splits}
        if found - {*_HALVES} or not all(found & {*half} for half in (TRAINS, TESTS)):
            rule = "has a column 'split', which must say train or test in each row"
            remedy = "rename the column if it says something else"
            refuse_file(file, rule, remedy, "labels")
    sources = _sources(folder, order, values, owners, splits, record)
    for source in sources:
        source.class_names, source.table = classes, file
    return sources


def _row_of_image(
    folder: Path,
    file: Path,
    rows: Mapping[int, Sequence[str]],
    image: int,
    known: Mapping[str, str],
    filled: Sequence[int],
) -> dict[str, int]:
    """Return the number of the row of each image; refuse a gap in columns `filled`."""
    numbers: dict[str, int] = {}
    for number, row in rows.items():
        found = _image_of(known, row[image])
        if not found:
            what = "no image" if found is None else "several images"
            remedy = f"give its path, relative to {folder}: {described(folder)}"
            refuse_file(file, f"row {number} names {what}", remedy, "labels")
        if found in numbers:
            rule = f"row {number} names the image of row {numbers[found]}"
            refuse_file(file, rule, "leave only one of them there", "labels")
        for column in filled:
            if (cell := row[column]).lower() in ("", *MISSING):
                rule = f"row {number} has {cell or 'nothing'} in column {column + 1}"
                remedy = "fill it in, or leave out the row"
                remedy += f"; {RENAME}" if cell else ""
                refuse_file(file, rule, remedy, "labels")
        numbers[found] = number
    return numbers


def _split_folders(folder: Path, files: Sequence[str]) -> list[str]:
    """Return whether images are in train or test folders; [] where they are not split.

    Refuse images in neither: which are for training is the user's to say.
    """
    halves = [_half(file) for file in files]
    found = {*halves}
    if not all(found & {*half} for half in (TRAINS, TESTS)):
        return []
    if "" in found:
        rule = "is in no train or test folder, and other images are in both"
        remedy = "move it into one of them, or move it elsewhere"
        refuse_file(folder / files[halves.index("")], rule, remedy)
    return halves


def _sources(
    folder: Path,
    files: Sequence[str],
    values: np.ndarray,
    owners: np.ndarray | None,
    splits: Sequence[str],
    record: Record,
) -> list[FolderSource]:
    """Return the training images and the test images; one source if not split."""
    parts = [[*range(len(files))]]
    if splits:
        train, test = (
            next(name for name in names if name in splits) for names in (TRAINS, TESTS)
        )
        for name in sorted({*splits} - {train, test}):
            unread = f"{counted(splits.count(name), 'image')} of split {name}"
            instead = train if name in TRAINS else test
            record.notes.append(f"not read: {unread}, because {instead} is")
        parts = [
            [n for n, name in enumerate(splits) if name == half]
            for half in (train, test)
        ]
    sources = []
    for part in parts:
        source = FolderSource(list_files(folder, [files[n] for n in part]), (1, 1, 3))
        source.owners = None if owners is None else owners[part]
        source.values = values[part]
        sources.append(source)
    return sources


def table_of(folder: Path, layout: Layout, record: Record) -> Path | None:
    """Return the CSV file that a layout names, else the only one beside the images."""
    if layout.labels is not None:
        file = expanded(layout.labels)
        for place in (file, folder / file):
            if place.is_file():
                return place
        validate.refuse("labels", str(file), "is not a file", "give a CSV file")
    _, others, below = looked(folder)
    tables = [name for name in others if name.lower().endswith(TABLES)]
    if len(tables) != 1:
        return None
    file = folder / tables[0]
    several = len(below) > 1 or any(has_classes(folder / name) for name in below)
    if several and not _has_labels(folder, file, layout):
        return None
    record.notes.append(f"labels are read from {file.name}")
    return file


def _has_labels(folder: Path, file: Path, layout: Layout) -> bool:
    """Return whether the labels are in a CSV file, not in the names of the folders.

    Refuse a file that names images in several folders and may hold labels, or not.
    """
    try:
        names, rows = _rows(file)
    except UnreadableFile:
        return False
    files = _files(folder, Record())
    known = _known(folder, file, files)
    columns = [*zip(*rows.values(), strict=True)]
    images = max(
        ([_image_of(known, cell) for cell in each] for each in columns), key=_count
    )
    if 2 * _count(images) <= max(len(rows), len(files)):
        return False
    found = [n for n, image in enumerate(images) if image]
    places = [part[:1] for part in _places([images[n] or "" for n in found])]
    for column in columns:
        pairs = {(place, column[n]) for place, n in zip(places, found, strict=True)}
        values = {value for _, value in pairs}
        if 1 < len(pairs) == len({*places}) == len(values) < len(found):
            return False  # The folders are its values.
    usual = {*LABEL_NAMES}.intersection(name.lower() for name in names)
    if (
        usual
        or layout.label_column
        or layout.multi_label
        or len({*places}) == 1
        or len(names) == 2
    ):
        return True
    rule = f"names images in {len({*places})} folders, and may hold their labels"
    remedy = f"{_shown(names)}: give --labels {file.name} --label-column NAME; or, if "
    remedy += "each folder is one class, move this file elsewhere"
    return refuse_file(file, rule, remedy, "labels")


def _count(images: Sequence[str | None]) -> int:
    return sum(map(bool, images))


def _files(folder: Path, record: Record, besides: Path | None = None) -> list[str]:
    """Return the paths of all images below a folder."""
    found = []
    for place, images, others in walked(folder):
        inside = place.relative_to(folder)
        found += [str(inside / name) for name in images]
        for name in others:
            if besides is None or (place / name).resolve() != besides.resolve():
                record.skip(name)
    if not found:
        refuse_file(folder, "has no images", described(folder))
    return sorted(found)


def _folders(
    folder: Path, files: Sequence[str], groups: str | None
) -> np.ndarray | None:
    """Return the folder that each image is right in, if these are their owners.

    Folders around all of them, and train and test, are left out. A person in two
    folders would be two persons: folders in an owner's folder are refused.
    """
    if groups != "folder":
        return None
    parts = _places(files)
    for file, part in zip(files, parts, strict=True):
        if not part:
            rule = "has images that are not in a folder of their owner"
            refuse_file(folder, rule, "with --groups folder, make one folder a person")
        if len(part) > 1:
            rule = "is too deep: with --groups folder, a person's images are right in "
            rule += "one folder, beside those of the others"
            remedy = "move it up, or name the owners in a column (--groups COLUMN)"
            refuse_file(folder / file, rule, remedy)
    return np.array([part[0] for part in parts])


def _places(files: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the folders of each file, without train, test, and those around all."""
    parts = [_besides_half(file) for file in files]
    while all(part[:1] == parts[0][:1] != () for part in parts):
        parts = [part[1:] for part in parts]
    return parts


def _half(file: str) -> str:
    """Return the first folder of a file that is named train or test, in lower case."""
    parts = [part.lower() for part in Path(file).parent.parts]
    return next((part for part in parts if part in _HALVES), "")


def _besides_half(file: str) -> tuple[str, ...]:
    """Return the folders of a file without the first that is named train or test."""
    parts, half = Path(file).parent.parts, _half(file)
    at = [part.lower() for part in parts].index(half) if half else len(parts)
    return parts[:at] + parts[at + 1 :]


def _rows(file: Path) -> tuple[list[str], dict[int, list[str]]]:
    """Return the names of the columns of a CSV file, and its rows that hold something.

    Rows have the numbers that a spreadsheet shows.
    """
    with reading(file, "is not a CSV file that can be read", argument="labels"):
        if file.stat().st_size > _LARGEST:
            refuse_file(file, "is larger than 1 GiB", argument="labels")
        text = file.read_bytes().decode("utf-8-sig", "replace")
        if "\ufffd" in text:
            refuse_file(file, "is not UTF-8", "save it as UTF-8", argument="labels")
        first = text.partition("\n")[0]
        mark = max(",;\t", key=first.count)
        lines = csv.reader(io.StringIO(text, newline=""), delimiter=mark, strict=True)
        rows = {
            number: [cell.strip() for cell in row]
            for number, row in enumerate(lines, 1)
            if any(row)
        }
    names = next(iter(rows.values()), [])
    if len(rows) < 2 or len(names) < 2:
        rule = "needs a line of names, and a line of two columns for each image"
        refuse_file(file, rule, argument="labels")
    for number, row in rows.items():
        if len(row) != len(names):
            rule = f"row {number} has {len(row)} columns, and the first line has "
            refuse_file(file, f"{rule}{len(names)}", argument="labels")
    return names, dict(list(rows.items())[1:])


def _known(folder: Path, file: Path, files: Sequence[str]) -> dict[str, str]:
    """Return each image by what may name it: a path, a name, a name without ending.

    A path is absolute, or relative to the folder, to its parent (as in CheXpert) or to
    the file's folder. What several images share names none of them. Letters with
    accents may be encoded in another way than in the file's name (Unicode NFC, as here,
    or NFD).
    """
    here, beside = os.path.abspath(folder), os.path.abspath(file.parent)
    whole, short = {}, {}
    for each in files:
        path = os.path.join(here, each)
        near = each if here == beside else os.path.relpath(path, beside)
        for part in {each, path, near, os.path.join(os.path.basename(here), each)}:
            whole[part] = each if whole.get(part, each) == each else ""
        name = os.path.basename(each)
        for part in {name, os.path.splitext(name)[0], os.path.splitext(each)[0]}:
            short[part] = "" if part in short else each
    exact, alike = short | whole, {}
    for name, each in exact.items():
        if (plain := unicodedata.normalize("NFC", name)) not in exact:
            alike[plain] = each if alike.get(plain, each) == each else ""
    return alike | exact


def _image_of(known: Mapping[str, str], cell: str) -> str | None:
    """Return the image that a cell names; "" if several, None if none."""
    found = known.get(cell)
    return known.get(unicodedata.normalize("NFC", cell)) if found is None else found


def _image_column(
    file: Path,
    names: Sequence[str],
    rows: Iterable[Sequence[str]],
    known: Mapping[str, str],
    given: str | None,
) -> int:
    if given is None:
        columns = zip(*rows, strict=True)
        counts = [_count([_image_of(known, cell) for cell in each]) for each in columns]
        most = max(counts)
        if most and counts.count(most) == 1:
            return counts.index(most)
    return _named(file, names, range(len(names)), "image", given, IMAGE_NAMES)


def _label_column(
    file: Path, names: Sequence[str], others: Sequence[int], given: str | None
) -> int:
    if given is None and len(others) == 1:
        return others[0]
    return _named(file, names, others, "label", given, LABEL_NAMES)


def _names_column(
    file: Path, names: Sequence[str], others: Sequence[int], given: str | None
) -> int | None:
    """Return the column of names of labels, if it was named or has a usual name."""
    usual = (*LABEL_NAMES, *USUAL)
    if given is None and not any(names[n].lower() in usual for n in others):
        return None
    return _named(file, names, others, "label", given, usual)


def _named(
    file: Path,
    names: Sequence[str],
    columns: Sequence[int],
    what: str,
    given: str | None,
    usual: Sequence[str],
) -> int:
    """Return the column that was named, or the first with a usual name."""
    wanted = usual if given is None else (given,)
    lower = {names[n] if given else names[n].lower(): n for n in columns}
    for name in wanted:
        if name in lower:
            return lower[name]
    if given in names:
        rule = f"column {given!r} cannot be that of the {what}s too"
        return refuse_file(file, rule, "name another", argument="labels")
    rule = f"has no column {' or '.join(map(repr, wanted))}"
    if given is not None:
        remedy = f"{_near(given, names)} (--{what}-column)"
        return refuse_file(file, rule, remedy, argument="labels")
    remedy = f"name that of the {what}s with {what}_column (--{what}-column)"
    return refuse_file(file, rule, f"{_shown(names)}: {remedy}", argument="labels")


def _near(given: str, names: Sequence[str]) -> str:
    """Return what mends the name of a column that is not there; no other is printed."""
    if near := near_column(given, names):
        return f"did you mean {near!r}?"
    return f"give one of the {len(names)} names in its first line"


def _shown(names: Sequence[str]) -> str:
    """Return the names of columns in words; only their number if they may be a row."""
    usual = {*IMAGE_NAMES, *LABEL_NAMES, "split"}
    if usual.intersection(name.lower() for name in names):
        return f"its columns are {list(names)!r:.300}"
    rule = "its first line must name them"
    return f"it has {len(names)} columns, none of a usual name ({rule})"
