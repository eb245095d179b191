import functools
import inspect
import json
import types
from unittest import mock

import jax
import pytest

import tanager
from tanager.bench import programs, timing
from tanager.cli import main
from tanager.clipping import ClippedGrad
from tanager.commands import bench
from tanager.commands.bench import one_batch


SMALL = ["--model", "linear", "--features", "6", "--classes", "3"]
STEP = ["bench", "step", *SMALL, "--physical-batch", "4", "--repeats", "2"]


def test_json_of_a_step_has_every_field(capsys):
    words = [*STEP, "--examples", "3", "--json"]
    assert main(words) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    record = json.loads(captured.out)
    assert [row["strategy"] for row in record["rows"]] == list(programs.NAMES)
    for row in record["rows"]:
        assert set(row) == {
            *("strategy", "seconds", "seconds_spread", "examples_per_second"),
            *("ratio_to_sgd", "temp_bytes", "compile_seconds", "traces", "error"),
        }
        assert row["traces"] == 1
        assert row["examples_per_second"] == pytest.approx(3 / row["seconds"])
    assert record["rows"][0]["ratio_to_sgd"] == 1
    assert record["update"]["seconds"] > 0
    assert record["workload"]["image_shape"] == [6]
    assert (record["physical_batch"], record["examples"]) == (4, 3)
    assert {"cpu", "cores", "platform", "device"} <= set(record["machine"])
    assert record["machine"]["cores"] >= 1
    assert record["versions"]["jax"] == jax.__version__
    assert record["versions"]["tanager"] == tanager.__version__
    assert record["command"] == "tanager " + " ".join(words)
    assert record["date"].endswith("+00:00")


