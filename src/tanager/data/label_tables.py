"""Which CSV files of a folder have the labels of its images."""

from collections.abc import Callable, Sequence
from pathlib import Path

from tanager import _validate as validate
from tanager._cache import expanded
from tanager._reading import UnreadableFile, refuse_file
from tanager._text import clean
from tanager.data.decoding import SUFFIXES
from tanager.data.folder import TESTS, TRAINS, has_classes, part_of, places_of
from tanager.data.label_files import (
    LABEL_NAMES,
    NoTable,
    Table,
    count_images,
    image_of,
    read_table,
    refuse_no_names,
    shown,
)
from tanager.data.layout import Layout, looked


TABLES = (".csv", ".tsv")
"""Endings of files of labels."""
_PEEK = 100  # rows of a file that may have labels
_Read = Callable[..., Table]  # a file, and at most how many rows


def find_tables(folder: Path, layout: Layout) -> list[Path]:
    """Return the CSV file that was named, or those beside the images."""
    if layout.labels is not None:
        file = expanded(layout.labels)
        for place in (file, folder / file):
            if place.is_file():
                return [place]
        validate.refuse("labels", str(file), "is not a file", "give a CSV file")
    _, beside, below = looked(folder)
    found = [folder / name for name in beside if name.lower().endswith(TABLES)]
    if len(found) == 1:
        return found
    for name in filter(part_of, below):
        inside = folder / name
        found += [inside / n for n in looked(inside)[1] if n.lower().endswith(TABLES)]
    return found


def choose_tables(
    folder: Path,
    found: Sequence[Path],
    files: Sequence[str],
    layout: Layout,
    groups: str | None,
) -> list[Table]:
    """Return the CSV file that has the labels, or the two of both parts; or none.

    Refuse to choose between several files that may have them.
    """

    def read(file: Path, most: int | None = None) -> Table:
        return read_table(folder, file, files, most)

    def have_labels(*tables: Table) -> bool:
        return _have_labels(files, tables, layout, groups)

    below = looked(folder)[2]
    several = len(below) > 1 or any(has_classes(folder / name) for name in below)
    unsure = several and layout.labels is None
    try:
        tables = _parts(found, read) or _alone(found, read, have_labels)
    except NoTable:
        if unsure:
            return []
        raise
    for table in tables:
        refuse_no_names(table)
    return [] if unsure and tables and not have_labels(*tables) else tables


def _parts(found: Sequence[Path], read: _Read) -> list[Table]:
    """Return the CSV files of the training images and of the test images; or none."""
    of_part: dict[str, list[Path]] = {}
    for file in found if len(found) > 1 else ():
        part = part_of(file.stem) or part_of(file.parent.name)
        of_part.setdefault(part, []).append(file)
    pair = []
    for names in (TRAINS, TESTS):
        parts = next((of_part[name] for name in names if name in of_part), [])
        pair += parts if len(parts) == 1 else []
    if len(pair) < 2:
        return []
    try:
        first, second = map(read, pair)
    except NoTable:
        return []
    same = first.names == second.names and "split" not in map(str.lower, first.names)
    return [first, second] if same else []


def _alone(
    found: Sequence[Path], read: _Read, have_labels: Callable[[Table], bool]
) -> list[Table]:
    """Return the only CSV file that may have the labels; or none."""
    if len(found) > 1:
        found = [file for file in found if _names_images(file, read)]
    tables = [*map(read, found)]
    if len(tables) > 1:
        tables = [table for table in tables if _may_have(table, have_labels)]
    if len(tables) > 1:
        names = ", ".join(clean(table.file.name) for table in tables)
        rule = f"has several files that may have the labels ({names})"
        remedy = "name one with --labels FILE; or, if each folder is one class, move "
        refuse_file(tables[0].file.parent, rule, f"{remedy}them elsewhere")
    return tables


def _names_images(file: Path, read: _Read) -> bool:
    """Return whether a column names images in most of the first rows of a CSV file."""
    try:
        table = read(file, _PEEK)
    except NoTable:
        return False
    columns = zip(*table.rows.values(), strict=True)
    named = ([image_of(table.known, cell) is not None for cell in c] for c in columns)
    return any(2 * sum(each) > len(each) for each in named)


def _may_have(table: Table, have_labels: Callable[[Table], bool]) -> bool:
    try:
        return have_labels(table)
    except UnreadableFile:
        return True


def _have_labels(
    files: Sequence[str], tables: Sequence[Table], layout: Layout, groups: str | None
) -> bool:
    """Return whether the labels are in CSV files, not in the names of the folders.

    Refuse files that name images in several folders and may hold labels, or not.
    """
    file, names = tables[0].file, tables[0].names
    lines = [(table.known, row) for table in tables for row in table.rows.values()]
    columns = [[row[n] for _, row in lines] for n in range(len(names))]
    of_cells = [
        [image_of(known, row[n]) for known, row in lines] for n in range(len(names))
    ]
    for column, images in zip(columns, of_cells, strict=True):
        cells = zip(column, images, strict=True)
        shared = sum(i == "" and c.lower().endswith(SUFFIXES) for c, i in cells)
        if 2 * shared > len(lines):
            rule = "names images by names that are in several folders"
            remedy = "give their paths; or, if each folder is one class, move this "
            refuse_file(file, rule, f"{remedy}file elsewhere", "labels")
    images = max(of_cells, key=count_images)
    if 2 * count_images(images) <= max(len(lines), len(files)):
        return False
    found = [n for n, image in enumerate(images) if image]
    places = [part[:1] for part in places_of([images[n] or "" for n in found])]
    as_folders, repeated = set(), set()
    for name, column in zip(names, columns, strict=True):
        pairs = {(place, column[n]) for place, n in zip(places, found, strict=True)}
        values = {value for _, value in pairs}
        if 1 < len(pairs) == len({*places}) == len(values) < len(found):
            as_folders.add(name)
        if 2 * len(values) <= len(found):
            repeated.add(name)
    if layout.multi_label or groups in names:
        return True
    if as_folders and repeated <= as_folders:
        return False  # The folders are the classes, and the files say so too.
    labels = {name for name in repeated if name.lower() in LABEL_NAMES}
    labels |= {layout.label_column}.intersection(names)
    if labels or len({*places}) == 1 or len(names) == 2:
        return as_folders.isdisjoint(labels)
    rule = f"names images in {len({*places})} folders, and may hold their labels"
    remedy = f"{shown(names)}: give --labels {file.name} --label-column NAME; or, if "
    remedy += "each folder is one class, move this file elsewhere"
    return refuse_file(file, rule, remedy, "labels")
