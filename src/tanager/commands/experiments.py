"""`tanager search privacy`, `data`, `ablation` and `norms`: tables of simulations."""

import abc
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tyro.conf import Positional

from tanager._files import write_json
from tanager._terminal import new_console
from tanager.commands import accounts, flags
from tanager.commands.tables import new_table, print_json
from tanager.commands.watching import work_through
from tanager.privacy.shown import format_epsilon
from tanager.recipes.recipe import Recipe


if TYPE_CHECKING:
    from tanager.search.experiments import Cell, Simulations
    from tanager.search.simulation import Target


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Table(abc.ABC):
    """Simulate a table of runs."""

    simulation_batch_size: int | None = None
    """Simulated batch size. Default: 1/64 of the recipe's, at least 32."""

    repeats: int = 1
    """Runs of each setting."""

    json: flags.Json = False

    @abc.abstractmethod
    def cells(self, target: "Target", simulations: "Simulations") -> list["Cell"]:
        """Return the settings of the table."""

    def axis(self, names: Sequence[str]) -> str:
        """Return which of the names that vary is the plot's axis."""
        return names[-1]

    def predict(self, target: "Target", rows: Sequence[dict]) -> dict[str, Any] | None:
        """Return what a finished table predicts, if it does."""
        del target, rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class Privacy(_Table):
    """Vary steps and batch size at a constant total amount of noise."""

    try_steps: tuple[int, ...] = ()
    """Numbers of steps. Default: 1/4, 1/2, 1 and 2 times the recipe's."""

    scale_average: bool = False
    """Average parameters over the same share of each run, not over the same steps."""

    def cells(self, target: "Target", simulations: "Simulations") -> list["Cell"]:
        """Return a cell for each number of steps."""
        from tanager.search.experiments import privacy_parameters

        steps = self.try_steps or tuple(
            max(1, round(target.steps * factor)) for factor in (0.25, 0.5, 1, 2)
        )
        return privacy_parameters(
            target, steps, simulations, scale_average=self.scale_average
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Data(_Table):
    """Vary the number of training examples."""

    try_examples: tuple[int, ...] = ()
    """Numbers of examples. Default: 1/4, 1/2 and all that are not held out."""

    predict_examples: int | None = None
    """Number of examples to predict for. Default: twice the data's."""

    repeats: int = 2
    """Runs of each setting."""

    def cells(self, target: "Target", simulations: "Simulations") -> list["Cell"]:
        """Return a cell for each number of examples."""
        from tanager.search.experiments import data_quantity

        target.at_examples(self._wanted(target))  # refused now, not at the end
        there = target.examples - simulations.validation_examples
        examples = self.try_examples or (there // 4, there // 2, there)
        return data_quantity(target, examples, simulations)

    def predict(self, target: "Target", rows: Sequence[dict]) -> dict[str, Any]:
        """Return what more data would do."""
        from tanager.search.experiments import more_data

        return more_data(target, rows, self._wanted(target))

    def _wanted(self, target: "Target") -> int:
        given = self.predict_examples
        return 2 * target.examples if given is None else given


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ablation(_Table):
    """Try every combination of some values; the last of --vary is the plot's axis."""

    vary: tuple[str, ...] = ("normalisation-order", "augmentation-multiplicity=1,4,16")
    """Names with their values, as for `tanager search`."""

    def cells(self, target: "Target", simulations: "Simulations") -> list["Cell"]:
        """Return a cell for each combination."""
        from tanager.search.experiments import ablation
        from tanager.search.space import Space

        return ablation(target, Space.parse(self.vary), simulations)

    def axis(self, names: Sequence[str]) -> str:
        """Return the last name of --vary."""
        from tanager.search.space import Space

        del names
        return next(iter(Space.parse(self.vary[-1:]).values))


TABLES = {"privacy": Privacy, "data": Data, "ablation": Ablation}


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

    json: flags.Json = False


def target_of(name: str, recipe: Recipe) -> "Target":
    """Return the run that simulations of a recipe stand for.

    It trains on all examples: the simulations alone hold some out.
    """
    from tanager.search import jobs
    from tanager.search.simulation import plan_simulation

    examples = jobs.training_examples(recipe)
    recipe = dataclasses.replace(recipe, validation_examples=0)
    return plan_simulation(name, recipe, examples)


def held_out(recipe: Recipe, target: "Target") -> int:
    """Return how many training examples simulations are compared on: a tenth."""
    return recipe.validation_examples or max(1, target.examples // 10)


def norms(words: Sequence[str]) -> int:
    """Run `tanager search norms RUN`."""
    options = flags.read(NormsArguments, "search norms", words)

    # JAX is imported from here on: the command line was fine.
    from tanager.report import figures, search_figures
    from tanager.training.norms import Norms, edges

    if options.plot is not None:
        figures.check_ending(options.plot)
    found = Norms.read(options.run, options.parts)
    bins, counts = edges().tolist(), found.counts.tolist()
    if options.plot is not None:
        search_figures.plot_norms(
            bins, counts, found.steps, found.clip_norm, options.plot
        )
    quantiles = {share: found.quantile(share) for share in (0.1, 0.25, 0.5, 0.75, 0.9)}
    if options.json:
        content = {
            "private": "computed from the training examples without noise",
            "clip_norm": found.clip_norm,
            "steps": found.steps,
            "clipped": found.clipped(),
            "quantiles": {str(share): norm for share, norm in quantiles.items()},
            "suggested_clip_norm": found.suggested_clip_norm(),
            "edges": bins,
            "counts": counts,
        }
        return print_json(content)
    console = new_console(markup=False)
    console.print("PRIVATE: computed from the training examples; not to be released")
    shares = zip(found.steps, found.clipped(), strict=True)
    headings = ("until step", f"norms above C = {found.clip_norm:g}")
    rows = [(f"{step}", f"{100 * share:.0f} %") for step, share in shares]
    console.print(new_table(*headings, texts=headings, rows=rows))
    middle = " ".join(f"{100 * s:g} %: {norm:.3g}" for s, norm in quantiles.items())
    console.print(f"quantiles of the norm  {middle}")
    console.print(
        f"a clipping norm to try: {found.suggested_clip_norm():.3g}, the median; "
        f"those below {quantiles[0.1]:.3g} train alike at one learning rate, as the "
        "Unlocking paper found, which took 1",
        soft_wrap=True,
    )
    if options.plot is not None:
        console.print(f"drawn to {options.plot}", soft_wrap=True)
    return 0


def tabulate(word: str, words: Sequence[str]) -> int:
    """Run `tanager search WORD RECIPE`; WORD is one of `TABLES`."""
    entry, recipe, options = flags.parse(f"search {word}", words, TABLES[word])

    # JAX is imported from here on: the command line was fine.
    from tanager.report import search_figures
    from tanager.search import experiments, jobs

    name = entry.name
    target = target_of(name, recipe)
    out = Path(recipe.out or f"runs/{name}-{word}")
    batch_size = options.simulation_batch_size or min(
        max(32, recipe.batch_size // 64), recipe.batch_size
    )
    factor = batch_size / recipe.batch_size
    simulations = experiments.Simulations(
        out, factor, held_out(recipe, target), options.repeats
    )
    cells = options.cells(target, simulations)
    every = [job for cell in cells for job in cell.jobs]
    jobs.require_room(every[0])
    screen = new_console(stderr=True)
    screen.print(
        f"{len(every)} simulations, with NO privacy guarantee, of runs at ε = "
        + ", ".join(format_epsilon(cell.target.epsilon) for cell in cells)
    )
    outcomes = work_through(every, screen, lambda job: job.folder.name)
    found = {job.folder: each for job, each in zip(every, outcomes, strict=True)}
    rows, names = experiments.table(cells, found), list(cells[0].title)
    more = options.predict(target, rows)
    content = {"experiment": word, "recipe": name, "rows": rows}
    content |= {} if more is None else {"prediction": more}
    write_json(out / "table.json", content)
    search_figures.plot_grid(
        rows,
        out / "table.png",
        out / "table.svg",
        along=options.axis(names),
        title=f"{name}: simulated at 1/{1 / factor:.4g} of the batch size",
        predicted=more,
    )
    if options.json:
        return print_json(content)
    _print(rows, out, word, more)
    charged = accounts.sentence(recipe, accounts.total_of(recipe, target.delta))
    print(charged, end="")
    return 0


def _print(
    rows: list[dict[str, Any]], out: Path, word: str, more: dict[str, Any] | None
) -> None:
    console = new_console(markup=False)
    if not console.is_terminal:
        console.width = 160
    names = dict.fromkeys(name for row in rows for name in row["title"])
    best = max(rows, key=lambda row: row["accuracy"])
    headings = (*names, "batch size", "learning rate", "ε", "δ", "simulated at")
    headings = [heading.replace("_", " ") for heading in (*headings, "accuracy")]
    table = new_table(*headings, texts=headings)
    for row in rows:
        spread = "" if row["deviation"] is None else f" ± {100 * row['deviation']:.1f}"
        table.add_row(
            *(str(row["title"].get(name, "—")) for name in names),
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
    console.print(f"table and picture: {out}/table.json, table.png", soft_wrap=True)
