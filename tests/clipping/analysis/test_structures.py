"""Losses of every structure against the oracle."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from oracle import ALL, cast, check, clip, curve, distinct, draw, gradients, kinds, read

from cases import in_full
from switch import FULL
from tanager.clipping import clipped_grad
from tanager.clipping.analysis.dtypes import widen
from tanager.clipping.rules.groups import Single


ROWS = 3


# Parameters that reach the loss without data


def test_regularisers_are_part_of_every_examples_gradient():
    w, b, x = draw(4, (4, 3), (3,), (ROWS, 4))

    def loss(params, x):
        data = curve(x @ params["w"] + params["b"])
        return data + 0.3 * sum(jnp.sum(p**2) for p in params.values())

    check(loss, {"w": w, "b": b}, x, strategies=ALL)


def test_a_loss_that_no_example_reaches():
    w, x = draw(5, (4, 3), (ROWS, 2))
    check(lambda w, x: curve(w), w, x, strategies=ALL)


def test_a_leaf_that_is_not_used_has_a_zero_sum_and_no_tap():
    w, v, x = draw(6, (4, 3), (5,), (ROWS, 4))

    def loss(params, x):
        return curve(x @ params["w"])

    params = {"unused": v, "w": w}
    program, _ = read(loss, params, x)
    assert [unit.leaves for unit in program.units] == [(1,)]
    check(loss, params, x, strategies=ALL)
    out = clipped_grad(loss, clip_norm=1.0)(cast(params, "float32"), cast(x, "float32"))
    assert out.sum["unused"].shape == (5,)
    assert not np.any(out.sum["unused"])


# Calls


def attacked(p, x):
    slope = jax.grad(lambda x: curve(jnp.tanh(x @ p["v"]) @ p["w"]))(x)
    return curve(jnp.tanh(lax.stop_gradient(x + jnp.sign(slope)) @ p["v"]) @ p["w"])


def without_stop(p, x):
    slope = jax.grad(lambda x: curve(jnp.tanh(x @ p["v"]) @ p["w"]))(x)
    return curve(jnp.tanh((x + jnp.sign(slope)) @ p["v"]) @ p["w"])


def rounded_target(p, x):
    target = jnp.round(x @ p["v"]) + lax.stop_gradient(x @ p["v"])
    return curve((jnp.tanh(x @ p["v"]) - target) @ p["w"])


@pytest.mark.parametrize("loss", [attacked, without_stop, rounded_target])
def test_uses_that_no_gradient_reaches_do_not_count_as_shared(loss):
    v, w, x = draw(11, (4, 5), (5, 3), (ROWS, 4))
    assert kinds(loss, {"v": v, "w": w}, x) == [Single, Single]
    check(loss, {"v": v, "w": w}, x, methods=True)


def test_a_leaf_whose_every_use_is_stopped():
    v, w, x = draw(11, (4, 5), (4, 3), (ROWS, 4))

    def loss(p, x):
        return curve(x @ p["w"]) * jnp.sum(lax.stop_gradient(x @ p["v"]))

    def stopped(p, x):
        return lax.stop_gradient(loss(p, x))

    assert kinds(loss, {"v": v, "w": w}, x) == [Single]
    check(loss, {"v": v, "w": w}, x, methods=True)
    found = clipped_grad(stopped, clip_norm=1.0)({"v": v, "w": w}, x)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves((found.sum, found.norms)))


def test_calls_within_calls():
    w, v, x = draw(7, (4, 4), (4, 4), (ROWS, 4))

    @jax.jit
    def layer(w, x):
        return jax.jit(jnp.tanh)(w @ x)

    @jax.checkpoint
    def block(params, x):
        return layer(params[1], layer(params[0], x))

    def loss(params, x):
        kept = jax.checkpoint(block, policy=jax.checkpoint_policies.dots_saveable)
        return curve(jax.jit(kept)(params, x))

    assert kinds(loss, (w, v), x) == [Single, Single]
    check(loss, (w, v), x, methods=True)


@jax.custom_vjp
def straight_through(x):
    return jnp.round(x)


straight_through.defvjp(lambda x: (jnp.round(x), None), lambda _, dy: (2.0 * dy,))


@jax.custom_jvp
def steep(x):
    return jnp.tanh(x)


@steep.defjvp
def _(primals, tangents):
    return jnp.tanh(primals[0]), 3.0 * tangents[0]


def test_own_derivative_rules_without_parameters_are_respected():
    w, v, x = draw(8, (4, 4), (4, 4), (ROWS, 4))

    def loss(params, x):
        hidden = straight_through(3.0 * (params[0] @ x))
        return curve(steep(params[1] @ hidden))

    assert kinds(loss, (w, v), x) == [Single, Single]
    expected = check(loss, (w, v), x)
    assert np.all(expected.norms[[0, 2]] > 0)


@jax.custom_vjp
def scaled_product(w, x):
    return w @ x


scaled_product.defvjp(
    lambda w, x: (w @ x, (w, x)),
    lambda kept, dy: (
        5.0 * jnp.outer(dy, kept[1]) + jnp.sum(dy) * kept[0],
        kept[0].T @ dy,
    ),
)


@jax.custom_jvp
def odd_product(w, x):
    return w @ x


@odd_product.defjvp
def _(primals, tangents):
    (w, x), (dw, dx) = primals, tangents
    return w @ x, 7.0 * (dw @ x) + w @ dx


@pytest.mark.parametrize("apply", [scaled_product, odd_product])
def test_own_derivative_rules_with_parameters_are_respected(apply):
    w, v, x = draw(9, (4, 4), (4, 4), (ROWS, 4))

    def loss(params, x):
        return curve(jax.jit(apply)(params[0], jnp.tanh(params[1] @ x)))

    check(loss, (w, v), x, methods=True)


def test_own_derivative_rules_of_parameters_alone_are_respected():
    w, x = draw(10, (4, 4), (ROWS, 4))
    check(
        lambda w, x: curve(steep(straight_through(2.0 * w)) @ x),
        w,
        x,
        methods=True,
    )


# Loops and branches


def test_a_scan_over_parameters_alone_and_one_over_data_alone():
    w, x = draw(13, (3, 4, 4), (ROWS, 5, 4))

    def loss(w, x):
        product, _ = lax.scan(
            lambda p, one: (p @ one, None), jnp.eye(4, dtype=x.dtype), w
        )
        total, _ = lax.scan(lambda s, one: (jnp.sin(s) + one, None), x[0], x)
        return curve(product @ total)

    check(loss, w, x, methods=True)


def test_branches_with_parameters():
    w, v, x = draw(14, (4, 4), (4, 4), (ROWS, 4))

    def loss(params, x):
        w, v = params
        first = lax.cond(x[0] > 0, lambda x: w @ x, lambda x: jnp.sin(v @ x), x)
        number = jnp.where(x[1] > 0, 2, 0) + jnp.where(x[2] > 0, 1, 0)
        branches = [lambda x, k=k: (1.0 + k) * (v @ x) for k in range(4)]
        return curve(lax.switch(number, branches, first))

    check(loss, (w, v), x, strategies=("bk", "auto"))


def test_branches_on_parameters():
    w, x = draw(15, (4, 4), (ROWS, 4))

    def loss(w, x):
        return curve(lax.cond(w[0, 0] > 0, lambda: w, lambda: 2.0 * w.T) @ x)

    check(loss, w, x, methods=True)


def test_a_while_loop_with_parameters_is_refused_by_name():
    w, x = draw(17, (4, 4), (ROWS, 4))

    def loss(w, x):
        return curve(
            lax.while_loop(lambda x: jnp.sum(x**2) > 1.0, lambda x: 0.1 * (w @ x), x)
        )

    with pytest.raises(ValueError, match="while_loop with parameters inside"):
        clipped_grad(loss, clip_norm=1.0, strategy="bk")(
            cast(w, "float32"), cast(x, "float32")
        )


def test_a_while_loop_over_data_alone():
    w, x = draw(18, (4, 4), (ROWS, 4))

    def loss(w, x):
        smaller = lax.while_loop(lambda x: jnp.sum(x**2) > 1.0, lambda x: 0.5 * x, x)
        return curve(w @ smaller)

    check(loss, w, x, mask=[True] * ROWS)


def test_views_inside_one_example():
    w, b, v, x = draw(19, (3, 3, 2, 4), (4,), (4, 3), (ROWS, 2, 4, 4, 2))

    def one(params, view):
        y = lax.conv_general_dilated(
            view[None],
            params["w"],
            (1, 1),
            "SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )[0]
        hidden = jnp.mean(jnp.tanh(y + params["b"][None, None]), axis=(0, 1))
        return curve(hidden @ params["v"])

    def loss(params, views):
        return jnp.mean(jax.vmap(one, in_axes=(None, 0))(params, views))

    params = {"w": w, "b": b, "v": v}
    found = read(loss, params, x)[1]
    assert [group.rule.name for group in found if group.grams()] == [
        "convolution",
        "dot",
    ]
    check(loss, params, x, strategies=("auto",), methods="few")


@pytest.mark.parametrize("length", [pytest.param(4, marks=pytest.mark.full), 5])
def test_an_associative_scan_over_a_learned_decay(length):
    def loss(params, x):
        decay = jnp.broadcast_to(params["decay"][None], x.shape)

        def both(one, other):
            return one[0] * other[0], other[0] * one[1] + other[1]

        return jnp.sum(
            lax.associative_scan(both, (decay, x * params["gain"][None]))[1] ** 2
        )

    decay, gain, x = draw(0, (3,), (3,), (4, length, 3))
    check(loss, {"decay": decay, "gain": gain}, x)


# Precision


def clipped(loss, clip_norm, params, x, strategies=ALL):
    names = distinct(loss, params, x, strategies)
    made = {n: clipped_grad(loss, clip_norm=clip_norm, strategy=n) for n in names}
    every = jax.jit(lambda *given: {n: each(*given) for n, each in made.items()})
    return every(params, x)


@pytest.mark.parametrize("params_too", [False, True])
def test_bfloat16_against_the_exact_gradient_of_the_same_numbers(params_too):
    w, b, v, x = draw(22, (8, 6), (6,), (6, 4), (ROWS, 5, 8), scale=0.5)
    params, x = cast(({"w": w, "b": b, "v": v}, x), jnp.bfloat16)

    def loss(params, x):
        low = cast(params, x.dtype)
        hidden = jnp.tanh(x @ low["w"] + low["b"][None])
        return curve(widen(hidden @ low["v"]))

    with jax.enable_x64(True):
        found, losses = gradients(loss, params, x)
        expected, clip_norm = clip(found, losses, np.ones(ROWS, bool))
    if not params_too:
        params = cast(params, jnp.float32)
    strategies = ALL if FULL else ("per_example", "bk", "bk_mixopt")
    for strategy, out in clipped(loss, clip_norm, params, x, strategies).items():
        assert {leaf.dtype.name for leaf in jax.tree.leaves((*out,))} == {"float32"}
        np.testing.assert_allclose(out.norms, expected.norms, rtol=2**-6)
        for leaf, right in zip(jax.tree.leaves(out.sum), expected.sum, strict=True):
            error = np.linalg.norm(np.asarray(leaf, np.float64) - right)
            assert error < 2**-6 * np.linalg.norm(right), strategy


@pytest.mark.cpu
# 24: by gradients in the mixes.
@pytest.mark.parametrize("positions", in_full([1, 3, 24], 3))
def test_norms_of_bfloat16_products_are_taken_in_float32(positions):
    # x and dy are exact in bfloat16; their products, squares and sums are not.
    numbers = 1 + np.arange(256 * positions).reshape(1, positions, 256) % 128 / 128
    x = jnp.asarray(numbers, jnp.bfloat16)
    dy = 1.0 + 2 * (7 * np.arange(3 * positions).reshape(positions, 3) % 120)
    low = jnp.asarray(dy, jnp.bfloat16)
    w = jnp.zeros((256, 3), jnp.bfloat16)

    def loss(w, x):
        return jnp.sum((x @ w) * low)

    exact = np.linalg.norm(numbers[0].T @ dy)
    # vmap(grad) rounds the gradient itself to bfloat16.
    for strategy, out in clipped(loss, 1.0, w, x, ALL[1:]).items():
        norm = float(out.norms[0])  # rounded up
        assert exact * (1 - 1e-6) <= norm <= exact * (1 + 2e-5), strategy


def test_mixed_precision_of_parameters():
    w, v, b, x = draw(23, (4, 4), (4, 3), (3,), (ROWS, 4))

    def mixed(params, x):
        hidden = jnp.tanh(x.astype(jnp.float32) @ params["w"])
        low = hidden.astype(jnp.bfloat16) @ params["v"]
        return curve(low.astype(params["b"].dtype) + params["b"])

    with jax.enable_x64(True):
        params = {
            "w": jnp.asarray(w, jnp.float32),
            "v": jnp.asarray(v, jnp.bfloat16),
            "b": jnp.asarray(b, jnp.float64),
        }
        x = jnp.asarray(x)
        every = clipped(mixed, 1.0, params, x, ("per_example", "bk", "bk_mixopt"))
        expected = every.pop("per_example")
        assert every
        for out in every.values():
            dtypes = jax.tree.map(lambda leaf: leaf.dtype.name, out.sum)
            assert dtypes == {"w": "float32", "v": "float32", "b": "float64"}
            assert out.norms.dtype == jnp.float64
            np.testing.assert_allclose(out.norms, expected.norms, rtol=2**-7)


def test_dropout_by_a_key_in_the_example():
    w, v, x = draw(24, (4, 6), (6, 3), (ROWS, 4))
    batch = {"x": x, "key": jax.random.split(jax.random.key(0), ROWS)}

    def loss(params, example):
        hidden = jnp.tanh(example["x"] @ params[0])
        keep = jax.random.bernoulli(example["key"], 0.5, hidden.shape)
        return curve(jnp.where(keep, 2.0 * hidden, 0.0) @ params[1])

    check(loss, (w, v), batch, strategies=("per_example", "bk", "auto"))
