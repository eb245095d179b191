"""Images in any folders, with labels in a CSV file or in the names of the files."""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tanager import _validate as validate
from tanager._cache import expanded
from tanager._reading import UnreadableFile, refuse_file
from tanager.data import label_files
from tanager.data.folder import (
    TESTS,
    TRAINS,
    FolderSource,
    has_classes,
    list_files,
    part_of,
)
from tanager.data.label_sets import ones_of, read_labels
from tanager.data.layout import Layout, Record, counted, described, looked, walked


TABLES = (".csv", ".tsv")
"""Endings of files of labels."""
_HALVES = (*TRAINS, *TESTS)
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


def from_tables(
    folder: Path,
    tables: Sequence[Path],
    layout: Layout,
    groups: str | None,
    record: Record,
) -> list[FolderSource]:
    """Return the images of a folder that CSV files have labels for.

    Two files are of training images and of test images. In one file a column ``split``
    may say which are; else the folders that images lie in, if they are named so.
    """
    files = _files(folder, record, besides=tables)
    read = [_labels(folder, file, files, layout, groups, record) for file in tables]
    order = [image for part in read for image in part.images]
    last = tables[-1]
    if len({*order}) < len(order):
        rule = f"names an image that is in {tables[0].name} too"
        refuse_file(last, rule, "leave each image in one of them", "labels")
    if read[-1].classes != read[0].classes:
        rule = f"has other columns of labels than {tables[0].name}"
        refuse_file(last, rule, "give them the same columns", "labels")
    if without := len(files) - len(order):
        named = " and ".join(file.name for file in tables)
        record.notes.append(
            f"not read: {counted(without, 'image')} without a row in {named}"
        )
    owners = _folders(folder, order, groups)
    if owners is None and groups is not None:
        owners = np.concatenate([part.owners for part in read])
    splits = read[0].splits
    if len(tables) > 1:
        names = (TRAINS[0], TESTS[0])
        splits = [
            name for name, part in zip(names, read, strict=True) for _ in part.images
        ]
    elif splits is None:
        splits = _split_folders(folder, order)
    values = np.concatenate([part.values for part in read])
    sources = _sources(folder, order, values, owners, splits, record)
    for number, source in enumerate(sources):
        source.class_names = read[0].classes
        source.table = tables[min(number, len(tables) - 1)]
    return sources


class _Labels(NamedTuple):
    """What a CSV file says: of each image its label, owner and split, where it does."""

    images: list[str]
    values: np.ndarray
    classes: tuple[str, ...]
    owners: np.ndarray
    splits: list[str] | None


def _labels(
    folder: Path,
    file: Path,
    files: Sequence[str],
    layout: Layout,
    groups: str | None,
    record: Record,
) -> _Labels:
    names, rows = label_files.read_rows(file)
    known = label_files.names_of(folder, file, files)
    if any(label_files.image_of(known, cell) is not None for cell in names):
        rule = "has no names of columns: its first line names an image"
        refuse_file(file, rule, "add a first line such as image,label", "labels")
    given = layout.image_column
    image = label_files.image_column(file, names, rows.values(), known, given)
    owner = names.index(groups) if groups in names else None
    if owner is not None and groups == "folder":
        rule = f"means a folder for each person, and {file.name} has a column 'folder'"
        validate.refuse("groups", groups, rule, "rename this column")
    if owner is None and groups not in (None, "folder"):
        rule = f"must be 'folder' or a column of {file.name}"
        validate.refuse("groups", groups, rule, label_files.near(groups, names))
    split = next((n for n, name in enumerate(names) if name.lower() == "split"), None)
    others = [
        n for n, name in enumerate(names) if name and n not in (image, owner, split)
    ]
    given, label, ones = layout.label_column, None, None
    usual = {*label_files.LABEL_NAMES}.intersection(names[n].lower() for n in others)
    if not (layout.multi_label or given or usual or len(others) < 2):
        ones = ones_of([[row[n] for n in others] for row in rows.values()])
    if ones is None and not layout.multi_label:
        label = label_files.label_column(file, names, others, given)
    filled = [column for column in (label, owner) if column is not None]
    row_of = label_files.row_of_image(folder, file, rows, image, known, filled)
    order = sorted(row_of)
    lines = [rows[row_of[each]] for each in order]
    classes: tuple[str, ...] = ()
    if label is not None:
        values = np.array([line[label] for line in lines])
    elif ones is not None:
        of_row = dict(zip(rows, ones, strict=True))
        classes = tuple(names[n] for n in others)
        values = np.array([of_row[row_of[each]] for each in order])
        record.notes.append("the class of an image is the column that has 1")
    else:
        column = label_files.names_column(file, names, others, given)
        classes, values = read_labels(
            file, names, lines, others, column, layout, record
        )
    splits = None if split is None else [line[split].lower() for line in lines]
    if splits is not None:
        found = {*splits}
        if found - {*_HALVES} or not all(found & {*half} for half in (TRAINS, TESTS)):
            rule = "has a column 'split', which must say train or test in each row"
            remedy = "rename the column if it says something else"
            refuse_file(file, rule, remedy, "labels")
    owners = np.array([line[owner] for line in lines] if owner is not None else [])
    return _Labels(order, values, classes, owners, splits)


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


