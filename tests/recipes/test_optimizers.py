import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tanager import recipes
from tanager.recipes.optimizers import OPTIMIZERS, optimizer, schedule


BASE = recipes.get("digits").recipe


def recipe(**changes):
    return dataclasses.replace(BASE, **changes)


def rates(steps, **changes):
    made = schedule(recipe(learning_rate=2.0, **changes), steps)
    if not callable(made):
        return [made] * steps
    return [float(jnp.asarray(made(jnp.int32(count)))) for count in range(steps)]


def test_unknown_optimizers_and_options_are_refused():
    with pytest.raises(ValueError, match=re.escape("did you mean sgd?")):
        optimizer(recipe(optimizer="sdg"), 10)
    options = {"momentun": 0.9}
    with pytest.raises(ValueError, match=re.escape("did you mean momentum?")):
        optimizer(recipe(optimizer_options=options), 10)


@pytest.mark.parametrize("name", ["lbfgs", "noisy_sgd"])
def test_optimizers_that_need_the_loss_or_have_noise_of_their_own_are_refused(name):
    with pytest.raises(
        ValueError, match=re.escape(f"optimizer (={name!r}) ") + ".*must be one"
    ):
        optimizer(recipe(optimizer=name), 10)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"optimizer": "adam", "optimizer_options": {"mu_dtype": 1.0}},
            "optimizer (='adam') does not work with options {'mu_dtype': 1.0}",
        ),
        (
            {"optimizer": "rprop", "learning_rate_schedule": "cosine"},
            "does not work with options {} and the cosine learning rate schedule",
        ),
    ],
)
def test_what_optax_cannot_make_or_update_is_one_message(changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        optimizer(recipe(**{"optimizer_options": {}} | changes), 10)


def test_every_optimizer_that_is_offered_updates():
    params = {"w": jnp.ones((3, 2)), "b": jnp.ones(2)}
    for name in OPTIMIZERS:
        made = optimizer(recipe(optimizer=name, optimizer_options={}), 10)
        with jax.numpy_dtype_promotion("standard"):  # some of optax need it
            state = jax.eval_shape(made.init, params)
            moved, _ = jax.eval_shape(made.update, params, state, params)
        assert jax.tree.map(jnp.shape, moved) == jax.tree.map(jnp.shape, params), name


def test_constant_is_constant():
    assert rates(5) == [2.0] * 5


def test_a_tenth_after_half_and_again_after_three_quarters():
    found = rates(20, learning_rate_schedule="step")
    assert found == pytest.approx([2.0] * 10 + [0.2] * 5 + [0.02] * 5)


def test_cosine_ends_at_nothing_and_is_half_way_in_the_middle():
    found = rates(101, learning_rate_schedule="cosine")
    assert found[0] == 2.0
    assert found[50] == pytest.approx(1.0, abs=0.02)
    assert found[100] == pytest.approx(0.0, abs=1e-3)


@pytest.mark.parametrize("name", ["constant", "step", "cosine"])
def test_the_warm_up_rises_in_a_line(name):
    found = rates(40, learning_rate_schedule=name, warmup_steps=10)
    assert found[:10] == pytest.approx([0.2 * count for count in range(10)])
    assert found[10] == pytest.approx(2.0)


def test_a_warm_up_longer_than_the_run_is_refused():
    with pytest.raises(ValueError, match=re.escape("must be below the 10 steps")):
        optimizer(recipe(warmup_steps=10), 10)


def test_weight_decay_enters_before_momentum():
    options = {"momentum": 0.5}
    made = optimizer(
        recipe(learning_rate=0.1, weight_decay=0.3, optimizer_options=options), 5
    )
    params = jnp.asarray([1.0, -2.0])
    state, gradient = made.init(params), jnp.asarray([0.4, 0.5])
    velocity = np.zeros(2)
    for _ in range(2):
        updates, state = made.update(gradient, state, params)
        velocity = 0.5 * velocity + (gradient + 0.3 * params)
        np.testing.assert_allclose(jnp.asarray(updates), -0.1 * velocity, rtol=1e-6)
        params = jax.tree.map(jnp.add, params, updates)
