"""Tables of simulations: budgets, privacy parameters, quantity of data, ablations.

Each table is a list of runs in folders (`tanager.search.jobs`), so it can be killed,
resumed and shared between workers like a study.

References:
    Sander, Stock and Sablayrolles 2023, TAN Without a Burn, Table 3 (privacy
    parameters), Tables 5 and 6 (quantity of data), Figure 5 (ablation). De et al. 2022,
    Unlocking High-Accuracy Differentially Private Image Classification through Scale,
    section 5 and appendix C.4 (budgets), Table 2 (cumulative ablation).
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tanager import __version__
from tanager import _validate as validate
from tanager._files import make_folder, write_json
from tanager._record import Each, read_record
from tanager.privacy import accountant
from tanager.report.run_files import read_metrics
from tanager.search.jobs import SHARED, Job, Outcome, repeats
from tanager.search.scaling_law import ScalingLaw
from tanager.search.settings import require_same
from tanager.search.simulation import Target
from tanager.search.space import Choices, Space
from tanager.training.run_folder import refuse_foreign


_AROUND = (0.5, 1, 2)
_ASKED = {"experiment": str, "recipe": Each(object), "runs": Each(Each(object))}


class Cell(NamedTuple):
    """One setting of a table, and its repeats.

    Attributes:
        title: what this setting varies, by name.
        target: the run that this setting stands for.
        jobs: its simulations, one for each repeat.
    """

    title: Mapping[str, Any]
    target: Target
    jobs: tuple[Job, ...]


@dataclasses.dataclass(frozen=True)
class Simulations:
    """How the settings of a table are simulated.

    Attributes:
        folder: of the table.
        factor: batch size of a simulation over that of the run it stands for, up to 1.
        validation_examples: training examples held out to compare the simulations.
        repeats: simulations of each setting.
        on_training: measure the accuracy on the training examples, too.
    """

    folder: Path
    factor: float
    validation_examples: int
    repeats: int = 1
    on_training: bool = False

    def __post_init__(self):
        validate.whole(repeats=self.repeats, at_least=1)
        validate.fraction(
            factor=self.factor, remedy="a simulation is smaller than its target"
        )

    def cell(self, title: Mapping[str, Any], target: Target, **fields: Any) -> Cell:
        """Return the cell of a setting; `fields` of its simulations' recipe change."""
        batch_size = round(target.recipe.batch_size * self.factor)
        left = target.examples - self.validation_examples
        if batch_size > left:
            rule = f"must be at most the {left} training examples that are not held out"
            validate.refuse("simulation_batch_size", batch_size, rule)
        fields = {"validation_examples": self.validation_examples, **fields}
        recipe = target.simulated(batch_size, **fields)
        name = "-".join(f"{key}={value}" for key, value in title.items())
        path = self.folder / "runs" / name
        shared = self.folder / SHARED
        first = Job(path, recipe, target.name, shared, self.on_training)
        return Cell(title, target, repeats(first, self.repeats))


def privacy_parameters(
    target: Target,
    steps: Sequence[int],
    simulations: Simulations,
    *,
    scale_average: bool = False,
) -> list[Cell]:
    """Vary S and B at constant η and σ (section 4.3, Table 3).

    With `scale_average`, the average of parameters is over the same share of each run.

    Raises:
        ValueError: a number of steps is so small that its batch would be larger than
            the data, or a simulation expects fewer than one example.
    """
    return [
        simulations.cell(
            {"steps": count},
            target
            if count == target.steps
            else target.at_steps(count, scale_average=scale_average),
        )
        for count in sorted({*steps, target.steps})
    ]


def data_quantity(
    target: Target, examples: Sequence[int], simulations: Simulations
) -> list[Cell]:
    """Vary N at the same B, σ and S (section 4.4, Tables 5 and 6).

    The gain in accuracy is simulated on parts of the data; the change of ε is computed.

    Raises:
        ValueError: there is only one number of examples, or one is below the batch
            size.
    """
    if len(set(examples)) < 2:
        rule = "must be two numbers or more"
        validate.refuse("try_examples", tuple(examples), rule, "add one")
    return [
        simulations.cell(
            {"examples": count}, target.at_examples(count), train_examples=count
        )
        for count in sorted(set(examples))
    ]


def more_data(
    target: Target, rows: Sequence[Mapping[str, Any]], examples: int
) -> dict[str, Any]:
    """Predict the effect of more data from the table of `data_quantity`.

    The prediction is of a simulation's accuracy, by a line against log N; its
    `batch_size` is N.

    Raises:
        ValueError: a batch would be larger than the data.
    """
    other = target.at_examples(examples)
    runs = [(row["title"]["examples"], each) for row in rows for each in row["runs"]]
    return {
        "examples": examples,
        "epsilon": other.epsilon,
        "delta": other.delta,
        "prediction": ScalingLaw.fit(runs).predict(examples)._asdict(),
    }


