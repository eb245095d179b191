"""A run from start to finish: the guarantee, the folder, and how it stops."""

import dataclasses
import datetime
import json
import os
import re
import signal
import stat
from typing import Any

import jax
import numpy as np
import optax
import pytest
from small_runs import EVALUATE, MECHANISM, OPTIMIZER, first_params, loss, run, same

import tanager
from tanager.adaptive import AdaptiveClipping
from tanager.models import weights
from tanager.privacy.accountant import composed_epsilon
from tanager.privacy.ledger import Ledger
from tanager.privacy.mechanism import Adjacency, Mechanism
from tanager.training.loop import _epsilon_ahead
from tanager.training.problem import DPSGD


# Event loops that orbax leaves behind say so whenever they are collected.
pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)


ADAPTIVE, COUNTS = AdaptiveClipping(), Mechanism(1.0, 5.0, 1)
REPLACED = dataclasses.replace(MECHANISM, adjacency=Adjacency.REPLACE_ONE)


def test_a_run_without_a_folder_is_the_same_and_keeps_the_first_parameters(seeded):
    params = first_params()
    result = run(seed=5, params=params)
    assert same(params, first_params())
    assert result.epsilon == tanager.epsilon(MECHANISM, 1e-3)
    assert result.summary["steps"] == 12
    assert result.evaluation is not None
    assert result.evaluation.accuracy > 0.5
    assert not same(result.params, params)
    assert same(result.params, seeded[0].params)


def test_a_fixed_seed_is_marked_not_private(seeded):
    result, out = seeded
    assert result.summary["private"] is False
    assert "NOT PRIVATE" in (out / "report.html").read_text().upper()


@pytest.mark.parametrize("seed", [5, None])
def test_a_run_with_a_fixed_seed_says_so_before_any_epsilon(seed, capsys):
    run(seed=seed, progress=True)
    before, _, _ = capsys.readouterr().out.partition("ε")
    assert ("NOT PRIVATE: whoever knows the seed" in before) == (seed is not None)


def test_the_folder_holds_everything(first_complete):
    result, out = first_complete
    names = {path.name for path in out.iterdir()}
    assert names == {
        "config.json",
        "ledger.jsonl",
        "metrics.jsonl",
        "tensorboard",
        "checkpoints",
        "model.safetensors",
        "model-ema.safetensors",
        "result.json",
        "report.html",
        "private",
    }
    summary = json.loads((out / "result.json").read_text())
    assert summary["epsilon"] == result.epsilon
    assert summary["accountant"] == "pld"
    assert summary["adjacency"] == "zero-out"
    assert summary["private"] is True
    assert result.evaluation is not None
    assert result.evaluation_ema is not None
    assert summary["test_accuracy"] == result.evaluation.accuracy
    assert summary["test_accuracy_ema"] == result.evaluation_ema.accuracy
    assert (summary["batch_size"], summary["examples"]) == (24, 60)
    measures = summary["measures"]
    for name, key in (
        ("parameters", "test_accuracy"),
        ("average", "test_accuracy_ema"),
    ):
        assert measures[name]["accuracy"]["value"] == pytest.approx(summary[key])
    assert np.sum(measures["average"]["confusion_matrix"]) == 30
    assert datetime.date.fromisoformat(summary["date"])
    assert Ledger.read(out / "ledger.jsonl").steps() == 12
    lines = (out / "metrics.jsonl").read_text().splitlines()
    metrics = [json.loads(line) for line in lines]
    assert [line["step"] for line in metrics] == [4, 8, 12]
    assert metrics[-1]["epsilon"] == result.epsilon
    for line in metrics:
        spent = Mechanism(0.4, 1.2, line["step"])
        exact = tanager.epsilon(spent, 1e-3)
        assert exact <= line["epsilon"] <= 1.0005 * exact


@pytest.mark.parametrize("by", ["pld", "rdp"])
def test_what_is_said_on_the_way_bounds_all_that_is_spent_until_then(by):
    options: dict[str, Any] = {"accountant": by, "class_counts": COUNTS}
    algorithm = DPSGD(MECHANISM, OPTIMIZER, delta=1e-3, **options)
    spent = COUNTS, dataclasses.replace(MECHANISM, steps=8)
    exact = composed_epsilon(spent, 1e-3, by)
    assert exact <= _epsilon_ahead(algorithm, 4, 4) <= 1.001 * exact


def test_the_saved_models_are_the_parameters_handed_over(first_complete):
    result, out = first_complete
    for name, params in [("model", result.params), ("model-ema", result.average)]:
        loaded = weights.load(first_params(), out / f"{name}.safetensors")
        assert same(loaded, params)


def test_secrets_stay_in_the_private_folder(complete):
    out = complete
    assert stat.S_IMODE((out / "private").stat().st_mode) == 0o700
    for path in (out / "private").iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    secret = json.loads((out / "private/seed.json").read_text())["secret"]
    assert len(bytes.fromhex(secret)) == 32
    public = [p for p in out.rglob("*") if p.is_file() and "private" not in p.parts]
    assert len(public) > 8
    for path in public:
        content = path.read_bytes()
        assert secret.encode() not in content, path
        assert bytes.fromhex(secret) not in content, path
    private = [
        json.loads(line)
        for line in (out / "private/metrics.jsonl").read_text().splitlines()
    ]
    assert [line["step"] for line in private] == list(range(1, 13))
    released = (out / "metrics.jsonl").read_text()
    assert not {"loss", "clipped", "examples"} & set(
        json.loads(released.split("\n")[0])
    )


def test_two_runs_draw_different_secrets(first_complete):
    assert not same(first_complete[0].params, run().params)


