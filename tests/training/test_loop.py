"""A run from start to finish: the guarantee, the folder, stopping and going on."""

import contextlib
import datetime
import errno
import gc
import json
import os
import re
import resource
import shutil
import signal
import stat
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tanager
from forks import Fork
from parts import train
from tanager import data
from tanager.models import weights
from tanager.privacy.hashed_file import HashedFile
from tanager.privacy.ledger import Ledger
from tanager.privacy.mechanism import Mechanism
from tanager.training import checkpoint, fingerprint, run_folder
from tanager.training.evaluate import Classification
from tanager.training.resume import Repeats
from tanager.training.run_folder import RunFolder


# Event loops that orbax leaves behind say so whenever they are collected.
pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)


N, FEATURES, CLASSES = 60, 4, 3
MECHANISM = Mechanism(sample_rate=0.4, noise_multiplier=1.2, steps=12)


def examples(rows=N, seed=0):
    random = np.random.default_rng(seed)
    labels = random.integers(0, CLASSES, rows).astype(np.int32)
    centres = np.eye(CLASSES, FEATURES)
    x = centres[labels] + 0.2 * random.normal(size=(rows, FEATURES))
    return {"x": x.astype(np.float32), "label": labels}


def predict(params, example):
    return params["w"] @ example["x"] + params["b"]


def loss(params, example):
    return optax.softmax_cross_entropy_with_integer_labels(
        predict(params, example), example["label"]
    )


def first_params():
    return {"w": jnp.zeros((CLASSES, FEATURES)), "b": jnp.zeros(CLASSES)}


# Runs of the same objects share their programs (`conftest`).
OPTIMIZER = optax.sgd(2.0, momentum=0.5)
EVALUATE = Classification(predict, examples(30, 1), ("a", "b", "c"))


def run(out=None, **changes):
    settings = {
        "loss": loss,
        "params": first_params(),
        "data": examples(),
        "mechanism": MECHANISM,
        "delta": 1e-3,
        "optimizer": OPTIMIZER,
        "out": out,
        "physical_batch_size": 16,
        "evaluate": EVALUATE,
        "evaluate_every": 4,
        "checkpoint_seconds": 1e6,
        "progress": False,
    }
    return train(**settings | changes)


class Killed(Exception):
    """Stands for a process that dies."""


def dies_at_evaluation(count):
    """An evaluator that dies at its n-th call after the one before the first step."""
    calls = []

    def evaluate(params):
        calls.append(1)
        if len(calls) == count + 1:
            raise Killed
        return EVALUATE(params)

    return evaluate


def contents(folder):
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder): path.read_bytes() for path in files}


def same(one, two):
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True)
    return all(np.array_equal(a, b) for a, b in pairs)


@pytest.fixture(scope="module")
def seeded(tmp_path_factory):
    """A complete run of seed 5: what it returned, and its folder, not to be changed."""
    out = tmp_path_factory.mktemp("seeded") / "run"
    return run(out, seed=5), out


@pytest.fixture(scope="module")
def first_complete(tmp_path_factory):
    out = tmp_path_factory.mktemp("complete") / "run"
    return run(out), out


def in_place_of(run, out):
    """Copy a run, as if it had been made there."""
    shutil.copytree(run, out)
    file = out / "private/seed.json"
    kept = json.loads(file.read_text())
    file.write_text(json.dumps(kept | {"place": str(out)}))
    return out


@pytest.fixture
def complete(first_complete, tmp_path):
    """The folder of a complete run of its own secret."""
    return in_place_of(first_complete[1], tmp_path / "run")


@pytest.fixture(scope="module")
def first_dead(tmp_path_factory):
    out = tmp_path_factory.mktemp("dead") / "run"
    with pytest.raises(Killed):
        run(out, evaluate=dies_at_evaluation(1))
    return out


@pytest.fixture
def dead(first_dead, tmp_path):
    """The folder of a run that died at its first evaluation."""
    return in_place_of(first_dead, tmp_path / "run")


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
    assert summary["batch_size"] == 24
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


def number_of(path):
    return int(path.name)


