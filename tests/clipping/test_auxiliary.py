"""Auxiliary results of each example, and losses that return something else."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cases import tuples_in_full
from tanager.clipping import clipped_grad
from trees import distance


ROWS = 6
DRAW = np.random.default_rng(0)
PARAMS = {
    "w": jnp.float32(DRAW.normal(size=(3, 4))),
    "b": jnp.float32(DRAW.normal(size=4)),
    "unused": jnp.ones(2),
}
BATCH = {"x": jnp.float32(DRAW.normal(size=(ROWS, 3))), "n": jnp.arange(ROWS)}
MASK = np.arange(ROWS) != 2


def loss(params, example):
    hidden = jnp.tanh(example["x"] @ params["w"] + params["b"])
    aux = {
        "hidden": hidden,
        "right": hidden.argmax() == example["n"] % 4,
        # What the loss does not need: a product of its own, a constant, an input.
        "more": (jnp.sum(hidden @ params["w"].T), params["unused"], example["n"]),
        "number": 3,
    }
    return jnp.sum(hidden**2), aux


def without(params, example):
    return loss(params, example)[0]


STRATEGIES = ["per_example", "bk", "bk_mixopt"]


PAIRS = [("per_example", "low"), ("bk", "default"), ("bk_mixopt", "default")]
MORE = [("per_example", "default"), ("bk", "low"), ("bk_mixopt", "low")]


@pytest.mark.parametrize(("strategy", "memory"), tuples_in_full(PAIRS + MORE, *MORE))
def test_sums_norms_and_losses_are_as_without(strategy, memory):
    options = {"clip_norm": 0.5, "strategy": strategy, "memory": memory}
    grad_fn = jax.jit(clipped_grad(loss, has_aux=True, **options))
    batch = {**BATCH, "x": BATCH["x"].at[2].set(jnp.nan)}
    out, aux = grad_fn(PARAMS, batch, MASK)
    plain = jax.jit(clipped_grad(without, **options))(PARAMS, batch, MASK)
    assert distance(out, plain) < 1e-6
    expected = jax.vmap(lambda example: loss(PARAMS, example)[1])(BATCH)
    for name, got in jax.tree_util.tree_leaves_with_path(aux):
        right = dict(jax.tree_util.tree_leaves_with_path(expected))[name]
        assert got.dtype == right.dtype and got.shape == right.shape
        np.testing.assert_allclose(got[MASK], right[MASK], rtol=1e-5, err_msg=str(name))
        assert not np.any(got[2]), name  # even where the row is NaN


def test_what_aux_alone_needs_has_no_tap():
    options = {"clip_norm": 0.5, "strategy": "bk"}
    with_aux = clipped_grad(loss, has_aux=True, **options).explain(PARAMS, BATCH)
    assert with_aux.taps == clipped_grad(without, **options).explain(PARAMS, BATCH).taps


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_loss_of_parameters_alone_and_no_rows(strategy):
    def of_parameters(params, example):
        return jnp.sum(params["w"] ** 2), example["x"] @ params["w"]

    grad_fn = clipped_grad(
        of_parameters, clip_norm=0.5, strategy=strategy, has_aux=True
    )
    out, aux = grad_fn(PARAMS, BATCH)
    assert aux.shape == (ROWS, 4)
    np.testing.assert_allclose(jnp.linalg.norm(out.sum["w"]), ROWS * 0.5, rtol=1e-3)
    out, aux = grad_fn(PARAMS, jax.tree.map(lambda leaf: leaf[:0], BATCH))
    assert aux.shape == (0, 4) and out.norms.shape == out.losses.shape == (0,)
    assert not np.any(out.sum["w"])


def test_a_row_that_is_not_finite_changes_no_other_row():
    grad_fn = jax.jit(clipped_grad(loss, clip_norm=0.5, strategy="bk", has_aux=True))
    clean, aux = grad_fn(PARAMS, BATCH, MASK)
    for value in (jnp.nan, jnp.inf, 1e30):
        batch = {**BATCH, "x": BATCH["x"].at[2].set(value)}
        assert distance(grad_fn(PARAMS, batch, MASK), (clean, aux)) == 0
        _, other = grad_fn(PARAMS, batch)
        for one, same in zip(*map(jax.tree.leaves, (aux, other)), strict=True):
            np.testing.assert_array_equal(one[MASK], same[MASK])


def mixing(params, example):
    return without(params, example), jax.lax.pmean(example["x"], "batch")


LOSSES = {
    "aux without has_aux": (loss, False, "give has_aux=True to clipped_grad"),
    "has_aux without aux": (without, True, "must return (loss, aux) with has_aux=True"),
    "shape (1,)": (
        lambda params, example: without(params, example)[None],
        False,
        "loss (returning float32[1]) must return one floating-point scalar for one "
        "example: take its one number, loss.reshape(())",
    ),
    "aux and shape (1,)": (
        lambda params, example: (without(params, example)[None], 0),
        True,
        "take its one number",
    ),
    "a triple": (
        lambda params, example: (without(params, example), 1, 2),
        False,
        "loss (returning (float32[], int32[], int32[])) must return one floating-point "
        "scalar for one example: return that number alone",
    ),
    "a whole number": (lambda params, example: 1, False, "or cast it to a float"),
    "text": (
        lambda params, example: (without(params, example), "text"),
        True,
        "loss (returning a str) must return one floating-point scalar",
    ),
    "a page of shapes": (lambda params, example: [example] * 50, False, " …) must"),
    "a vector": (lambda params, example: example["x"], False, "called without a batch"),
    "aux that mixes": (mixing, True, "must not mix examples"),
}


@pytest.mark.parametrize("name", LOSSES)
def test_other_results_are_refused_in_one_plain_line(name):
    bad, has_aux, message = LOSSES[name]
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        clipped_grad(bad, clip_norm=1.0, has_aux=has_aux)(PARAMS, BATCH)
    assert "sharding" not in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_keys_are_auxiliary_results_too(strategy):
    def of_key(params, example, key):
        own = jax.random.uniform(key) * without(params, example)
        return own, (jax.random.fold_in(key, 1), jax.random.key(0))

    keys = jax.random.split(jax.random.key(7, impl="threefry2x32"), ROWS)
    grad_fn = clipped_grad(of_key, clip_norm=0.5, strategy=strategy, has_aux=True)
    _, aux = grad_fn(PARAMS, BATCH, MASK, keys=keys)
    folded = jax.vmap(jax.random.fold_in, (0, None))(keys, 1)
    for got, right in zip(
        aux, (folded, jax.random.split(jax.random.key(0), 1)), strict=True
    ):
        assert got.shape == (ROWS,) and got.dtype == right.dtype
    got, right = map(jax.random.key_data, (aux[0][MASK], folded[MASK]))
    np.testing.assert_array_equal(got, right)


@pytest.mark.measures
def test_no_rows_are_clipped_and_explained_without_a_measurement_of_none():
    grad_fn = clipped_grad(without, clip_norm=0.5)
    none = jax.tree.map(lambda leaf: leaf[:0], BATCH)
    assert not np.any(grad_fn(PARAMS, none).sum["w"])
    assert grad_fn.explain(PARAMS, none).rows == 1


def test_what_a_function_in_the_loss_is_given_is_not_taken_for_what_it_returns():
    def loss(params, example):
        return jnp.sum(jax.vmap(lambda _, x: x)(jnp.tanh, example["x"]))

    with pytest.raises(TypeError, match=r"^Argument .* is not a valid JAX type"):
        clipped_grad(loss, clip_norm=1.0)(PARAMS, BATCH)
