"""Measured times: used where known, remembered between runs, never trusted blindly."""

import json
import math
import os
import types
from typing import ClassVar

import jax.numpy as jnp
import pytest
from oracle import draw, read

from tanager import _heap
from tanager.clipping import clipped_grad
from tanager.clipping.planning import autotune, choices, cost
from tanager.clipping.planning.autotune import Timings
from tanager.clipping.rules.groups import RETAINED, Method


pytestmark = pytest.mark.measures

ROWS = 4
TRIED = [Method("gram", "vmap"), Method("vmap", RETAINED)]
AGAIN = Method("vmap", "vmap")


def loss(w, x):
    return jnp.sum(jnp.sin(x @ w))


def problem():
    w, x = draw(0, (5, 6), (ROWS, 7, 5))
    return jnp.asarray(w, jnp.float32), jnp.asarray(x, jnp.float32)


def only_group():
    (group,) = read(loss, *problem())[1]
    return group


class FakeBench:
    """Seconds by part, instead of measuring."""

    seconds_of: ClassVar[dict[str, float]] = {}
    asked: ClassVar[list[str]] = []
    disturbed: ClassVar[set[str]] = set()

    def __init__(self, group, rows):
        pass

    def seconds(self, part):
        self.asked.append(part)
        return self.seconds_of.get(part, 1e-3), part in self.disturbed


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.setattr(autotune, "_Bench", FakeBench)
    monkeypatch.setattr(autotune, "WORTH_MEASURING", 0.0)
    monkeypatch.setattr(autotune, "_HOPELESS", float("inf"))
    FakeBench.seconds_of, FakeBench.asked, FakeBench.disturbed = {}, [], set()
    return FakeBench


def measured():
    timings = Timings()
    timings.measure([only_group()], ROWS)
    return timings


def chosen(timings, most_bytes=1e9):
    group = only_group()
    (method,) = choices.choose(
        "auto",
        [group],
        ROWS,
        most_bytes=most_bytes,
        estimate=lambda group, method: timings.estimate(group, method, ROWS),
    )
    return method


def all_parts():
    """One sum for each method for norms."""
    return {part for method in TRIED for part in autotune._parts(method)}


def test_measurements_overrule_the_cost_model(bench):
    assert [*TRIED, AGAIN] == cost.candidates(only_group())
    for winner in TRIED:
        timings = Timings()
        timings.path.unlink(missing_ok=True)
        bench.seconds_of = dict.fromkeys(all_parts(), 1.0)
        bench.seconds_of.update(dict.fromkeys(autotune._parts(winner), 1e-6))
        assert chosen(measured()) == winner


def test_measurements_are_remembered_by_the_next_instance(bench):
    bench.seconds_of = {part: 1.0 + n for n, part in enumerate(sorted(all_parts()))}
    first = measured()
    assert sorted(bench.asked) == sorted(all_parts())
    bench.asked.clear()
    again = measured()
    assert not bench.asked
    group = only_group()
    for method in TRIED:
        known = again.known(group, method, ROWS)
        assert known is not None
        assert known == first.known(group, method, ROWS)
        assert known == again.estimate(group, method, ROWS).seconds
        assert known == sum(bench.seconds_of[p] for p in autotune._parts(method))


def test_a_disturbed_timing_counts_until_it_is_measured_again(bench):
    (part,) = autotune._parts(TRIED[1])
    bench.disturbed, bench.seconds_of = {part}, {part: 1e-6}
    assert chosen(measured()) == chosen(Timings()) == TRIED[1]
    bench.asked.clear()
    bench.disturbed, bench.seconds_of = set(), {part: 1.0}
    assert chosen(measured()) == chosen(Timings()) != TRIED[1]
    assert bench.asked == [part]
    bench.asked.clear()
    measured()
    assert not bench.asked


@pytest.mark.parametrize("first", [True, False])
def test_of_two_processes_the_undisturbed_timing_stands(bench, first):
    (part,) = autotune._parts(TRIED[1])
    bench.seconds_of = {}
    one, other = Timings(), Timings()
    for timings, disturbed in ((one, first), (other, not first)):
        bench.disturbed = {part} if disturbed else set()
        bench.seconds_of[part] = 2.0 if disturbed else 1.0
        timings.measure([only_group()], ROWS)
    both = Timings()
    assert both.known(only_group(), TRIED[1], ROWS) == 1.0
    assert not both.as_json()["disturbed"]