def test_the_table_has_a_line_for_each_strategy(capsys):
    words = [*STEP, "--strategies", "per_example", "--breakdown"]
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[0] == "strategy"
    assert lines[1].split()[0] == "per_example"
    assert " — " in lines[1]  # no SGD, no ratio
    assert lines[2].startswith("noisy update, once for each logical batch: ")
    assert any("clip" in line for line in lines[3:])
    assert main([*words, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["notes"][0].startswith("backward: the plain gradient minus forward")
    assert record["notes"][1].startswith("optimizer step of a strategy: the noisy")
    assert record["notes"][2].endswith("al. 2024, Table 2)")
    assert set(record["notes"][:3]) <= set(lines)  # a fourth is of its timings
    assert len(record["rows"][0]["breakdown"]) == 4


def test_no_line_of_help_begins_like_a_flag():
    # tyro begins a paragraph there.
    for kind in bench._COMMANDS.values():
        lines = (inspect.getdoc(kind) or "").splitlines()
        assert [line for line in lines if line.startswith("-")] == []


def test_a_section_below_zero_has_a_note():
    rows = [
        {"breakdown": {"forward": {"seconds": seconds}}} for seconds in (1.0, -1e-9)
    ]
    assert any(note.startswith("below 0: ") for note in one_batch._notes(rows))
    assert len(one_batch._notes([*rows[:1], {"breakdown": None}])) == 3


def test_failing_strategies_are_told_of(capsys, monkeypatch):
    def fail(workload, name):
        if name != programs.SGD:
            raise RuntimeError("no rule for tap [3]")
        return programs.sgd(workload)

    monkeypatch.setattr(programs, "training", fail)
    assert main([*STEP, "--strategies", "sgd", "per_example"]) == 0
    assert "per_example: RuntimeError: no rule for tap [3]" in capsys.readouterr().out
    assert main([*STEP, "--strategies", "per_example"]) == 1


def test_stopping_prints_what_was_measured(capsys, monkeypatch):
    row = {
        "strategy": "sgd",
        "seconds": 0.5,
        "seconds_spread": 0.01,
        "ratio_to_sgd": 1.0,
    }
    row |= {"examples_per_second": 64.0, "temp_bytes": 2**21, "compile_seconds": 3.0}
    row |= {"traces": 1, "error": None}
    found = timing.StepBench([row], {"seconds": None}, stopped=True)
    monkeypatch.setattr(timing, "bench_step", lambda *words, **options: found)
    assert main(STEP) == 130
    captured = capsys.readouterr()
    words = captured.out.splitlines()[1].split()
    assert words == ["sgd", "500", "±", "10", "64", "1.00", "2.0", "3.0", "1"]
    assert "stopped: this is what was measured before" in captured.err


def test_the_largest_batch_under_a_limit(capsys):
    words = ["bench", "memory", *SMALL, "--limit-gib", "1e-5"]
    assert main([*words, "--strategies", "sgd", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["limit_bytes"] == int(1e-5 * 2**30)
    assert record["rows"][0]["physical_batch"] > 1
    assert "machine" in record
    assert main([*words, "--strategies", "sgd"]) == 0
    line = capsys.readouterr().out.splitlines()[1].split()
    assert line == ["sgd", str(record["rows"][0]["physical_batch"]), "1.00"]
    assert main([*words[:-1], "1e-8", "--strategies", "sgd"]) == 0
    assert "sgd: one example needs more memory than that" in capsys.readouterr().out


def test_a_pipe_is_told_now_and_then_what_is_tried(capsys, monkeypatch):
    words = ["bench", "memory", *SMALL, "--limit-gib", "1e-5", "--strategies", "sgd"]
    now = iter(range(0, 10**6, 3))  # each look at the clock is 3 s later
    seldom = functools.partial(bench._seldom, clock=lambda: next(now))
    monkeypatch.setattr(bench, "_seldom", seldom)
    assert main(words) == 0
    first, *more = capsys.readouterr().err.splitlines()
    assert first == "sgd: looking where to begin"
    assert more and all("sgd: trying" in line for line in more)
    assert len(more) < next(now) / 3 / 3
    assert main([*words, "--json"]) == 0
    assert not capsys.readouterr().err


def test_explain_prints_what_the_clipped_gradient_says(capsys, monkeypatch):
    said = types.SimpleNamespace(as_json=lambda: {"taps": 2})
    explain = mock.Mock(return_value=said)
    monkeypatch.setattr(ClippedGrad, "explain", explain)
    words = ["bench", "explain", *SMALL, "--strategy", "per_example"]
    assert main([*words, "--physical-batch", "7"]) == 0
    assert capsys.readouterr().out == f"{said}\n"
    params, batch = explain.call_args.args
    assert len(jax.tree.leaves(params)) == 2
    assert batch["image"].shape[0] == 7
    assert main([*words, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["explain"] == {"taps": 2}
    assert record["strategy"] == "per_example"
    assert main([*words[:-1], "auto:low"]) == 0


@pytest.mark.parametrize(
    ("more", "shape"), [([], [28, 28, 1]), (["--image-size", "16"], [16, 16, 1])]
)
def test_a_model_is_measured_on_its_own_images_by_default(capsys, more, shape):
    words = ["bench", "explain", "--model", "lenet", "--physical-batch", "2", "--json"]
    assert main([*words, "--strategy", "bk", *more]) == 0
    assert json.loads(capsys.readouterr().out)["workload"]["image_shape"] == shape


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["step", "--model", "wrn-16-5x"], "did you mean wrn-16-4?"),
        (
            ["step", "--strategies", "per_exampl"],
            "--strategies (='per_exampl') is unknown: did you mean per_example?",
        ),
        (
            ["step", "--precision", "fp32"],
            "precision (='fp32') is unknown",
        ),
        (["step", "--examples", "33"], "must be at most the physical batch 32"),
        (["step", "--features", "3"], "model (='wrn-16-4') must be one of mlp, linear"),
        (["step", *SMALL, "--features", "0"], "(=0) must be at least 1"),
        (["step", *SMALL, "--image-size", "8"], "--image-size (=8) is of images"),
        (["step", *SMALL, "--channels", "1"], "--channels (=1) is of images: leave"),
        (["step", *SMALL, "--clip-norm", "-1"], "clip-norm (=-1.0) must be positive"),
        (["step", "--model", "vit-tiny-16", "--image-size", "40"], "use 32 or 48"),
        (["memory", *SMALL], "--limit-gib (=None) must be given on a CPU"),
        (["memory", *SMALL, "--limit-gib", "0"], "limit-gib (=0.0) must be positive"),
        (["explain", *SMALL, "--strategy", "atuo"], "strategy (='atuo') is unknown"),
        (["explain", *SMALL, "--physical-batch", "0"], "physical-batch (=0) must be"),
    ],
)
def test_bad_input_gives_one_message(capsys, words, message):
    assert main(["bench", *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("tanager: error: ")
    assert message in error
