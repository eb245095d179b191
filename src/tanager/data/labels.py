"""Number the classes of labels: of whole numbers, text, or true and false."""

import collections
import unicodedata
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from tanager._reading import refuse_file
from tanager._text import clean
from tanager.data.streamed import StreamedImages


_KINDS = {"i": "whole numbers", "u": "whole numbers", "b": "true or false", "U": "text"}
MISSING = ("nan", "na", "n/a", "#n/a", "<na>", "null")
"""What programs write, in either case, where nothing is known. None may be a class."""
RENAME = "if it is a class, give it another name"


def alike(names: Sequence[str]) -> list[str]:
    """Return the names that differ from another in case or in how they are encoded."""
    same = collections.defaultdict(list)
    for name in names:
        same[unicodedata.normalize("NFC", name).casefold()].append(name)
    return [name for each in same.values() if len(each) > 1 for name in each]


def number_labels(
    sources: Sequence[StreamedImages], names: Sequence[str] = ()
) -> tuple[str, ...]:
    """Make labels of the sources' `values`, and return the names of the classes.

    Where the classes have names, a value is the number of one. Otherwise every value is
    a class of its own, in their order, and its name: so 1 … K and gaps are fine. No
    message holds a value. Values [N, K] of 0 and 1, one for each name, are kept.

    Args:
        sources: of training images, and of test images if there are any.
        names: of the classes, if they are known.

    Raises:
        UnreadableFile: labels are of another kind, out of range, or below 0.
    """
    found = [source.values for source in sources]
    kinds = [_KINDS.get(each.dtype.kind) for each in found]
    for source, each, kind in zip(sources, found, kinds, strict=True):
        if kind is None:
            rule = f"has labels of {each.dtype}"
            refuse_file(_file(source), rule, "give whole numbers, text or true/false")
        if kind != kinds[0]:
            rule = f"has labels of another kind than the training labels, {kinds[0]}"
            refuse_file(_file(source), rule, "make all of one kind")
    if found[0].ndim == 2:
        classes = tuple(names)
    elif names and kinds[0] != "text":
        most = len(names) - 1
        _refuse(sources, found, lambda v: (v < 0) | (v > most), f"from 0 to {most}")
        classes = tuple(names)
    else:
        if kinds[0] == "whole numbers":
            remedy = "the Hub writes −1 where labels are secret: leave that split out"
            _refuse(sources, found, lambda v: v < 0, "0 or above", remedy)
        elif kinds[0] == "text" and not names:
            rule = f"the name of a class, but missing ({', '.join(MISSING)})"
            _refuse(sources, found, _missing, rule, RENAME)
        values = np.sort(names) if names else np.unique(np.concatenate(found))
        _refuse(sources, found, lambda v: ~np.isin(v, values), "the name of a class")
        classes = tuple(names) or tuple(map(str, values.tolist()))
        order = np.argsort(names) if names else np.arange(len(values))
        if 2 * len(classes) > sum(map(len, found)) and not names:
            rule = "has fewer than two images a class, if every label is a class"
            refuse_file(_file(sources[0]), rule, "name another column of labels")
        found = [order[np.searchsorted(values, each)] for each in found]
    for name in classes:
        if clean(name) != name:
            rule = "has a class whose name has control characters"
            refuse_file(_file(sources[0]), rule, "rename it")
    for source, each in zip(sources, found, strict=True):
        source.labels = each.astype(np.int32)
    return classes


def _missing(values: np.ndarray) -> np.ndarray:
    return np.isin(np.char.lower(values), MISSING)


def _file(source: StreamedImages) -> Path:
    return source.label_place(0)[0]


def _refuse(
    sources: Sequence[StreamedImages],
    values: Sequence[np.ndarray],
    wrong: Callable[[np.ndarray], np.ndarray],
    rule: str,
    remedy: str = "",
) -> None:
    for source, each in zip(sources, values, strict=True):
        rows = np.flatnonzero(wrong(each))
        if rows.size:
            file, place = source.label_place(int(rows[0]))
            refuse_file(file, f"{place}has a label that is not {rule}", remedy)