@pytest.mark.parametrize("calls", [1, pytest.param(4, marks=pytest.mark.full), 5])
def test_a_run_that_died_goes_on_bit_identically(tmp_path, seeded, calls):
    whole, _ = seeded
    with pytest.raises(Killed):
        dies = {"evaluate": dies_at_evaluation(calls), "checkpoint_seconds": 0.0}
        run(tmp_path / "died", seed=5, **dies)
    (newest, *_) = sorted((tmp_path / "died/checkpoints").glob("[0-9]*"), key=number_of)
    assert 0 < number_of(newest) < 12
    resumed = run(tmp_path / "died", seed=5)
    assert same(resumed.params, whole.params)
    assert same(resumed.average, whole.average)
    assert resumed.epsilon == whole.epsilon
    assert Ledger.read(tmp_path / "died/ledger.jsonl").steps() == 12
    lines = (tmp_path / "died/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [4, 8, 12]


def test_without_its_checkpoints_it_begins_again_with_the_same_randomness(
    tmp_path, seeded
):
    whole, out = seeded
    shutil.copytree(out, tmp_path / "run")
    shutil.rmtree(tmp_path / "run/checkpoints")
    again = run(tmp_path / "run", seed=5)
    assert same(again.params, whole.params)
    assert again.epsilon == whole.epsilon


def test_a_complete_run_is_not_run_again(first_complete, complete):
    """Nor does it forget how fast it was."""
    ledger = (complete / "ledger.jsonl").read_bytes()
    before = json.loads((complete / "result.json").read_text())
    again = run(complete)
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

    with pytest.raises(KeyboardInterrupt):
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


@pytest.mark.parametrize(
    ("change", "streams"), [({"device": "another"}, 2), ({"deterministic": False}, 1)]
)
def test_steps_that_could_come_out_otherwise_are_not_made_again(
    tmp_path, monkeypatch, caplog, change, streams
):
    here = fingerprint.environment

    def elsewhere(*arguments):
        return here(*arguments) | change

    if "deterministic" in change:
        monkeypatch.setattr(fingerprint, "environment", elsewhere)
    with pytest.raises(Killed):
        run(tmp_path / "run", evaluate=dies_at_evaluation(3))
    assert Ledger.read(tmp_path / "run/ledger.jsonl").steps() == 8
    monkeypatch.setattr(fingerprint, "environment", elsewhere)
    with caplog.at_level("WARNING", logger="tanager"):
        result = run(tmp_path / "run")
    assert "8 steps after checkpoint 0" in caplog.text  # the model lacks them
    ledger = Ledger.read(tmp_path / "run/ledger.jsonl")
    lines = (tmp_path / "run/ledger.jsonl").read_text().splitlines()
    assert len({json.loads(line)["stream"] for line in lines}) == streams
    assert ledger.steps() == ledger.next_step() == 12
    assert result.epsilon == tanager.epsilon(MECHANISM, 1e-3)


def test_after_a_step_that_gave_other_sums_charged_steps_are_left_out(tmp_path, caplog):
    with pytest.raises(Killed):
        run(tmp_path / "run", evaluate=dies_at_evaluation(3))
    identities = json.loads((tmp_path / "run/private/fingerprint.json").read_text())
    (stream,) = identities["streams"]
    with closing(Repeats(tmp_path / "run/private/sums.jsonl", stream)) as repeats:
        repeats.check(5, np.zeros(4, np.uint32))
        repeats.check(5, np.ones(4, np.uint32))
    result = run(tmp_path / "run")
    assert Ledger.read(tmp_path / "run/ledger.jsonl").steps() == 12
    assert result.epsilon == tanager.epsilon(MECHANISM, 1e-3)
    assert "8 steps after checkpoint 0" in caplog.text


@pytest.mark.parametrize("kept", [0, 2, 3, 4])
def test_steps_whose_sums_are_not_on_record_are_left_out(dead, caplog, kept):
    """Nobody would know whether they come out as before; the last was not yet used."""
    file = dead / "private/sums.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    charged = Ledger.read(dead / "ledger.jsonl").steps()
    assert len(lines) == charged == 4
    file.unlink() if not kept else file.write_text("".join(lines[:kept]))
    assert run(dead).summary["steps"] == 12
    left_out = f"{charged} steps after checkpoint 0" in caplog.text
    assert left_out == (kept < charged - 1)
    assert Ledger.read(dead / "ledger.jsonl").steps() == 12


def test_sums_before_the_checkpoint_are_not_needed(tmp_path, caplog):
    with pytest.raises(Killed):
        run(tmp_path, evaluate=dies_at_evaluation(3), checkpoint_seconds=0.0)
    (tmp_path / "private/sums.jsonl").unlink()
    for call in (1, 2):
        with contextlib.suppress(Killed):
            run(tmp_path, evaluate=dies_at_evaluation(call), checkpoint_seconds=0.0)
    assert run(tmp_path).summary["steps"] == 12
    assert "were charged and are now" not in caplog.text


def test_after_a_change_of_environment_a_second_death_costs_nothing(dead, monkeypatch):
    """Lost steps stay lost when the new environment dies before a checkpoint."""
    here = fingerprint.environment
    monkeypatch.setattr(
        fingerprint,
        "environment",
        lambda *arguments: here(*arguments) | {"device": "x"},
    )
    with pytest.raises(Killed):
        run(dead, evaluate=dies_at_evaluation(1))
    assert Ledger.read(dead / "ledger.jsonl").next_step() == 8
    result = run(dead)
    assert Ledger.read(dead / "ledger.jsonl").steps() == 12
    assert result.epsilon == tanager.epsilon(MECHANISM, 1e-3)


def weighing(*classes, back=1.0):
    """A loss with a constant in a function of its own, and with its own derivative."""
    weights = np.asarray(classes, np.float32)

    @jax.jit
    def weight(label):
        return jnp.asarray(weights)[label]

    @jax.custom_vjp
    def same_value(x):
        return x

    same_value.defvjp(lambda x: (x, None), lambda _, dx: (back * dx,))
    return lambda p, e: same_value(loss(p, e) * weight(e["label"]))


CHANGES = {
    "noise": ({"mechanism": Mechanism(0.4, 1.3, 12)}, "mechanism.noise_multiplier was"),
    "clip": ({"clip_norm": 2.0}, "clip_norm was 1.0 and is 2.0"),
    "style": ({"style": "automatic"}, "clip_gamma was None and is 0.01"),
    "learning rate": ({"optimizer": optax.sgd(2.5, momentum=0.5)}, "optimizer"),
    "another optimizer": (
        {"optimizer": optax.sgd(2.0)},
        "configuration: optimizer changed; initial state of the optimizer changed",
    ),
    "loss": ({"loss": lambda p, e: 2 * loss(p, e)}, "configuration: loss"),
    "constant within": ({"loss": weighing(1.0, 1.0, 5.0)}, "configuration: loss"),
    "derivative": ({"loss": weighing(1.0, 1.0, 1.0, back=5.0)}, "configuration: loss"),
    "data": ({"data": examples(seed=4)}, "configuration: data"),
    "start": (
        {"params": jax.tree.map(lambda leaf: leaf + 1, first_params())},
        "initial parameters",
    ),
    "described": ({"description": {"model": "other"}}, "model was None and is 'other'"),
    "decay": ({"ema_decay": 0.5}, "ema_decay was 0.9999 and is 0.5"),
}


@pytest.fixture(scope="module")
def weighed(tmp_path_factory):
    """The folder of a run that died, of another loss."""
    out = tmp_path_factory.mktemp("weighed") / "run"
    with pytest.raises(Killed):
        run(out, loss=weighing(1.0, 1.0, 1.0), evaluate=dies_at_evaluation(2))
    return out


@pytest.mark.parametrize("name", CHANGES)
def test_another_configuration_in_the_same_folder_is_refused(dead, weighed, name):
    changes, message = CHANGES[name]
    if name in ("constant within", "derivative"):
        dead = weighed
    before = contents(dead)
    with pytest.raises(ValueError, match=re.escape(message)):
        run(dead, **changes)
    assert contents(dead) == before


@pytest.mark.parametrize("rows", [1, 1025, 3000])
def test_any_byte_of_examples_in_memory_tells_them_apart(monkeypatch, rows):
    monkeypatch.setattr(fingerprint, "_BLOCK", 4096)
    first = data.ArraySource(examples(rows))
    part = np.arange(rows)[::-1]
    for row in {0, rows // 3, rows - 1}:
        for leaf in ("x", "label"):
            changed = {name: array.copy() for name, array in first.tree.items()}
            changed[leaf][row] += 1
            other = data.ArraySource(changed)
            assert fingerprint.sample(first) != fingerprint.sample(other)
            same_part = fingerprint.sample(data.subset(first, part))
            assert same_part != fingerprint.sample(data.subset(other, part))
    copied = data.ArraySource(jax.tree.map(np.array, first.tree))
    assert fingerprint.sample(copied) == fingerprint.sample(first)


def test_one_example_that_changed_among_thousands_is_refused(tmp_path):
    before = examples(3000)
    after = {name: array.copy() for name, array in before.items()}
    after["x"][1] *= -1000
    with pytest.raises(Killed):
        run(tmp_path / "run", data=before, delta=1e-4, evaluate=dies_at_evaluation(1))
    with pytest.raises(ValueError, match="configuration: data"):
        run(tmp_path / "run", data=after, delta=1e-4)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("jax_threefry_partitionable", False),
        ("jax_enable_x64", True),
        ("jax_default_matmul_precision", "tensorfloat32"),
        ("jax_disable_jit", True),
    ],
)
def test_settings_of_jax_are_part_of_the_environment(name, value):
    before, here = getattr(jax.config, name), fingerprint.environment(16, "")
    try:
        jax.config.update(name, value)
        there = fingerprint.environment(16, "")
    finally:
        jax.config.update(name, before)
    assert there != here
    assert json.loads(json.dumps(there)) == there
    assert fingerprint.environment(16, "") == here


