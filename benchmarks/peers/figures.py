"""Figures of what `run.py` measured."""

from pathlib import Path
from typing import Any

import records
from records import MODELS, NAMES

from tanager.report.figures import number_axis, save


_COLOURS = {
    "torch-sgd": "0.35",
    "jax-sgd": "0.6",
    "tanager": "#c0392b",
    "opacus": "#2c6fb0",
    "jax-privacy": "#2e8b57",
    "jax-vmap": "#8a6d3b",
    "private-vision": "#7b4fa3",
    "fastdp": "#b07aa1",
}


def draw(record: dict[str, Any], folder: Path) -> None:
    """Draw bars of examples per second, and lines where batches of a model vary."""
    folder.mkdir(parents=True, exist_ok=True)
    _draw_bars(records.columns(record["works"]), folder / "peers.svg")
    for model in dict.fromkeys(work["model"] for work in record["works"]):
        works = [work for work in record["works"] if work["model"] == model]
        if len(works) > 1:
            works.sort(key=lambda work: work["physical_batch"])
            _draw_lines(works, folder / f"peers-{model}.svg")


def _draw_bars(works: list[dict[str, Any]], path: Path) -> None:
    from matplotlib import pyplot

    systems = records.systems(works)[::-1]
    columns = min(len(works), 3)
    count = -(-len(works) // columns)
    size = (1.8 + 2.2 * columns, 0.6 + 3 * count)
    figure, panels = pyplot.subplots(
        count, columns, figsize=size, sharey=True, squeeze=False
    )
    for axes in panels.flat[len(works) :]:
        axes.set_axis_off()
    for axes, work in zip(panels.flat, works, strict=False):
        best = max(rate for name in systems if (rate := records.rate(work, name)))
        for place, name in enumerate(systems):
            rate = records.rate(work, name)
            axes.barh(place, rate or 0, color=_COLOURS[name.split(":")[0]])
            tried = name in (row["system"] for row in work["rows"])
            label = records.number(rate) if rate or not tried else "failed"
            axes.annotate(
                label,
                (rate or 0, place),
                (3, 0),
                textcoords="offset points",
                va="center",
                fontsize=7,
                color="0.2" if rate else "0.55",
            )
        axes.set_xlim(0, 1.28 * best)
        axes.set_xticks([])
        axes.spines[["top", "right", "bottom"]].set_visible(False)
        title = MODELS[work["model"]].split(",")[0].replace(" weight ", "\nweight ")
        axes.set_title(f"{title}\nbatch {work['physical_batch']}", fontsize=8)
        axes.tick_params(left=False)
    names = [NAMES[name].replace("**", "") for name in systems]
    for axes in panels[:, 0]:
        axes.set_yticks(range(len(systems)), names, fontsize=8)
    figure.supxlabel("examples per second", fontsize=8)
    figure.tight_layout()
    save(figure, path)
    pyplot.close(figure)


def _draw_lines(works: list[dict[str, Any]], path: Path) -> None:
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(11, 3.6), layout="constrained"
    )
    for system in records.systems(works):
        found = [
            (
                work["physical_batch"],
                records.rate(work, system),
                row["step_bytes"] / 2**20,
            )
            for work in works
            for row in work["rows"]
            if row["system"] == system and not records.failed(row)
        ]
        if not found:
            continue
        batches, rates, steps = zip(*found, strict=True)
        style = {
            "color": _COLOURS[system.split(":")[0]],
            "marker": "o",
            "markersize": 3,
            "linestyle": ("-", "--", ":", "-.")[_variant(system)],
            "label": NAMES[system].replace("**", ""),
            "linewidth": 2 if system.startswith("tanager") else 1.2,
        }
        left.plot(batches, rates, **style)
        right.plot(batches, steps, **style)
    for axes, title in ((left, "examples/s"), (right, "memory of a step, MiB")):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        for one in (axes.xaxis, axes.yaxis):
            number_axis(one)
        axes.set_xticks([work["physical_batch"] for work in works])
        axes.set_xlabel("physical batch")
        axes.set_title(title, fontsize=10)
        axes.grid(alpha=0.3, which="both", linewidth=0.5)
    figure.suptitle(MODELS[works[0]["model"]], fontsize=11)
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=8, loc="outside right center")
    save(figure, path)
    pyplot.close(figure)


def _variant(system: str) -> int:
    same = [name for name in NAMES if name.split(":")[0] == system.split(":")[0]]
    return min(same.index(system), 3)
