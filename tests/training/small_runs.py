"""Small runs of softmax regression, of the same objects: they share their programs."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import softmax
from parts import train
from softmax import loss, predict
from tanager.privacy.mechanism import Mechanism
from tanager.training.evaluate import Classification


N, FEATURES, CLASSES = 60, 4, 3


MECHANISM = Mechanism(sample_rate=0.4, noise_multiplier=1.2, steps=12)


def examples(rows=N, seed=0):
    return softmax.examples(rows, CLASSES, FEATURES, seed)


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
        "strategy": "per_example",  # traced in half of the time
        "progress": False,
    }
    return train(**settings | changes)


class Killed(Exception):
    """Stands for a process that dies."""


def die(out, at, **settings):
    """Run until the n-th evaluation after the one before the first step; die there."""
    calls = []

    def evaluate(params):
        calls.append(1)
        if len(calls) == at + 1:
            raise Killed
        return EVALUATE(params)

    with pytest.raises(Killed):
        run(out, evaluate=evaluate, **settings)


def contents(folder):
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder): path.read_bytes() for path in files}


def same(one, two):
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True)
    return all(np.array_equal(a, b) for a, b in pairs)


def in_place_of(run, out):
    """Copy a run, as if it had been made there."""
    shutil.copytree(run, out)
    file = out / "private/seed.json"
    kept = json.loads(file.read_text())
    file.write_text(json.dumps(kept | {"place": str(out)}))
    return out


LONGER = {"seed": 11, "mechanism": Mechanism(0.4, 1.2, 30), "strategy": "bk"}
