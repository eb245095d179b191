import itertools
import json
import threading
import time

import numpy as np
import pytest
from matplotlib.figure import Figure

from tanager.bench import programs, throughput
from tanager.bench.throughput import Pool, Protocol, bench_throughput, data
from tanager.bench.timing import Measurement
from tanager.bench.workload import Workload
from tanager.cli import main
from tanager.data import ArraySource
from tanager.report import throughput_figures
from tanager.sampling import PhysicalBatch
from tanager.training.step import Step


WORKLOAD = Workload("linear", (6,), classes=3)
PROTOCOL = Protocol(examples=60, sample_rate=0.5, steps=3)
SMALL = ["bench", "throughput", "--model", "linear", "--features", "6", "--classes"]
SMALL += ["3", "--examples", "40", "--steps", "2", "--physical-batches", "4"]


@pytest.mark.parametrize(("streamed", "sizes"), [(False, (4, 16)), (True, (16,))])
def test_batches_change_and_are_compiled_once(monkeypatch, streamed, sizes):
    seen = []
    accumulate = Step.accumulate

    def counted(step, params, total, batch, key):
        seen.append(int(np.asarray(batch.mask).sum()))
        return accumulate(step, params, total, batch, key)

    monkeypatch.setattr(Step, "accumulate", counted)
    if streamed:
        monkeypatch.setattr(throughput, "can_hold", lambda *_: False)
    rows, stopped = bench_throughput(WORKLOAD, ("sgd", "auto"), sizes, PROTOCOL)
    assert not stopped
    assert [(row["strategy"], row["physical_batch"]) for row in rows] == [
        (strategy, size) for size in sizes for strategy in ("sgd", "auto")
    ]
    step = WORKLOAD.step("sgd", sample_rate=0.5, examples=60)
    drawn = [len(step.sampler.indices(number)) for number in range(3)]
    assert sum(seen) == len(rows) * sum(drawn)
    assert len(set(seen)) > 2
    for row in rows:
        assert row["compilations"] == 1
        assert row["low"] <= row["examples_per_second"] <= row["high"]
        assert row["first_batch_seconds"] > 0
        assert row["error"] is None
    assert rows[0]["relative_throughput"] == 1


def test_nothing_is_read_ahead_in_the_turn_of_another(monkeypatch):
    readers, gather = [], Pool.gather

    def read(pool, indices):
        readers.append(threading.get_ident())
        return gather(pool, indices)

    def reading():
        return {thread.ident for thread in threading.enumerate()} & set(readers)

    def alone(step, params, total, batch, key):
        # A reader that was told to end may take a moment.
        deadline = time.monotonic() + 10
        while len(reading() - {threading.get_ident()}) > 1:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return accumulate(step, params, total, batch, key)

    accumulate = Step.accumulate
    monkeypatch.setattr(Step, "accumulate", alone)
    monkeypatch.setattr(throughput, "_POOL_BYTES", 3 * (6 * 4 + 4))
    monkeypatch.setattr(Pool, "gather", read)
    rows, _ = bench_throughput(WORKLOAD, ("sgd", "per_example"), (4,), PROTOCOL)
    assert [row["error"] for row in rows] == [None, None]
    assert len(set(readers)) >= 2


def test_a_batch_of_another_shape_is_a_compilation(monkeypatch):
    held = throughput.held

    def cut(step, examples, size):
        feed = held(step, examples, size)

        def batches(number):
            for batch, unread in feed.batches(number):
                rows = number + 1
                yield (
                    PhysicalBatch(examples, batch.mask[:rows], batch.indices[:rows]),
                    unread,
                )

        return feed._replace(batches=batches)

    monkeypatch.setattr(throughput, "held", cut)
    (row,), _ = bench_throughput(WORKLOAD, ("sgd",), (8,), PROTOCOL)
    assert row["compilations"] >= 1 + 3


def test_rates_are_real_examples_over_seconds(monkeypatch):
    seconds = {"sgd": [1.0, 2.0, 4.0], "bk": [2.0, 4.0, 8.0], "auto": []}

    def planted(names, prepare, *_):
        done = {name: Measurement(seconds=seconds[name]) for name in names}
        for name in ("sgd", "bk"):
            prepare(name, done[name])
        done["auto"].error = "RuntimeError: no rule for tap"
        return done, True

    monkeypatch.setattr(throughput, "in_turns", planted)
    rows, stopped = bench_throughput(WORKLOAD, ("sgd", "bk", "auto"), (4, 8), PROTOCOL)
    assert stopped
    assert len(rows) == 3  # nothing of the second size
    step = WORKLOAD.step("sgd", sample_rate=0.5, examples=60)
    drawn = np.array([len(step.sampler.indices(number)) for number in range(3)])
    for row in rows[:2]:
        rates = drawn / seconds[row["strategy"]]
        assert row["examples_per_second"] == np.median(rates)
        # With three, the bootstrap's median is any of them often enough.
        assert (row["low"], row["high"]) == (rates.min(), rates.max())
    assert rows[1]["relative_throughput"] == 0.5
    assert rows[2]["error"] == "RuntimeError: no rule for tap"
    assert rows[2]["examples_per_second"] is rows[2]["relative_throughput"] is None
    assert rows[2]["compilations"] is None


