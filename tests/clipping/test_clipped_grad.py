"""`clipped_grad` against an oracle that clips one example at a time, in float64."""

import functools
import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import ALL, exact

from tanager.clipping import STRATEGIES, clipped_grad
from trees import distance


C = 0.7
strategies = pytest.mark.parametrize("strategy", ALL)


def loss(params, example):
    hidden = jnp.tanh(params["w"] @ example["x"] + params["b"])
    return jnp.sum((params["v"] @ hidden - example["y"]) ** 2)


def problem(rows=6, dtype: Any = np.float32, seed=0):
    draw = np.random.default_rng(seed).normal
    params = {
        "w": jnp.asarray(draw(size=(4, 3)), dtype),
        "b": jnp.asarray(draw(size=4), dtype),
        "v": jnp.asarray(draw(size=(2, 4)), dtype),
    }
    size = np.geomspace(0.01, 3, rows)[:, None]
    batch = {
        "x": jnp.asarray(size * draw(size=(rows, 3)), dtype),
        "y": jnp.asarray(size * draw(size=(rows, 2)), dtype),
    }
    return params, batch


@functools.cache
def grad_of(strategy="auto"):
    """One function for all tests, so that a program is compiled once."""
    return clipped_grad(loss, clip_norm=C, strategy=strategy)


def length(tree):
    return distance(tree, jax.tree.map(np.zeros_like, tree))


@pytest.mark.parametrize("strategy", sorted(STRATEGIES))
@pytest.mark.parametrize("jit", [False, True])
def test_agrees_with_the_oracle(strategy, jit):
    params, batch = problem()
    mask = np.array([True, True, False, True, True, True])
    grad_fn = grad_of(strategy)
    out = (jax.jit(grad_fn) if jit else grad_fn)(params, batch, jnp.asarray(mask))
    total, norms, losses = exact(loss, params, batch, mask, C)
    assert norms.min() < C < norms.max()
    assert distance(out.sum, total) < 1e-5 * length(total)
    np.testing.assert_allclose(out.norms, norms, rtol=1e-5)
    np.testing.assert_allclose(out.losses, losses, rtol=1e-5)


@strategies
def test_agrees_with_the_oracle_in_float64(strategy):
    with jax.enable_x64(True):
        params, batch = problem(dtype=np.float64)
        mask = np.ones(6, bool)
        out = grad_of(strategy)(params, batch)
        total, norms, _ = exact(loss, params, batch, mask, C)
        assert distance(out.sum, total) < 1e-13 * length(total)
        np.testing.assert_allclose(out.norms, norms, rtol=1e-13)


@strategies
def test_without_clipping_the_sum_is_the_plain_gradient(strategy):
    params, batch = problem()
    out = clipped_grad(loss, clip_norm=1e6, strategy=strategy)(params, batch)
    plain = jax.grad(lambda params: jnp.sum(jax.vmap(loss, (None, 0))(params, batch)))(
        params
    )
    assert distance(out.sum, plain) < 1e-5 * length(plain)


@strategies
def test_it_is_a_sum_not_a_mean(strategy):
    params, batch = problem(rows=4)
    twice = jax.tree.map(lambda leaf: jnp.concatenate([leaf, leaf]), batch)
    grad_fn = grad_of(strategy)
    once, both = grad_fn(params, batch).sum, grad_fn(params, twice).sum
    assert distance(both, jax.tree.map(lambda leaf: 2 * leaf, once)) < 1e-5


@strategies
def test_a_poisoned_example_contributes_at_most_c(strategy):
    params, batch = problem()
    grad_fn = grad_of(strategy)
    clean = grad_fn(params, batch, jnp.arange(6) < 5)
    for poison in (np.nan, np.inf, -np.inf, 1e30, 1e38):
        spoilt = jax.tree.map(lambda leaf, p=poison: leaf.at[5].set(p), batch)
        out = grad_fn(params, spoilt, jnp.ones(6, bool))
        assert np.isfinite(length(out.sum))
        assert distance(out.sum, clean.sum) <= C * (1 + 1e-5)
        if not np.isfinite(poison):
            assert distance(out.sum, clean.sum) == 0


@strategies
def test_masked_rows_contribute_exact_zeros(strategy):
    params, batch = problem()
    mask = jnp.asarray([True, True, True, False, False, True])
    clean = grad_of(strategy)(params, batch, mask)
    for padding in (0.0, np.nan, np.inf, 1e30):
        rows = jax.tree.map(lambda leaf, p=padding: leaf.at[3:5].set(p), batch)
        out = grad_of(strategy)(params, rows, mask)
        assert distance(out.sum, clean.sum) == 0
        assert np.all(np.asarray(out.norms)[3:5] == 0)
        assert np.all(np.asarray(out.losses)[3:5] == 0)


@strategies
def test_all_rows_masked_gives_zeros(strategy):
    params, batch = problem()
    out = grad_of(strategy)(params, batch, jnp.zeros(6, bool))
    assert length(out.sum) == 0


