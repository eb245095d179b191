"""What a result claims is of every charge in the ledger."""

import contextlib
import dataclasses
from typing import Any

import numpy as np
import pytest

from tanager.privacy import tan
from tanager.privacy.accountant import composed_epsilon
from tanager.privacy.ledger import CLASS_COUNTS, Ledger
from tanager.privacy.mechanism import Adjacency, Mechanism
from tanager.privacy.risk import risk
from tanager.training.evaluate import ClassResult, Evaluation, Outputs
from tanager.training.result import cost, hand_over
from tanager.training.resume import Position
from tanager.training.state import State


RUN, DELTA = Mechanism(0.1, 2.0, 3), 1e-4
COUNTS = Mechanism(1.0, 5.0, 1)
CONFIG: dict[str, Any] = {"delta": DELTA, "batch_size": 5, "examples": 50}
CONFIG |= {"clip_norm": 1.0}


def cost_of(path, charges, config, run=RUN, counts=None):
    with contextlib.closing(Ledger(path)) as ledger:
        if counts is not None:
            ledger.charge(counts, 0, CLASS_COUNTS)
        for stream, step in charges:
            ledger.charge(run, step, stream)
        return cost(ledger, run, config)


def test_class_counts_and_steps_of_every_stream_are_spent(tmp_path):
    steps = ("a", 0), ("a", 1), ("b", 1), ("b", 2)
    config = CONFIG | {"class_counts": dataclasses.asdict(COUNTS)}
    found = cost_of(tmp_path / "ledger.jsonl", steps, config, counts=COUNTS)
    spent = dataclasses.replace(RUN, steps=4)
    both = COUNTS, spent
    assert (found["steps"], found["examples"]) == (4, 50)
    assert found["epsilon"] == composed_epsilon(both, DELTA)
    assert found["epsilon_rdp"] == composed_epsilon(both, DELTA, "rdp")
    two = composed_epsilon(both, DELTA, group=2)
    assert found["epsilon_of_person"]["2"] == two > found["epsilon"]
    assert found["risk"] == risk(*both).to_json()
    assert found["eta"] == tan.eta(spent)
    assert found["class_counts_noise"] == COUNTS.noise_multiplier
    with pytest.raises(ValueError, match="does not charge the class counts"):
        cost_of(tmp_path / "other", steps, config)


def test_a_step_that_is_not_charged_is_missed(tmp_path):
    with pytest.raises(ValueError, match="does not charge step 1, which was made"):
        cost_of(tmp_path / "ledger.jsonl", [("a", 0), ("a", 2)], CONFIG)


def test_for_replace_one_no_bound_is_claimed_that_is_not_known(tmp_path):
    run = dataclasses.replace(RUN, adjacency=Adjacency.REPLACE_ONE, steps=1)
    found = cost_of(tmp_path / "ledger.jsonl", [("a", 0)], CONFIG, run)
    assert found["epsilon"] == composed_epsilon([run], DELTA)
    assert (found["epsilon_rdp"], found["epsilon_of_person"]) == (None, {})


def test_a_run_of_persons_states_one_epsilon_of_a_person(tmp_path):
    """Whatever the number of their images: that of several persons is another."""
    config = CONFIG | {"unit": "person", "examples_per_group": 4}
    run = dataclasses.replace(RUN, steps=1)
    found = cost_of(tmp_path / "ledger.jsonl", [("a", 0)], config, run)
    assert found["epsilon"] == composed_epsilon([run], DELTA)
    assert (found["unit"], found["epsilon_of_person"]) == ("person", {})
    assert found["examples_per_group"] == 4


def test_what_is_measured_of_parameters_and_of_their_average_is_told_apart():
    labels = np.array([0, 0, 1, 1], np.int32)

    def of(*classes):
        right = np.equal(classes, labels)
        each = [ClassResult(str(of), 2, right[labels == of].mean()) for of in (0, 1)]
        outputs = Outputs(np.eye(2, dtype=np.float32)[[*classes]], labels)
        return Evaluation(right.mean(), 1 - right.mean(), tuple(each), outputs=outputs)

    raw, ema = of(0, 0, 1, 0), of(1, 1, 1, 0)
    ledger = Ledger()
    run = dataclasses.replace(RUN, steps=1)
    ledger.charge(run, 0, "a")
    config = CONFIG | {"mechanism": dataclasses.asdict(run), "unreadable": "error"}
    speed = {"examples_per_second": None}
    position = Position(State(None, None, None), ledger)
    found = hand_over(position, config, (1, 2), (raw, ema), True, speed)
    assert (found.params, found.average) == (1, 2)
    summary = found.summary
    assert (summary["test_accuracy"], summary["test_accuracy_ema"]) == (0.75, 0.25)
    assert (summary["test_loss"], summary["test_loss_ema"]) == (0.25, 0.75)
    first = summary["per_class"][0]
    assert (first["accuracy"], first["accuracy_ema"]) == (1.0, 0.0)
    for name, accuracy in (("parameters", 0.75), ("average", 0.25)):
        assert summary["measures"][name]["accuracy"]["value"] == accuracy
