"""`tanager models`: list the models, their size and their weights."""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.table import Table

from tanager.commands import flags
from tanager.commands.tables import new_table, print_json, print_table


if TYPE_CHECKING:
    from tanager.models import ModelEntry


@dataclasses.dataclass(frozen=True)
class Arguments:
    """List the models: parameters, FLOPs, public weights; with --json, their source."""

    json: flags.Json = False


def run(arguments: Sequence[str]) -> int:
    options = flags.read(Arguments, "models", arguments)
    from tanager.models import ENTRIES

    rows = [_row(entry) for entry in ENTRIES.values()]
    if options.json:
        return print_json({"models": rows})
    # Full width: a name that is cut off cannot be copied.
    print_table(_table(rows))
    print(
        "\nGFLOP: multiplications and additions of one forward pass of one image of "
        "that size.\nWeights: for --weights. All that are known to fit, classes and "
        "sources: --json."
    )
    return 0


def _row(entry: "ModelEntry") -> dict[str, Any]:
    from tanager.models import PUBLISHED
    from tanager.models.counted import COUNTED

    parameters, flops = COUNTED[entry.name]
    return {
        "name": entry.name,
        "parameters": parameters,
        "flops": flops,
        "image_shape": entry.image_shape,
        "classes": entry.classes,
        "weights": [known.weights for known in PUBLISHED.get(entry.name, ())],
        "source": entry.source,
    }


def _table(rows: list[dict[str, Any]]) -> Table:
    return new_table(
        *("model", "parameters", "GFLOP", "image", "weights"),
        texts=("weights",),
        rows=[
            (
                row["name"],
                f"{row['parameters']:,}".replace(",", " "),
                np.format_float_positional(
                    row["flops"] / 1e9, precision=3, fractional=False, trim="-"
                ),
                "×".join(map(str, row["image_shape"])),
                row["weights"][0].removeprefix("hf:") if row["weights"] else "—",
            )
            for row in rows
        ],
    )
