"""Sharp edges that no room's own tests guard: docs/sharp_edges.md lists them all."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import parts
import tanager
from tanager.audit.replay import replay


MECHANISM = tanager.Mechanism(sample_rate=0.3, noise_multiplier=1.0, steps=6)


def data():
    x = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
    return {"x": x, "y": x.sum(1)}


def loss(params, example):
    return (params @ example["x"] - example["y"]) ** 2


def train(out=None, **changes):
    settings = {
        "loss": loss,
        "params": jnp.zeros(3),
        "data": data(),
        "mechanism": MECHANISM,
        "delta": 1e-3,
        "optimizer": optax.sgd(0.1),
        "physical_batch_size": 8,
        "strategy": "per_example",
        "out": out,
        "progress": False,
    }
    return parts.train(**settings | changes)


class Listed:
    """The same examples, read one at a time."""

    def __len__(self):
        return len(data()["y"])

    def __getitem__(self, index):
        return jax.tree.map(lambda leaf: leaf[index], data())


def test_a_step_that_cannot_be_charged_is_not_made(monkeypatch, tmp_path):
    charge, draw, made = tanager.Ledger.charge, tanager.GaussianNoise.draw, []

    def full(self, mechanism, step, stream=""):
        if step == 3:
            raise OSError("No space left on device")
        charge(self, mechanism, step, stream)

    monkeypatch.setattr(tanager.Ledger, "charge", full)
    monkeypatch.setattr(
        tanager.GaussianNoise, "draw", lambda *of: made.append(of[1]) or draw(*of)
    )
    with pytest.raises(OSError, match="No space left"):
        train(tmp_path / "run")
    assert made == [0, 1, 2]


RARE = {"mechanism": tanager.Mechanism(1e-9, 1.0, 3), "seed": 1}


@pytest.fixture(scope="module")
def empty(tmp_path_factory):
    """A run whose batches are all empty, and its folder."""
    folder = tmp_path_factory.mktemp("empty") / "run"
    with pytest.warns(UserWarning, match="the expected batch size is"):
        return train(folder, **RARE), folder


@pytest.mark.filterwarnings("ignore:the expected batch size is")
def test_a_run_of_empty_batches_is_noise_alone(empty):
    held, folder = empty
    streamed = train(data=Listed(), **RARE)
    assert np.all(np.isfinite(held.params)) and np.all(np.asarray(held.params) != 0)
    np.testing.assert_array_equal(held.params, streamed.params)
    assert held.summary["steps"] == 3
    lines = (folder / "private/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["examples"] for line in lines] == [0, 0, 0]
    assert [json.loads(line)["loss"] for line in lines] == [None] * 3


def test_a_loop_of_ones_own_that_begins_again_with_another_secret_spends_again():
    ledger, secrets = tanager.Ledger(), [tanager.Seed.from_os() for _ in range(2)]
    for secret in (secrets[0], secrets[0], secrets[1]):
        for step in range(MECHANISM.steps):
            ledger.charge(MECHANISM, step, stream=secret.fingerprint(b"my loop"))
    assert ledger.steps() == 2 * MECHANISM.steps


def test_an_optimizer_with_memory_sees_noisy_updates_alone():
    optimizer = optax.sgd(0.1, momentum=0.9, nesterov=True)
    found = replay(
        tanager.Problem(loss, jnp.zeros(3), data()),
        tanager.DPSGD(MECHANISM, optimizer, delta=1e-3),
        tanager.Runtime(physical_batch_size=4, strategy="per_example"),
    )
    assert {finding.check for finding in found if not finding.passed} == set()
    assert len(found) > 8


def test_an_exported_model_tells_no_time(empty, tmp_path):
    """How long a run took depends on who was sampled."""
    shutil.copytree(empty[1], tmp_path / "run")
    result = tmp_path / "run/result.json"
    told = json.loads(result.read_text())
    # Numbers that stand nowhere by chance, as the 0.3 of a fast run does.
    clocks = {"seconds": 918.2736, "examples_per_second": 5463.7281}
    clocks["wait_fraction"] = 0.19283746
    assert clocks.keys() <= told.keys()
    result.write_text(json.dumps(told | clocks))
    to = tanager.export(tmp_path / "run", tmp_path / "model")
    for path in to.iterdir():
        content = path.read_bytes()
        for clock, value in clocks.items():
            assert clock.encode() not in content, path
            assert str(value).encode() not in content, path
