"""What a result claims is of every charge in the ledger."""

import contextlib
import dataclasses
from typing import Any

import pytest

from tanager.privacy import tan
from tanager.privacy.accountant import composed_epsilon
from tanager.privacy.ledger import CLASS_COUNTS, Ledger
from tanager.privacy.mechanism import Adjacency, Mechanism
from tanager.privacy.risk import risk
from tanager.training.result import cost


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
