"""Training a part of a model, and training without privacy."""

import json
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from parts import step, train
from tanager.clipping.analysis.trainable import split
from tanager.data import ArraySource
from tanager.privacy.mechanism import Mechanism
from tanager.sampling import PhysicalBatch
from tanager.seed import Seed
from tanager.training import fingerprint, norms


N, FEATURES, CLASSES = 60, 6, 3
MECHANISM = Mechanism(sample_rate=0.4, noise_multiplier=0.7, steps=6)
OPTIMIZER = optax.sgd(0.5)


def examples():
    draw = np.random.default_rng(0)
    return {
        "x": draw.standard_normal((N, FEATURES)).astype(np.float32),
        "label": draw.integers(0, CLASSES, N).astype(np.int32),
    }


def params():
    draw = np.random.default_rng(1)
    return {
        "body": jnp.asarray(draw.standard_normal((FEATURES, 5)), jnp.float32),
        "head": jnp.zeros((5, CLASSES)),
        "activation": jax.nn.relu,
    }


HEAD = {"body": False, "head": True, "activation": False}


def loss(params, example):
    hidden = params["activation"](example["x"] @ params["body"])
    return optax.softmax_cross_entropy_with_integer_labels(
        hidden @ params["head"], example["label"]
    )


def run(mechanism=MECHANISM, **changes):
    settings = {
        "data": examples(),
        "mechanism": mechanism,
        "delta": 1e-3,
        "optimizer": OPTIMIZER,
        "seed": 1,
        "physical_batch_size": 16,
        "strategy": "per_example",
        "progress": False,
        "trainable": HEAD,
    }
    return train(loss=loss, params=params(), **settings | changes)


def test_a_frozen_body_stays_and_is_the_same_as_a_loss_around_it():
    whole, start = run(), params()
    np.testing.assert_array_equal(whole.params["body"], start["body"])
    np.testing.assert_array_equal(whole.average["body"], start["body"])
    assert np.all(whole.params["head"] != 0)

    def of_head(head, example):
        return loss({**start, "head": head}, example)

    alone = train(
        loss=of_head,
        params=start["head"],
        data=examples(),
        mechanism=MECHANISM,
        optimizer=optax.sgd(0.5),
        seed=1,
        physical_batch_size=16,
        strategy="per_example",
    )
    np.testing.assert_allclose(whole.params["head"], alone.params, rtol=1e-5)


def test_frozen_arrays_are_arguments_and_not_constants():
    trained, _ = eqx.partition(params(), HEAD)
    assert not jax.tree.leaves(split(params(), False)[0])
    made = step(
        loss=loss, params=params(), mechanism=MECHANISM, examples=N, trainable=HEAD
    )
    batch = jax.tree.map(lambda leaf: leaf[:4], examples())

    def accumulate(step):
        return jax.make_jaxpr(step._accumulate)(
            trained,
            step.frozen,
            step.zero(),
            PhysicalBatch(batch, jnp.ones(4, bool), jnp.arange(4, dtype=jnp.int32)),
            step.augmentation_key(0),
        )

    bins = np.float32(norms.edges())  # for counts of norms
    constants = [x for x in accumulate(made).consts if not np.array_equal(x, bins)]
    sizes = [np.size(constant) for constant in constants]
    assert max(sizes, default=0) < params()["body"].size


def test_a_run_with_another_body_or_augmentation_is_another_run():
    def prints(body, scale=1.0):
        made = step(
            loss=loss,
            params=params() | {"body": body},
            mechanism=MECHANISM,
            examples=N,
            trainable=HEAD,
            augment=lambda key, example: example | {"x": scale * example["x"]},
            augmentation_multiplicity=1,
        )
        one = jax.tree.map(lambda leaf: leaf[:1], examples())
        source = ArraySource(examples())
        return fingerprint.fingerprints(Seed.from_int(0), made, source, one)

    body = params()["body"]
    first = prints(body)
    assert first == prints(body)
    for changed, name in (((2 * body,), "fixed parameters"), ((body, 2.0), "augment")):
        other = prints(*changed)
        (found,) = (each for each in first if first[each] != other[each])
        assert found.startswith(name)


def test_finish_makes_what_is_handed_over_of_the_trained_leaves(tmp_path):
    result = run(out=tmp_path / "run", finish=lambda model: model["head"])
    assert result.params.shape == (5, CLASSES)
    config = json.loads((tmp_path / "run/config.json").read_text())
    assert config["parameters"] == 5 * CLASSES
    assert config["frozen_parameters"] == FEATURES * 5
    # Other trained leaves are another run.
    with pytest.raises(ValueError, match="parameters"):
        run(out=tmp_path / "run", trainable=None)


def test_without_clipping_a_step_is_plain_sgd_and_the_page_says_so(tmp_path):
    everyone = Mechanism(sample_rate=1.0, noise_multiplier=0.0, steps=3)
    with pytest.warns(UserWarning, match="NOT PRIVATE"):
        plain = {"clip_norm": None, "trainable": None, "ema_decay": 0.0}
        result = run(everyone, **plain, out=tmp_path / "run")

    def mean(trained):
        model = {**trained, "activation": jax.nn.relu}
        return jnp.mean(jax.vmap(loss, (None, 0))(model, examples()))

    trained = {name: params()[name] for name in ("body", "head")}
    for _ in range(3):
        gradient = jax.jit(jax.grad(mean))(trained)
        trained = jax.tree.map(lambda p, g: p - 0.5 * g, trained, gradient)
    for name, value in trained.items():
        np.testing.assert_allclose(result.params[name], value, rtol=1e-4, atol=1e-6)
    assert result.epsilon == np.inf
    assert result.summary["private"] is False
    assert result.summary["clip_norm"] is None
    page = (tmp_path / "run/report.html").read_text()
    assert "NOT PRIVATE" in page
    assert "No noise was added" in page


def test_noise_on_gradients_that_nothing_bounds_is_refused():
    message = "clip_norm (=None) must be a number with noise multiplier 0.7"
    with pytest.raises(ValueError, match=re.escape(message)):
        run(clip_norm=None)
