"""Audits insert persons; the bug that this prevents is found by the same audit."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tanager
from cases import in_full
from parts import parts
from tanager.audit.black_box import audit_one_run
from tanager.audit.membership import Attack, audit_membership
from tanager.audit.replay import Replay
from tanager.data import gather, load
from tanager.privacy.mechanism import Mechanism
from tanager.training.problem import Problem


RUN = Mechanism(0.1, 0.8, 40)
OWNERS = np.repeat(np.arange(20), 3)


def loss(params, example):
    x, y = example
    return jnp.sqrt(1 + (jnp.dot(params["w"], x) - y) ** 2)


@pytest.fixture
def persons(regression):
    return tanager.Grouped(regression, OWNERS, 4)


@pytest.fixture(scope="module")
def digits():
    """200 digits, as flat rows, with planted owners of 1 to 9 images each."""
    rows = gather(load("digits").train, np.arange(200))
    pixels = rows["image"].reshape(200, -1).astype(np.float32) / 255
    sizes = np.random.default_rng(0).integers(1, 10, 200)
    owners = np.repeat(np.arange(200), sizes)[:200]
    return (pixels, rows["label"]), owners


def cross_entropy(params, example):
    logits = example[0] @ params["w"] + params["b"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, example[1])


LINEAR = {
    "loss": cross_entropy,
    "params": {"w": jnp.zeros((64, 10)), "b": jnp.zeros(10)},
    "optimizer": optax.sgd(0.5),
    "examples_each": 5,
}


@pytest.mark.parametrize("knows_sample", in_full([False, True], False))
def test_persons_are_below_the_claim(white_box, digits, knows_sample):
    """Canaries of five images, of which a step uses four."""
    data, owners = digits
    found = white_box(
        RUN,
        2000,
        data=tanager.Grouped(data, owners, 4),
        knows_sample=knows_sample,
        physical_batch_size=64,
        **LINEAR,
    )
    assert 0.4 * found.claimed_epsilon < found.epsilon_lower_bound
    assert not found.violated


@pytest.mark.parametrize("knows_sample", in_full([False, True], False))
def test_planted_training_per_image_is_above_the_claim(white_box, digits, knows_sample):
    """Persons of five images in a run whose claim is per image."""
    found = white_box(
        RUN,
        1000,
        data=digits[0],
        knows_sample=knows_sample,
        physical_batch_size=256,
        **LINEAR,
    )
    assert found.violated
    assert found.epsilon_lower_bound > 1.2 * found.claimed_epsilon


def test_a_replay_agrees_with_the_definition(persons):
    problem, algorithm, runtime, _ = parts(
        {
            "loss": loss,
            "params": {"w": jnp.ones(5)},
            "physical_batch_size": 4,
            "data": persons,
            "mechanism": Mechanism(0.5, 1.0, 4),
            "optimizer": optax.sgd(0.1),
        }
    )
    replayed = Replay(problem, algorithm, runtime, steps=4)
    # What it samples are no persons, and noise asks what sums ask, once more.
    found = [*replayed.sums(), *replayed.after()]
    assert all(finding.passed for finding in found), found


def test_one_run_inserts_persons(persons):
    canaries = np.eye(5, dtype=np.float32).repeat(20, 0), np.full(100, 9, np.float32)
    problem, algorithm, runtime, _ = parts(
        {
            "loss": loss,
            "params": {"w": jnp.zeros(5)},
            "data": persons,
            "mechanism": RUN,
            "physical_batch_size": 32,
        }
    )
    found = audit_one_run(problem, algorithm, canaries, runtime, guessed=0.3, seed=1)
    assert len(found.inside) + len(found.outside) == 100
    assert not found.violated


def test_membership_inserts_a_person(persons):
    attack = Attack(
        6.0,
        0.01,
        batch_size=10,
        steps=(8,),
        learning_rates=(0.1,),
        clip_norms=(1.0,),
        confidence=0.95,
    )
    canary = {"far": (np.full(5, 4, np.float32), np.float32(-40))}
    problem = Problem(loss, {"w": jnp.zeros(5)}, persons)
    found = audit_membership(
        problem, attack, canary, models=400, models_at_once=200, strategy="bk", seed=1
    )
    assert 0 < found.epsilon_lower_bound < found.claimed_epsilon
    assert not found.violated
