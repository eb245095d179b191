"""Files of pictures: PNG or SVG, by the ending of their name."""

import pathlib
from typing import TYPE_CHECKING, Any

from tanager import _validate as validate


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure


def check_ending(path: str | pathlib.Path) -> None:
    """Refuse a file that is neither a PNG nor an SVG.

    Raises:
        ValueError: its name ends otherwise.
    """
    if pathlib.Path(path).suffix.lower() not in (".png", ".svg"):
        validate.refuse("plot", str(path), "must end in .png or .svg")


def one_panel() -> tuple["Figure", "Axes"]:
    """Return a new figure of one panel, drawn without a screen."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots()


def number_axis(axis: "Axis") -> None:
    """Label a logarithmic axis with plain numbers, at 1, 2 and 5 of each decade."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(10, subs=(1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axis.set_minor_formatter(NullFormatter())


def save(figure: "Figure", path: str | pathlib.Path) -> None:
    """Write a figure; the same figure gives the same file.

    Raises:
        ValueError: the name ends neither in .png nor in .svg.
    """
    from matplotlib import rc_context

    check_ending(path)
    svg = pathlib.Path(path).suffix.lower() == ".svg"
    # Without these an SVG has neither the time in it nor links to vocabularies.
    names = ("Creator", "Date", "Format", "Type")
    metadata: dict[str, Any] | None = dict.fromkeys(names) if svg else None
    with rc_context({"svg.hashsalt": "tanager"}):
        figure.savefig(path, dpi=160, metadata=metadata)