def test_what_was_left_out_is_as_much_slower_as_expected(bench):
    group, timings = only_group(), measured()
    expected = {
        m: cost.estimate(group, m, ROWS).seconds for m in cost.candidates(group)
    }
    assert timings.known(group, AGAIN, ROWS) is None
    fastest = min(TRIED, key=lambda m: timings.estimate(group, m, ROWS).seconds)
    times = max(expected[AGAIN] / expected[fastest], autotune._LEFT_OUT)
    seconds = timings.estimate(group, AGAIN, ROWS).seconds
    assert seconds == times * timings.estimate(group, fastest, ROWS).seconds
    assert chosen(timings) == fastest


def test_nothing_is_measured_where_one_method_is_expected_to_win(bench, monkeypatch):
    monkeypatch.setattr(autotune, "_HOPELESS", 1.0)
    assert not Timings().measure([only_group()], ROWS)
    assert not bench.asked


def test_measurements_hold_for_one_batch_size_only(bench):
    timings = measured()
    group = only_group()
    (method, *_) = cost.candidates(group)
    assert timings.known(group, method, ROWS) is not None
    assert timings.known(group, method, ROWS + 1) is None
    expected = cost.estimate(group, method, ROWS + 1)
    assert timings.estimate(group, method, ROWS + 1) == expected


def test_no_more_is_measured_than_it_is_worth(bench):
    groups = [only_group()]
    assert not Timings().measure(groups, ROWS, worth=0.0)
    seconds = cost.estimate(groups[0], chosen(Timings()), ROWS).seconds
    needed = autotune._PART_SECONDS * len(all_parts()) / seconds
    assert not Timings().measure(groups, ROWS, worth=0.99 * needed)
    assert not bench.asked
    said = []
    assert Timings().measure(groups, ROWS, said.append, worth=1.01 * needed)
    assert sorted(bench.asked) == sorted(all_parts())
    assert said[0].startswith(f"{len(said)} timings, at most {len(said)} s left (")
    assert said[-1].startswith("1 timings")


@pytest.fixture
def two_seconds(bench, monkeypatch):
    """Each part takes two seconds to measure; of two groups the last is dearer."""
    now = [0.0]
    clock = types.SimpleNamespace(perf_counter=lambda: now[0])
    monkeypatch.setattr(autotune, "time", clock)

    def measure(self, part):
        now[0] += 2
        bench.asked.append(part)
        return 1e-3, False

    monkeypatch.setattr(FakeBench, "seconds", measure)
    small, large, x = draw(0, (5, 6), (6, 60), (ROWS, 7, 5))
    params = [jnp.asarray(w, jnp.float32) for w in (small, large)]

    def loss(params, x):
        return jnp.sum(jnp.sin(x @ params[0]) @ params[1])

    return loss, params, jnp.asarray(x, jnp.float32)


@pytest.mark.parametrize(("seconds", "known"), [(2.9, 0), (4.1, 1), (11.9, 1), (12, 2)])
def test_the_dearest_groups_are_measured_until_the_budget_is_spent(
    two_seconds, seconds, known
):
    groups = read(*two_seconds)[1]
    assert Timings().measure(groups, ROWS, seconds=seconds) == (known > 0)
    timings = Timings()
    measured = [timings.known(each, TRIED[0], ROWS) for each in groups]
    assert [each is not None for each in measured] == [known > 1, known > 0]


def test_a_part_that_takes_long_is_the_last_and_is_not_measured_again(
    two_seconds, bench
):
    groups = read(*two_seconds)[1]
    assert Timings().measure(groups, ROWS, seconds=3.1)  # and a part takes two
    assert len(bench.asked) == 2
    assert Timings().known(groups[1], TRIED[0], ROWS) is None
    while Timings().measure(groups, ROWS, seconds=3.1):
        pass
    assert len(bench.asked) == 2 * len(all_parts())
    assert all(Timings().known(group, TRIED[0], ROWS) for group in groups)


def test_twenty_seconds_are_spent_by_default(two_seconds, bench, monkeypatch):
    grad_fn, parts = clipped_grad(two_seconds[0], clip_norm=1.0), len(all_parts())
    monkeypatch.setattr(autotune, "_PART_SECONDS", 20.1 / parts)
    assert not grad_fn.tune(*two_seconds[1:])
    monkeypatch.setattr(autotune, "_PART_SECONDS", 19.9 / parts)
    grad_fn(*two_seconds[1:])
    assert not bench.asked  # a second look at the same shapes costs nothing
    clipped_grad(two_seconds[0], clip_norm=1.0)(*two_seconds[1:])
    assert len(bench.asked) == 2 * parts


