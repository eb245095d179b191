"""Tables of simulations: privacy parameters, quantity of data, ablations.

Each table is a list of runs in folders (`tanager.search.jobs`), so it can be killed,
resumed and shared between workers like a study.

References:
    Sander, Stock and Sablayrolles 2023, TAN Without a Burn, Table 3 (privacy
    parameters), Tables 5 and 6 (quantity of data), Figure 5 (ablation).
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tanager import _validate as validate
from tanager.search.jobs import Job, Outcome
from tanager.search.scaling_law import ScalingLaw
from tanager.search.simulation import Target
from tanager.search.space import Space


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
        jobs = tuple(
            Job(self.folder / "runs" / f"{name}-{repeat}", recipe, target.name)
            for repeat in range(self.repeats)
        )
        return Cell(title, target, jobs)


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


def ablation(target: Target, space: Space, simulations: Simulations) -> list[Cell]:
    """Try every combination of some values (Figure 5).

    Raises:
        ValueError: a range is given, or a combination makes no recipe.
    """
    cells = []
    for title in space.points(target.recipe):
        recipe = space.recipe(target.recipe, title)
        cells.append(
            simulations.cell(title, dataclasses.replace(target, recipe=recipe))
        )
    return cells


def table(
    cells: Sequence[Cell], outcomes: Mapping[Path, Outcome]
) -> list[dict[str, Any]]:
    """Return a row for each cell, from the outcomes of all jobs by their folder.

    The accuracy is the mean over the repeats, the deviation their standard deviation.
    """
    rows = []
    for cell in cells:
        runs = [outcomes[job.folder].accuracy for job in cell.jobs]
        rows.append(
            {
                "title": cell.title,
                "batch_size": cell.target.recipe.batch_size,
                "steps": cell.target.steps,
                "learning_rate": cell.target.recipe.learning_rate,
                "epsilon": cell.target.epsilon,
                "delta": cell.target.delta,
                "simulated_batch_size": cell.jobs[0].recipe.batch_size,
                "accuracy": float(np.mean(runs)),
                "deviation": float(np.std(runs, ddof=1)) if len(runs) > 1 else None,
                "runs": runs,
            }
        )
    return rows
