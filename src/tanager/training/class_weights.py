"""Class weights from noisy class counts, released once before the first step.

The weights are an array of the model that is not trained: 1 until the counts are
released, which is after everything was checked and the run was charged.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from tanager import _validate as validate
from tanager._files import write_json
from tanager._record import Maybe, read_record
from tanager.parallel import hosts
from tanager.privacy.class_counts import (
    balancing_weights,
    checked_labels,
    noisy_counts,
)
from tanager.seed import Seed
from tanager.training.problem import DPSGD, Problem
from tanager.training.resume import Position
from tanager.training.step import Step


_RECORD = "noisy_counts"
_SHAPE = {_RECORD: Maybe({"counts": [float], "weights": [float]})}


class Weighted(eqx.Module):
    """A model beside the weights of the classes that it is trained with, float32[K]."""

    model: PyTree
    class_weights: Array


def balanced(
    problem: Problem, labels: Callable[[], np.ndarray], classes: int
) -> Problem:
    """Return a problem whose loss of an example is multiplied by its class's weight.

    Examples have a `label`; `labels` returns those of all, int[n], which are private.
    """
    trained, _ = problem.split()
    marks = jax.tree.map(
        lambda leaf: leaf is not None, trained, is_leaf=lambda leaf: leaf is None
    )

    def loss(params: Weighted, example: Any) -> Array:
        weight = params.class_weights[example["label"].astype(jnp.int32)]
        return weight * problem.loss(params.model, example)

    return replace(
        problem,
        loss=loss,
        params=Weighted(problem.params, jnp.ones(classes, jnp.float32)),
        trainable=Weighted(marks, False),  # pyrefly: ignore[bad-argument-type]
        finish=lambda params: problem.finish(params.model),
        labels=labels,
    )


def labels_of(problem: Problem) -> np.ndarray:
    """Return the labels of a balanced problem, int64[n]: one for each example.

    Raises:
        ValueError: the problem is not balanced, or its labels are not as above. The
            message names no label.
    """
    assert problem.labels is not None
    if not isinstance(problem.params, Weighted):
        rule = "must be Weighted with labels"
        remedy = "see tanager.training.class_weights.balanced"
        validate.refuse_type("params", problem.params, rule, remedy)
    labels = checked_labels(problem.labels(), len(problem.params.class_weights))
    if len(labels) != (examples := len(problem.source())):
        rule = f"must be one for each of the {examples} examples"
        validate.refuse("labels", len(labels), rule, "one example counts once")
    return labels


def recorded(out: str | Path | None) -> dict[str, Any]:
    """Return what config.json of a run's folder says of counts released before."""
    path = None if out is None else Path(out) / "config.json"
    if path is None or not path.exists():
        return {}
    found = read_record(path, _SHAPE)[_RECORD]
    return {} if found is None else {_RECORD: found}


def release(
    problem: Problem,
    algorithm: DPSGD,
    position: Position,
    secret: Seed,
    config: dict[str, Any],
    step: Step,
) -> Step:
    """Charge the class counts, release them, and return the step with their weights.

    They are computed once, and are in config.json before anything is made of them: a
    run that resumes reads them there. One that was killed before draws the same noise
    again, for the same counts.
    """
    spent, labels = algorithm.class_counts, problem.labels
    assert spent is not None and labels is not None

    def once() -> dict[str, list[float]]:
        position.charge_class_counts(spent)
        if _RECORD in config:
            return config[_RECORD]
        owners = None if problem.groups is None else problem.groups.numbers
        classes = len(problem.params.class_weights)
        counts = noisy_counts(spent, labels(), classes, secret, owners)
        weights = balancing_weights(counts, spent, config["examples"])
        found = {"counts": counts, "weights": weights}
        if position.folder is not None:
            write_json(position.folder.config, config | {_RECORD: found})
        return found

    config[_RECORD] = hosts.from_chief(once)
    return step.with_class_weights(config[_RECORD]["weights"])
