"""Figures of a search: the scaling law, and grids of simulations.

The scaling law is drawn as in figures 1 and 4 of TAN Without a Burn.
"""

import math
import pathlib
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tanager.report.figures import COLOURS, drawing


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis


_FEW_TICKS = 6
_FEW_LINES = 2  # whose names have room in the picture
_ROOM = 0.15  # of an axis, for a label
_WRAPPED = 16  # letters of a label's line
_STYLES = ("-", "--", ":")
_LAW, _PREDICTED, _OBTAINED = COLOURS[:3]
_ACCURACY = "accuracy on held-out examples, %"


def plot_law(
    law: Mapping[str, Any],
    prediction: Mapping[str, Any],
    bands: Sequence[tuple[float, float, float, float]],
    *paths: str | pathlib.Path,
    title: str,
    obtained: Sequence[tuple[float, float]] = (),
) -> None:
    """Draw accuracy against batch size as PNG or SVG files.

    Law and prediction are those of result.json, `bands` (batch size, height of the
    line, low, high of its confidence band), `obtained` (batch size, accuracy) of real
    runs at the predicted size.
    """
    sizes, *rest = zip(*bands, strict=True)
    heights, lows, highs = (_percent(each) for each in rest)
    confidence = f"{100 * prediction['confidence']:g} %"
    simulated = [run["batch_size"] for run in law["runs"]]
    reference = prediction["reference_batch_size"]
    every = sorted({*simulated, reference})
    with drawing(*paths) as (_, (axes,)):
        band = f"{confidence} band of the line"
        axes.fill_between(
            sizes, lows, highs, color=_LAW, alpha=0.15, linewidth=0, label=band
        )
        axes.plot(sizes, heights, color=_LAW, linestyle="--", linewidth=1.2)
        axes.plot(
            simulated,
            _percent(run["accuracy"] for run in law["runs"]),
            "x",
            color=_LAW,
            markersize=7,
            label="simulations",
        )
        label = f"predicted, with the {confidence} interval of one run"
        _draw_prediction(axes, reference, prediction, color=_PREDICTED, label=label)
        if obtained:
            axes.plot(
                [size for size, _ in obtained],
                _percent(reached for _, reached in obtained),
                "*",
                color=_OBTAINED,
                markersize=13,
                markeredgecolor="white",
                label="obtained, on test examples",
            )
        axes.set_xscale("log", base=2)
        axes.set_xticks(every, [f"{size:g}" for size in every])
        axes.minorticks_off()
        axes.set_xlabel(r"batch size $B$, at constant $\sigma/B$ and steps")
        axes.set(ylabel=_ACCURACY, title=title)
        axes.legend()


def _draw_prediction(
    axes: "Axes", place: float, prediction: Mapping[str, Any], **look: Any
) -> None:
    """Draw a predicted accuracy with its interval."""
    names = ("accuracy", "low", "high")
    accuracy, low, high = _percent(prediction[name] for name in names)
    around = [[accuracy - low], [high - accuracy]]
    axes.errorbar([place], [accuracy], yerr=around, fmt="o", capsize=4, **look)


def plot_grid(
    rows: Sequence[Mapping[str, Any]],
    *paths: str | pathlib.Path,
    along: str,
    title: str,
    predicted: Mapping[str, Any] | None = None,
) -> None:
    """Draw mean accuracy along one name, a line for each value of the others.

    Bars are two standard deviations over the repeats, as in Figure 5 of the TAN paper;
    one run has none.

    `rows` are of a table of experiments, `along` is the name on the horizontal axis,
    and `predicted` what more data would do: a hollow point with its interval.
    """
    lines: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        others = {name: v for name, v in row["title"].items() if name != along}
        label = ", ".join(f"{_words(name)} {value}" for name, value in others.items())
        lines.setdefault(label, []).append(row)
    places = list(dict.fromkeys(row["title"].get(along, "none") for row in rows))
    names = [textwrap.fill(str(place), _WRAPPED) for place in places]
    repeats = max(len(row["runs"]) for row in rows)
    about = f"mean of {repeats} runs, bars of two standard deviations"
    wide = 0.7 + 1.2 * (len(names) + (predicted is not None))
    with drawing(*paths, size=_size(len(lines), wide)) as (_, (axes,)):
        for number, (label, cells) in enumerate(lines.items()):
            found = [places.index(cell["title"].get(along, "none")) for cell in cells]
            axes.errorbar(
                # A little apart, so that bars do not hide each other.
                [place + 0.05 * number * (repeats > 1) for place in found],
                _percent(cell["accuracy"] for cell in cells),
                yerr=_bars(cells, 200),
                fmt="o",
                capsize=4,
                label=label or None,
                **_look(number),
            )
        if predicted is not None:
            prediction = predicted["prediction"]
            look = {"color": COLOURS[0], "markerfacecolor": "white"}
            _draw_prediction(axes, len(places), prediction, **look)
            confidence = 100 * prediction["confidence"]
            names.append(f"{predicted['examples']}\npredicted, {confidence:g} %")
        axes.set_xticks(range(len(names)), names)
        axes.set(xlabel=_words(along), ylabel=_ACCURACY)
        axes.set_title(f"{title}\n{about if repeats > 1 else 'one run each'}")
        if any(lines):
            _explain(axes, len(lines))


