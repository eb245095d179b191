"""CSV files of labels: their rows, their columns, and the image that a cell names."""

import csv
import io
import itertools
import os
import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tanager import _validate as validate
from tanager._reading import UnreadableFile, reading, refuse_file
from tanager.data.decoding import SUFFIXES
from tanager.data.label_sets import USUAL
from tanager.data.labels import MISSING, RENAME
from tanager.data.layout import described, near_column


IMAGE_NAMES = ("image", "file", "filename", "file_name", "path", "image_path", "img")
LABEL_NAMES = ("label", "labels", "class", "target", "category", "diagnosis")
"""Names that a column usually has, in lower or upper case."""
_LARGEST = 1 << 30  # bytes of a CSV file


class NoTable(UnreadableFile):
    """A CSV file is too small to have labels."""


class Table(NamedTuple):
    """A CSV file of labels.

    Attributes:
        file: where it is.
        names: of its columns.
        rows: those that hold something, by the numbers that a spreadsheet shows.
        known: each image by what may name it, as `names_of`.
    """

    file: Path
    names: list[str]
    rows: dict[int, list[str]]
    known: dict[str, str]


def read_table(
    folder: Path, file: Path, files: Sequence[str], most: int | None = None
) -> Table:
    """Read a CSV file, or its first `most` lines, that names images of a folder.

    `files` are the paths of these images, relative to the folder.

    Raises:
        NoTable: it has one line, or one column.
        UnreadableFile: it is damaged, or of another format.
    """
    names, rows = _read_rows(file, most)
    return Table(file, names, rows, names_of(folder, file, files))


def refuse_no_names(table: Table) -> None:
    """Refuse a CSV file that begins with a row, not with the names of its columns."""
    if any(image_of(table.known, cell) is not None for cell in table.names):
        rule = "has no names of columns: its first line names an image"
        refuse_file(table.file, rule, "add a first line such as image,label", "labels")


def _read_rows(file: Path, most: int | None) -> tuple[list[str], dict[int, list[str]]]:
    """Return the names of the columns of a CSV file, and its rows."""
    with reading(file, "is not a CSV file that can be read", argument="labels"):
        if file.stat().st_size > _LARGEST:
            refuse_file(file, "is larger than 1 GiB", argument="labels")
        text = file.read_bytes().decode("utf-8-sig", "replace")
        if "\ufffd" in text:
            refuse_file(file, "is not UTF-8", "save it as CSV in UTF-8", "labels")
        first = text.partition("\n")[0]
        mark = max(",;\t", key=first.count)
        lines = csv.reader(io.StringIO(text, newline=""), delimiter=mark, strict=True)
        rows = {
            number: [cell.strip() for cell in row]
            for number, row in enumerate(itertools.islice(lines, most), 1)
            if any(row)
        }
    names = next(iter(rows.values()), [])
    if len(rows) < 2 or len(names) < 2:
        rule = "needs a line of names, and a line of two columns for each image"
        raise NoTable(validate.message("labels", str(file), rule, ""))
    for number, row in rows.items():
        if len(row) != len(names):
            rule = f"row {number} has {len(row)} columns, and the first line has "
            refuse_file(file, f"{rule}{len(names)}", argument="labels")
    return names, dict(list(rows.items())[1:])


def names_of(folder: Path, file: Path, files: Sequence[str]) -> dict[str, str]:
    """Return each image by what may name it: a path, a name, a name without ending.

    A path is absolute, or relative to the folder, to its parent (as in CheXpert) or to
    the file's folder. What several images share names none of them, or the only one of
    them in the file's folder. Letters with accents may be encoded in another way than
    in the file's name (Unicode NFC, as here, or NFD).
    """
    here, beside = os.path.abspath(folder), os.path.abspath(file.parent)
    whole, below = {}, []
    for each in files:
        path = os.path.join(here, each)
        relative = each if here == beside else os.path.relpath(path, beside)
        for part in {each, path, relative, os.path.join(os.path.basename(here), each)}:
            whole[part] = each if whole.get(part, each) == each else ""
        if path.startswith(os.path.join(beside, "")):
            below.append(each)
    exact, alike = _short(files) | _short(below) | whole, {}
    for name, each in exact.items():
        if (plain := unicodedata.normalize("NFC", name)) not in exact:
            alike[plain] = each if alike.get(plain, each) == each else ""
    return alike | exact


