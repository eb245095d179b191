"""What a complete run hands over: the guarantee, the models, the report."""

import contextlib
import dataclasses
import datetime
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import equinox as eqx
import numpy as np
from jaxtyping import PyTree

from tanager._files import write_json
from tanager._reading import UnreadableFile
from tanager.keys import is_key
from tanager.models import weights
from tanager.parallel import hosts
from tanager.privacy import accountant, tan
from tanager.privacy.class_counts import release_in
from tanager.privacy.ledger import Ledger
from tanager.privacy.mechanism import Adjacency, Mechanism
from tanager.privacy.risk import risk
from tanager.report import run_page
from tanager.report.run_files import read_result
from tanager.training import fingerprint
from tanager.training.evaluate import Evaluation
from tanager.training.resume import Position
from tanager.training.run_folder import RunFolder
from tanager.training.targets import TARGETS


PERSON_SIZES = (2, 5, 10)
"""Images of a person whose ε a run per image states."""
_NOTED = ("epsilon", "delta", "adjacency", "unit", "accountant", "private", "steps")
_MOST_DRAWN = 1 << 20  # logits, of which intervals are drawn in seconds
_MOST_CLASSES = 200  # of a confusion matrix on record


@dataclasses.dataclass(frozen=True)
class TrainResult:
    """The result of a complete run; all of it may be released.

    Attributes:
        params: the final parameters, like the `params` given.
        average: their exponential moving average, likewise.
        epsilon: ε spent, by the run's accountant, for every step in the ledger. No
            guarantee if ``summary["private"]`` is False: a seed was given, say.
        delta: the δ it holds at.
        evaluation: of the final parameters; None without an evaluator.
        evaluation_ema: of the average; None without an evaluator.
        summary: the numbers of result.json.
        out: the run's folder; None when there is none.
    """

    params: PyTree
    average: PyTree
    epsilon: float
    delta: float
    evaluation: Evaluation | None
    evaluation_ema: Evaluation | None
    summary: Mapping[str, Any]
    out: Path | None

    def __repr__(self) -> str:
        """Return the guarantee and the measures, without parameters."""
        names = ("epsilon", "delta", "private", "test_accuracy", "test_accuracy_ema")
        said = {name: self.summary.get(name) for name in names} | {"out": self.out}
        return f"TrainResult({', '.join(f'{n}={v!r}' for n, v in said.items())})"


def hand_over(
    position: Position,
    config: Mapping[str, Any],
    models: tuple[PyTree, PyTree],
    evaluations: tuple[Evaluation, Evaluation] | None,
    private: bool,
    speed: Mapping[str, float | None],
    total: Mapping[str, Any] | None = None,
) -> TrainResult:
    """Compute the guarantee from the ledger and write the run's final files.

    `total` is what the account of the data says, see `charging.total`. On several
    hosts the chief does so, and tells the others.
    """
    raw, ema = evaluations or (None, None)
    folder, mechanism = position.folder, Mechanism(**config["mechanism"])

    def write() -> dict[str, Any]:
        assert position.ledger is not None
        of_search = config.get("private_search", False)
        summary = {
            **cost(position.ledger, mechanism, config),
            **scores(evaluations),
            "per_class": raw and ema and _per_class(raw, ema),
            "measures": raw and ema and _measures(raw, ema),
            **_times(folder, speed),
            "private": private and mechanism.noise_multiplier > 0 and not of_search,
            "unreadable": config["unreadable"],
            "versions": fingerprint.versions(),
        }
        if of_search:
            summary["private_search"] = True
        if total is not None:
            summary["account"] = total
        if folder is not None:
            _write(folder, summary, config, *models)
        return summary

    summary = hosts.from_chief(write)
    out = folder.path if folder else None
    return TrainResult(
        *models, summary["epsilon"], config["delta"], raw, ema, summary, out
    )