@strategies
def test_adding_or_replacing_any_example_moves_the_sum_within_the_sensitivity(strategy):
    params, batch = problem(rows=8)
    grad_fn = grad_of(strategy)
    assert grad_fn.sensitivity == C * (1 + 2.0**-11)
    everyone = grad_fn(params, batch).sum
    for number in range(8):
        without = grad_fn(params, batch, jnp.arange(8) != number).sum
        assert distance(everyone, without) <= C * (1 + 1e-5)
        replaced = jax.tree.map(
            lambda leaf, number=number: leaf.at[number].multiply(-50), batch
        )
        assert distance(everyone, grad_fn(params, replaced).sum) <= 2 * C * (1 + 1e-5)


@strategies
def test_an_example_with_zero_gradient_contributes_zero(strategy):
    params, _ = problem()
    flat = clipped_grad(
        lambda params, example: 0.0 * jnp.sum(params["w"]) * example,
        clip_norm=C,
        strategy=strategy,
    )
    out = flat(params, jnp.ones(3))
    assert length(out.sum) == 0
    assert np.all(np.asarray(out.norms) == 0)


@strategies
def test_views_are_averaged_before_clipping(strategy):
    params, batch = problem(rows=6)
    views = jax.tree.map(lambda leaf: leaf.reshape(3, 2, *leaf.shape[1:]), batch)

    def mean_loss(params, views):
        return jnp.mean(jax.vmap(loss, (None, 0))(params, views))

    out = clipped_grad(mean_loss, clip_norm=C, strategy=strategy)(params, views)
    total, norms, _ = exact(mean_loss, params, views, np.ones(3, bool), C)
    assert distance(out.sum, total) < 1e-5 * length(total)
    np.testing.assert_allclose(out.norms, norms, rtol=1e-5)


@strategies
def test_bfloat16_parameters_have_float32_norms_and_sums(strategy):
    params, batch = problem()
    low = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)

    def low_loss(params, example):
        return loss(params, jax.tree.map(lambda x: x.astype(jnp.bfloat16), example))

    out = clipped_grad(low_loss, clip_norm=C, strategy=strategy)(low, batch)
    assert {leaf.dtype for leaf in jax.tree.leaves(out.sum)} == {jnp.dtype("float32")}
    assert out.norms.dtype == out.losses.dtype == jnp.float32
    rounded = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), low)
    total, norms, _ = exact(loss, rounded, batch, np.ones(6, bool), C)
    # A few roundings to the 8 bits of bfloat16 on the way forward and back.
    np.testing.assert_allclose(out.norms, norms, rtol=2**-5)
    assert distance(out.sum, total) < 2**-5 * length(total)


@strategies
def test_norms_of_bfloat16_gradients_are_not_rounded_to_bfloat16(strategy):
    weight = jnp.ones((3, 5), jnp.bfloat16)
    # Gradients are whole numbers of 8 bits: exact in bfloat16, their norms are not.
    x = np.random.default_rng(0).integers(1, 200, (6, 5)).astype(np.float64)

    def linear(weight, x):
        return jnp.sum(weight @ x)

    out = clipped_grad(linear, clip_norm=1e6, strategy=strategy)(
        weight, jnp.asarray(x, jnp.bfloat16)
    )
    np.testing.assert_allclose(out.norms, np.sqrt(3 * np.sum(x**2, axis=1)), rtol=1e-6)


@strategies
def test_an_equinox_module_is_a_parameter_tree(strategy):
    model = eqx.nn.MLP(3, 2, 5, 1, key=jax.random.key(0))
    _, batch = problem()

    def model_loss(model, example):
        return jnp.sum((model(example["x"]) - example["y"]) ** 2)

    out = clipped_grad(model_loss, clip_norm=C, strategy=strategy)(model, batch)
    arrays, static = eqx.partition(model, eqx.is_inexact_array)
    total, _, _ = exact(
        lambda arrays, example: model_loss(eqx.combine(arrays, static), example),
        arrays,
        batch,
        np.ones(6, bool),
        C,
    )
    assert distance(eqx.filter(out.sum, eqx.is_array), total) < 1e-5 * length(total)


def test_integer_leaves_are_not_trained():
    params, batch = problem()
    grad_fn = clipped_grad(
        lambda params, example: loss(params["net"], example), clip_norm=C
    )
    out = grad_fn({"net": params, "version": jnp.int32(3)}, batch)
    assert out.sum["version"] is None
    assert distance(out.sum["net"], grad_of()(params, batch).sum) == 0


def test_low_memory_holds_the_kept_gradients_of_half_a_batch():
    def loss(weights, x):
        for weight in weights:
            x = jnp.tanh(x @ weight)
        return jnp.sum(x)

    weights, x = [jnp.zeros((128, 128))] * 8, jnp.zeros((16, 96, 128))

    def held(memory):
        grad_fn = clipped_grad(loss, clip_norm=C, strategy="bk_mixopt", memory=memory)
        lowered = jax.jit(lambda weights, x: grad_fn(weights, x).sum).lower(weights, x)
        analysis = lowered.compile().memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes

    assert held("low") < 0.7 * held("default")


