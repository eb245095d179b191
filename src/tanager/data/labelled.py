"""Images in any folders, with labels in a CSV file or in the names of the files."""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tanager import _validate as validate
from tanager._reading import refuse_file
from tanager.data.folder import (
    PARTS,
    TESTS,
    TRAINS,
    FolderSource,
    half_of,
    list_files,
    places_of,
)
from tanager.data.label_files import (
    LABEL_NAMES,
    Table,
    image_column,
    label_column,
    names_column,
    near,
    row_of_image,
)
from tanager.data.label_sets import ones_of, read_labels
from tanager.data.label_tables import choose_tables, find_tables
from tanager.data.layout import Layout, Record, counted, described, walked


_BEGINNING = re.compile(r"[^\d_.(-]+")


def from_names(folder: Path, groups: str | None, record: Record) -> list[FolderSource]:
    """Return the images of a folder, by classes that their names begin with.

    They are training images and test images if they lie in folders named so, or else
    one source of all.
    """
    files, others = _files(folder)
    for other in others:
        record.skip(other.name)
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
    folder: Path, layout: Layout, groups: str | None, record: Record
) -> list[FolderSource]:
    """Return the images of a folder that CSV files have labels for; [] without such.

    One file is named by the layout, or is the only one beside the images that may have
    labels. Two are named for training and test images, or in folders so named. In one
    file a column ``split`` may say which image is for what; else the folders that
    images lie in, if they are named so.
    """
    found = find_tables(folder, layout)
    if not found:
        return []
    files, others = _files(folder)
    tables = choose_tables(folder, found, files, layout, groups)
    if not tables:
        return []
    if layout.labels is None:
        names = " and ".join(str(table.file.relative_to(folder)) for table in tables)
        record.notes.append(f"labels are read from {names}")
    own = {table.file.resolve() for table in tables}
    for other in others:
        if other.resolve() not in own:
            record.skip(other.name)
    return _joined(folder, files, tables, layout, groups, record)


def _joined(
    folder: Path,
    files: Sequence[str],
    tables: Sequence[Table],
    layout: Layout,
    groups: str | None,
    record: Record,
) -> list[FolderSource]:
    """Return the images of one file, or the training and test images of two."""
    read = [_labels(folder, table, layout, groups, record) for table in tables]
    order = [image for part in read for image in part.images]
    first, last = tables[0].file, tables[-1].file
    if len({*order}) < len(order):
        rule = f"names an image that is in {first.name} too"
        refuse_file(last, rule, "leave each image in one of them", "labels")
    if read[-1].classes != read[0].classes:
        rule = f"has other columns of labels than {first.name}"
        refuse_file(last, rule, "give them the same columns", "labels")
    if without := len(files) - len(order):
        named = " and ".join(table.file.name for table in tables)
        unread = f"not read: {counted(without, 'image')} without a row in {named}"
        record.notes.append(unread)
    owners = _folders(folder, order, groups)
    if owners is None and groups is not None:
        owners = np.concatenate([part.owners for part in read])
    splits = read[0].splits
    if len(tables) > 1:
        halves = zip((TRAINS[0], TESTS[0]), read, strict=True)
        splits = [name for name, part in halves for _ in part.images]
    elif splits is None:
        splits = _split_folders(folder, order)
    values = np.concatenate([part.values for part in read])
    sources = _sources(folder, order, values, owners, splits, record)
    for number, source in enumerate(sources):
        source.class_names = read[0].classes
        source.table = tables[min(number, len(tables) - 1)].file
    return sources


class _Labels(NamedTuple):
    """What a CSV file says: of each image its label, owner and split, where it does."""

    images: list[str]
    values: np.ndarray
    classes: tuple[str, ...]
    owners: np.ndarray
    splits: list[str] | None


def _labels(
    folder: Path, table: Table, layout: Layout, groups: str | None, record: Record
) -> _Labels:
    file, names, rows = table.file, table.names, table.rows
    image = image_column(table, layout.image_column)
    owner = names.index(groups) if groups in names else None
    if owner is not None and groups == "folder":
        rule = f"means a folder for each person, and {file.name} has a column 'folder'"
        validate.refuse("groups", groups, rule, "rename this column")
    if owner is None and groups not in (None, "folder"):
        rule = f"must be 'folder' or a column of {file.name}"
        validate.refuse("groups", groups, rule, near(groups, names))
    split = next((n for n, name in enumerate(names) if name.lower() == "split"), None)
    used = (image, owner, split)
    others = [n for n, name in enumerate(names) if name and n not in used]
    given, label, ones = layout.label_column, None, None
    usual = {*LABEL_NAMES}.intersection(names[n].lower() for n in others)
    if not (layout.multi_label or given or usual or len(others) < 2):
        ones = ones_of([[row[n] for n in others] for row in rows.values()])
    if ones is None and not layout.multi_label:
        label = label_column(table, others, given)
    filled = [column for column in (label, owner) if column is not None]
    row_of = row_of_image(folder, table, image, filled)
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
        column = names_column(table, others, given)
        classes, values = read_labels(
            file, names, lines, others, column, layout, record
        )
    splits = None if split is None else [line[split].lower() for line in lines]
    if splits is not None:
        found = {*splits}
        if found - {*PARTS} or not all(found & {*half} for half in (TRAINS, TESTS)):
            rule = "has a column 'split', which must say train or test in each row"
            remedy = "rename the column if it says something else"
            refuse_file(file, rule, remedy, "labels")
    owners = np.array([line[owner] for line in lines] if owner is not None else [])
    return _Labels(order, values, classes, owners, splits)


def _split_folders(folder: Path, files: Sequence[str]) -> list[str]:
    """Return whether images are in train or test folders; [] where they are not split.

    Refuse images in neither: which are for training is the user's to say.
    """
    halves = [half_of(file) for file in files]
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


def _files(folder: Path) -> tuple[list[str], list[Path]]:
    """Return the paths of all images in a folder and below, and all other files."""
    images, others = [], []
    for place, names, rest in walked(folder):
        inside = place.relative_to(folder)
        images += [str(inside / name) for name in names]
        others += [place / name for name in rest]
    if not images:
        refuse_file(folder, "has no images", described(folder))
    return sorted(images), others


def _folders(
    folder: Path, files: Sequence[str], groups: str | None
) -> np.ndarray | None:
    """Return the folder that each image is right in, if these are their owners.

    Folders around all of them, and train and test, are left out. A person in two
    folders would be two persons: folders in an owner's folder are refused.
    """
    if groups != "folder":
        return None
    parts = places_of(files)
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
