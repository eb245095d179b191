"""Axes of accuracy against ε, for the scripts beside this one."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any


def new(
    epsilons: Sequence[float], right: float, size: tuple[float, float], images: str
) -> Any:
    """Return axes with ticks at `epsilons`, up to ε = `right`; `size` is in inches."""
    from matplotlib.figure import Figure

    axis = Figure(figsize=size, layout="constrained").subplots()
    axis.set_xscale("log", base=2)
    axis.set_xticks(epsilons, [str(epsilon) for epsilon in epsilons])
    axis.set_xlim(0.9, right)
    axis.set_ylabel(f"accuracy on {images} (%)")
    axis.grid(True, linewidth=0.6, alpha=0.5)
    axis.spines[["top", "right"]].set_visible(False)
    return axis


def line(axis: Any, xs: Any, ys: Any, name: str, colour: str, **look: Any) -> None:
    """Draw a line with its name at its end."""
    axis.plot(xs, ys, color=colour, **look)
    axis.annotate(
        name,
        (xs[-1], ys[-1]),
        (8, 0),
        textcoords="offset points",
        color=colour,
        va="center",
    )


def save(axis: Any, path: Path) -> None:
    """Write the figure of axes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    axis.figure.savefig(path, dpi=150)
