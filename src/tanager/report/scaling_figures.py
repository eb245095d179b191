"""Figure of scaling: throughput against devices, measured and predicted.

After figures 7 and A.5 of the efficiency paper.
"""

import pathlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tanager.report.figures import COLOURS, drawing


if TYPE_CHECKING:
    from matplotlib.axes import Axes


Points = dict[int, float]
"""Examples a second, by number of devices."""


def plot(
    measured: Sequence[Mapping[str, Any]],
    parallel: Mapping[str, float | None],
    predicted: Sequence[Mapping[str, Any]],
    path: str | pathlib.Path,
    *,
    title: str,
) -> bool:
    """Draw throughput against devices, both axes logarithmic, as a PNG or SVG file.

    Each strategy has a colour: what was measured, the ideal line through one device,
    Amdahl's law with the fitted p as far as was measured (on one device alone, as far
    as was predicted), and what was predicted. It returns whether there was anything to
    draw.

    `measured` are rows of `tanager.bench.scaling.bench_scaling`, `parallel` Amdahl's p
    by strategy (empty for weak scaling), and `predicted` rows of
    `tanager.bench.cluster.predict`, each with its `strategy`.
    """
    seen, ahead = _by_strategy(measured), _by_strategy(predicted)
    names = list(dict.fromkeys([*seen, *ahead]))
    if not names:
        return False
    ones = {
        row["strategy"]: row["examples_per_second"]
        / row["devices"]
        / row["share_of_ideal"]
        for row in predicted
    }
    ones |= {name: points[1] for name, points in seen.items() if 1 in points}
    everything = [points for found in (seen, ahead) for points in found.values()]
    counts = {count for points in everything for count in points}
    with drawing(path, size=(8.2, 4.8)) as (_, (axes,)):
        for number, name in enumerate(names):
            _draw(
                axes,
                COLOURS[number % len(COLOURS)],
                name,
                seen.get(name, {}),
                ahead.get(name, {}),
                ones.get(name),
                parallel.get(name),
            )
        _dress(axes, sorted(counts | {1} if ones else counts))
        axes.set_title(title)
        fitted = any(parallel.get(name) is not None for name in names)
        law = "Amdahl's law, fitted"
        if fitted and all(len(points) < 2 for points in seen.values()):
            law += "\nto the simulation"
        _explain(axes, bool(seen), law if fitted else "", bool(ahead))
    return True


def _by_strategy(rows: Sequence[Mapping[str, Any]]) -> dict[str, Points]:
    found: dict[str, Points] = {}
    for row in rows:
        if row["examples_per_second"] is not None:
            points = found.setdefault(row["strategy"], {})
            points[row["devices"]] = row["examples_per_second"]
    return found


def _draw(
    axes: "Axes",
    colour: str,
    name: str,
    seen: Points,
    ahead: Points,
    one: float | None,
    parallel: float | None,
) -> None:
    counts = [*seen, *ahead]
    label = name
    if one is not None:
        ends = (min(1, *counts), max(1, *counts))
        axes.plot(
            ends, [one * n for n in ends], "--", color=colour, linewidth=1, alpha=0.75
        )
    if one is not None and parallel is not None:
        label += f": {100 * parallel:.1f} % parallel"
        devices = np.geomspace(
            1, max(ahead if len(seen) < 2 and ahead else seen), 51
        ).tolist()
        inverse = {n: 1 - parallel + parallel / n for n in devices}
        # A p above 1, of devices faster than ideal, would have the law run off.
        law = {n: one / inverse for n, inverse in inverse.items() if inverse > 0}
        axes.plot([*law], [*law.values()], ":", color=colour, linewidth=1.8)
    counts, rates = sorted(ahead), [ahead[count] for count in sorted(ahead)]
    axes.plot(counts, rates, "-", color=colour, linewidth=1, alpha=0.6)
    axes.plot(counts, rates, "s", color=colour, markerfacecolor="white", zorder=3)
    axes.plot([*seen], [*seen.values()], "o", color=colour, markersize=7, zorder=4)
    axes.plot([], [], "-", color=colour, linewidth=5, label=label)


def _dress(axes: "Axes", counts: list[int]) -> None:
    from matplotlib.ticker import LogLocator

    (low, high), (left, right) = axes.dataLim.intervaly, axes.dataLim.intervalx
    if right == left:
        axes.set(xlim=(left / 2, right * 2), ylim=(low / 2, high * 2))
    axes.set(xscale="log", yscale="log")
    axes.minorticks_off()
    axes.set_xticks(_apart(counts))
    axes.xaxis.set_major_formatter("{x:,.10g}")
    axes.yaxis.set_major_formatter("{x:,.10g}")
    subs = (1, 2, 5) if high / low > 8 else (1, 1.5, 2, 3, 4, 5, 6, 7, 8)
    axes.yaxis.set_major_locator(LogLocator(10, subs=subs))
    axes.set(xlabel="devices", ylabel="examples per second")


def _apart(counts: list[int]) -> list[int]:
    """Numbers of devices that leave room for each other's label; the last is kept."""
    kept: list[int] = []
    for count in reversed(counts):
        if not kept or kept[-1] / count > 1.4:
            kept.append(count)
    return kept[::-1]


def _explain(axes: "Axes", seen: bool, law: str, ahead: bool) -> None:
    """Add the legend: colours are strategies; line and marker say what is drawn."""
    for drawn, form, inside, label in (
        (True, "--", "0.3", "ideal"),
        (seen, "o", "0.3", "measured"),
        (law, ":", "0.3", law),
        (ahead, "s-", "white", "simulated"),
    ):
        if drawn:
            axes.plot([], [], form, color="0.3", mfc=inside, label=label)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
