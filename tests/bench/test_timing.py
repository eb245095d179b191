import re
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from tanager.bench import programs, timing
from tanager.bench.workload import Workload


WORKLOAD = Workload("linear", (6,), classes=3)
# Seconds of each timed call: medians 2, 3 and 9.
SECONDS = {
    "sgd": [2.0, 1.0, 2.0, 7.0],
    "per_example": [3.0, 3.0, 3.0, 3.0],
    "update": [9.0, 9.0, 9.0, 9.0],
    "forward": [0.5, 0.5, 0.5, 0.5],
    "gradient": [1.5, 1.5, 1.5, 1.5],
}


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


class Fake:
    """A program that takes as long as it is told: 100 s to compile, 50 to warm up."""

    def __init__(self, name, clock, calls, fail=None):
        self.name, self.clock, self.calls, self.fail = name, clock, calls, fail
        self.traces, self.timed = 1, iter(SECONDS[name])
        self.warm_ups = 3

    def prepare(self, params, batch):
        pass

    def compile(self, mask, clock):
        if self.fail == "compile":
            raise RuntimeError("no rule for tap")
        self.clock.now += 100
        return 100.0, 2048

    def run(self, mask):
        if self.warm_ups:
            self.warm_ups -= 1
            self.clock.now += 50
            return
        self.calls.append((self.name, int(mask.sum())))
        if self.fail in ("run", KeyboardInterrupt) and len(self.calls) > 4:
            raise (KeyboardInterrupt if self.fail != "run" else MemoryError)(self.fail)
        self.clock.now += next(self.timed)


@pytest.fixture
def bench(monkeypatch):
    clock, calls = Clock(), []

    def run(fail=None, strategies=("sgd", "per_example"), **options):
        fail = fail or {}

        def fake(name):
            return Fake(name, clock, calls, fail.get(name))

        monkeypatch.setattr(programs, "training", lambda workload, name: fake(name))
        for name in ("update", "forward", "gradient"):
            maker = lambda workload, name=name: fake(name)  # noqa: E731
            monkeypatch.setattr(programs, name, maker)
        settings: dict[str, Any] = {"physical_batch": 8, "repeats": 4} | options
        found = timing.bench_step(WORKLOAD, strategies, clock=clock, **settings)
        return found, calls

    return run


def test_medians_and_spreads_are_of_the_timed_calls_alone(bench):
    found, _ = bench()
    sgd, private = found.rows
    lower, upper = np.quantile(SECONDS["sgd"], [0.25, 0.75])
    assert (sgd["seconds"], sgd["seconds_spread"]) == (2.0, upper - lower)
    assert (private["seconds"], private["seconds_spread"]) == (3.0, 0.0)
    assert private["ratio_to_sgd"] == 1.5
    assert private["compile_seconds"] == 100.0
    assert private["temp_bytes"] == 2048
    assert found.update["seconds"] == 9.0
    assert not found.stopped


def test_examples_are_counted_and_padding_is_not(bench):
    found, calls = bench(examples=5)
    assert [row["examples_per_second"] for row in found.rows] == [5 / 2, 5 / 3]
    assert {count for _, count in calls} == {5}
    found, _ = bench()
    assert [row["examples_per_second"] for row in found.rows] == [8 / 2, 8 / 3]


def test_programs_take_turns(bench):
    _, calls = bench()
    assert [name for name, _ in calls] == ["sgd", "per_example", "update"] * 4


def test_a_strategy_that_fails_is_a_row_and_the_others_go_on(bench):
    for moment, reason in [
        ("compile", "RuntimeError: no rule for tap"),
        ("run", "MemoryError: run"),
    ]:
        found, _ = bench(fail={"per_example": moment})
        sgd, private = found.rows
        assert private["error"] == reason
        assert sgd["error"] is None
        assert sgd["seconds"] == 2.0
        assert found.update["seconds"] == 9.0