def begin(
    simulations: Simulations, experiment: str, target: Target, cells: Sequence[Cell]
) -> None:
    """Put on record what a table is made of, so that its runs can be told from others.

    More cells can come later; those that are there must stay as they are.

    Raises:
        ValueError: its folder has a table of something else.
    """
    folder = simulations.folder
    path = folder / "asked.json"
    recipe = {"name": target.name, **target.recipe.to_json(), "out": None}
    every = [job for cell in cells for job in cell.jobs]
    runs = {job.folder.name: job.recipe.to_json() for job in every}
    content = {
        "tanager": __version__,
        "experiment": experiment,
        "recipe": recipe,
        "examples": target.examples,
        "factor": simulations.factor,
        "validation_examples": simulations.validation_examples,
        "training_accuracy": simulations.on_training,
    }
    known: dict[str, Any] = {}
    if path.exists():
        before = read_record(path, _ASKED)
        known = before["runs"]
        require_same(folder, {name: before.get(name) for name in content}, content)
        for name in known.keys() & runs.keys():
            own = {"recipe": known[name]}, {"recipe": runs[name]}
            require_same(folder / "runs" / name, *own)
    else:
        refuse_foreign(folder, (), "table")
    make_folder(folder, "out", 0o700)
    write_json(path, content | {"runs": known | runs})


def around(target: Target, validation_examples: int) -> Space:
    """Return batch size, steps and learning rate at ½, 1 and 2 times the target's."""
    recipe, most = target.recipe, target.examples - validation_examples
    sizes = [min(most, max(1, round(f * recipe.batch_size))) for f in _AROUND]
    steps = [max(1, round(f * target.steps)) for f in _AROUND]
    rates = [f * recipe.learning_rate for f in _AROUND]
    names = ("batch_size", "steps", "learning_rate")
    values = zip(names, (sizes, steps, rates), strict=True)
    return Space({name: Choices(tuple(dict.fromkeys(each))) for name, each in values})


def at_the_edge(
    rows: Sequence[Mapping[str, Any]], best: Mapping[str, Any]
) -> list[str]:
    """Return what of the best row is the least or largest that was tried."""
    said = []
    for name, value in best["title"].items():
        tried = sorted({row["title"][name] for row in rows if name in row["title"]})
        least, most = tried[0], tried[-1]
        if least != most and not isinstance(value, str) and value in (least, most):
            which = "least" if value == least else "largest"
            said.append(f"{name.replace('_', ' ')} {value:g} is the {which} tried")
    return said


def cumulative(target: Target, space: Space, simulations: Simulations) -> list[Cell]:
    """Begin with the first value of each name, then change one name after another.

    Each name, in the order given, changes to its last value and keeps it (Unlocking
    paper, Table 2).

    Raises:
        ValueError: a range is given, or a combination makes no recipe.
    """
    points = space.points(target.recipe)
    first, last = points[0], points[-1]
    if len(points) < 2 or first.keys() != last.keys():
        rule = "must change, and apply to one optimizer"
        remedy = "give two values of each name: NAME=FIRST,LAST"
        validate.refuse("vary", [*space.values], rule, remedy)
    values, cells = dict(first), []
    for name in (None, *(name for name in space.values if name in first)):
        title = {"change": "none"}
        if name is not None:
            values[name] = last[name]
            change = f"{name.replace('_', ' ')} from {first[name]} to {last[name]}"
            title = {"change": change}
        cells.append(simulations.cell(title, target.varied(space, values)))
    return cells


def ablation(target: Target, space: Space, simulations: Simulations) -> list[Cell]:
    """Try every combination of some values (TAN paper, Figure 5).

    Raises:
        ValueError: a range is given, or a combination makes no recipe.
    """
    points = space.points(target.recipe)
    return [simulations.cell(point, target.varied(space, point)) for point in points]


def curves(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """Return the mean accuracy of each cell while its run's budget is spent.

    `epsilon` is what the run, not its simulation, has spent at each evaluation
    (Unlocking paper, Figure 9).
    """
    found = []
    for cell in cells:
        reached: dict[int, list[float]] = {}
        for job in cell.jobs:
            for line in read_metrics(job.folder):
                if (accuracy := line.get("test_accuracy_ema")) is not None:
                    reached.setdefault(line["step"], []).append(accuracy)
        curve: dict[str, Any] = {"title": cell.title, "steps": sorted(reached)}
        target = cell.target
        curve["epsilon"] = [
            accountant.epsilon(
                target.mechanism, target.delta, target.recipe.accountant, step
            )
            for step in curve["steps"]
        ]
        means = [float(np.mean(reached[step])) for step in curve["steps"]]
        found.append(curve | {"accuracy": means})
    return found


def table(
    cells: Sequence[Cell], outcomes: Mapping[Path, Outcome]
) -> list[dict[str, Any]]:
    """Return a row for each cell, from the outcomes of all jobs by their folder.

    The accuracy is the mean over the repeats, the deviation their standard deviation.
    That on the training examples is None if it was not measured.
    """
    rows = []
    for cell in cells:
        found = [outcomes[job.folder] for job in cell.jobs]
        runs = [each.accuracy for each in found]
        training = [each.training_accuracy for each in found]
        known = [each for each in training if each is not None]
        rows.append(
            {
                "title": cell.title,
                "batch_size": cell.target.recipe.batch_size,
                "steps": cell.target.steps,
                "noise_multiplier": cell.target.mechanism.noise_multiplier,
                "learning_rate": cell.target.recipe.learning_rate,
                "epsilon": cell.target.epsilon,
                "delta": cell.target.delta,
                "accountant": cell.target.recipe.accountant,
                "simulated_batch_size": cell.jobs[0].recipe.batch_size,
                "accuracy": float(np.mean(runs)),
                "deviation": float(np.std(runs, ddof=1)) if len(runs) > 1 else None,
                "training_accuracy": float(np.mean(known)) if known else None,
                "runs": runs,
            }
        )
    return rows