def test_low_memory_changes_nothing_but_the_order_of_sums():
    params, batch = problem(rows=7)
    mask = jnp.arange(7) != 2
    low = clipped_grad(loss, clip_norm=C, memory="low")(params, batch, mask)
    out = grad_of()(params, batch, mask)
    assert distance(low.sum, out.sum) < 1e-6 * length(out.sum)
    np.testing.assert_allclose(low.norms, out.norms, rtol=1e-6)
    np.testing.assert_allclose(low.losses, out.losses, rtol=1e-6)
    one = jax.tree.map(lambda leaf: leaf[:1], batch)
    single = clipped_grad(loss, clip_norm=C, memory="low")(params, one)
    assert single.norms.shape == (1,)


def test_an_unknown_memory_is_refused_with_the_nearest():
    with pytest.raises(ValueError, match=re.escape("did you mean low?")):
        clipped_grad(loss, clip_norm=1.0, memory="lo")


@pytest.mark.parametrize("clip_norm", [0.0, -1.0, 1e-20, 1e20, np.inf, np.nan])
def test_a_useless_clipping_norm_is_refused(clip_norm):
    with pytest.raises(ValueError, match="clip_norm"):
        clipped_grad(loss, clip_norm=clip_norm)


def test_an_unknown_strategy_is_refused_with_the_nearest():
    with pytest.raises(ValueError, match=re.escape("did you mean per_example?")):
        clipped_grad(loss, clip_norm=1.0, strategy="per-example")


def test_a_loss_that_is_no_scalar_is_refused():
    params, batch = problem()
    with pytest.raises(ValueError, match="must return one floating-point scalar"):
        clipped_grad(lambda params, example: params["b"], clip_norm=C)(params, batch)


def test_a_loss_with_a_collective_over_examples_is_refused():
    params, batch = problem()

    def mixing(params, example):
        return loss(params, example) - jax.lax.pmean(loss(params, example), "batch")

    with pytest.raises(ValueError, match=r"must not mix examples.*group or layer"):
        clipped_grad(mixing, clip_norm=C)(params, batch)


def test_a_loss_of_a_batch_is_refused_as_such():
    params, batch = problem()

    def of_a_batch(params, batch):
        hidden = jnp.einsum("bi,ij->bj", batch["x"], jnp.ones((batch["x"].shape[1], 2)))
        return jnp.mean(hidden) + loss(params, jax.tree.map(lambda x: x[0], batch))

    with pytest.raises(ValueError, match=r"takes a batch.*one example.*row.*compare"):
        clipped_grad(of_a_batch, clip_norm=C)(params, batch)


def test_a_symbol_for_the_rows_is_refused():
    grad_fn = clipped_grad(lambda w, x: jnp.sum(w * x), clip_norm=1.0)
    (rows,) = jax.export.symbolic_shape("b")
    shape = jax.ShapeDtypeStruct((rows, 3), jnp.float32)
    with pytest.raises(ValueError, match=r"with b rows.* known number of rows"):
        jax.export.export(jax.jit(lambda x: grad_fn(jnp.ones(3), x).sum))(shape)


def test_keys_of_examples_may_be_all_the_data():
    keys = jax.random.split(jax.random.key(0), 4)
    out = clipped_grad(lambda w, key: jnp.sum(w**2), clip_norm=1.0)(jnp.ones(3), keys)
    np.testing.assert_allclose(out.norms, 12**0.5, rtol=1e-5)


def test_batches_that_do_not_fit_are_refused():
    params, batch = problem()
    with pytest.raises(ValueError, match="share one leading axis"):
        grad_of()(params, {**batch, "y": batch["y"][:3]})
    with pytest.raises(ValueError, match=re.escape("must be bool[6]")):
        grad_of()(params, batch, jnp.ones(5, bool))
    with pytest.raises(ValueError, match=re.escape("mask (=float32[6])")):
        grad_of()(params, batch, jnp.ones(6))
    with pytest.raises(ValueError, match="at least one floating-point array"):
        grad_of()({"w": jnp.arange(3)}, batch)
    with pytest.raises(ValueError, match="what trainable does not leave out"):
        clipped_grad(loss, clip_norm=C, trainable=lambda leaf: False)(params, batch)


@pytest.mark.parametrize("rest", [{"scale": 2.0}, [2.0]])
def test_a_float_among_the_parameters_is_not_ignored(rest):
    grad_fn = clipped_grad(lambda params, x: jnp.sum(params["w"] * x), clip_norm=1.0)
    batch = jnp.ones((2, 3))
    message = r"params\['rest'\]\[.*\] \(=2.0\) must be an array: write jnp.asarray"
    with pytest.raises(ValueError, match=message):
        grad_fn({"w": jnp.ones(3), "rest": rest}, batch)
    # A module's float is a setting.
    params = {"w": jnp.ones(3), "drop": eqx.nn.Dropout(0.5)}
    assert grad_fn(params, batch).norms.shape == (2,)
