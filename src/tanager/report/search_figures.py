"""Pictures of a search: the scaling law, and grids of simulations.

The scaling law is drawn as figures 1 and 4 of TAN Without a Burn.
"""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from tanager.report.pictures import check_ending, save


_RUNS, _LAW, _PREDICTED, _OBTAINED = "#386cb0", "#386cb0", "#d62728", "#1b9e77"
_COLOURS = ("#386cb0", "#d62728", "#1b9e77", "#7570b3", "#a6761d", "#666666")


def plot_law(
    law: Mapping[str, Any],
    prediction: Mapping[str, Any],
    bands: Sequence[tuple[float, float, float]],
    path: str | pathlib.Path,
    *,
    title: str,
    obtained: Sequence[tuple[float, float]] = (),
) -> None:
    """Draw accuracy against batch size as a PNG or SVG file.

    Args:
        law: what `ScalingLaw.to_json` returned.
        prediction: `result.json`'s.
        bands: (batch size, low, high) of the confidence band of the line, in [0, 1].
        path: where to write; the ending, .png or .svg, chooses the format.
        title: what was simulated.
        obtained: (batch size, accuracy) of real runs at the predicted size.

    Raises:
        ValueError: the ending is another one.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    check_ending(path)
    figure = Figure(figsize=(7.2, 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    sizes = [size for size, _, _ in bands]
    confidence = f"{100 * prediction['confidence']:g} %"
    axes.fill_between(
        sizes,
        [100 * low for _, low, _ in bands],
        [100 * high for _, _, high in bands],
        color=_LAW,
        alpha=0.15,
        linewidth=0,
        label=f"{confidence} band of the line",
    )
    axes.plot(
        sizes,
        [50 * (low + high) for _, low, high in bands],
        color=_LAW,
        linestyle="--",
        linewidth=1.2,
    )
    axes.plot(
        [run["batch_size"] for run in law["runs"]],
        [100 * run["accuracy"] for run in law["runs"]],
        "x",
        color=_RUNS,
        markersize=7,
        label="simulations",
    )
    reference = prediction["reference_batch_size"]
    accuracy, low, high = (100 * prediction[n] for n in ("accuracy", "low", "high"))
    axes.errorbar(
        [reference],
        [accuracy],
        yerr=[[accuracy - low], [high - accuracy]],
        fmt="o",
        color=_PREDICTED,
        capsize=4,
        label=f"predicted, with the {confidence} interval of one run",
    )
    if obtained:
        axes.plot(
            [size for size, _ in obtained],
            [100 * reached for _, reached in obtained],
            "*",
            color=_OBTAINED,
            markersize=13,
            markeredgecolor="white",
            label="obtained",
        )
    every = sorted({run["batch_size"] for run in law["runs"]} | {reference})
    axes.set_xscale("log", base=2)
    axes.set_xticks(every, [f"{size:g}" for size in every])
    axes.minorticks_off()
    axes.set_xlabel(r"batch size $B$, at constant $\sigma/B$ and steps")
    axes.set_ylabel("accuracy on held-out examples, %")
    axes.set_title(title, fontsize=11)
    axes.grid(alpha=0.25)
    axes.legend(fontsize=9, framealpha=0.9, edgecolor="none")
    save(figure, path)
