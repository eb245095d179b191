"""Tables of simulations: privacy parameters, quantity of data, ablations.

Each is a list of runs in folders (`tanager.search.jobs`), so any of them can be killed,
gone on with and shared like a study, and a table made of what they came to.

References:
    Sander, Stock and Sablayrolles 2023, TAN Without a Burn, Table 3 (privacy
    parameters), Tables 5 and 6 (quantity of data), Figure 5 (ablation).
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tanager import _validate as validate
from tanager.recipes.recipe import Recipe
from tanager.search.jobs import Job, Outcome
from tanager.search.scaling_law import Prediction, ScalingLaw
from tanager.search.simulation import Target
from tanager.search.space import Between, Space


class Cell(NamedTuple):
    """One setting of a table, and its repeats.

    Attributes:
        title: what is different here, by name.
        target: the run that this setting stands for.
        jobs: its simulations, one for each repeat.
    """

    title: Mapping[str, Any]
    target: Target
    jobs: tuple[Job, ...]


class Row(NamedTuple):
    """What a cell came to.

    Attributes:
        title: of the cell.
        batch_size: of the run that it stands for, B.
        steps: S.
        learning_rate: of both.
        epsilon: of the run that it stands for, by PLD.
        delta: of that ε.
        simulated_batch_size: of the simulations.
        accuracy: mean over the repeats, in [0, 1].
        deviation: their standard deviation; None for a single one.
        runs: each of them.
    """

    title: Mapping[str, Any]
    batch_size: int
    steps: int
    learning_rate: float
    epsilon: float
    delta: float
    simulated_batch_size: int
    accuracy: float
    deviation: float | None
    runs: tuple[float, ...]


class MoreData(NamedTuple):
    """What more examples than there are would do.

    Attributes:
        examples: so many to train on, N.
        epsilon: of the run on them, by PLD.
        delta: of that ε.
        prediction: of the simulations' accuracy, by a line through those that were
            made against log N; its `batch_size` is N.
    """

    examples: int
    epsilon: float
    delta: float
    prediction: Prediction


def privacy_parameters(
    target: Target,
    steps: Sequence[int],
    factor: float,
    folder: Path,
    *,
    repeats: int = 1,
    validation_examples: int,
) -> list[Cell]:
    """Vary S and B at constant η and σ (section 4.3, Table 3).

    Args:
        target: the run to start from; it is a row of the table too.
        steps: numbers of steps S to try.
        factor: B of a simulation over B of what it stands for, below 1.
        folder: of the runs.
        repeats: simulations of each.
        validation_examples: held out to compare them.

    Raises:
        ValueError: so few steps would need a batch larger than the data, or a
            simulation expects less than one example.
    """
    every = sorted({*steps, target.steps})
    cells = []
    for count in every:
        other = target if count == target.steps else target.at_steps(count)
        batch_size = _scaled(other, factor)
        recipe = other.simulated(batch_size, validation_examples=validation_examples)
        cells.append(_cell({"steps": count}, other, recipe, folder, repeats))
    return cells


def data_quantity(
    target: Target,
    examples: Sequence[int],
    factor: float,
    folder: Path,
    *,
    repeats: int = 1,
    validation_examples: int,
) -> list[Cell]:
    """Vary N at the same B, σ and S (section 4.4, Tables 5 and 6).

    The gain in accuracy is simulated, on parts of the data that are there; what ε does
    is computed.

    Args:
        target: the run to start from.
        examples: numbers of training examples N to try.
        factor: B of a simulation over the target's, below 1.
        folder: of the runs.
        repeats: simulations of each.
        validation_examples: held out to compare them, the same for all.

    Raises:
        ValueError: there are not so many examples, or a batch would be larger, or
            there is but one number of them.
    """
    if len(set(examples)) < 2:
        validate.refuse(
            "try_examples", tuple(examples), "must be two numbers or more", "add one"
        )
    cells = []
    for count in sorted(set(examples)):
        other = target.at_examples(count)
        recipe = other.simulated(
            _scaled(other, factor),
            validation_examples=validation_examples,
            train_examples=count,
        )
        cells.append(_cell({"examples": count}, other, recipe, folder, repeats))
    return cells


def more_data(
    target: Target, rows: Sequence[Row], examples: int, confidence: float = 0.95
) -> MoreData:
    """Predict what more data would do (Tables 5 and 6).

    Args:
        target: the run on the data that are there.
        rows: the table of `data_quantity`.
        examples: how many there would be.
        confidence: of the interval.

    Raises:
        ValueError: a batch would be larger than so many examples.
    """
    other = target.at_examples(examples)
    runs = [(row.title["examples"], each) for row in rows for each in row.runs]
    predicted = ScalingLaw.fit(runs).predict(examples, confidence)
    return MoreData(examples, other.epsilon, other.delta, predicted)


def ablation(
    target: Target,
    space: Space,
    factor: float,
    folder: Path,
    *,
    repeats: int = 3,
    validation_examples: int,
) -> list[Cell]:
    """Every combination of some values (Figure 5).

    Args:
        target: the run to start from.
        space: names with their values; ranges have none to combine.
        factor: B of a simulation over the target's, below 1.
        folder: of the runs.
        repeats: simulations of each.
        validation_examples: held out to compare them.

    Raises:
        ValueError: a range is given, or a combination makes no recipe.
    """
    names, grids = [], []
    for name, values in space.values.items():
        if isinstance(values, Between):
            validate.refuse("vary", name, "must have values, not a range", "list them")
        names.append(name)
        grids.append(values.values)
    cells = []
    for chosen in itertools.product(*grids):
        title = dict(zip(names, chosen, strict=True))
        other = dataclasses.replace(target, recipe=space.recipe(target.recipe, title))
        recipe = other.simulated(
            _scaled(other, factor), validation_examples=validation_examples
        )
        cells.append(_cell(title, other, recipe, folder, repeats))
    return cells


def table(cells: Sequence[Cell], outcomes: Mapping[Path, Outcome]) -> list[Row]:
    """Return what each cell came to.

    Args:
        cells: of an experiment.
        outcomes: of all their jobs, by folder.
    """
    rows = []
    for cell in cells:
        runs = tuple(outcomes[job.folder].accuracy for job in cell.jobs)
        recipe = cell.target.recipe
        rows.append(
            Row(
                cell.title,
                recipe.batch_size,
                cell.target.steps,
                recipe.learning_rate,
                cell.target.epsilon,
                cell.target.delta,
                cell.jobs[0].recipe.batch_size,
                float(np.mean(runs)),
                float(np.std(runs, ddof=1)) if len(runs) > 1 else None,
                runs,
            )
        )
    return rows


def _scaled(target: Target, factor: float) -> int:
    validate.fraction(factor=factor, remedy="a simulation is smaller than its target")
    return round(target.recipe.batch_size * factor)


def _cell(
    title: Mapping[str, Any],
    target: Target,
    recipe: Recipe,
    folder: Path,
    repeats: int,
) -> Cell:
    validate.whole(repeats=repeats, at_least=1)
    name = "-".join(f"{key}={value}" for key, value in title.items())
    return Cell(
        title,
        target,
        tuple(
            Job(folder / "runs" / f"{name}-{repeat}", recipe, target.name)
            for repeat in range(repeats)
        ),
    )
