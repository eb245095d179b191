"""The tables that `tanager evaluate` prints."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from tanager._terminal import new_console
from tanager.commands.tables import new_table, print_table
from tanager.report.guarantee import between


NOTE = (
    "ε does not cover these numbers: they depend on the labelled examples exactly. The "
    "intervals count each example as drawn independently: several of a person make "
    "them too narrow."
)
_MOST_CLASSES = 20  # of a confusion matrix that fits on a screen


def print_labels(title: str, found: Mapping[str, Any]) -> None:
    """Print the measures of a model of any number of labels."""
    both = {"AUROC": "auroc", "average precision": "average_precision"}
    means = [
        (f"{name}, mean over labels", _percent(found[key]), between(found[key]))
        for name, key in both.items()
    ]
    headings = ("label", "examples", "AUROC", "95 % interval", "average precision")
    headings += ("95 % interval", "sensitivity", "specificity")
    rows = []
    for each in found["per_class"]:
        cells = [each["class"], str(each["examples"])]
        for key in (*both.values(), "sensitivity", "specificity"):
            cells.append(_percent(each[key]))
            if key in both.values():
                cells.append(between(each[key]))
        rows.append(cells)
    console = _print(title, means, headings, rows)
    console.print(
        "\nA label is named from a probability of 0.5 on. At random the AUROC is 50 %, "
        "and the average precision the share of examples that have the label."
    )
    console.print(f"\n{NOTE}", soft_wrap=True)


def print_classes(title: str, found: Mapping[str, Any]) -> None:
    """Print the measures of a model of classes."""
    names = {
        "accuracy": "accuracy",
        "top_5_accuracy": "top-5 accuracy",
        "balanced_accuracy": "balanced accuracy",
        "macro_f1": "macro F1",
        "auroc": "AUROC, one against the rest",
    }
    of_all = [
        (name, _percent(found[key]), between(found[key]))
        for key, name in names.items()
        if found.get(key)
    ]
    largest = f"always {found['majority_class']!r}, the largest class"
    of_all.append((largest, f"{100 * found['majority_share']:.1f} %", ""))
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
    console = _print(title, of_all, headings, rows)
    classes = found["classes"]
    if len(classes) <= _MOST_CLASSES:
        cells = zip(classes, found["confusion_matrix"], strict=True)
        rows = [(name, *map(str, row)) for name, row in cells]
        console.print("\nconfusion matrix: a row for each true class")
        print_table(new_table("", *classes, rows=rows))
    console.print(f"\n{NOTE}", soft_wrap=True)


def _print(
    title: str,
    of_all: Sequence[Sequence[str]],
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
) -> Console:
    """Print measures of all and of each class, and what a dash in them means."""
    from tanager.measures import FEWEST

    console = new_console(markup=False)
    console.print(f"{title}\n", soft_wrap=True)
    print_table(new_table("measure", "value", "95 % interval", rows=of_all))
    console.print()
    print_table(new_table(*headings, rows=rows))
    if any("–" in row for row in (*of_all, *rows)):
        console.print(
            "–: not defined, because a class or label has no example or all of them, "
            f"or fewer than {FEWEST} (intervals of AUROC and precision), or the value "
            "is 0 or 100 %",
            soft_wrap=True,
        )
    return console


def _percent(interval: Mapping[str, float | None]) -> str:
    value = interval["value"]
    return "–" if value is None else f"{100 * value:.1f} %"
