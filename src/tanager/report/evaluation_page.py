"""The page of an evaluation, and what it shares with the page of a run."""

import datetime
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tanager._version import __version__
from tanager.report.render import without_folders, write_page


_Fields = Mapping[str, Any]

_MOST_CLASSES = 20  # of a confusion matrix that fits on a page
_WORST = 10
_TILES = {
    False: {"accuracy": "accuracy", "balanced accuracy": "balanced_accuracy"},
    True: {"AUROC": "auroc", "average precision": "average_precision"},
}
"""The first measures of a page, for classes and for labels."""


def write_evaluation(
    page: Path, found: _Fields, model: str, data: str, which: str
) -> Path:
    """Write how good a model is on labelled images as one HTML page; return its path.

    Of a path it shows the last part: those before it can tell who the user is.

    `found` is what a function of `tanager.measures` returned, of classes or of labels.
    `which` names the images, such as "test examples".
    """
    several = "average_precision" in found
    rows = [
        {
            "class": each["class"],
            "examples": each["examples"],
            "accuracy_ema": each["accuracy"]["value"],
        }
        for each in ([] if several else found["per_class"])
    ]
    return write_page(
        page,
        "evaluation.html",
        kind="Evaluation of a model with tanager",
        subject=without_folders(data),
        model=without_folders(model),
        which=which,
        date=datetime.date.today().isoformat(),
        version=__version__,
        found=found,
        several=several,
        tiles=_TILES[several],
        **by_class(rows, found),
    )


def by_class(per_class: Sequence[_Fields], measures: _Fields) -> dict[str, Any]:
    """Return what templates/measures.html shows of each class.

    `measures` may lack ``confusion_matrix`` and ``per_class``.
    """
    classes = _rows(per_class, measures)
    measured = [each for each in classes if each["accuracy_ema"] is not None]
    return {
        "classes": classes,
        "intervals": any(each["interval"] for each in classes),
        "few": len(classes) <= _MOST_CLASSES,
        "worst": sorted(measured, key=lambda each: each["accuracy_ema"])[:_WORST],
    }


def _rows(per_class: Sequence[_Fields], measures: _Fields) -> list[dict[str, Any]]:
    """Return each class with its results, and what it is most often taken for."""
    unknown: dict[str, Any] = dict.fromkeys(
        ("interval", "auroc", "taken_for", "mistake")
    )
    rows: list[dict[str, Any]] = [unknown | dict(each) for each in per_class]
    for row, each in zip(rows, measures.get("per_class") or (), strict=False):
        row |= {"interval": each["accuracy"], "auroc": each["auroc"]}
    matrix: list[list[int]] = measures.get("confusion_matrix") or []
    for number, counts in enumerate(matrix):
        total = max(sum(counts), 1)
        rows[number]["taken_for"] = counts
        rows[number]["shares"] = [count / total for count in counts]
        wrong = [0 if k == number else count for k, count in enumerate(counts)]
        if any(wrong):
            mistake = wrong.index(max(wrong))
            rows[number]["mistake"] = (rows[mistake]["class"], wrong[mistake])
    return rows