@pytest.mark.parametrize(
    "name", ["NPROC", "PJRT_NPROC", "OMP_NUM_THREADS", "XLA_FLAGS", "JAX_NEW", "TF_X"]
)
def test_variables_that_can_change_sums_are_part_of_the_environment(monkeypatch, name):
    here = fingerprint.environment(16, "")
    monkeypatch.setenv(name, "--xla_cpu_enable_fast_math=false")
    assert fingerprint.environment(16, "") != here


@pytest.mark.parametrize(
    "name",
    ["JAX_COMPILATION_CACHE_DIR", "CUDA_VISIBLE_DEVICES", "JAX_TRANSFER_GUARD", "A"],
)
def test_variables_that_cannot_are_not(monkeypatch, name):
    here = fingerprint.environment(16, "")
    monkeypatch.setenv(name, "1")
    assert fingerprint.environment(16, "") == here


def test_a_refusal_lets_go_of_the_folder(dead):
    """Whoever keeps the error, as a notebook does: its frames hold nothing open."""
    metrics = dead / "metrics.jsonl"
    before = metrics.read_text()
    metrics.write_text("?\n" + before)
    with pytest.raises(ValueError, match="delete that line") as kept:
        run(dead)
    metrics.write_text(before)
    assert run(dead).summary["steps"] == 12
    assert kept.tb is not None