def test_data_too_large_for_memory_repeat_themselves(monkeypatch):
    assert isinstance(data(WORKLOAD, 10), ArraySource)
    monkeypatch.setattr(throughput, "_POOL_BYTES", 3 * (6 * 4 + 4))
    source = data(WORKLOAD, 10)
    assert isinstance(source, Pool)
    assert len(source) == 10
    some = source.gather(np.array([0, 3, 8, 2]))["image"]
    np.testing.assert_array_equal(some[:2], some[[0, 0]])
    np.testing.assert_array_equal(some[2], some[3])
    assert np.any(some[0] != some[2])
    np.testing.assert_array_equal(source[9]["image"], some[0])
    rows, _ = bench_throughput(WORKLOAD, ("sgd",), (4,), PROTOCOL)
    assert rows[0]["error"] is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--physical-batches", "0"], "--physical-batches (=0) must be"),
        (["--physical-batches"], "--physical-batches (='') needs a value"),
        (["--sample-rate", "0.001"], "sample-rate (=0.001) must be such that"),
        (["--sample-rate", "1.5"], "sample-rate (=1.5) must be above 0"),
        (["--steps", "0"], "steps (=0) must be"),
        (["--strategies", "best"], "--strategies (='best')"),
        (["--strategies"], "--strategies (='') needs a value"),
        (["--plot", "a.txt"], "plot (='a.txt') must end in .png or .svg"),
        (["--beside", "none.json"], "(='none.json') is drawn: it needs --plot"),
        (["--beside", "none.json", "--plot", "a.png"], "none.json') cannot be read"),
    ],
)
def test_bad_input_is_one_message(capsys, words, message):
    assert main([*SMALL, *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("steps", [throughput.FEWEST, 7, 20])
def test_the_interval_of_the_median_holds_as_often_as_is_said(steps):
    rates = np.random.default_rng(0).lognormal(0, 0.1, (1000, steps))
    found = [throughput._estimated(each) for each in rates]
    low, high = (np.array([each[end] for each in found]) for end in ("low", "high"))
    assert np.mean((low <= 1) & (high >= 1)) > 0.94


def test_results_of_another_machine_are_drawn_beside(capsys, tmp_path, monkeypatch):
    assert main([*SMALL, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["protocol"] == {"examples": 40, "sample_rate": 0.5, "steps": 2}
    assert [row["strategy"] for row in record["rows"]] == ["sgd", "auto"]
    other = tmp_path / "other.json"
    other.write_text(json.dumps(record))
    path = tmp_path / "throughput.png"
    words = ["--strategies", "sgd", "--plot", str(path), "--beside", str(other)]
    assert main([*SMALL, *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:4] == ["strategy", "physical", "batch", "examples/s"]
    assert "slowest – fastest" in lines[0]
    assert lines[1].split()[0] == "sgd"
    assert lines[-1].split() == ["Drawn", "to", str(path)]
    assert path.stat().st_size > 10_000


def test_the_picture_tells_precisions_apart(capsys, tmp_path, monkeypatch):
    drawn = []

    def plot(measured, path):
        return drawn.append([name for name, _ in measured])

    monkeypatch.setattr(throughput_figures, "plot", plot)
    small = [*SMALL, "--strategies", "sgd", "--precision"]
    assert main([*small, "tf32", "--json"]) == 0
    (tmp_path / "a.json").write_text(capsys.readouterr().out)
    words = ["--plot", "a.png", "--beside", str(tmp_path / "a.json")]
    for precision in ("float32", "bfloat16"):
        assert main([*small, precision, *words]) == 0
    assert [names[0] for names in drawn] == ["linear", "linear, bfloat16"]
    assert all(names[1].startswith("linear, tf32, ") for names in drawn)


def test_the_picture_has_each_strategy_of_each_model(monkeypatch):
    figures = []
    monkeypatch.setattr(
        Figure, "savefig", lambda figure, *_, **__: figures.append(figure)
    )

    def row(strategy, size, rate):
        row = {
            "strategy": strategy,
            "physical_batch": size,
            "examples_per_second": rate,
        }
        return row | {"low": rate, "high": rate, "first_batch_seconds": 2.0}

    failed = row("bk", 16, None)
    rows = [row("sgd", 16, 80.0), row("sgd", 32, 100.0), row("auto", 32, 90.0), failed]
    assert not throughput_figures.plot([("a", [failed])], "a.png")
    assert throughput_figures.plot([("a", rows), ("b, H100", rows[1:3])], "a.png")
    rate, share, first, bars = figures[0].axes
    (legend,) = figures[0].legends
    named = [text.get_text() for text in legend.get_texts()]
    assert named == ["sgd", "auto", "a", "b, H100"]
    assert [list(line.get_ydata()) for line in share.lines][:2] == [[80, 100], [100]]
    assert [patch.get_height() for patch in bars.patches] == [0.9, 0.9]
    assert len(first.lines) == 4
    assert rate.get_yscale() == "log"
    assert rate.get_xlabel() == "physical batch"
    processor = "cpu: Intel(R) Xeon(R) Processor @ 2.80GHz"
    names = "vit-base-16", f"vit-base-16, {processor}", f"wrn-16-4, {processor}"
    assert throughput_figures.plot([(name, rows) for name in names], "a.png")
    figures[1].draw_without_rendering()
    (legend,) = figures[1].legends
    places = legend.get_window_extent(), figures[1].bbox
    assert places[1].x0 <= places[0].x0 <= places[0].x1 <= places[1].x1
    one_each = [row(strategy, 16, 1.0) for strategy in programs.NAMES]
    assert throughput_figures.plot([("vit-base-16", one_each)], "a.png")
    figures[2].draw_without_rendering()
    (legend,) = figures[2].legends
    places = legend.get_window_extent(), figures[2].bbox
    assert places[1].x0 <= places[0].x0 <= places[0].x1 <= places[1].x1
    tops = {round(text.get_window_extent().y0) for text in legend.get_texts()}
    assert len(tops) == 1  # names are in one line
    labels = [each.get_window_extent() for each in figures[1].axes[3].get_xticklabels()]
    assert all(a.x1 < b.x0 for a, b in itertools.pairwise(labels))
