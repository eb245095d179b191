"""`jax.grad` through `clipped_grad`, also where the gradient of an example is zero."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from oracle import ALL, ways

from tanager.clipping import clipped_grad
from tanager.models.layers import standardise


C = 0.7
PLANE = ("NHWC", "HWIO", "NHWC")


def convolved(x, kernel):
    y = lax.conv_general_dilated(
        x[None], kernel, (1, 1), "SAME", dimension_numbers=PLANE
    )
    return jnp.sum(jnp.square(jnp.tanh(y)))


def dense(w, e):
    return jnp.sum(jnp.square(jnp.tanh(e["x"] @ w["w"] + w["b"])))


def positions(w, e):
    return jnp.sum(jnp.square(jnp.tanh(e["x"] @ w["w"]) @ w["v"]))


def rows(w, e):
    return jnp.sum(jnp.square(w["w"][e["n"]]) * e["x"])


def masked(w, e):
    return jnp.sum(jnp.square(e["x"] @ (w["w"] * np.tri(4, 3, dtype=np.float32))))


def tied(w, e):
    return jnp.sum(jnp.square(jnp.tanh(e["x"] @ w["w"]) @ w["w"].T))


CASES = {
    dense: ((4,), {"w": (4, 3), "b": (3,)}),
    positions: ((6, 4), {"w": (4, 3), "v": (3, 2)}),
    rows: ((4, 3), {"w": (7, 3)}),
    masked: ((4,), {"w": (4, 3)}),
    tied: ((4,), {"w": (4, 3)}),
    lambda w, e: convolved(e["x"], w["w"]): ((4, 4, 2), {"w": (3, 3, 2, 4)}),
    lambda w, e: convolved(e["x"], standardise(w["w"], w["gain"])): (
        (4, 4, 2),
        {"w": (3, 3, 2, 4), "gain": (4,)},
    ),
}


@pytest.mark.parametrize("loss", CASES)
def test_derivatives_are_those_of_the_definition(loss):
    shape, sizes = CASES[loss]
    normal = np.random.default_rng(0).normal
    x = np.asarray(normal(size=(4, *shape)), np.float32)
    x[1], x[3] = 0, 0.01 * x[3]  # without a gradient, and below the clipping norm
    params = {name: jnp.float32(normal(size=size)) for name, size in sizes.items()}
    params |= {"b": jnp.zeros(3)} if "b" in params else {}
    numbers = jnp.asarray(normal(size=(4, 4)) * 2, jnp.int32) % 7
    mask = jnp.ones(4, bool)
    every = ways(loss, ALL, True, C)

    def definition(params, batch, _):
        def one(e):
            gradient = jax.grad(loss)(params, e)
            squares = sum(jnp.sum(jnp.square(g)) for g in jax.tree.leaves(gradient))
            norm = jnp.sqrt(jnp.where(squares > 0, squares, C**2))
            return jax.tree.map(lambda g: g * jnp.minimum(1, C / norm), gradient)

        return jax.tree.map(lambda g: jnp.sum(g, 0), jax.vmap(one)(batch))

    def slopes(clip, name=None):
        def along(params, x):
            total = clip(params, {"x": x, "n": numbers}, mask)
            total = total if name is None else total[name][0]
            return sum(jnp.sum(jnp.cos(3 * g)) for g in jax.tree.leaves(total))

        return jax.jit(jax.grad(along, (0, 1)))(params, jnp.asarray(x))

    expected = jax.tree.leaves(slopes(definition))
    for name in jax.eval_shape(every, params, {"x": x, "n": numbers}, mask):
        for got, right in zip(
            jax.tree.leaves(slopes(every, name)), expected, strict=True
        ):
            size = np.max(np.abs(right))
            np.testing.assert_allclose(got, right, atol=1e-3 * size, err_msg=name)


@pytest.mark.parametrize("transformed", [jax.grad, jax.jacfwd])
def test_a_loss_that_holds_what_is_differentiated_outside(transformed):
    held = {}
    w, x = jnp.ones((3, 2)), jnp.asarray(np.random.default_rng(0).normal(size=(4, 3)))
    x = x.astype(jnp.float32)
    grad_fn = clipped_grad(
        lambda w, x: held["t"] * jnp.sum(jnp.tanh(x @ w)), clip_norm=C
    )

    def total(t):
        held["t"] = t
        return jnp.sum(grad_fn(w, x).sum)

    for t in (0.1, 0.2, 30.0):
        near = (jax.jit(total)(t + 1e-2) - jax.jit(total)(t - 1e-2)) / 2e-2
        np.testing.assert_allclose(transformed(total)(t), near, atol=1e-3)


@pytest.mark.parametrize(
    "strategy", ["auto", "bk", "bk_mixopt", "ghost", "per_example"]
)
@pytest.mark.parametrize("keyed", [False, True])
def test_low_memory_under_jit_vmap_and_grad_gives_the_same(strategy, keyed):
    def plain(params, example):
        return jnp.sum(jnp.tanh(example @ params) ** 2)

    def with_key(params, example, key):
        return plain(params, example + jax.random.normal(key, example.shape))

    keys = jax.random.split(jax.random.key(0), 3)
    params = jax.random.normal(keys[0], (6, 3))
    rows, mask = jax.random.normal(keys[1], (40, 6)), jnp.arange(40) % 3 > 0
    given = {"keys": jax.random.split(keys[2], 40)} if keyed else {}
    low, default = (
        clipped_grad(
            with_key if keyed else plain,
            clip_norm=0.5,
            strategy=strategy,
            memory=memory,
        )
        for memory in ("low", "default")
    )

    def clipped(grad_fn):
        return lambda params: grad_fn(params, rows, mask, **given).sum

    def squared(grad_fn):
        return jax.grad(lambda params: jnp.sum(clipped(grad_fn)(params) ** 2))

    expected = clipped(default)(params)
    for found in (
        jax.jit(clipped(low))(params),
        jax.vmap(clipped(low))(params[None])[0],
    ):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(
        squared(low)(params), squared(default)(params), rtol=1e-5, atol=2e-5
    )
