"""Figures of one run, as SVG inside a page.

Colours are CSS variables of the page, so one figure serves light, dark and print.
"""

import io
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tanager.report.figures import NO_METADATA, embed


if TYPE_CHECKING:
    from matplotlib.axes import Axes


# Colours that matplotlib accepts, replaced by the page's variables afterwards.
_INK, _GRID, _RAW, _AVERAGE, _EPSILON = (f"#01020{digit}" for digit in range(3, 8))
_CSS = {
    _INK: "var(--ink)",
    _GRID: "var(--line)",
    _RAW: "var(--raw)",
    _AVERAGE: "var(--average)",
    _EPSILON: "var(--epsilon)",
}


def curves(metrics: Sequence[Mapping[str, Any]]) -> str:
    """Draw accuracy (raw and averaged) and ε against step.

    Args:
        metrics: lines of metrics.jsonl. Without accuracies only ε is drawn.

    Returns:
        An ``<svg>`` element that refers to nothing outside itself; empty if there is
        nothing to draw.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    accuracies = {
        "parameters": _series(metrics, "test_accuracy", 100.0),
        "average of parameters": _series(metrics, "test_accuracy_ema", 100.0),
    }
    epsilons = _series(metrics, "epsilon", 1.0)
    panels = [any(accuracies.values()), bool(epsilons)]
    if not any(panels):
        return ""
    style: dict[Any, Any] = {
        "svg.fonttype": "none",
        "svg.hashsalt": "tanager",
        "font.family": "sans-serif",
        "text.color": _INK,
        "axes.edgecolor": _GRID,
        "axes.labelcolor": _INK,
        "xtick.color": _INK,
        "ytick.color": _INK,
        "grid.color": _GRID,
    }
    with rc_context(style):
        figure = Figure(figsize=(4.6 * sum(panels), 3.1), layout="constrained")
        axes = iter(figure.subplots(1, sum(panels), squeeze=False)[0])
        if panels[0]:
            axis = next(axes)
            lines = zip(accuracies.items(), (_RAW, _AVERAGE), ("--", "-"), strict=True)
            for (label, points), colour, dashes in lines:
                if points:
                    _draw(axis, points, colour, dashes, label)
            axis.set_ylabel("test accuracy (%)")
            axis.legend(loc="best", frameon=False)
        if panels[1]:
            axis = next(axes)
            _draw(axis, epsilons, _EPSILON, "-", "ε")
            axis.set_ylim(bottom=0)
            axis.set_ylabel("ε spent")
        content = io.StringIO()
        figure.savefig(content, format="svg", transparent=True, metadata=NO_METADATA)
    svg = content.getvalue()
    for stand_in, variable in _CSS.items():
        svg = svg.replace(stand_in, variable)
    shown = [("test accuracy", panels[0]), ("ε spent", panels[1])]
    names = " and ".join(name for name, is_drawn in shown if is_drawn)
    return embed(svg, f"{names} against step")


def _series(
    metrics: Sequence[Mapping[str, Any]], name: str, factor: float
) -> list[tuple[int, float]]:
    return [
        (line["step"], factor * line[name])
        for line in metrics
        if line.get(name) is not None and math.isfinite(line[name])
    ]


def _draw(
    axis: "Axes",
    points: Sequence[tuple[int, float]],
    colour: str,
    dashes: str,
    label: str,
) -> None:
    steps, values = zip(*points, strict=True)
    marker = "o" if len(points) == 1 else None
    axis.plot(
        steps, values, dashes, color=colour, label=label, linewidth=1.8, marker=marker
    )
    axis.set_xlabel("step")
    axis.grid(True, linewidth=0.6)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