def test_without_sgd_there_is_no_ratio(bench):
    found, _ = bench(strategies=("per_example",))
    assert found.rows[0]["ratio_to_sgd"] is None
    found, _ = bench(fail={"sgd": "compile"})
    assert [row["ratio_to_sgd"] for row in found.rows] == [None, None]


def test_stopping_keeps_what_was_measured(bench):
    found, _ = bench(fail={"per_example": KeyboardInterrupt})
    assert found.stopped
    sgd, private = found.rows
    assert sgd["seconds"] == np.median(SECONDS["sgd"][:2])
    assert private["seconds"] == 3.0
    assert private["traces"] == 1


def test_stopping_before_the_first_round_says_so(bench):
    def stop(text):
        if text.startswith("timing"):
            raise KeyboardInterrupt

    found, _ = bench(report=stop)
    assert found.stopped
    assert {row["error"] for row in found.rows} == {"stopped before it was timed"}
    assert {row["compile_seconds"] for row in found.rows} == {100.0}


def test_the_breakdown_is_the_differences_of_prefixes(bench):
    found, calls = bench(breakdown=True)
    assert len(calls) == 20
    sgd, private = (row["breakdown"] for row in found.rows)
    assert {name: part["seconds"] for name, part in private.items()} == {
        "forward": 0.5,
        "backward": 1.0,
        "clip_and_accumulate": 1.5,
        "optimizer_step": 9.0,
    }
    assert private["optimizer_step"]["share"] == 9 / 12
    assert {name: part["seconds"] for name, part in sgd.items()} == {
        "forward": 0.5,
        "backward": 1.0,
        "clip_and_accumulate": 0.0,
        "optimizer_step": 0.5,
    }
    assert sum(part["share"] for part in sgd.values()) == 1
    found, _ = bench(breakdown=True, fail={"forward": "compile"})
    assert [row["breakdown"] for row in found.rows] == [None, None]


def test_real_programs_are_traced_once_while_masks_change():
    found = timing.bench_step(
        WORKLOAD,
        programs.training_names(),
        physical_batch=4,
        examples=3,
        repeats=3,
        breakdown=True,
    )
    assert [row["strategy"] for row in found.rows] == [*programs.training_names()]
    for row in found.rows:
        assert row["error"] is None, row
        assert row["traces"] == 1
        assert row["temp_bytes"] >= 0
        assert row["examples_per_second"] == pytest.approx(3 / row["seconds"])
        assert sum(s["share"] for s in row["breakdown"].values()) == pytest.approx(1)
    assert found.update["error"] is None


def test_a_retrace_is_seen_in_the_row(monkeypatch):
    """As if a logical batch were cut into physical batches of whatever size is left."""

    def sizes(rows, examples):
        return [jnp.ones(n, bool) for n in (1, 2)], [jnp.ones(n, bool) for n in (3, 3)]

    def planted(workload, name):
        def function(carried, inputs, mask):
            return carried + jnp.sum(mask, dtype=jnp.int32)

        return programs.Program(name, lambda *_: (jnp.int32(0), ()), function)

    monkeypatch.setattr(programs, "masks", sizes)
    for name in ("training", "update"):
        maker = planted if name == "training" else lambda w: planted(w, "update")
        monkeypatch.setattr(programs, name, maker)
    found = timing.bench_step(WORKLOAD, ["per_example"], physical_batch=4, repeats=2)
    assert found.rows[0]["traces"] == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"strategies": ["sdg"]}, "strategy (='sdg') must be one of sgd"),
        ({"physical_batch": 0}, "physical_batch (=0) must be at least 1"),
        ({"repeats": 0}, "repeats (=0) must be at least 1"),
        ({"examples": 0}, "examples (=0) must be at least 1"),
        ({"examples": 9}, "examples (=9) must be at most the physical batch 8"),
    ],
)
def test_what_cannot_be_timed_is_refused(bench, change, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        bench(**change)