def test_after_a_refusal_the_run_itself_goes_on(dead):
    with pytest.raises(ValueError, match="ema_decay was"):
        run(dead, ema_decay=0.5)
    assert run(dead).summary["steps"] == 12


def test_a_copy_is_refused_while_the_run_itself_is_there(first_dead, tmp_path):
    """Else, on machines that compute otherwise, one noise hides two sums."""
    for name in ("moved", "one", "two"):
        shutil.copytree(first_dead, tmp_path / name)
    with pytest.raises(ValueError, match=f"is a copy of the run in {first_dead}: if"):
        run(tmp_path / "one")
    for name in ("moved", "one", "two"):
        file = tmp_path / name / "private/seed.json"
        kept = json.loads(file.read_text())
        file.write_text(json.dumps(kept | {"place": str(tmp_path / "moved")}))
    (tmp_path / "moved").rename(tmp_path / "here")
    (tmp_path / "link").symlink_to(tmp_path / "here")
    assert run(tmp_path / "link").summary["steps"] == 12
    place = json.loads((tmp_path / "here/private/seed.json").read_text())["place"]
    assert place == str(tmp_path / "link")
    assert run(tmp_path / "here").summary["steps"] == 12
    shutil.copytree(tmp_path / "here", tmp_path / "finished")
    assert run(tmp_path / "finished").summary["steps"] == 12  # nothing is made again
    # One of two copies of what is gone resumes, and the other cannot be told apart.
    assert run(tmp_path / "one").summary["steps"] == 12