def test_no_time_is_negative():
    grad_fn = clipped_grad(loss, clip_norm=1.0)
    with pytest.raises(ValueError, match=r"seconds \(=-1\) must not be negative"):
        grad_fn.tune(*problem(), seconds=-1)
    with pytest.raises(ValueError, match=r"worth \(=nan\) must not be negative"):
        grad_fn.tune(*problem(), worth=math.nan)


def test_long_work_is_measured_with_fewer_examples(bench, monkeypatch):
    """And the times of many are those of few, as many times as there are more."""
    group, asked = only_group(), []
    assert autotune.measured_rows(group, 1000) == 1000
    monkeypatch.setattr(autotune, "_LONG_SECONDS", 0.0)
    monkeypatch.setattr(
        FakeBench, "__init__", lambda self, group, rows: asked.append(rows)
    )
    assert [autotune.measured_rows(group, rows) for rows in (4, 32, 33, 128, 200)] == [
        *(4, 16, 9, 16, 13)
    ]
    groups = [group]
    bench.seconds_of = {part: 1.0 + n for n, part in enumerate(sorted(all_parts()))}
    timings = Timings()
    timings.measure(groups, 128)
    timings.measure(groups, 64)
    assert asked == [16]
    for method in TRIED:
        few, many = (timings.known(group, method, rows) for rows in (16, 128))
        assert few is not None
        assert many == 8 * few == timings.estimate(group, method, 128).seconds


@pytest.mark.parametrize(
    ("takes", "runs"), [(2**-10, 103), (2**-4, 6), (2**-2, 3), (4.0, 3)]
)
def test_the_longer_a_run_the_fewer_there_are(monkeypatch, takes, runs):
    clock = iter(n * takes for n in range(10_000))
    ticks = []

    def tick():
        ticks.append(None)
        return next(clock)

    group = only_group()
    bench = autotune._Bench(group, ROWS)
    # Not the clock of all: others look at it too.
    monkeypatch.setattr(autotune, "time", types.SimpleNamespace(perf_counter=tick))
    part = autotune._parts(cost.candidates(group)[0])[0]
    assert bench.seconds(part)[0] == takes
    assert len(ticks) == 2 * runs


def test_the_faster_method_is_given_up_for_memory(bench):
    costs = {
        method: cost.estimate(only_group(), method, ROWS).bytes
        for method in cost.candidates(only_group())
    }
    greedy = max(costs, key=lambda method: costs[method])
    least = min(costs.values())
    assert costs[greedy] > least
    bench.seconds_of = dict.fromkeys(all_parts(), 1.0)
    bench.seconds_of.update(dict.fromkeys(autotune._parts(greedy), 1e-6))
    timings = measured()
    assert chosen(timings) == greedy
    assert costs[chosen(timings, most_bytes=least)] == least


def test_what_xla_is_told_has_timings_of_its_own(monkeypatch):
    path = Timings().path  # XLA reads its flags once, when it starts
    flags = os.environ["XLA_FLAGS"].split()
    monkeypatch.setenv("XLA_FLAGS", " ".join([*flags[::-1], "--xla_dump_to=here"]))
    assert Timings().path == path
    monkeypatch.setenv("XLA_FLAGS", " ".join([*flags, "--xla_cpu_use_onednn=true"]))
    assert Timings().path != path


def test_a_process_that_keeps_its_memory_has_timings_of_its_own(monkeypatch):
    monkeypatch.setattr(_heap, "_active", False)
    path = Timings().path
    monkeypatch.setattr(_heap, "_active", True)
    assert Timings().path != path


