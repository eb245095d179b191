"""A process that trains many times keeps nothing of the runs before."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax

from parts import train
from tanager.clipping import clipped_grad
from tanager.privacy.mechanism import Mechanism
from tanager.training import loop
from tanager.training.evaluate import Classification
from tanager.training.step import Step


DRAW = np.random.default_rng(0)
EXAMPLES = {
    "image": DRAW.standard_normal((32, 4)).astype(np.float32),
    "label": DRAW.integers(0, 2, 32),
}


def programs():
    gc.collect()
    return len(jax.local_devices()[0].client.live_executables())


def loss(params, example):
    logits = example["image"] @ params
    return optax.softmax_cross_entropy_with_integer_labels(logits, example["label"])


def predict(params, example):
    return example["image"] @ params


def run(folder):
    evaluate = Classification(predict, EXAMPLES, ("a", "b"))
    train(
        loss=loss,
        params=jnp.zeros((4, 2)),
        data=EXAMPLES,
        mechanism=Mechanism(0.5, 1.0, 2),
        optimizer=optax.sgd(0.1),
        delta=1e-3,
        evaluate=evaluate,
        out=folder,
    )
    return weakref.ref(evaluate)


def test_a_run_leaves_neither_programs_nor_test_data(tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "Step", Step)  # the other tests of this folder share it
    run(tmp_path / "0")
    before = programs()
    dead = run(tmp_path / "1")
    assert programs() == before
    assert dead() is None


def test_clipping_outside_of_jit_leaves_no_program():
    def once():
        clip = clipped_grad(lambda params, example: loss(params, example), clip_norm=1)
        clip(jnp.zeros((4, 2)), EXAMPLES)

    once()
    before = programs()
    once()
    assert programs() == before