def test_a_complete_run_is_not_run_again(first_complete, complete, capsys):
    """It says so. Nor does it forget how fast it was."""
    ledger = (complete / "ledger.jsonl").read_bytes()
    before = json.loads((complete / "result.json").read_text())
    again = run(complete, progress=True)
    printed = capsys.readouterr().out
    assert printed == f"12 of 12 steps were made before, in {complete}\n"
    assert same(first_complete[0].params, again.params)
    assert (complete / "ledger.jsonl").read_bytes() == ledger
    assert json.loads((complete / "result.json").read_text()) == before
    assert before["examples_per_second"] > 0


def test_ctrl_c_writes_a_checkpoint_and_the_run_goes_on(tmp_path, seeded):
    whole, _ = seeded
    before = signal.getsignal(signal.SIGINT)
    calls = []

    def evaluate(params):
        calls.append(1)
        if len(calls) == 4:
            os.kill(os.getpid(), signal.SIGINT)
        return EVALUATE(params)

    with pytest.raises(KeyboardInterrupt, match=r"^8 steps were saved in .*run: the"):
        run(tmp_path / "run", seed=5, evaluate=evaluate)
    assert (tmp_path / "run/checkpoints/8").is_dir()
    assert signal.getsignal(signal.SIGINT) is before
    assert same(run(tmp_path / "run", seed=5).params, whole.params)


def test_ctrl_c_in_the_last_evaluation_stops_once_everything_is_written(tmp_path):
    def press(line):
        if line["step"] == MECHANISM.steps:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "run", seed=5, on_metrics=press)
    ledger = (tmp_path / "run/ledger.jsonl").read_bytes()
    assert (tmp_path / "run/report.html").exists()
    assert run(tmp_path / "run", seed=5).evaluation is not None
    assert (tmp_path / "run/ledger.jsonl").read_bytes() == ledger


def test_what_on_metrics_raises_ends_the_run_once_it_is_saved(tmp_path, seeded):
    def enough(line):
        raise RuntimeError("accurate enough")

    with pytest.raises(RuntimeError, match="accurate enough"):
        run(tmp_path / "run", seed=5, on_metrics=enough)
    assert (tmp_path / "run/checkpoints/4").is_dir()
    assert same(run(tmp_path / "run", seed=5).params, seeded[0].params)


def test_numbers_of_numpy_are_numbers(tmp_path):
    described = {"levels": np.int64(3), "mean": np.float32(0.5), "width": np.inf}
    first = run(tmp_path / "run", seed=5, description=described)
    kept = json.loads((tmp_path / "run/config.json").read_text())
    assert (kept["levels"], kept["mean"], kept["width"]) == (3, 0.5, None)
    again = run(tmp_path / "run", seed=5, description=described)
    assert same(first.params, again.params)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"delta": 0.0}, "delta (=0.0) must be strictly between"),
        ({"delta": 1.5}, "delta (=1.5) must be strictly between"),
        ({"clip_norm": 0.0}, "clip_norm (=0.0) must be positive"),
        ({"style": "unit"}, "style (='unit') must be clip or automatic: updates"),
        ({"adaptive": ADAPTIVE, "style": "automatic"}, "must be None unless gradien"),
        ({"accountant": "tan"}, "accountant (='tan') must be one of pld, rdp"),
        ({"accountant": "rdp", "mechanism": REPLACED}, "has no RDP bound"),
        ({"class_counts": MECHANISM}, "must have sample rate 1 and 1 step"),
        ({"class_counts": COUNTS, "mechanism": REPLACED}, "must be the same for all"),
        ({"class_counts": COUNTS}, "must be given with the labels of the problem"),
        ({"declared_examples": 0}, "declared_examples (=0) must be at least 1"),
        ({"physical_batch_size": 0}, "physical_batch_size (=0) must be at least 1"),
        ({"physical_batch_size": 2**40}, "must be at most 1048576: it only affects"),
        ({"evaluate_every": 0}, "evaluate_every (=0) must be at least 1"),
        ({"augmentation_multiplicity": 4}, "augmentation_multiplicity (=4)"),
        ({"augment": lambda key, e: e}, "augmentation_multiplicity (=0)"),
        ({"ema_decay": 1.1}, "ema_decay (=1.1)"),
        ({"strategy": "ghosts"}, "strategy (='ghosts')"),
        ({"seed": -1}, "seed (=-1) must be at least 0"),
        ({"description": {"levels": np.arange(3)}}, "description must be JSON"),
        ({"description": {"classes": 3}}, "has classes 3, which must be a list"),
        ({"loss": lambda p, e: p["b"]}, "must return one floating-point scalar"),
        ({"loss": lambda p, e: jax.lax.pmean(loss(p, e), "b")}, "must not mix"),
    ],
)
def test_bad_input_is_refused_and_nothing_is_left_behind(tmp_path, changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        run(tmp_path / "run", **changes)
    if "seed" not in changes:
        assert not (tmp_path / "run").exists()


def test_a_run_without_noise_is_warned_of_and_its_files_are_valid_json(tmp_path):
    def refuse(constant):
        raise AssertionError(constant)

    silent = Mechanism(0.4, 0.0, 3)
    with pytest.warns(UserWarning, match="this run is not private"):
        result = run(tmp_path / "run", mechanism=silent)
    assert result.epsilon == np.inf
    assert result.summary["private"] is False
    names = ("result.json", "config.json", "metrics.jsonl")
    *whole, lines = [(tmp_path / "run" / name).read_text() for name in names]
    for text in (*whole, *lines.splitlines()):
        json.loads(text, parse_constant=refuse)
    assert "NOT PRIVATE" in (tmp_path / "run/report.html").read_text()


def test_parameters_that_blow_up_stop_the_run():
    with pytest.raises(FloatingPointError, match="not finite after step 4"):
        run(optimizer=optax.scale(np.inf))
