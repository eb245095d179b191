"""`tanager search budget`, `privacy`, `data` and `ablation`: tables of simulations."""

import abc
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tanager import _validate as validate
from tanager._files import write_json
from tanager._terminal import new_console
from tanager.commands import accounts, flags
from tanager.commands.tables import new_table, print_json, print_table
from tanager.commands.watching import work_through
from tanager.privacy.shown import format_delta, format_epsilon
from tanager.recipes.budget import solve_budget
from tanager.recipes.recipe import Recipe
from tanager.report import search_figures
from tanager.search.simulation import Target, plan_simulation
from tanager.search.space import Space


if TYPE_CHECKING:
    from tanager.privacy.mechanism import Mechanism
    from tanager.search.experiments import Cell, Simulations


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Table(abc.ABC):
    """Simulate a table of runs."""

    simulation_batch_size: int | None = None
    """Simulated batch size. Default: 1/64 of the recipe's, at least 32."""

    repeats: int = 1
    """Runs of each setting."""

    training_accuracy: bool = False
    """Also measure accuracy on the training examples. No ε covers it: only for public
    data."""

    json: flags.Json = False

    @abc.abstractmethod
    def cells(self, target: Target, simulations: "Simulations") -> list["Cell"]:
        """Return the settings of the table."""

    def axis(self, names: Sequence[str]) -> str:
        """Return which of the names that vary is the plot's axis."""
        return names[-1]

    def predict(self, target: Target, rows: Sequence[dict]) -> dict[str, Any] | None:
        """Return what a finished table predicts, if it does."""
        del target, rows

    def draw(self, cells: Sequence["Cell"], content: dict[str, Any], out: Path) -> None:
        """Draw a finished table, `content` of table.json."""
        factor = cells[0].target.recipe.batch_size / cells[0].jobs[0].recipe.batch_size
        search_figures.plot_grid(
            content["rows"],
            out / "table.png",
            out / "table.svg",
            along=self.axis(list(cells[0].title)),
            title=f"{content['recipe']}: simulated at 1/{factor:.4g} of the batch size",
            predicted=content.get("prediction"),
        )

    def then(self, cells: Sequence["Cell"]) -> list["Mechanism"]:
        """Return what `train` will spend."""
        return []

    def train(
        self, cells: Sequence["Cell"], rows: Sequence[dict], out: Path
    ) -> dict[str, Any] | None:
        """Train the best of a finished table, if it is for that; return its scores."""
        del cells, rows, out


