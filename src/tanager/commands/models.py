"""`tanager models`: list the models, their size and their source."""

import dataclasses
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.table import Table

from tanager.commands import flags
from tanager.commands.tables import new_table, print_json


if TYPE_CHECKING:
    from tanager.models import ModelEntry


@dataclasses.dataclass(frozen=True)
class Arguments:
    """List the models: parameters, FLOPs, public weights, source.

    Models are traced on shapes: nothing is allocated or downloaded.
    """

    json: bool = False
    """Print one JSON object only."""


def run(arguments: Sequence[str]) -> int:
    """Run the command; `arguments` are the words after `tanager models`."""
    options = flags.read(Arguments, "models", arguments)
    screen = Console(stderr=True)
    started = time.perf_counter()
    rows = []
    with screen.status("starting") as status:
        from tanager.models import ENTRIES

        for entry in ENTRIES.values():
            status.update(f"counting {entry.name}")
            rows.append(_row(entry))
    if options.json:
        return print_json({"models": rows})
    # Full width: a name that is cut off cannot be copied.
    Console(highlight=False, width=1000).print(_table(rows))
    seconds = time.perf_counter() - started
    print(
        "\nGFLOP: multiplications and additions of one forward pass of one image of "
        "that size.\nWeights: for --weights; --json has all that are known to fit. "
        f"Counted in {seconds:.1f} s."
    )
    return 0


def _row(entry: "ModelEntry") -> dict[str, Any]:
    import equinox as eqx
    import jax

    from tanager.models import PUBLISHED, count_flops, count_parameters

    model = eqx.filter_eval_shape(
        entry.builder,
        classes=entry.classes,
        image_shape=entry.image_shape,
        key=jax.random.key(0),
    )
    return {
        "name": entry.name,
        "parameters": count_parameters(model),
        "flops": count_flops(model, entry.image_shape),
        "image_shape": entry.image_shape,
        "classes": entry.classes,
        "weights": [known.weights for known in PUBLISHED.get(entry.name, ())],
        "source": entry.source,
    }


def _table(rows: list[dict[str, Any]]) -> Table:
    return new_table(
        *("model", "parameters", "GFLOP", "image", "classes", "weights", "source"),
        texts=("weights", "source"),
        rows=[
            (
                row["name"],
                f"{row['parameters']:,}".replace(",", " "),
                np.format_float_positional(
                    row["flops"] / 1e9, precision=4, fractional=False, trim="-"
                ),
                "×".join(map(str, row["image_shape"])),
                str(row["classes"]),
                row["weights"][0] if row["weights"] else "—",
                row["source"],
            )
            for row in rows
        ],
    )
