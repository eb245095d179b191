"""The result of a study: best choices, prediction, cost and privacy."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from tanager.search import jobs
from tanager.search.jobs import Job, Outcome
from tanager.search.scaling_law import Run, ScalingLaw
from tanager.search.simulation import Target
from tanager.search.study import Study
from tanager.training.norms import Norms


def summarise(
    study: Study, winner: Sequence[Job], outcomes: Sequence[Outcome]
) -> dict[str, Any]:
    """Return the result of a study whose trials are done, as content of result.json.

    `winner` are the runs of the best choices, `outcomes` the result of each.
    """
    settings = study.settings
    target, results, best = settings.target, study.results(), study.best()
    if best is None:
        raise ValueError(
            f"none of {len(results)} trials was complete: all diverged or were pruned; "
            "search lower learning rates"
        )
    target = target.varied(settings.space, best.values)
    recipe = target.recipe
    held_out = settings.validation_examples
    reference = dataclasses.replace(recipe, validation_examples=held_out)
    one = jobs.flops(reference, target.steps)
    trials = sum(each.flops for each in results)
    confirmed = sum(found.flops for found in outcomes)
    return {
        "recipe": target.name,
        "target": {
            "batch_size": target.recipe.batch_size,
            "noise_multiplier": target.mechanism.noise_multiplier,
            "steps": target.steps,
            "examples": target.examples,
            "epsilon": target.epsilon,
            "delta": target.delta,
        },
        "best": {
            "trial": best.number,
            "values": best.values,
            "accuracy": best.accuracy,
            "batch_size": winner[0].recipe.batch_size,
            "recipe": recipe.to_json(),
        },
        **_prediction(target, winner, outcomes),
        "trials": [each._asdict() for each in results],
        "cost": {
            "trials_flops": trials,
            "winner_flops": confirmed,
            "reference_flops": one,
            "trials_share": trials / one,
            "winner_share": confirmed / one,
            "share_of_reference": (trials + confirmed) / one,
            "seconds": sum(each.seconds for each in (*results, *outcomes)),
        },
        "privacy": {
            "simulations_epsilon": {
                str(batch_size): target.epsilon_at(batch_size)
                for batch_size in sorted({job.recipe.batch_size for job in winner})
            },
            "held_out_examples": held_out,
        },
    }


def _prediction(
    target: Target, winner: Sequence[Job], outcomes: Sequence[Outcome]
) -> dict[str, Any]:
    runs = [
        Run(job.recipe.batch_size, found.accuracy)
        for job, found in zip(winner, outcomes, strict=True)
    ]
    if len({run.batch_size for run in runs}) < 2:
        return {"prediction": None, "law": None, "bands": []}
    law, reference = ScalingLaw.fit(runs), target.recipe.batch_size
    mean_square = _mean_square(winner, outcomes)
    sigma, parameters = target.mechanism.noise_multiplier, jobs.parameters(winner[0])
    of_noise = sigma, parameters, mean_square
    predicted = law.predict(reference)._asdict()
    doubts = law.doubts(reference, *of_noise)
    return {
        "prediction": {
            "reference_batch_size": predicted.pop("batch_size"),
            **predicted,
            "mean_square": mean_square,
            "without_sampling": law.without_sampling(reference, *of_noise),
            "trusted": not doubts,
            "doubts": doubts,
        },
        "law": law.to_json(),
        "bands": [
            (size, law.at(size), *law.band(size))
            for size in np.geomspace(runs[0].batch_size, reference, 60).tolist()
        ],
    }


def _mean_square(winner: Sequence[Job], outcomes: Sequence[Outcome]) -> float:
    """Return the mean of `Norms.mean_square` of the runs that did not diverge."""
    found = [
        Norms.read(job.folder).mean_square()
        for job, outcome in zip(winner, outcomes, strict=True)
        if not outcome.diverged
    ]
    return float(np.mean(found)) if found else 1.0