DAMAGE = {
    "empty": lambda held: "",
    "torn": lambda held: json.dumps(held)[:-9],
    "not JSON": lambda held: "\x00\x01 timings",
    "a list": lambda held: "[1, 2]",
    "null": lambda held: "null",
    "of another device": lambda held: json.dumps(
        {**held, "identity": {**held["identity"], "device": "abacus"}}
    ),
    "of another version": lambda held: json.dumps(
        {**held, "identity": {**held["identity"], "tanager": "0.0.0"}}
    ),
    "without identity": lambda held: json.dumps({"seconds": held["seconds"]}),
    "without seconds": lambda held: json.dumps({"identity": held["identity"]}),
    "seconds of the wrong type": lambda held: json.dumps({**held, "seconds": [1.0]}),
    "no word of what was disturbed": lambda held: json.dumps(
        {key: value for key, value in held.items() if key != "disturbed"}
    ),
    "numbers of the wrong type": lambda held: json.dumps(
        {**held, "seconds": {k: str(v) for k, v in held["seconds"].items()}}
    ),
    "impossible numbers": lambda held: json.dumps(
        {
            **held,
            "seconds": {
                k: [float("nan"), float("inf"), -1.0, 0.0, True][n % 5]
                for n, k in enumerate(held["seconds"])
            },
        }
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_or_foreign_file_is_ignored_and_made_anew(name, bench):
    timings = measured()
    path, held = timings.path, json.loads(timings.path.read_text())
    assert held["seconds"]
    path.write_text(DAMAGE[name](held))
    fresh = Timings()
    group = only_group()
    for method in cost.candidates(group):
        assert fresh.known(group, method, ROWS) is None
        assert fresh.estimate(group, method, ROWS) == cost.estimate(group, method, ROWS)
    measured()
    assert json.loads(path.read_text()) == held


def test_a_file_that_is_not_text_is_ignored(bench):
    path = measured().path
    path.write_bytes(b"\xff\xfe\x80")
    assert Timings().known(only_group(), chosen(Timings()), ROWS) is None


def test_a_folder_that_cannot_be_made_costs_time_alone(bench, tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    monkeypatch.setenv("TANAGER_CACHE_DIR", str(blocked / "inside"))
    timings = measured()
    assert timings.known(only_group(), chosen(timings), ROWS) is not None
    assert not timings.path.exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_costs_time_alone(bench, tmp_path, monkeypatch):
    folder = tmp_path / "locked"
    folder.mkdir(mode=0o500)
    monkeypatch.setenv("TANAGER_CACHE_DIR", str(folder))
    timings = measured()
    assert timings.known(only_group(), chosen(timings), ROWS) is not None
    assert not list(folder.iterdir())


def test_two_processes_writing_keep_both_measurements(bench):
    one, other = Timings(), Timings()
    groups = [only_group()]
    one.measure(groups, ROWS)
    other.measure(groups, ROWS + 1)
    both = Timings()
    (method, *_) = cost.candidates(groups[0])
    assert both.known(groups[0], method, ROWS) is not None
    assert both.known(groups[0], method, ROWS + 1) is not None


def test_the_folder_is_the_users_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("TANAGER_CACHE_DIR", str(tmp_path / "own"))
    assert autotune.cache_folder() == tmp_path / "own"
    monkeypatch.delenv("TANAGER_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert autotune.cache_folder() == tmp_path / "xdg" / "tanager"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert autotune.cache_folder() == tmp_path / ".cache" / "tanager"


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_what_waits_for_cores_is_disturbed(monkeypatch, share):
    monkeypatch.setattr(autotune._processor, "share_waited", lambda before: share)
    monkeypatch.setattr(autotune, "_LEAST_SECONDS", 0.0)
    part = autotune._parts(TRIED[0])[0]
    assert autotune._Bench(only_group(), ROWS).seconds(part)[1] == bool(share)


def test_gains_are_timed_at_ordinary_sizes():
    """Of a standardised weight with a gain near 0, norms take another way."""
    group = only_group()
    bench = autotune._Bench(group, ROWS)
    (weight,) = (bench._constants[v] for v in group.program.parameters)
    assert jnp.min(weight) > 0.25


def test_real_measurements_are_taken_and_kept(monkeypatch):
    monkeypatch.setattr(autotune, "_DISTURBED", math.inf)  # others run beside the tests
    monkeypatch.setattr(autotune, "WORTH_MEASURING", 0.0)
    monkeypatch.setattr(autotune, "_LEAST_SECONDS", 0.0)
    monkeypatch.setattr(autotune, "_LEAST_RUNS", 1)
    reports = []
    grad_fn = clipped_grad(loss, clip_norm=1.0)
    grad_fn.tune(*problem(), report=reports.append)
    assert reports
    (row,) = grad_fn.explain(*problem()).taps
    assert row.seconds is not None
    assert 0 < row.seconds < 10
    assert "measured" in row.why
    reports.clear()
    clipped_grad(loss, clip_norm=1.0).tune(*problem(), report=reports.append)
    assert not reports


def test_groups_that_are_too_small_are_not_measured():
    reports = []
    clipped_grad(loss, clip_norm=1.0).tune(*problem(), report=reports.append)
    assert not reports
