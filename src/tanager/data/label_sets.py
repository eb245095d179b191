"""Several labels an image, from the rows of a CSV file.

======================  ==========================================================
one column of names     separated by ``|``, as "Finding Labels" of NIH ChestX-ray14.
                        Blank cells, "No Finding", "none" and words for missing values
                        (`tanager.data.labels.MISSING`) give no label
one column a label      1 or 0, as CheXpert and CelebA have; also 1.0, 0.0, true and
                        false. A blank cell is 0
======================  ==========================================================

The column of names is the one that was named (`Layout.label_column`), else one with a
usual name. Without it, every column of 1, 0, −1 and blanks is a label. If there is
none, the only other column has names.

−1 is 0 where the label columns have no 0 and no blank, as CelebA writes it. Beside them
it means uncertain, as in CheXpert: `Layout.uncertain` says what that counts as.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tanager import _validate as validate
from tanager._reading import refuse_file
from tanager.data.labels import MISSING
from tanager.data.layout import Layout, Record


USUAL = ("finding labels", "finding_labels", "findings")
"""Names of a column of names, beside those of a column of one label."""
_MARK = "|"
_NONE = {"", "none", "no finding", *MISSING}
_CELLS = {"": 2, "1": 1, "1.0": 1, "true": 1, "0": 0, "0.0": 0, "false": 0}
_CELLS |= {"-1": -1, "-1.0": -1}  # 2 is a blank, until it is counted as 0


def read_labels(
    file: Path,
    names: Sequence[str],
    rows: Sequence[Sequence[str]],
    columns: Sequence[int],
    named: int | None,
    layout: Layout,
    record: Record,
) -> tuple[tuple[str, ...], np.ndarray]:
    """Return the names of the labels, and int32[rows, labels] of 0 and 1.

    `columns` may have labels, and `named` is the column of names, if it is known.
    `record` notes which columns are not labels.
    """
    cells = {n: [_CELLS.get(row[n].lower()) for row in rows] for n in columns}
    flags = [n for n in columns if None not in cells[n] and any(row[n] for row in rows)]
    if named is None and not flags:
        if len(columns) != 1:
            rule = "has no column of labels separated by |, and none of 1 and 0"
            refuse_file(file, rule, "name one with --label-column", "labels")
        named = columns[0]
    if named is not None:
        return _of_names(file, [row[named] for row in rows])
    if others := [names[n] for n in columns if n not in flags]:
        record.notes.append(
            f"not labels, because cells are other than 1, 0, -1 and blank: columns "
            f"{', '.join(others):.300}"
        )
    found = np.array([cells[n] for n in flags], np.int32).T
    return tuple(names[n] for n in flags), _flags(file, found, layout, record)


def ones_of(rows: Sequence[Sequence[str]]) -> list[int] | None:
    """Return the number of the cell of each row that is 1; None if others are not 0."""
    cells = [[_CELLS.get(cell.lower()) for cell in row] for row in rows]
    alone = all(row.count(1) == 1 and row.count(0) == len(row) - 1 for row in cells)
    return [row.index(1) for row in cells] if alone else None


def _of_names(file: Path, values: Sequence[str]) -> tuple[tuple[str, ...], np.ndarray]:
    parts = [{name.strip() for name in value.split(_MARK)} for value in values]
    sets = [{name for name in each if name.lower() not in _NONE} for each in parts]
    names = sorted(set().union(*sets))
    if 2 * len(names) > len(sets):
        rule = "has fewer than two images a label, if each name is one"
        refuse_file(file, rule, "name another column with --label-column", "labels")
    number = {name: k for k, name in enumerate(names)}
    found = np.zeros((len(sets), len(names)), np.int32)
    for row, each in enumerate(sets):
        found[row, [number[name] for name in each]] = 1
    return tuple(names), found


def _flags(file: Path, found: np.ndarray, layout: Layout, record: Record) -> np.ndarray:
    """Return 0 and 1 in place of blanks and −1."""
    uncertain = found == -1
    value = 0
    if uncertain.any() and np.isin(found, (0, 2)).any():
        if layout.uncertain == "refuse":
            rule = "has -1, which means uncertain beside 0 and blank cells"
            remedy = "say what it counts as, with --uncertain absent or present"
            validate.refuse("labels", str(file), rule, remedy)
        value = int(layout.uncertain == "present")
        record.notes.append(f"labels of -1, uncertain, are read as {layout.uncertain}")
    if (found == 2).any():
        record.notes.append("blank cells in columns of labels are read as 0")
    return np.where(uncertain, value, np.where(found == 2, 0, found)).astype(np.int32)
