import re
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from tanager.bench import programs, timing
from tanager.bench.timing import Measurement
from tanager.bench.workload import Workload
from tanager.commands import tables


WORKLOAD = Workload("linear", (6,), classes=3)
# Seconds of each timed call: medians 2, 3 and 9.
SECONDS = {
    "sgd": [2.0, 1.0, 2.0, 7.0],
    "per_example": [3.0, 3.0, 3.0, 3.0],
    "update": [9.0, 9.0, 9.0, 9.0],
    "forward": [0.5, 0.5, 0.5, 0.5],
    "gradient": [1.5, 1.5, 1.5, 1.5],
}


@pytest.fixture
def turns(monkeypatch):
    """Time what takes as long as it is told to, and 100 s to prepare."""
    now, calls = [0.0], []
    clock = SimpleNamespace(perf_counter=lambda: now[0])
    monkeypatch.setattr(timing, "time", clock)

    def time(*, failing=None, error=None, report=lambda text: None):
        def prepare(name, found):
            now[0] += 100
            if name == failing and error is None:
                raise RuntimeError("no rule for tap")
            left = iter(SECONDS[name])

            def run(number):
                calls.append(name)
                if name == failing and number == 2 and error is not None:
                    raise error
                now[0] += next(left)

            return run

        names = ["sgd", "per_example", "update"]
        return *timing.in_turns(names, prepare, 4, report), calls

    return time


def test_programs_take_turns_and_only_their_calls_are_timed(turns):
    measured, stopped, calls = turns()
    assert calls == ["sgd", "per_example", "update"] * 4
    assert not stopped
    assert {name: found.seconds for name, found in measured.items()} == {
        name: SECONDS[name] for name in measured
    }
    lower, upper = np.quantile(SECONDS["sgd"], [0.25, 0.75])
    assert measured["sgd"].times() == {
        "seconds": 2.0,
        "seconds_spread": upper - lower,
        "error": None,
    }
    once = Measurement()
    once.seconds.append(0.002)
    assert once.times()["seconds_spread"] is None
    assert tables.milliseconds(once.times()) == "2 ± —"


@pytest.mark.parametrize(
    ("error", "message", "timed"),
    [
        (None, "RuntimeError: no rule for tap", 0),
        (MemoryError("run"), "MemoryError: run", 2),
    ],
)
def test_what_fails_says_so_and_the_others_go_on(turns, error, message, timed):
    measured, stopped, _ = turns(failing="per_example", error=error)
    assert not stopped
    assert measured["per_example"].times()["error"] == message
    assert len(measured["per_example"].seconds) == timed
    assert measured["update"].seconds == SECONDS["update"]


def test_stopping_keeps_what_was_measured(turns):
    measured, stopped, _ = turns(failing="per_example", error=KeyboardInterrupt())
    assert stopped
    assert [len(found.seconds) for found in measured.values()] == [3, 2, 2]
    assert measured["per_example"].error is None


def test_stopping_while_compiling_says_so(turns):
    def stop(text):
        if text == "compiling per_example":
            raise KeyboardInterrupt

    measured, stopped, _ = turns(report=stop)
    assert stopped
    errors = {found.times()["error"] for found in measured.values()}
    assert errors == {"stopped before it was timed"}


@pytest.fixture
def bench(monkeypatch):
    """Make the rows of what took `SECONDS`, and of what failed."""

    def run(strategies=("sgd", "per_example"), failed=(), stopped=False, **options):
        def planted(names, *_):
            done = {
                name: Measurement(100.0, 2048, SECONDS[name], 1)
                if name not in failed
                else Measurement(error="RuntimeError: no rule for tap")
                for name in names
            }
            return done, stopped

        monkeypatch.setattr(timing, "in_turns", planted)
        settings: dict[str, Any] = {"physical_batch": 8, "repeats": 4} | options
        return timing.bench_step(WORKLOAD, strategies, **settings)

    return run


def test_rows_are_medians_next_to_sgds(bench):
    assert bench(stopped=True).stopped
    found = bench()
    assert not found.stopped
    sgd, private = found.rows
    assert (sgd["seconds"], private["seconds"]) == (2.0, 3.0)
    assert private["ratio_to_sgd"] == 1.5
    assert (private["compile_seconds"], private["temp_bytes"]) == (100.0, 2048)
    assert found.update["seconds"] == 9.0
    assert [row["examples_per_second"] for row in found.rows] == [8 / 2, 8 / 3]
    # Padding does not count.
    rows = bench(examples=5).rows
    assert [row["examples_per_second"] for row in rows] == [5 / 2, 5 / 3]


def test_without_sgd_there_is_no_ratio(bench):
    assert bench(strategies=("per_example",)).rows[0]["ratio_to_sgd"] is None
    rows = bench(failed=("sgd",)).rows
    assert [row["ratio_to_sgd"] for row in rows] == [None, None]
    assert rows[0]["error"] == "RuntimeError: no rule for tap"


def test_the_breakdown_is_the_differences_of_prefixes(bench):
    sgd, private = (row["breakdown"] for row in bench(breakdown=True).rows)
    assert {name: part["seconds"] for name, part in private.items()} == {
        "forward": 0.5,
        "backward": 1.0,
        "clip_and_accumulate": 1.5,
        "optimizer_step": 9.0,
    }
    assert private["optimizer_step"]["share"] == 9 / 12
    assert [part["seconds"] for part in sgd.values()] == [0.5, 1.0, 0.0, 0.5]
    assert sum(part["share"] for part in sgd.values()) == 1
    rows = bench(breakdown=True, failed=("forward",)).rows
    assert [row["breakdown"] for row in rows] == [None, None]


def test_real_programs_are_traced_once_while_masks_change():
    names = ["sgd", "per_example"]
    sizes: dict[str, Any] = {"physical_batch": 4, "examples": 3}
    found = timing.bench_step(WORKLOAD, names, **sizes, repeats=3, breakdown=True)
    assert [row["strategy"] for row in found.rows] == names
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

    def planted(workload, name="update"):
        def function(carried, inputs, mask):
            return carried + jnp.sum(mask, dtype=jnp.int32)

        return programs.Program(name, lambda *_: (jnp.int32(0), ()), function)

    monkeypatch.setattr(programs, "masks", sizes)
    monkeypatch.setattr(programs, "training", planted)
    monkeypatch.setattr(programs, "update", planted)
    found = timing.bench_step(WORKLOAD, ["per_example"], physical_batch=4, repeats=2)
    assert found.rows[0]["traces"] == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"strategies": ["sdg"]}, "strategies (='sdg') is unknown: did you mean sgd?"),
        ({"repeats": 0}, "repeats (=0) must be at least 1"),
        ({"examples": 9}, "examples (=9) must be at most the physical batch 8"),
    ],
)
def test_what_cannot_be_timed_is_refused(bench, change, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        bench(**change)