def test_a_copy_is_refused_before_its_seed_is_used(tmp_path):
    """Else two runs have one noise, and the account counts them once."""
    secret = RunFolder(tmp_path / "one").seed(None)
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    with pytest.raises(ValueError, match=f"is a copy of the run in {tmp_path}/one: if"):
        run(tmp_path / "two")
    (tmp_path / "one").rename(tmp_path / "moved")
    assert RunFolder(tmp_path / "moved").seed(None) == secret


def test_a_run_of_version_0_1_is_refused(tmp_path):
    (tmp_path / "private").mkdir()
    (tmp_path / "private/identity.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tanager 0\.1 began, .* finish it with"):
        run(tmp_path)
    assert [path.name for path in tmp_path.rglob("*")] == ["private", "identity.json"]


@pytest.mark.parametrize(("first", "second"), [(None, 1), (1, None), (1, 2)])
def test_another_seed_in_the_same_folder_is_refused(tmp_path, first, second):
    RunFolder(tmp_path).seed(first)
    with pytest.raises(ValueError, match="differs from the seed"):
        RunFolder(tmp_path).seed(second)


@pytest.mark.parametrize("links", [True, False])
def test_processes_that_begin_at_once_share_a_secret(tmp_path, monkeypatch, links):
    if not links:

        def link(*paths):
            raise OSError("Operation not supported")

        monkeypatch.setattr(os, "link", link)
    drawn, at_once = tanager.Seed.from_os, threading.Barrier(8 if links else 1)

    def from_os():
        seed = drawn()
        at_once.wait()  # nobody has written yet
        return seed

    monkeypatch.setattr(run_folder.Seed, "from_os", from_os)
    with ThreadPoolExecutor(8 if links else 1) as threads:
        begun = [threads.submit(RunFolder(tmp_path).seed, None) for _ in range(8)]
        secrets = {each.result().secret for each in begun}
    assert len(secrets) == 1
    (kept,) = (tmp_path / "private").iterdir()
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert json.loads(kept.read_text())["secret"] == secrets.pop().hex()


@pytest.mark.parametrize(
    ("lost", "message"),
    [
        ("private/seed.json", "its secret seed"),
        ("config.json", "lost config.json, but its secret seed has been used"),
        (
            "private/fingerprint.json",
            "lost private/fingerprint.json, but its secret seed",
        ),
        ("ledger.jsonl", "lost ledger.jsonl, but its secret seed has been used"),
    ],
)
def test_a_folder_that_lost_a_part_is_refused(complete, lost, message):
    (complete / lost).unlink()
    with pytest.raises(ValueError, match=re.escape(message)):
        RunFolder(complete).seed(None)


@pytest.mark.parametrize(
    "left", [("seed.json",), ("seed.json", "fingerprint.json"), None]
)
def test_a_secret_without_its_run_is_not_used_again(complete, left):
    """The other files were moved out, to be published."""
    for path in complete.iterdir():
        if path.name != "private":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    for path in (complete / "private").iterdir():
        if left is not None and path.name not in left:
            path.unlink()
    with pytest.raises(ValueError, match="would add the same noise to other sums"):
        RunFolder(complete).seed(None)


def test_a_secret_that_no_step_was_charged_for_is_used(tmp_path, monkeypatch):
    """A run that was killed as it began goes on in the same folder."""

    def dies(*arguments):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "charge", dies)
        with pytest.raises(Killed):
            run(tmp_path / "run")
    (tmp_path / "run/ledger.jsonl").unlink()
    assert run(tmp_path / "run").summary["steps"] == 12


def charge_elsewhere(mechanism, steps):
    """Put the ledger of another run in the place of a folder's."""

    def put(path):
        path.unlink()
        with Ledger(path) as ledger:
            for step in range(steps):
                ledger.charge(mechanism, step, "0123456789abcdef")

    return put


def cut(path):
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:5]))


@pytest.mark.parametrize(
    ("put", "message"),
    [
        (charge_elsewhere(Mechanism(0.01, 5.0, 12), 12), "a stream of another run"),
        (charge_elsewhere(MECHANISM, 12), "a stream of another run"),
        (cut, "does not charge step 5, which was made"),
    ],
)
def test_the_ledger_of_another_run_is_refused(complete, put, message):
    """A run of ε = 8 must not claim 0.5 because the ledger beside it does."""
    put(complete / "ledger.jsonl")
    with pytest.raises(ValueError, match=message) as refused:
        run(complete)
    assert "from a copy" not in str(refused.value)