def tables_of(folder: Path, layout: Layout, record: Record) -> list[Path]:
    """Return the CSV files of labels: one, or one of training and one of test images.

    One is named by the layout, or is the only one beside the images. Two have the same
    columns, and are named for their parts or in folders so named.
    """
    if layout.labels is not None:
        file = expanded(layout.labels)
        for place in (file, folder / file):
            if place.is_file():
                return [place]
        validate.refuse("labels", str(file), "is not a file", "give a CSV file")
    _, others, below = looked(folder)
    files = [folder / name for name in others if name.lower().endswith(TABLES)]
    tables = files if len(files) == 1 else _of_parts(folder, files, below)
    several = len(below) > 1 or any(has_classes(folder / name) for name in below)
    if not tables or (several and not _have_labels(folder, tables, layout)):
        return []
    named = " and ".join(str(file.relative_to(folder)) for file in tables)
    record.notes.append(f"labels are read from {named}")
    return tables


def _of_parts(folder: Path, files: list[Path], below: Sequence[str]) -> list[Path]:
    """Return the table of the training images and that of the test images; or none."""
    inside = [
        folder / name / other
        for name in below
        if part_of(name)
        for other in looked(folder / name)[1]
        if other.lower().endswith(TABLES)
    ]
    parts = {}
    for file in files + inside:
        part = part_of(file.stem) or part_of(file.parent.name)
        parts.setdefault(part, []).append(file)
    halves = [
        next((parts[n] for n in names if n in parts), []) for names in (TRAINS, TESTS)
    ]
    if [*map(len, halves)] != [1, 1]:
        return []
    pair = [file for half in halves for file in half]
    try:
        first, second = (label_files.read_rows(file)[0] for file in pair)
    except UnreadableFile:
        return []
    same = first == second and "split" not in map(str.lower, first)
    return pair if same else []


def _have_labels(folder: Path, tables: Sequence[Path], layout: Layout) -> bool:
    """Return whether the labels are in CSV files, not in the names of the folders.

    Refuse files that name images in several folders and may hold labels, or not.
    """
    files, names, lines = _files(folder, Record()), [], []
    try:
        for table in tables:
            names, rows = label_files.read_rows(table)
            known = label_files.names_of(folder, table, files)
            lines += [(known, row) for row in rows.values()]
    except UnreadableFile:
        return False
    columns = [[row[n] for _, row in lines] for n in range(len(names))]
    images = max(
        (
            [label_files.image_of(known, row[n]) for known, row in lines]
            for n in range(len(names))
        ),
        key=label_files.count_images,
    )
    if 2 * label_files.count_images(images) <= max(len(lines), len(files)):
        return False
    found = [n for n, image in enumerate(images) if image]
    places = [part[:1] for part in _places([images[n] or "" for n in found])]
    for column in columns:
        pairs = {(place, column[n]) for place, n in zip(places, found, strict=True)}
        values = {value for _, value in pairs}
        if 1 < len(pairs) == len({*places}) == len(values) < len(found):
            return False  # The folders are its values.
    usual = {*label_files.LABEL_NAMES}.intersection(name.lower() for name in names)
    known_labels = usual or layout.label_column or layout.multi_label
    if known_labels or len({*places}) == 1 or len(names) == 2:
        return True
    rule = f"names images in {len({*places})} folders, and may hold their labels"
    remedy = f"{label_files.shown(names)}: give --labels {tables[0].name} "
    remedy += "--label-column NAME; or, if each folder is one class, move this file "
    remedy += "elsewhere"
    return refuse_file(tables[0], rule, remedy, "labels")


def _files(folder: Path, record: Record, besides: Sequence[Path] = ()) -> list[str]:
    """Return the paths of all images below a folder."""
    found, tables = [], {file.resolve() for file in besides}
    for place, images, others in walked(folder):
        inside = place.relative_to(folder)
        found += [str(inside / name) for name in images]
        for name in others:
            if (place / name).resolve() not in tables:
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