@dataclasses.dataclass(frozen=True, kw_only=True)
class Privacy(_Table):
    """Vary steps and batch size at a constant total amount of noise."""

    try_steps: tuple[int, ...] = ()
    """Numbers of steps. Default: 1/4, 1/2, 1 and 2 times the recipe's."""

    scale_average: bool = False
    """Average parameters over the same share of each run, not over the same steps."""

    def cells(self, target: Target, simulations: "Simulations") -> list["Cell"]:
        from tanager.search.experiments import privacy_parameters

        for number in self.try_steps:
            validate.whole(try_steps=number, at_least=1)
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

    def cells(self, target: Target, simulations: "Simulations") -> list["Cell"]:
        from tanager.search.experiments import data_quantity

        there = target.examples - simulations.validation_examples
        examples = self.try_examples or (there // 4, there // 2, there)
        fewest, remedy = target.recipe.batch_size, "a batch is drawn from them"
        # Refused now, not at the end.
        wanted = self._wanted(target)
        validate.whole(predict_examples=wanted, at_least=fewest, remedy=remedy)
        for each in examples:
            validate.whole(try_examples=each, at_least=fewest, remedy=remedy)
        return data_quantity(target, examples, simulations)

    def predict(self, target: Target, rows: Sequence[dict]) -> dict[str, Any]:
        from tanager.search.experiments import more_data

        return more_data(target, rows, self._wanted(target))

    def _wanted(self, target: Target) -> int:
        given = self.predict_examples
        return 2 * target.examples if given is None else given


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ablation(_Table):
    """Try every combination of some values; the last of --vary is the plot's axis."""

    vary: tuple[str, ...] = ("normalisation-order", "augmentation-multiplicity=1,4,16")
    """Names with their values, as for `tanager search`."""

    cumulative: bool = False
    """Begin with the first value of each name, and change one after another to its
    last, as in Table 2 of the Unlocking paper."""

    def cells(self, target: Target, simulations: "Simulations") -> list["Cell"]:
        from tanager.search import experiments

        make = experiments.cumulative if self.cumulative else experiments.ablation
        return make(target, Space.parse(self.vary), simulations)

    def axis(self, names: Sequence[str]) -> str:
        if self.cumulative:
            return names[-1]
        return next(iter(Space.parse(self.vary[-1:]).values))

    def draw(self, cells: Sequence["Cell"], content: dict[str, Any], out: Path) -> None:
        """Also draw the accuracy of each run while its budget is spent."""
        from tanager.search.experiments import curves

        super().draw(cells, content, out)
        paths = out / "curves.png", out / "curves.svg"
        search_figures.plot_curves(curves(cells), *paths)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Budget(_Table):
    """Search batch size, steps and learning rate at one budget; train the best again.

    The recipe's ε and δ stay, and the noise multiplier is solved for. Settings are
    compared on training examples that are held out; the best is trained on all of them.
    To compare real runs, give the recipe's batch size as --simulation-batch-size.
    """

    vary: tuple[str, ...] = ()
    """Names with their values, as for `tanager search`. Default: batch-size, steps and
    learning-rate at 1/2, 1 and 2 times the recipe's."""

    winner_repeats: int = 5
    """Private runs of the best, for the median of their scores."""

    def __post_init__(self):
        validate.whole(winner_repeats=self.winner_repeats, at_least=1)

    def cells(self, target: Target, simulations: "Simulations") -> list["Cell"]:
        from tanager.search import experiments

        space = (
            Space.parse(self.vary)
            if self.vary
            else experiments.around(target, simulations.validation_examples)
        )
        for free in ({"epsilon"}, {"steps", "noise_multiplier"}):
            if free <= space.values.keys():
                rule = "changes ε, which this search keeps"
                remedy = "leave one out, or use tanager search ablation"
                validate.refuse("vary", sorted(free), rule, remedy)
        return experiments.ablation(target, space, simulations)

    def draw(self, cells: Sequence["Cell"], content: dict[str, Any], out: Path) -> None:
        """Draw what is best at each batch size, noise multiplier and steps."""
        paths = out / "table.png", out / "table.svg"
        examples = cells[0].target.examples
        search_figures.plot_budget(content["rows"], examples, *paths)

    def then(self, cells: Sequence["Cell"]) -> list["Mechanism"]:
        """Return what the runs of the best will spend, were it the one of most ε."""
        from tanager.search import jobs

        target = max((cell.target for cell in cells), key=lambda each: each.epsilon)
        classes = len(jobs.load(cells[0].jobs[0].recipe).classes)
        budget = solve_budget(target.recipe, target.examples, classes)
        return budget.mechanisms() * self.winner_repeats

    def train(
        self, cells: Sequence["Cell"], rows: Sequence[dict], out: Path
    ) -> dict[str, Any]:
        from tanager.recipes import repeats, runner
        from tanager.recipes.accounts import account_of
        from tanager.search.experiments import at_the_edge

        if (best := _best(rows))["accuracy"] == 0:  # that of a run that diverged
            raise ValueError(
                f"none of {len(rows)} settings got a held-out example right: runs "
                "diverged; try lower learning rates"
            )
        screen = new_console(stderr=True)
        for edge in at_the_edge(rows, best):
            screen.print(f"at the edge of the grid: {edge}", style="yellow")
        cell = cells[rows.index(best)]
        target, name = cell.target, cell.jobs[0].folder.name.removesuffix("-0")
        recipe = dataclasses.replace(target.recipe, out=f"{out}/winner/{name}")
        if recipe.features is not None:  # those of the simulations lack some examples
            recipe = dataclasses.replace(recipe, features=f"{recipe.features}/all")
        prepared = runner.prepare(target.name, recipe)
        account = account_of(recipe, prepared.dataset)
        repeats.require_room(prepared, self.winner_repeats, account)
        study = {"path": str(out.resolve()), "trial": None, "prediction": None}
        given = {"account": account, "links": {"study": study}}
        results = [
            runner.run(each, progress=not self.json, **given)
            for each in repeats.repeated(prepared, self.winner_repeats)
        ]
        return repeats.summary(prepared, results)


TABLES = {"budget": Budget, "privacy": Privacy, "data": Data, "ablation": Ablation}


def target_of(name: str, recipe: Recipe) -> Target:
    """Return the run that simulations of a recipe stand for.

    It trains on all examples: the simulations alone hold some out.
    """
    from tanager.search import jobs

    examples = jobs.training_examples(recipe)
    recipe = dataclasses.replace(recipe, validation_examples=0)
    return plan_simulation(name, recipe, examples)


def held_out(recipe: Recipe, target: Target) -> int:
    """Return how many training examples simulations are compared on: a tenth."""
    return recipe.validation_examples or max(1, target.examples // 10)


def tabulate(word: str, words: Sequence[str]) -> int:
    """Run `tanager search WORD RECIPE`; WORD is one of `TABLES`."""
    entry, recipe, options = flags.parse(f"search {word}", words, TABLES[word])

    # JAX is imported from here on: the command line was fine.
    from tanager.recipes.repeats import sentence
    from tanager.search import experiments, jobs
    from tanager.search.settings import check_choices
    from tanager.search.simulation import TOO_SMALL

    name = entry.name
    if options.training_accuracy and recipe.unreadable == "skip":
        rule = "must be error to measure accuracy on the training examples"
        remedy = "remove the images that cannot be read"
        validate.refuse("unreadable", recipe.unreadable, rule, remedy)
    target = target_of(name, recipe)
    out = Path(recipe.out or f"runs/{name}-{word}")
    batch_size = options.simulation_batch_size
    if batch_size is None:
        batch_size = min(max(32, recipe.batch_size // 64), recipe.batch_size)
    validate.whole(simulation_batch_size=batch_size, at_least=1, remedy=TOO_SMALL)
    if batch_size > recipe.batch_size:
        rule = f"must be at most the target's batch size, {recipe.batch_size}"
        validate.refuse("simulation_batch_size", batch_size, rule)
    factor = batch_size / recipe.batch_size
    simulations = experiments.Simulations(
        out,
        factor,
        held_out(recipe, target),
        options.repeats,
        options.training_accuracy,
    )
    cells = options.cells(target, simulations)
    every = [job for cell in cells for job in cell.jobs]
    if vary := getattr(options, "vary", ()):
        start = target.simulated(batch_size)
        dataset = jobs.load(every[0].recipe)
        check_choices(Space.parse(vary), start, target.steps, dataset)
    then = [] if (out / "winner").exists() else options.then(cells)
    words = "all simulations" + " and then the runs of the best" * bool(then)
    jobs.require_room(every, then, words)
    experiments.begin(simulations, word, target, cells)
    screen = new_console(stderr=True)
    budgets = dict.fromkeys(format_epsilon(cell.target.epsilon) for cell in cells)
    screen.print(
        f"{len(every)} simulations, with NO privacy guarantee, of runs at ε = "
        + ", ".join(budgets)
    )
    outcomes = work_through(every, screen, lambda job: job.folder.name)
    found = {job.folder: each for job, each in zip(every, outcomes, strict=True)}
    rows = experiments.table(cells, found)
    more = options.predict(target, rows)
    content = {"experiment": word, "recipe": name, "rows": rows}
    content |= {} if more is None else {"prediction": more}
    write_json(out / "table.json", content)
    options.draw(cells, content, out)
    if (winner := options.train(cells, rows, out)) is not None:
        content["winner"] = winner
        write_json(out / "table.json", content)
    if options.json:
        return print_json(content)
    _print(rows, out, word, more)
    if winner is not None:
        who = "persons" if recipe.unit == "group" else "examples"
        size = f"{target.examples} {who}"
        print(f"the best again, on {size}, none held out: {sentence(winner)}")
    charged = accounts.sentence(recipe, accounts.total_of(recipe, target.delta))
    print(charged, end="")
    return 0


_PRINTED = ("epsilon", "batch_size", "steps", "noise_multiplier", "learning_rate")


def _best(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return max(rows, key=lambda row: row["accuracy"])


def _print(
    rows: list[dict[str, Any]], out: Path, word: str, more: dict[str, Any] | None
) -> None:
    console = new_console(markup=False)
    # These have a column.
    own = ("batch_size", "learning_rate", "noise_multiplier", "epsilon")
    names = [n for n in {n: 0 for row in rows for n in row["title"]} if n not in own]
    best = _best(rows)
    headings = (*names, "batch size", "learning rate", "σ", "ε", "δ", "simulated at")
    headings = [heading.replace("_", " ") for heading in (*headings, "accuracy")]
    measured = best["training_accuracy"] is not None
    headings += ["on training examples"] * measured
    table = new_table(*headings, texts=headings)
    for row in rows:
        spread = "" if row["deviation"] is None else f" ± {100 * row['deviation']:.1f}"
        table.add_row(
            *(str(row["title"].get(name, "—")) for name in names),
            f"{row['batch_size']}",
            f"{row['learning_rate']:g}",
            f"{row['noise_multiplier']:.4g}",
            format_epsilon(row["epsilon"]),
            format_delta(row["delta"]),
            f"{row['simulated_batch_size']}",
            f"{100 * row['accuracy']:.2f} %{spread}" + (" ←" if row is best else ""),
            *([f"{100 * row['training_accuracy']:.2f} %"] if measured else []),
        )
    print_table(table)
    if word in ("privacy", "budget"):
        rest = [name for name in best["title"] if name not in _PRINTED]
        others = "".join(
            f"; {name.replace('_', ' ')} {best['title'][name]}" for name in rest
        )
        console.print(
            f"best: --noise-multiplier {best['noise_multiplier']} "
            f"--steps {best['steps']} --batch-size {best['batch_size']} "
            f"--learning-rate {best['learning_rate']}, "
            f"ε = {format_epsilon(best['epsilon'])} at "
            f"δ = {format_delta(best['delta'])} by {best['accountant'].upper()}"
            f"{others}"
        )
    if more is not None:
        told = more["prediction"]
        console.print(
            f"with {more['examples']} examples: "
            f"ε = {format_epsilon(more['epsilon'])} at "
            f"δ = {format_delta(more['delta'])}, "
            "and a simulation is predicted to reach "
            f"{100 * told['accuracy']:.1f} %, between {100 * told['low']:.1f} and "
            f"{100 * told['high']:.1f} % in {100 * told['confidence']:g} of 100 tables"
        )
    drawn = ", ".join(sorted(path.name for path in out.glob("*.png")))
    console.print(f"table and pictures: {out}/table.json, {drawn}", soft_wrap=True)
