"""`tanager runs`: what was trained in a folder, and several runs side by side."""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from tyro.conf import Positional

from tanager import _validate as validate
from tanager._text import clean
from tanager.commands import flags
from tanager.commands.tables import new_table, number, print_json, print_table
from tanager.privacy.shown import format_delta, format_epsilon


@dataclasses.dataclass(frozen=True)
class Listing:
    """List the runs in a folder: ε, accuracy, state and date, the newest last.

    A result.json is compared with its ledger's steps, noise multiplier and sample rate.
    `tanager runs compare RUN RUN` shows settings, results and curves side by side.
    """

    folder: Positional[Path] = Path("runs")
    """Folder of the runs."""

    json: flags.Json = False


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Write a page with results, curves and settings of some runs side by side.

    A run whose result.json does not follow from its ledger is refused.
    """

    runs: Positional[tuple[Path, ...]]
    """Folders of two runs or more."""

    to: Path = Path("runs/comparison.html")
    """Page to write."""


def run(arguments: Sequence[str]) -> int:
    if arguments[:1] == ["compare"]:
        return _compare(flags.read(Comparison, "runs compare", arguments[1:]))
    options = flags.read(Listing, "runs", arguments)

    from tanager.report import runs

    rows = []
    for each in runs.find_runs(options.folder):
        try:
            rows.append(runs.describe(each))
        except ValueError as error:
            print(f"tanager: warning: {error}", file=sys.stderr)
    if options.json:
        return print_json({"runs": rows})
    labels = ["test AUROC"] * any(row["test_auroc_ema"] is not None for row in rows)
    last = ("state", "began", "recipe")
    first = ("run", "ε alone", "δ", "for each", "test accuracy", "average")
    table = new_table(*first, *labels, *last, texts=("for each", *last))
    for row in rows:
        epsilon = "—" if row["epsilon"] is None else format_epsilon(row["epsilon"])
        table.add_row(
            clean(row["run"]),
            "NOT PRIVATE" if row["private"] is False else epsilon,
            "—" if row["delta"] is None else format_delta(row["delta"]),
            row["unit"],
            number(row["test_accuracy"], "{:.2%}"),
            number(row["test_accuracy_ema"], "{:.2%}"),
            *(number(row["test_auroc_ema"], "{:.2%}") for _ in labels),
            row["state"],
            row["began"],
            row["recipe"] or "—",
        )
    print_table(table)
    return 0


def _compare(options: Comparison) -> int:
    from tanager.report import runs
    from tanager.training.export import check_claims

    if options.to.is_dir():
        remedy = "name a file, such as comparison.html"
        validate.refuse("to", str(options.to), "is a folder", remedy)
    for each in options.runs:
        if (each / "result.json").exists() or not (each / "ledger.jsonl").exists():
            check_claims(each)
    print(runs.write_comparison(options.runs, options.to))
    return 0
