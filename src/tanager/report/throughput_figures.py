"""Figure of throughput: by physical batch, and beside training without privacy.

After figures 1, 2, 4, 6, A.1 and A.2 of the efficiency paper.
"""

import itertools
import pathlib
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tanager._record import Maybe, read_record
from tanager.report.figures import COLOURS, drawing, number_axis


if TYPE_CHECKING:
    from matplotlib.axes import Axes


Rows = Sequence[Mapping[str, Any]]
_RECORD = {
    "rows": [
        {
            "strategy": str,
            "physical_batch": int,
            "examples_per_second": Maybe(float),
            "low": Maybe(float),
            "high": Maybe(float),
            "first_batch_seconds": Maybe(float),
        }
    ],
    "workload": {"model": str, "precision": str},
    "machine": {"device": str},
}
_STYLES = ("-", "--", ":", "-.")
_WRAPPED = 16  # letters of a label's line


def read(path: pathlib.Path) -> tuple[str, Rows]:
    """Return model, precision and device of a file of ``--json``, and its rows."""
    remedy = "give a file of tanager bench throughput --json"
    content = read_record(path, _RECORD, remedy, "beside")
    name = f"{named(**content['workload'])}, {content['machine']['device']}"
    return name, content["rows"]


def named(model: str, precision: str, **others: Any) -> str:
    """Return the model, and its precision unless it is float32."""
    return model if precision == "float32" else f"{model}, {precision}"


def plot(measured: Sequence[tuple[str, Rows]], path: str | pathlib.Path) -> bool:
    """Draw four panels as a PNG or SVG file.

    Examples a second against the physical batch, with their intervals; the same as a
    share of each line's largest; the seconds of the first batch; and for each model or
    machine the best throughput of each strategy over that of SGD.

    `measured` are rows of `tanager.bench.throughput.bench_throughput`, by model or
    machine. It returns whether there was anything to draw.
    """
    kept = [
        (name, [row for row in rows if row["examples_per_second"] is not None])
        for name, rows in measured
    ]
    kept = [(name, rows) for name, rows in kept if rows]
    if not kept:
        return False
    strategies = list(
        dict.fromkeys(row["strategy"] for _, rows in kept for row in rows)
    )
    colours = dict(zip(strategies, itertools.cycle(COLOURS)))
    with drawing(path, columns=4, size=(17, 5)) as (figure, panels):
        for (_, rows), style in zip(kept, itertools.cycle(_STYLES)):
            for strategy in dict.fromkeys(row["strategy"] for row in rows):
                mine = [row for row in rows if row["strategy"] == strategy]
                _lines(panels, mine, style, colours[strategy])
        sizes = sorted({row["physical_batch"] for _, rows in kept for row in rows})
        for axes in panels[:3]:
            axes.set(xlabel="physical batch", xscale="log")
            axes.set_xticks(sizes, [str(size) for size in sizes])
            axes.xaxis.minorticks_off()
        panels[0].set(ylabel="examples per second", yscale="log")
        number_axis(panels[0].yaxis)
        panels[1].set(ylabel="% of the largest throughput", ylim=(0, 105))
        panels[2].set(
            ylabel="seconds of the first batch, with compilation", ylim=(0, None)
        )
        _bars(panels[3], kept, strategies, colours)
        # Beyond the data: colours are strategies, styles are models or machines.
        for strategy in strategies:
            panels[0].plot([], [], "o-", color=colours[strategy], label=strategy)
        if len(kept) > 1:
            for (name, _), style in zip(kept, itertools.cycle(_STYLES)):
                panels[0].plot([], [], style, color="0.3", label=name)
        columns = 4 if len(kept) > 1 else len(strategies)
        figure.legend(
            *panels[0].get_legend_handles_labels(),
            loc="outside lower center",
            ncols=columns,
        )
    return True


def _lines(panels: Sequence["Axes"], rows: Rows, style: str, colour: str) -> None:
    rows = sorted(rows, key=lambda row: row["physical_batch"])
    sizes = [row["physical_batch"] for row in rows]
    rates = np.array([row["examples_per_second"] for row in rows])
    around = np.array([[r["low"] for r in rows], [r["high"] for r in rows]])
    given: dict[str, Any] = {"color": colour, "linestyle": style, "marker": "o"}
    panels[0].errorbar(sizes, rates, yerr=np.abs(around - rates), capsize=3, **given)
    panels[1].plot(sizes, 100 * rates / rates.max(), **given)
    panels[2].plot(sizes, [row["first_batch_seconds"] for row in rows], **given)


def _bars(
    axes: "Axes",
    measured: Sequence[tuple[str, Rows]],
    strategies: Sequence[str],
    colours: Mapping[str, str],
) -> None:
    """Draw the best throughput of each strategy over the best of SGD, by group."""
    best: list[dict[str, float]] = [{} for _ in measured]
    for fastest, (_, rows) in zip(best, measured, strict=True):
        for row in rows:
            name, rate = row["strategy"], row["examples_per_second"]
            fastest[name] = max(rate, fastest.get(name, 0.0))
    private = [strategy for strategy in strategies if strategy != "sgd"]
    width = 0.8 / max(1, len(private))
    for number, strategy in enumerate(private):
        found = [
            (
                group + (number - (len(private) - 1) / 2) * width,
                of[strategy] / of["sgd"],
            )
            for group, of in enumerate(best)
            if "sgd" in of and strategy in of
        ]
        if found:
            places, heights = zip(*found, strict=True)
            bars = axes.bar(places, heights, width, color=colours[strategy])
            axes.bar_label(bars, fmt="%.2f", fontsize=8)
    axes.axhline(1, color="0.3", linestyle="--", linewidth=1)
    names = [
        "\n".join(textwrap.fill(part, _WRAPPED) for part in name.split(", "))
        for name, _ in measured
    ]
    axes.set_xticks(range(len(measured)), names, fontsize=8)
    ends = (-0.5, len(measured) - 0.5)
    axes.set(ylabel="throughput over that of SGD", ylim=(0, None), xlim=ends)
