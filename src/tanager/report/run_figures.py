"""Figures of one run, as SVG that lives inside a page.

Colours are CSS variables of the page, so one picture serves light, dark and print.
"""

import io
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from matplotlib.axes import Axes


# Stand-ins that matplotlib takes for colours, and what the page puts in their place.
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
        An ``<svg>`` element without any reference outside itself; empty where there is
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
        no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(content, format="svg", transparent=True, metadata=no_metadata)
    return _embeddable(content.getvalue())


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


def _embeddable(svg: str) -> str:
    """Keep the element alone, and hand its colours over to the page."""
    svg = svg[svg.index("<svg") :].strip()
    # A page knows both namespaces; without their names nothing in it looks like a link.
    svg = svg.replace(' xmlns:xlink="http://www.w3.org/1999/xlink"', "", 1)
    svg = svg.replace(' xmlns="http://www.w3.org/2000/svg"', "", 1)
    for stand_in, variable in _CSS.items():
        svg = svg.replace(stand_in, variable)
    label = 'role="img" aria-label="Test accuracy and ε against step"'
    return svg.replace("<svg", f"<svg {label}", 1)