def test_an_older_copy_of_the_ledger_is_refused(complete):
    """Without checkpoints, checksums still tell how many steps were made."""
    shutil.rmtree(complete / "checkpoints")
    identities = json.loads((complete / "private/fingerprint.json").read_text())
    with closing(
        Repeats(complete / "private/sums.jsonl", *identities["streams"])
    ) as repeats:
        for step in range(12):
            repeats.check(step, np.zeros(4, np.uint32))
    cut(complete / "ledger.jsonl")
    with pytest.raises(ValueError, match="does not charge step 5, which was made"):
        run(complete)


def test_a_folder_in_use_is_refused(complete):
    with (
        Ledger(complete / "ledger.jsonl"),
        pytest.raises(ValueError, match="written by another process"),
    ):
        run(complete)


def test_a_full_disk_is_refused_before_anything_is_spent(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=10_000)
    monkeypatch.setattr(run_folder.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(
        ValueError, match=r"9\.8 KiB left, but the run needs about [\d.]+ MiB"
    ):
        run(tmp_path / "run")
    assert not (tmp_path / "run/ledger.jsonl").exists()


@pytest.mark.parametrize("file", [(HashedFile, "append"), (Repeats, "_append")])
def test_a_disk_that_fills_up_is_named_and_the_run_resumes(
    tmp_path, seeded, monkeypatch, file
):
    kind, name = file
    append, calls = getattr(kind, name), iter(range(5))

    def until_full(*arguments):
        if next(calls, None) is None:
            raise OSError(errno.ENOSPC, "No space left on device")
        append(*arguments)

    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(kind, name, until_full)
        message = f"a disk is full, likely that of run folder {out} (No space left on"
        with pytest.raises(OSError, match=re.escape(message)):
            run(out, seed=5)
    assert same(run(out, seed=5).params, seeded[0].params)


@pytest.mark.parametrize("name", [None, "run/config.json", "elsewhere.jsonl"])
def test_a_full_disk_of_another_file_is_not_that_of_the_run(tmp_path, name):
    named = None if name is None else str(tmp_path / name)
    with pytest.raises(OSError) as caught:  # noqa: SIM117
        with run_folder.naming_full_disks(tmp_path / "run"):
            raise OSError(errno.ENOSPC, "No space left on device", named)
    elsewhere = caught.value.filename == str(tmp_path / "elsewhere.jsonl")
    assert elsewhere != ("which resumes" in str(caught.value))


def test_out_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(ValueError, match="must be a folder, not a file"):
        run(tmp_path / "run")


def test_a_path_that_is_not_utf8_is_refused_before_anything_is_spent(
    tmp_path, monkeypatch
):
    """Checkpoints and models could not be written there."""
    with pytest.raises(ValueError, match=r"run.udcff'\) must be a path that is valid"):
        run(tmp_path / "run\udcff")
    os.mkdir(tmp_path / "above\udcff")
    monkeypatch.chdir(tmp_path / "above\udcff")
    with pytest.raises(ValueError, match="like the folders above it"):
        run("run")
    assert not list((tmp_path / "above\udcff").iterdir())


@pytest.mark.parametrize("name", ["patients.csv", "images/1.png", "private/names.csv"])
def test_a_folder_with_files_of_others_is_refused(tmp_path, name):
    """A run's folder is shown and handed on. Hidden files do not matter."""
    (tmp_path / "run/private").mkdir(parents=True)
    (tmp_path / "run/.DS_Store").write_text("")
    RunFolder(tmp_path / "run")
    (tmp_path / "run" / name).parent.mkdir(exist_ok=True)
    (tmp_path / "run" / name).write_text("Anna")
    if not name.startswith("private"):
        (tmp_path / "run/private").rmdir()
    with pytest.raises(
        ValueError, match="must be new, be empty or hold a run, but it holds "
    ):
        run(tmp_path / "run")
    assert len([*(tmp_path / "run").iterdir()]) == 2


def test_the_log_of_a_job_is_better_elsewhere(tmp_path):
    """A traceback in it may show more than the guarantee covers."""
    for name in ("slurm-123.out", "slurm-123.err"):
        (tmp_path / name).write_text("")
    beside = re.escape(str(tmp_path / "run"))
    message = f"holds slurm-123.err: if that is the log of .* such as --out {beside}$"
    with pytest.raises(ValueError, match=message):
        RunFolder(tmp_path)
    (tmp_path / "names.csv").write_text("Anna")
    with pytest.raises(ValueError, match="move that elsewhere"):
        RunFolder(tmp_path)


@pytest.mark.parametrize(
    "name", ["config.json", "metrics.jsonl", "model.safetensors", "report.html"]
)
def test_a_folder_with_the_work_of_another_program_is_refused(tmp_path, name):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).write_text('{"mine": true}')
    with pytest.raises(ValueError, match=f"holds a {name} that tanager did not write"):
        run(tmp_path / "run")
    assert [path.name for path in (tmp_path / "run").iterdir()] == [name]
    assert (tmp_path / "run" / name).read_text() == '{"mine": true}'


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


