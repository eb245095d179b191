"""Tables of simulations: privacy parameters, quantity of data, ablations.

Each table is a list of runs in folders (`tanager.search.jobs`), so it can be killed,
resumed and shared between workers like a study.

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
from tanager.search.jobs import Job, Outcome
from tanager.search.scaling_law import Prediction, ScalingLaw
from tanager.search.simulation import Target
from tanager.search.space import Between, Space


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


class Row(NamedTuple):
    """The result of a cell.

    Attributes:
        title: of the cell.
        batch_size: of the run that it stands for, B.
        steps: of that run, S.
        learning_rate: of that run and of its simulations.
        epsilon: of that run, by PLD.
        delta: of that ε.
        simulated_batch_size: of the simulations.
        accuracy: mean over the repeats, in [0, 1].
        deviation: their standard deviation; None for a single one.
        runs: the accuracy of each repeat.
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
    """What a run on another number of examples is predicted to reach.

    Attributes:
        examples: how many it trains on, N.
        epsilon: of that run, by PLD.
        delta: of that ε.
        prediction: of a simulation's accuracy, by a line through the table against
            log N; its `batch_size` is N.
    """

    examples: int
    epsilon: float
    delta: float
    prediction: Prediction


@dataclasses.dataclass(frozen=True)
class Simulations:
    """How the settings of a table are simulated.

    Attributes:
        folder: of the table.
        factor: batch size of a simulation over that of the run it stands for, below 1.
        validation_examples: training examples held out to compare the simulations.
        repeats: simulations of each setting.

    Raises:
        ValueError: a field is out of range.
    """

    folder: Path
    factor: float
    validation_examples: int
    repeats: int = 1

    def __post_init__(self):
        validate.whole(repeats=self.repeats, at_least=1)
        validate.fraction(
            factor=self.factor, remedy="a simulation is smaller than its target"
        )

    def cell(self, title: Mapping[str, Any], target: Target, **fields: Any) -> Cell:
        """Return the cell of a setting; `fields` of its simulations' recipe change."""
        batch_size = round(target.recipe.batch_size * self.factor)
        fields = {"validation_examples": self.validation_examples, **fields}
        recipe = target.simulated(batch_size, **fields)
        name = "-".join(f"{key}={value}" for key, value in title.items())
        runs = self.folder / "runs"
        jobs = tuple(
            Job(runs / f"{name}-{repeat}", recipe, target.name)
            for repeat in range(self.repeats)
        )
        return Cell(title, target, jobs)


def privacy_parameters(
    target: Target, steps: Sequence[int], simulations: Simulations
) -> list[Cell]:
    """Vary S and B at constant η and σ (section 4.3, Table 3).

    Args:
        target: the run to start from, which is a row of the table too.
        steps: numbers of steps S to try.
        simulations: how to simulate them.

    Raises:
        ValueError: a number of steps is so small that its batch would be larger than
            the data, or a simulation expects fewer than one example.
    """
    return [
        simulations.cell(
            {"steps": count},
            target if count == target.steps else target.at_steps(count),
        )
        for count in sorted({*steps, target.steps})
    ]


def data_quantity(
    target: Target, examples: Sequence[int], simulations: Simulations
) -> list[Cell]:
    """Vary N at the same B, σ and S (section 4.4, Tables 5 and 6).

    The gain in accuracy is simulated on parts of the data; the change of ε is computed.

    Args:
        target: the run to start from.
        examples: numbers of training examples N to try.
        simulations: how to simulate them.

    Raises:
        ValueError: there is only one number of examples, there are fewer examples than
            that, or a batch would be larger than the data.
    """
    if len(set(examples)) < 2:
        validate.refuse(
            "try_examples", tuple(examples), "must be two numbers or more", "add one"
        )
    return [
        simulations.cell(
            {"examples": count}, target.at_examples(count), train_examples=count
        )
        for count in sorted(set(examples))
    ]


def more_data(
    target: Target, rows: Sequence[Row], examples: int, confidence: float = 0.95
) -> MoreData:
    """Predict the effect of more data (Tables 5 and 6).

    Args:
        target: the run on the data at hand.
        rows: the table of `data_quantity`.
        examples: the number of examples to predict for.
        confidence: of the interval.

    Raises:
        ValueError: a batch would be larger than the data.
    """
    other = target.at_examples(examples)
    runs = [(row.title["examples"], each) for row in rows for each in row.runs]
    predicted = ScalingLaw.fit(runs).predict(examples, confidence)
    return MoreData(examples, other.epsilon, other.delta, predicted)


def ablation(target: Target, space: Space, simulations: Simulations) -> list[Cell]:
    """Try every combination of some values (Figure 5).

    Args:
        target: the run to start from.
        space: names with their values; ranges are refused.
        simulations: how to simulate the combinations.

    Raises:
        ValueError: a range is given, or a combination makes no recipe.
    """
    grids = []
    for name, values in space.values.items():
        if isinstance(values, Between):
            validate.refuse("vary", name, "must have values, not a range", "list them")
        grids.append(values.values)
    cells = []
    for chosen in itertools.product(*grids):
        title = dict(zip(space.values, chosen, strict=True))
        recipe = space.recipe(target.recipe, title)
        cells.append(
            simulations.cell(title, dataclasses.replace(target, recipe=recipe))
        )
    return cells


def table(cells: Sequence[Cell], outcomes: Mapping[Path, Outcome]) -> list[Row]:
    """Return the result of each cell.

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
