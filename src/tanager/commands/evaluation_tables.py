"""The tables that `tanager evaluate` prints."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from tanager._terminal import new_console
from tanager.commands.tables import new_table
from tanager.report.guarantee import between


NOTE = "ε does not cover these numbers: they depend on the labelled examples exactly."
_MOST_CLASSES = 20  # of a confusion matrix that fits on a screen


def print_labels(title: str, found: Mapping[str, Any]) -> None:
    """Print the measures of a model of any number of labels."""
    console = new_console(markup=False)
    console.print(f"{title}\n", soft_wrap=True)
    both = {"AUROC": "auroc", "average precision": "average_precision"}
    rows = [
        (f"{name}, mean over labels", _percent(found[key]), between(found[key]))
        for name, key in both.items()
    ]
    headings = ("measure", "value", "95 % interval")
    console.print(new_table(*headings, rows=rows), soft_wrap=True)
    keys = (*both.values(), "sensitivity", "specificity")
    headings = ("label", "examples", "AUROC", "95 % interval", "average precision")
    headings += ("95 % interval", "sensitivity", "specificity")
    means, rows = rows, []
    for each in found["per_class"]:
        cells = [each["class"], str(each["examples"])]
        for key in keys:
            cells.append(_percent(each[key]))
            if key in both.values():
                cells.append(between(each[key]))
        rows.append(cells)
    console.print()
    console.print(new_table(*headings, rows=rows), soft_wrap=True)
    _explain(console, *means, *rows)
    console.print(
        "\nA label is named from a probability of 0.5 on. At random the AUROC is 50 %, "
        "and the average precision the share of examples that have the label."
    )
    console.print(f"\n{NOTE}", soft_wrap=True)


def print_classes(title: str, found: Mapping[str, Any]) -> None:
    """Print the measures of a model of classes."""
    console = new_console(markup=False)
    console.print(f"{title}\n", soft_wrap=True)
    rows = [
        ("accuracy", _percent(found["accuracy"]), between(found["accuracy"])),
        *(
            (name, _percent(found[key]), between(found[key]))
            for name, key in (
                ("top-5 accuracy", "top_5_accuracy"),
                ("balanced accuracy", "balanced_accuracy"),
                ("macro F1", "macro_f1"),
                ("AUROC, one against the rest", "auroc"),
            )
            if found.get(key)
        ),
        (
            f"always {found['majority_class']!r}, the largest class",
            f"{100 * found['majority_share']:.1f} %",
            "",
        ),
    ]
    headings = ("measure", "value", "95 % interval")
    console.print(new_table(*headings, rows=rows), soft_wrap=True)
    of_all = rows
    rows = [
        (
            each["class"],
            str(each["examples"]),
            _percent(each["accuracy"]),
            between(each["accuracy"]),
            "–" if each["auroc"] is None else f"{100 * each['auroc']:.1f} %",
        )
        for each in found["per_class"]
    ]
    headings = ("class", "examples", "accuracy", "95 % interval", "AUROC")
    console.print()
    console.print(new_table(*headings, rows=rows), soft_wrap=True)
    _explain(console, *of_all, *rows)
    classes = found["classes"]
    if len(classes) <= _MOST_CLASSES:
        cells = zip(classes, found["confusion_matrix"], strict=True)
        rows = [(name, *map(str, row)) for name, row in cells]
        console.print("\nconfusion matrix: a row for each true class")
        console.print(new_table("", *classes, rows=rows), soft_wrap=True)
    console.print(f"\n{NOTE}", soft_wrap=True)


def _explain(console: Console, *rows: Sequence[str]) -> None:
    """Say what a dash in one of the rows means."""
    from tanager.measures import FEWEST

    if any("–" in row for row in rows):
        console.print(
            "–: not defined, because a class or label has no example or all of them, "
            f"or fewer than {FEWEST} (intervals of AUROC and precision), or the value "
            "is 0 or 100 %",
            soft_wrap=True,
        )


def _percent(interval: Mapping[str, float | None]) -> str:
    value = interval["value"]
    return "–" if value is None else f"{100 * value:.1f} %"