def test_a_large_delta_is_warned_of():
    with pytest.warns(UserWarning, match=r"delta \(0.02\) is not below 1/N \(0.0167\)"):
        run(delta=0.02)


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


LONGER = {"seed": 11, "mechanism": Mechanism(0.4, 1.2, 30), "strategy": "bk"}
LONGER |= {"devices": 1}
SCRIPT = textwrap.dedent(
    """
    import sys
    sys.path.insert(0, {tests!r})
    import test_loop
    test_loop.run({out!r}, checkpoint_seconds=0.0, **test_loop.LONGER)
    """
)


@pytest.mark.slow
def test_killed_for_real_it_goes_on_bit_identically(tmp_path):
    """kill -9 whenever the ledger has grown a little, until the run is through."""
    out, kills, script = tmp_path / "killed", 0, tmp_path / "script.py"
    script.write_text(SCRIPT.format(tests=str(Path(__file__).parent), out=str(out)))
    while not (out / "result.json").exists():
        fork, begun = Fork(script), _lines(out)
        while fork.running and not begun + 8 < _lines(out) < 27:
            time.sleep(0.01)
        if fork.running:
            fork.kill()
            kills += 1
        fork.wait()
        assert fork.code in (0, -signal.SIGKILL), fork.errors
    assert kills >= 2
    whole = run(**LONGER)
    for name, expected in (("model", whole.params), ("model-ema", whole.average)):
        loaded = weights.load(first_params(), out / f"{name}.safetensors")
        assert same(loaded, expected)
    assert Ledger.read(out / "ledger.jsonl").steps() == 30


def _lines(out):
    path = out / "ledger.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def test_a_checkpoint_that_cannot_be_written_is_one_message(tmp_path, monkeypatch):
    checkpoints = checkpoint.Checkpoints(tmp_path / "checkpoints")
    checkpoints.save(1, first_params())

    def full(*arguments, **options):
        raise ValueError("RESOURCE_EXHAUSTED: No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints._manager, "save", full)
        with pytest.raises(OSError, match="the checkpoint of step 2 cannot be written"):
            checkpoints.save(2, first_params())
    restored = checkpoints.restore(first_params())
    checkpoints.close()
    assert restored is not None
    assert restored[0] == 1


def test_a_full_disk_is_told_of_without_stacks_of_others(tmp_path, capfd):
    noise = np.random.default_rng(0).normal(size=100_000)
    state = {str(n): jnp.asarray(noise, jnp.float32) for n in range(20)}
    checkpoints = checkpoint.Checkpoints(tmp_path / "checkpoints")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, before[1]))
    try:
        with pytest.raises(OSError, match="the checkpoint of step 1 cannot be written"):
            checkpoints.save(1, state)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        checkpoints.close()
    gc.collect()
    assert capfd.readouterr().err == ""


def test_for_want_of_memory_no_checkpoint_is_deleted(tmp_path, monkeypatch):
    def full(*arguments, **options):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    checkpoints = checkpoint.Checkpoints(tmp_path / "checkpoints")
    checkpoints.save(1, first_params())
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints._manager, "restore", full)
        with pytest.raises(jax.errors.JaxRuntimeError):
            checkpoints.restore(first_params())
    restored = checkpoints.restore(first_params())
    checkpoints.close()
    assert restored is not None and restored[0] == 1
