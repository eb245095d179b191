"""A run traces its step once: what checks the loss is what the first batch compiles."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tanager
from tanager.clipping.autotune import Timings
from tanager.data import ArraySource
from tanager.training.step import Step


ROWS = 60


class Streamed:
    """Examples of which no more than is asked for is read."""

    def __init__(self, source):
        self.source = source

    def __len__(self):
        return len(self.source)

    def __getitem__(self, index):
        return jax.tree.map(lambda leaf: leaf[0], self.source.gather(np.array([index])))


def source():
    draw = np.random.default_rng(0).normal
    return ArraySource(
        {
            "x": draw(size=(ROWS, 8)).astype(np.float32),
            "y": draw(size=(ROWS, 3)),  # float64: the device has float32
        }
    )


def loss(params, example):
    away = jnp.tanh(example["x"] @ params["w"]) - example["y"]
    return jnp.sum(away**2)


def train(data, **options):
    return tanager.train(
        loss,
        {"w": jnp.ones((8, 3))},
        data,
        tanager.Mechanism(0.3, 1.0, 3),
        delta=1e-3,
        optimizer=optax.sgd(0.1),
        physical_batch_size=8,
        progress=False,
        **options,
    )


@pytest.fixture
def traces(monkeypatch):
    """The steps whose `_accumulate` was traced, one entry each time."""
    found = []
    accumulate = Step._accumulate

    def counted(step, params, *rest):
        found.append(step)
        return accumulate(step, params, *rest)

    monkeypatch.setattr(Step, "_accumulate", counted)
    return found


@pytest.mark.parametrize(
    "kind", [lambda data: data, Streamed], ids=["held", "streamed"]
)
@pytest.mark.parametrize(
    "options",
    [
        {"devices": 1},
        {"devices": 2},
        {"devices": 2, "shard_parameters": True},
        {"devices": 1, "memory": "low"},
        {"devices": 1, "strategy": "per_example"},
        {
            "devices": 2,
            "augment": lambda key, example: example,
            "augmentation_multiplicity": 2,
        },
    ],
    ids=["one", "two", "sharded", "low", "per_example", "views"],
)
def test_the_step_is_traced_once(traces, kind, options):
    train(kind(source()), **options)
    assert len(traces) == 1


def test_what_was_measured_is_traced_anew(traces, monkeypatch):
    measured = []
    monkeypatch.setattr(
        Timings, "measure", lambda *arguments: not measured.append(len(traces))
    )
    train(source(), devices=1)
    assert measured == [1]  # after the loss was found fit
    assert len(traces) == 2
