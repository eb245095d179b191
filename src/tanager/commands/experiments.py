"""`tanager search privacy`, `data`, `ablation` and `norms`: tables of simulations."""

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from tyro.conf import Positional

from tanager._files import json_text, write_json
from tanager.commands import flags
from tanager.commands.tables import new_table
from tanager.commands.targets import held_out, target_of
from tanager.commands.watching import work_through
from tanager.privacy.shown import format_epsilon


if TYPE_CHECKING:
    from tanager.search.experiments import Cell, Row, Simulations
    from tanager.search.simulation import Target


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Simulate a table of runs."""

    simulation_batch_size: int | None = None
    """Simulated batch size. Default: 1/64 of the recipe's, at least 32."""

    repeats: int = 1
    """Runs of each setting."""

    json: bool = False
    """Print one JSON object only."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrivacyOptions(Options):
    """Vary steps and batch size at a constant total amount of noise."""

    try_steps: tuple[int, ...] = ()
    """Numbers of steps. Default: 1/4, 1/2, 1 and 2 times the recipe's."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataOptions(Options):
    """Vary the number of training examples."""

    try_examples: tuple[int, ...] = ()
    """Numbers of examples. Default: 1/4, 1/2 and all that are not held out."""

    predict_examples: int | None = None
    """Number of examples to predict for. Default: twice the data's."""

    repeats: int = 2
    """Runs of each setting."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AblationOptions(Options):
    """Try every combination of some values."""

    vary: tuple[str, ...] = ("normalisation-order", "augmentation-multiplicity=1,4,16")
    """Names with their values, as for `tanager search`."""

    along: str | None = None
    """Name on the horizontal axis of the plot. Default: the last."""


@dataclasses.dataclass(frozen=True)
class NormsArguments:
    """Show the gradient norms of a run, in parts of training.

    They are PRIVATE: computed from the training examples without noise.
    """

    run: Positional[str]
    """Folder of the run, with its private/."""

    parts: int = 4
    """Number of equal parts of the steps."""

    plot: Path | None = None
    """Draw histograms as a PNG or SVG file."""

    json: bool = False
    """Print one JSON object only."""


def privacy(words: Sequence[str]) -> int:
    """Run `tanager search privacy RECIPE`."""
    from tanager.search import experiments

    def cells(
        target: "Target", options: PrivacyOptions, simulations: "Simulations"
    ) -> list["Cell"]:
        steps = options.try_steps or tuple(
            max(1, round(target.steps * factor)) for factor in (0.25, 0.5, 1, 2)
        )
        return experiments.privacy_parameters(target, steps, simulations)

    return _run("privacy", words, PrivacyOptions, cells, "steps")


def data(words: Sequence[str]) -> int:
    """Run `tanager search data RECIPE`."""
    from tanager.search import experiments

    def wanted(target: "Target", options: DataOptions) -> int:
        given = options.predict_examples
        return 2 * target.examples if given is None else given

    def cells(
        target: "Target", options: DataOptions, simulations: "Simulations"
    ) -> list["Cell"]:
        target.at_examples(wanted(target, options))  # refused now, not at the end
        there = target.examples - simulations.validation_examples
        examples = options.try_examples or (there // 4, there // 2, there)
        return experiments.data_quantity(target, examples, simulations)

    def predict(
        target: "Target", options: DataOptions, rows: Sequence["Row"]
    ) -> dict[str, Any]:
        count = wanted(target, options)
        found = experiments.more_data(target, rows, count)._asdict()
        return {"prediction": {**found, "prediction": found["prediction"]._asdict()}}

    return _run("data", words, DataOptions, cells, "examples", predict)


def ablation(words: Sequence[str]) -> int:
    """Run `tanager search ablation RECIPE`."""
    from tanager.search import experiments
    from tanager.search.space import Space

    def cells(
        target: "Target", options: AblationOptions, simulations: "Simulations"
    ) -> list["Cell"]:
        return experiments.ablation(target, Space.parse(options.vary), simulations)

    return _run("ablation", words, AblationOptions, cells, None)


def norms(words: Sequence[str]) -> int:
    """Run `tanager search norms RUN`."""
    from tanager.report import figures, search_figures
    from tanager.training.norms import Norms, edges

    options = flags.read(NormsArguments, "search norms", words)
    if options.plot is not None:
        figures.check_ending(options.plot)
    found = Norms.read(options.run, options.parts)
    if options.plot is not None:
        search_figures.plot_norms(
            edges().tolist(),
            found.counts.tolist(),
            found.steps,
            found.clip_norm,
            options.plot,
        )
    content = {
        "private": "computed from the training examples without noise",
        "clip_norm": found.clip_norm,
        "steps": found.steps,
        "clipped": found.clipped(),
        "quantiles": {str(s): found.quantile(s) for s in (0.1, 0.25, 0.5, 0.75, 0.9)},
        "suggested_clip_norm": found.suggested_clip_norm(),
        "edges": edges().tolist(),
        "counts": found.counts.tolist(),
    }
    if options.json:
        print(json.dumps(content, indent=2))
        return 0
    console = Console(highlight=False)
    console.print("PRIVATE: computed from the training examples; not to be released")
    shares = zip(found.steps, found.clipped(), strict=True)
    headings = ("until step", f"norms above C = {found.clip_norm:g}")
    rows = [(f"{step}", f"{100 * share:.0f} %") for step, share in shares]
    console.print(new_table(*headings, texts=headings, rows=rows))
    middle = " ".join(
        f"{100 * float(share):g} %: {value:.3g}"
        for share, value in content["quantiles"].items()
    )
    console.print(f"quantiles of the norm  {middle}")
    console.print(
        f"a clipping norm to try: {found.suggested_clip_norm():.3g}, the median"
    )
    if options.plot is not None:
        console.print(f"drawn to {options.plot}", soft_wrap=True, markup=False)
    return 0


def _run(
    word: str,
    words: Sequence[str],
    options_of: type[Any],
    make_cells: Callable[..., list["Cell"]],
    along: str | None,
    predict: Callable[..., dict[str, Any]] = lambda target, options, rows: {},
) -> int:
    from tanager.report import search_figures
    from tanager.search import experiments

    entry, recipe, options = flags.parse(f"search {word}", words, options_of)
    name = entry.name
    target = target_of(name, recipe)
    out = Path(recipe.out or f"runs/{name}-{word}")
    batch_size = options.simulation_batch_size or min(
        max(32, recipe.batch_size // 64), recipe.batch_size
    )
    simulations = experiments.Simulations(
        out,
        batch_size / recipe.batch_size,
        held_out(recipe, target),
        options.repeats,
    )
    cells = make_cells(target, options, simulations)
    every = [job for cell in cells for job in cell.jobs]
    screen = Console(stderr=True, highlight=False)
    screen.print(
        f"{len(every)} simulations, with NO privacy guarantee, of runs at ε = "
        + ", ".join(format_epsilon(cell.target.epsilon) for cell in cells)
    )
    outcomes = work_through(every, screen, lambda job: job.folder.name)
    found = {job.folder: each for job, each in zip(every, outcomes, strict=True)}
    results = experiments.table(cells, found)
    rows = [row._asdict() for row in results]
    predicted = predict(target, options, results)
    content = {"experiment": word, "recipe": name, "rows": rows, **predicted}
    write_json(out / "table.json", content)
    axis = getattr(options, "along", None) or along or list(cells[0].title)[-1]
    share = recipe.batch_size / batch_size
    title = f"{name}: simulated at 1/{share:.4g} of the batch size"
    for ending in ("png", "svg"):
        search_figures.plot_grid(
            rows,
            out / f"table.{ending}",
            along=axis.replace("-", "_"),
            title=title,
            predicted=predicted.get("prediction"),
        )
    if options.json:
        print(json_text(content, indent=2))
        return 0
    _print(rows, out, word, predicted.get("prediction"))
    return 0


def _print(
    rows: list[dict[str, Any]],
    out: Path,
    word: str,
    more: dict[str, Any] | None,
) -> None:
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 160
    names = list(rows[0]["title"])
    best = max(rows, key=lambda row: row["accuracy"])
    headings = (*names, "batch size", "learning rate", "ε", "δ", "simulated at")
    headings = [heading.replace("_", " ") for heading in (*headings, "accuracy")]
    table = new_table(*headings, texts=headings)
    for row in rows:
        spread = "" if row["deviation"] is None else f" ± {100 * row['deviation']:.1f}"
        table.add_row(
            *(str(row["title"][name]) for name in names),
            f"{row['batch_size']}",
            f"{row['learning_rate']:g}",
            format_epsilon(row["epsilon"]),
            f"{row['delta']:.3g}",
            f"{row['simulated_batch_size']}",
            f"{100 * row['accuracy']:.2f} %{spread}" + (" ←" if row is best else ""),
        )
    console.print(table)
    if word == "privacy":
        console.print(
            f"best: --steps {best['steps']} --batch-size {best['batch_size']} "
            f"--learning-rate {best['learning_rate']:g}, "
            f"ε = {format_epsilon(best['epsilon'])} at δ = {best['delta']:g} by PLD"
        )
    if more is not None:
        told = more["prediction"]
        console.print(
            f"with {more['examples']} examples: "
            f"ε = {format_epsilon(more['epsilon'])} at δ = {more['delta']:.3g}, "
            "and a simulation is predicted to reach "
            f"{100 * told['accuracy']:.1f} %, between {100 * told['low']:.1f} and "
            f"{100 * told['high']:.1f} % in {100 * told['confidence']:g} of 100 tables"
        )
    where = f"table and picture: {out}/table.json, table.png"
    console.print(where, soft_wrap=True, markup=False)
