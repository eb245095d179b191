"""Figures of one run, as SVG inside a page.

Colours are CSS variables of the page, so one figure serves light, dark and print.
"""

import io
import math
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from tanager.measures import HEADLINES
from tanager.report.figures import COLOURS, NO_METADATA, embed, styled


# Colours that matplotlib accepts, replaced by the page's variables afterwards.
_INK, _GRID, _RAW, _AVERAGE, _EPSILON = (f"#01020{digit}" for digit in range(3, 8))
_CSS = {
    _INK: "var(--ink)",
    _GRID: "var(--line)",
    _RAW: "var(--raw)",
    _AVERAGE: "var(--average)",
    _EPSILON: "var(--epsilon)",
}
_STYLE: Any = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "text.color": _INK,
    "axes.axisbelow": True,
    "axes.edgecolor": _GRID,
    "axes.grid": True,
    "axes.labelcolor": _INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "grid.color": _GRID,
    "grid.linewidth": 0.6,
}


def curves(
    metrics: Sequence[Mapping[str, Any]], averaged: bool, private: bool = True
) -> list[str]:
    """Draw the test scores and ε against step.

    Args:
        metrics: lines of metrics.jsonl. Without scores only ε is drawn.
        averaged: also draw the scores of the average of parameters.
        private: also draw ε, which a run that is not private must not claim.

    Returns:
        An ``<svg>`` element for each that there is something to draw of. They refer to
        nothing outside themselves.
    """
    scores = []
    for name, words in HEADLINES.items():
        lines = [(f"test_{name}", _RAW, "--", "parameters" if averaged else None)]
        if averaged:
            lines.append((f"test_{name}_ema", _AVERAGE, "-", "average of parameters"))
        scores.append((f"test {words}", f"test {words} (%)", 100.0, lines))
    panels = []
    for name, unit, factor, lines in (
        *scores,
        ("ε spent", "ε spent", 1.0, [("epsilon", _EPSILON, "-", None)] * private),
    ):
        drawn = [(_series(metrics, key, factor), *how) for key, *how in lines]
        if drawn := [line for line in drawn if line[0]]:
            panels.append(_panel(name, unit, drawn))
    return panels


def _panel(name: str, unit: str, lines: Sequence[Any]) -> str:
    with styled({**_STYLE, "svg.hashsalt": name}) as new_figure:
        figure = new_figure(figsize=(4.6, 3.1), layout="constrained")
        axes = figure.subplots()
        for points, colour, dashes, label in lines:
            axes.plot(
                *zip(*points, strict=True),
                dashes,
                color=colour,
                label=label,
                linewidth=1.8,
                marker="o" if len(points) == 1 else None,
            )
        axes.set(xlabel="update", ylabel=unit)
        if any(line[-1] for line in lines):
            axes.legend(loc="best", frameon=False)
        else:
            axes.set_ylim(bottom=0)
        content = io.StringIO()
        figure.savefig(content, format="svg", transparent=True, metadata=NO_METADATA)
    svg = content.getvalue()
    for stand_in, variable in _CSS.items():
        svg = svg.replace(stand_in, variable)
    return embed(svg, f"{name} against update")


def compared(metrics: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Draw accuracy (averaged, where there is an average) and ε of several runs.

    `metrics` are lines of metrics.jsonl by the run's name. If no run has an accuracy,
    the AUROC is drawn. It returns an ``<svg>`` element for a white background; "" if
    there is nothing to draw.
    """
    drawn, every = [], [line for lines in metrics.values() for line in lines]
    score = next((s for s in HEADLINES if f"test_{s}" in {*chain(*every)}), "accuracy")
    for name, lines in metrics.items():
        averages = _series(lines, f"test_{score}_ema", 100.0)
        accuracies = averages or _series(lines, f"test_{score}", 100.0)
        drawn.append((name, accuracies, _series(lines, "epsilon", 1.0)))
    if not any(accuracies or epsilons for _, accuracies, epsilons in drawn):
        return ""
    style = {"svg.fonttype": "none", "svg.hashsalt": "tanager"}
    with styled(style) as new_figure:
        figure = new_figure(figsize=(9.2, 3.4), layout="constrained")
        axes = figure.subplots(1, 2)
        for number, (name, *both) in enumerate(drawn):
            colour = COLOURS[number % len(COLOURS)]
            for axis, points in zip(axes, both, strict=True):
                if points:
                    axis.plot(*zip(*points, strict=True), color=colour, label=name)
        words = f"test {HEADLINES[score]}"
        for axis, unit in zip(axes, (f"{words} (%)", "ε spent"), strict=True):
            axis.set(xlabel="update", ylabel=unit)
            axis.spines[["top", "right"]].set_visible(False)
        axes[1].set_ylim(bottom=0)
        handles = [line for axis in axes for line in axis.lines]
        of_each = {str(line.get_label()): line for line in handles}
        axes[1].legend(of_each.values(), of_each, loc="best", frameon=False)
        content = io.StringIO()
        figure.savefig(content, format="svg", metadata=NO_METADATA)
    return embed(content.getvalue(), f"{words} and ε spent against update")


def _series(
    metrics: Sequence[Mapping[str, Any]], name: str, factor: float
) -> list[tuple[int, float]]:
    return [
        (line["step"], factor * line[name])
        for line in metrics
        if line.get(name) is not None and math.isfinite(line[name])
    ]