def cost(
    ledger: Ledger, mechanism: Mechanism, config: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what a complete run spent, for every step in its ledger.

    Raises:
        ValueError: the ledger is not this run's, or lacks a step.
    """
    counts = release_in(config)
    ledger.require(mechanism, mechanism.steps, class_counts=counts)
    spent = dataclasses.replace(mechanism, steps=ledger.steps())
    delta, replaces = config["delta"], mechanism.adjacency is Adjacency.REPLACE_ONE
    by, unit = config.get("accountant", "pld"), config.get("unit", "example")
    both = [*filter(None, (counts,)), spent]
    sizes = () if replaces or unit != "example" else PERSON_SIZES
    return {
        "epsilon": accountant.composed_epsilon(both, delta, by),
        "delta": delta,
        "adjacency": str(mechanism.adjacency),
        "accountant": by,
        "epsilon_rdp": None
        if replaces
        else accountant.composed_epsilon(both, delta, "rdp"),
        "epsilon_of_person": {
            str(size): accountant.composed_epsilon(both, delta, group=size)
            for size in sizes
        },
        "steps": spent.steps,
        "batch_size": config["batch_size"],
        "sample_rate": mechanism.sample_rate,
        "noise_multiplier": mechanism.noise_multiplier,
        "class_counts_noise": counts and counts.noise_multiplier,
        "clip_norm": config["clip_norm"],
        "clip_gamma": config.get("clip_gamma"),
        "adaptive_clipping": config.get("adaptive_clipping"),
        "examples": config["examples"],
        "unit": unit,
        "examples_per_group": config.get("examples_per_group"),
        "eta": tan.eta(spent),
        "eta_step": tan.eta_step(spent),
        "total_noise": tan.total_noise(spent),
        "risk": risk(*both).to_json(),
    }


def scores(
    evaluations: tuple[Evaluation, Evaluation] | None,
) -> dict[str, float | None]:
    """Return the numbers on record of the parameters and of their average."""
    raw, ema = evaluations or (None, None)
    shown: dict[str, float | None] = {"test_accuracy": None, "test_accuracy_ema": None}
    for each, end in ((raw, ""), (ema, "_ema")):
        if each is not None:
            found = each.scores or {"accuracy": each.accuracy}
            shown |= {f"test_{name}{end}": value for name, value in found.items()}
    return {
        **shown,
        "test_accuracy_vote": raw.vote_accuracy if raw else None,
        "test_accuracy_vote_ema": ema.vote_accuracy if ema else None,
        "test_loss": raw.loss if raw else None,
        "test_loss_ema": ema.loss if ema else None,
    }


def _times(
    folder: RunFolder | None, speed: Mapping[str, float | None]
) -> Mapping[str, Any]:
    """Return the day and the speed; those on record if this time there were no steps.

    The speed is then not known.
    """
    today = {"date": datetime.datetime.now(datetime.UTC).date().isoformat(), **speed}
    if folder and speed["examples_per_second"] is None and folder.result.exists():
        with contextlib.suppress(UnreadableFile):  # it is written again
            before = read_result(folder.path)
            return {name: before.get(name) for name in today}
    return today


def note(result: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what weights say of themselves: what was spent, and the id of its charge.

    The id is left out if a person gave the seed, which it could reveal.
    """
    said = {name: result.get(name) for name in _NOTED}
    if config.get("private", result.get("private")):
        said["charge"] = config.get("charge")
    return said


def _write(
    folder: RunFolder,
    summary: Mapping[str, Any],
    config: Mapping[str, Any],
    params: PyTree,
    average: PyTree,
) -> None:
    # One string: safetensors keeps several in no fixed order.
    metadata = {"tanager": json.dumps(note(summary, config))}
    for model, name in ((params, "model"), (average, "model-ema")):
        tensors = eqx.filter(model, is_key, inverse=True)
        weights.save(tensors, folder.path / f"{name}.safetensors", metadata)
    write_json(folder.result, summary)
    run_page.write_report(folder.path)


def _per_class(raw: Evaluation, ema: Evaluation) -> list[dict[str, Any]]:
    return [
        {
            "class": one.name,
            "examples": one.examples,
            "accuracy": one.accuracy,
            "accuracy_ema": two.accuracy,
        }
        for one, two in zip(raw.per_class, ema.per_class, strict=True)
    ]


def _measures(raw: Evaluation, ema: Evaluation) -> dict[str, Any] | None:
    """Return all measures of both models; None of logits that have no order."""
    both = {"parameters": raw, "average": ema}
    measured = {}
    for name, each in both.items():
        outputs = each.outputs
        if outputs is None or not np.isfinite(outputs.logits).all():
            return None
        classes = [str(one.name) for one in each.per_class]
        target = TARGETS[outputs.labels.ndim == 2]
        found = target.measure(
            target.probabilities(outputs.logits),
            outputs.labels,
            classes,
            bootstrap=each is ema and outputs.logits.size <= _MOST_DRAWN,
        )
        if each is raw or len(classes) > _MOST_CLASSES:
            found.pop("confusion_matrix", None)
        if each is raw:
            del found["per_class"]
        del found["classes"]  # they are in config.json
        measured[name] = found
    return measured