def plot_curves(
    curves: Sequence[Mapping[str, Any]], *paths: str | pathlib.Path
) -> None:
    """Draw accuracy against the ε spent so far, a line for each setting of a table.

    As Figure 9 of the Unlocking paper. `curves` are those of
    `tanager.search.experiments.curves`.
    """
    with drawing(*paths, size=_size(len(curves))) as (_, (axes,)):
        for number, curve in enumerate(curves):
            title = curve["title"].items()
            axes.plot(
                curve["epsilon"],
                _percent(curve["accuracy"]),
                marker=".",  # a line of one evaluation cannot be seen
                label=", ".join(f"{_words(name)} {value}" for name, value in title),
                **_look(number),
            )
        axes.set(xlabel="ε spent by the run that is simulated", ylabel=_ACCURACY)
        _explain(axes, len(curves), fontsize=8)


def _bars(rows: Iterable[Mapping[str, Any]], scale: float) -> list[float]:
    """Return how long bars are; NaN, which draws none, where there was one run."""
    found = (row["deviation"] for row in rows)
    return [math.nan if each is None else scale * each for each in found]


_OF_ALL: dict[str, Any] = {"color": "black", "linestyle": "-"}
"""The look of what is of no one batch size, where the legend names those."""


def _look(number: int) -> dict[str, Any]:
    """Return colour and style of a line: no two are alike among the first eighteen."""
    style = _STYLES[number // len(COLOURS) % len(_STYLES)]
    return {"color": COLOURS[number % len(COLOURS)], "linestyle": style}


def _size(lines: int, wide: float = 0.0) -> tuple[float, float]:
    """Return a size in inches for this many lines and at least this wide."""
    return max(7.2, wide) + 3.6 * (lines > _FEW_LINES), 4.4


def _explain(axes: "Axes", lines: int, **given: Any) -> None:
    """Add a legend, beside the picture where many lines leave no room in it."""
    outside = {"loc": "upper left", "bbox_to_anchor": (1, 1)}
    axes.legend(**given, **(outside if lines > _FEW_LINES else {}))


_BUDGET_PANELS = (
    # What is drawn against what, a line for each: Figures 2, 6(a) and 6(b), …
    ("batch_size", "accuracy", None),
    ("noise_multiplier", "accuracy", "batch_size"),
    ("steps", "accuracy", "batch_size"),
    # … and 7(a) to 7(c), of the best setting at each batch size.
    ("batch_size", "steps", None),
    ("batch_size", "epochs", None),
    ("batch_size", "learning_rate", None),
)


def plot_budget(
    rows: Sequence[Mapping[str, Any]], examples: int, *paths: str | pathlib.Path
) -> None:
    """Draw what a budget buys, as Figures 2, 6, 7, 10 and 11 of the Unlocking paper.

    Each point is the best of all rows that share its place: accuracy against batch
    size, noise multiplier and steps; then steps, epochs and learning rate of the best
    row at each batch size. Hollow points are the same rows' accuracy on their training
    examples, if it was measured. `rows` are of a table of experiments at one budget,
    and `examples` is N, of an epoch.
    """
    rows = [
        {**row, "epochs": row["steps"] * row["batch_size"] / examples} for row in rows
    ]
    with drawing(*paths, columns=3, rows=2, size=(13, 7.5)) as (figure, panels):
        for axes, (along, shown, by) in zip(panels, _BUDGET_PANELS, strict=True):
            lines: dict[Any, list[Mapping[str, Any]]] = {}
            for row in rows:
                lines.setdefault(by and row[by], []).append(row)
            for number, (value, mine) in enumerate(sorted(lines.items())):
                best = _best_along(mine, along)
                look = _look(number) if by else _OF_ALL
                heights = [row[shown] for row in best]
                axes.errorbar(
                    [row[along] for row in best],
                    _percent(heights) if shown == "accuracy" else heights,
                    yerr=_bars(best, 100) if shown == "accuracy" else None,
                    fmt="o",
                    capsize=4,
                    label=by and f"{_words(by)} {value}",
                    **look,
                )
                training = [row.get("training_accuracy") or 0.0 for row in best]
                if shown == "accuracy" and any(training):
                    axes.plot(
                        [row[along] for row in best],
                        _percent(training),
                        marker="o",
                        markerfacecolor="white",
                        **look,
                    )
            axes.set_xscale("log", base=2)
            _tick(axes.xaxis, [row[along] for row in rows])
            axes.set_xlabel(_words(along))
            if shown == "accuracy":
                also = rows[0].get("training_accuracy") is not None
                hollow = "\n(hollow: on training examples)" * also
                axes.set_ylabel(_ACCURACY + hollow)
            else:
                axes.set_yscale("log", base=2)
                _tick(axes.yaxis, [row[shown] for row in rows])
                axes.set_ylabel(f"best {_words(shown)}")
        named = panels[1].get_legend_handles_labels()
        figure.legend(*named, loc="outside lower center", ncols=7)


def _best_along(
    rows: Sequence[Mapping[str, Any]], along: str
) -> list[Mapping[str, Any]]:
    """Return the row of the best accuracy at each value, in the order of values."""
    values = sorted({row[along] for row in rows})
    return [
        max((r for r in rows if r[along] == value), key=lambda row: row["accuracy"])
        for value in values
    ]


def _tick(axis: "Axis", values: Sequence[float]) -> None:
    """Label a logarithmic axis at the values that were tried, if they are few."""
    every = sorted(set(values))
    if len(every) <= _FEW_TICKS:
        apart, named = (every[-1] / every[0]) ** _ROOM, every[:1]
        for value in every[1:]:
            if value >= apart * named[-1]:
                named.append(value)
        labels = [_plain(value) if value in named else "" for value in every]
        axis.set_ticks(every, labels=labels)
        axis.set_ticks([], minor=True)
    else:
        axis.set_major_formatter(lambda value, _: _plain(value))


def _plain(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _words(name: str) -> str:
    return name.replace("_", " ")


def plot_norms(
    edges: Sequence[float],
    counts: Sequence[Sequence[int]],
    steps: Sequence[int],
    clip_norm: float,
    path: pathlib.Path,
) -> None:
    """Draw histograms of gradient norms in parts of training (TAN paper, Figure 7).

    `edges` are between one bin and the next: each part has one count more. Norms beyond
    the edges, zero among them, are drawn in a bin as wide as the next. `steps` are the
    last of each part.
    """
    wide = edges[1] / edges[0]
    borders = [edges[0] / wide, *edges, edges[-1] * wide]
    used = [i for i in range(len(counts[0])) if any(part[i] for part in counts)]
    first, last = used[0], used[-1] + 1
    beyond = [f"leftmost bar: all norms below {_norm(edges[0])}"] * (first == 0)
    if last == len(counts[0]):
        beyond.append(f"rightmost bar: all norms from {_norm(edges[-1])} on")
    begun = 1
    with drawing(path) as (_, (axes,)):
        for number, (part, step) in enumerate(zip(counts, steps, strict=True)):
            total = sum(part)
            axes.stairs(
                [100 * count / total for count in part[first:last]],
                borders[first : last + 1],
                color=COLOURS[number % len(COLOURS)],
                linewidth=1.8,
                label=f"steps {begun:,} to {step:,}",
            )
            begun = step + 1
        axes.axvline(clip_norm, color="black", linestyle="--", linewidth=1)
        axes.text(
            clip_norm,
            0.98,
            f" C = {clip_norm:g}",
            transform=axes.get_xaxis_transform(),
            verticalalignment="top",
        )
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda value, _: _norm(value))
        about = f"\n({', '.join(beyond)})" if beyond else ""
        axes.set_xlabel(f"gradient norm of an example before clipping{about}")
        axes.set_ylabel("examples, %")
        axes.set_title("PRIVATE: computed from the training examples")
        axes.legend()


def _norm(value: float) -> str:
    return f"{value:g}" if value >= 1 else f"1/{1 / value:g}"


def _percent(shares: Iterable[float]) -> list[float]:
    return [100 * share for share in shares]
