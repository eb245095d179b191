"""Figures as PNG or SVG files, and as SVG inside a page."""

import contextlib
import os
import pathlib
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from tanager import _validate as validate


if TYPE_CHECKING:
    from markupsafe import Markup
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure


COLOURS = ("#386cb0", "#d62728", "#1b9e77", "#7570b3", "#a6761d", "#666666")
NO_METADATA: dict[str, Any] = dict.fromkeys(("Creator", "Date", "Format", "Type"))
"""Of an SVG: without these it has neither the time in it nor links."""
_STYLE: Any = {
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 11,
    "grid.alpha": 0.25,
    "legend.edgecolor": "none",
    "legend.fontsize": 9,
    "legend.framealpha": 0.9,
}


def check_ending(path: str | pathlib.Path) -> None:
    """Refuse a file whose name ends neither in .png nor in .svg, or that is in a file.

    A figure is drawn after what was measured.
    """
    path = pathlib.Path(path)
    if path.suffix.lower() not in (".png", ".svg"):
        validate.refuse("plot", str(path), "must end in .png or .svg")
    if not next(filter(pathlib.Path.exists, path.parents)).is_dir():
        validate.refuse("plot", str(path), "must be in a folder, not in a file")


@contextlib.contextmanager
def styled(style: Mapping[str, Any]) -> Iterator[type["Figure"]]:
    """Give the class of matplotlib's figures, and the style while the block runs."""
    scheme, _, module = os.environ.get("MPLBACKEND", "").partition("://")
    if scheme == "module" and find_spec(module.partition(".")[0]) is None:
        # A notebook's, whose kernel alone has it: matplotlib could not be imported.
        del os.environ["MPLBACKEND"]
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(dict(style)):
        yield Figure


@contextlib.contextmanager
def drawing(
    *paths: str | pathlib.Path,
    columns: int = 1,
    rows: int = 1,
    size: tuple[float, float] = (7.2, 4.4),
) -> Iterator[tuple["Figure", list["Axes"]]]:
    """Give a new figure and its panels to draw on, then write it; no screen is used.

    `paths` are PNG or SVG files; `size` is width and height in inches.
    """
    for path in paths:
        check_ending(path)
    with styled(_STYLE) as new_figure:
        figure = new_figure(figsize=size, layout="constrained")
        yield figure, list(figure.subplots(rows, columns, squeeze=False).flat)
        for path in paths:
            save(figure, path)


def number_axis(*axes: "Axis") -> None:
    """Label logarithmic axes with plain numbers, at 1, 2 and 5 of each decade."""
    from matplotlib.ticker import LogLocator, NullFormatter

    for axis in axes:
        axis.set_major_locator(LogLocator(10, subs=(1, 2, 5)))
        axis.set_major_formatter(lambda value, _: f"{value:,g}")
        axis.set_minor_formatter(NullFormatter())


def save(figure: "Figure", path: str | pathlib.Path) -> None:
    """Write a figure as a PNG or SVG file; the same figure gives the same file."""
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    svg = path.suffix.lower() == ".svg"
    with styled({"svg.hashsalt": "tanager"}):
        figure.savefig(path, dpi=160, metadata=NO_METADATA if svg else None)


def embed(svg: str, description: str) -> "Markup":
    """Return the ``<svg>`` element of an SVG file for a page, without any link.

    The description is for people who cannot see the figure.
    """
    from markupsafe import Markup

    svg = svg[svg.index("<svg") :].strip()
    # A page knows both namespaces; without their names nothing in it looks like a link.
    svg = svg.replace(' xmlns:xlink="http://www.w3.org/1999/xlink"', "", 1)
    svg = svg.replace(' xmlns="http://www.w3.org/2000/svg"', "", 1)
    start = Markup('<svg role="img" aria-label="{}"').format(description)
    return Markup(svg.replace("<svg", start, 1))