def _short(files: Sequence[str]) -> dict[str, str]:
    """Return each image by its name, with and without its ending."""
    short = {}
    for each in files:
        name = os.path.basename(each)
        for part in {name, os.path.splitext(name)[0], os.path.splitext(each)[0]}:
            short[part] = "" if part in short else each
    return short


def image_of(known: Mapping[str, str], cell: str) -> str | None:
    """Return the image that a cell names; "" if several, None if none."""
    if (found := known.get(cell)) is not None:
        return found
    path = cell.replace("\\", "/")  # Windows writes the other one
    return known.get(path, known.get(unicodedata.normalize("NFC", path)))


def count_images(images: Sequence[str | None]) -> int:
    """Return how many images cells name."""
    return len({*images} - {None, ""})


def row_of_image(
    folder: Path, table: Table, image: int, filled: Sequence[int]
) -> dict[str, int]:
    """Return the number of the row of each image; refuse a gap in columns `filled`."""
    file, numbers = table.file, {}
    for number, row in table.rows.items():
        found = image_of(table.known, row[image])
        if not found:
            what = "no image" if found is None else "several images"
            remedy = f"leave it out, or give its path, relative to {folder}: "
            remedy += described(folder)
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


def image_column(table: Table, given: str | None) -> int:
    """Return the column that was named, or that names most images.

    Of two, it is the one with endings: the other has the numbers of the rows.
    """
    if given is None:
        found = []
        for cells in zip(*table.rows.values(), strict=True):
            count = count_images([image_of(table.known, cell) for cell in cells])
            found.append(
                (count, sum(cell.lower().endswith(SUFFIXES) for cell in cells))
            )
        most = max(found)
        if most[0] and found.count(most) == 1:
            return found.index(most)
    return _named(table, range(len(table.names)), "image", given, IMAGE_NAMES)


def label_column(table: Table, others: Sequence[int], given: str | None) -> int:
    """Return the column that was named, is the only one, or has a usual name."""
    if given is None and len(others) == 1:
        return others[0]
    return _named(table, others, "label", given, LABEL_NAMES)


def names_column(table: Table, others: Sequence[int], given: str | None) -> int | None:
    """Return the column of names of labels, if it was named or has a usual name."""
    usual = (*LABEL_NAMES, *USUAL)
    if given is None and not any(table.names[n].lower() in usual for n in others):
        return None
    return _named(table, others, "label", given, usual)


def _named(
    table: Table,
    columns: Sequence[int],
    what: str,
    given: str | None,
    usual: Sequence[str],
) -> int:
    """Return the column that was named, or the first with a usual name."""
    file, names = table.file, table.names
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
        remedy = f"{near(given, names)} (--{what}-column)"
        return refuse_file(file, rule, remedy, argument="labels")
    remedy = f"name that of the {what}s with {what}_column (--{what}-column)"
    return refuse_file(file, rule, f"{shown(names)}: {remedy}", argument="labels")


def near(given: str, names: Sequence[str]) -> str:
    """Return what mends the name of a column that is not there; no other is printed."""
    if near := near_column(given, names):
        return f"did you mean {near!r}?"
    return f"give one of the {len(names)} names in its first line"


def shown(names: Sequence[str]) -> str:
    """Return the names of columns in words; only their number if they may be a row."""
    usual = {*IMAGE_NAMES, *LABEL_NAMES, "split"}
    if usual.intersection(name.lower() for name in names):
        return f"its columns are {list(names)!r:.300}"
    rule = "its first line must name them"
    return f"it has {len(names)} columns, none of a usual name ({rule})"
