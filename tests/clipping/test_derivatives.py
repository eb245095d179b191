"""`jax.grad` through `clipped_grad`, also where the gradient of an example is zero."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from oracle import by_method, read

from cases import in_full
from switch import FULL
from tanager.clipping import book_keeping, clipped_grad
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
    lambda w, e: convolved(e["x"], w["w"]): ((3, 3, 1), {"w": (2, 2, 1, 3)}),
    lambda w, e: convolved(e["x"], standardise(w["w"], w["gain"])): (
        (4, 4, 2),
        {"w": (3, 3, 2, 4), "gain": (4,)},
    ),
}


def at_taps(program, clip_at, params, batch, mask):
    leaves = jax.tree.leaves(params)
    found = book_keeping.tap_values(program, leaves, jax.tree.leaves(batch))
    return clip_at(leaves, found, mask)


@pytest.mark.parametrize("loss", CASES)
def test_derivatives_are_those_of_the_definition(loss):
    shape, sizes = CASES[loss]
    normal = np.random.default_rng(0).normal
    x = np.asarray(normal(size=(3, *shape)), np.float32)
    x[1], x[2] = 0, 0.01 * x[2]  # without a gradient, and below the clipping norm
    params = {name: np.float32(normal(size=size)) for name, size in sizes.items()}
    params |= {"b": np.zeros(3, np.float32)} if "b" in params else {}
    numbers = jnp.asarray(np.int32(normal(size=(3, 4)) * 2) % 7)
    mask = jnp.ones(3, bool)
    program, own = read(loss, params, {"x": x, "n": numbers})
    # Whatever the loss, what is beyond its rules has the same derivative.
    clips: dict[str, Callable] = {
        name: clipped_grad(loss, clip_norm=C, strategy=name)
        for name in ("auto", "per_example")
        if FULL or loss is dense
    }
    for name, clip_at in by_method(own, C, few=True).items():
        clips[name] = functools.partial(at_taps, program, clip_at)

    def definition(params, batch, _):
        def one(e):
            gradient = jax.grad(loss)(params, e)
            squares = sum(jnp.sum(jnp.square(g)) for g in jax.tree.leaves(gradient))
            norm = jnp.sqrt(jnp.where(squares > 0, squares, C**2))
            return jax.tree.map(lambda g: g * jnp.minimum(1, C / norm), gradient)

        return jax.tree.map(lambda g: jnp.sum(g, 0), jax.vmap(one)(batch))

    def slopes(clip):
        def along(params, x):
            total, *_ = clip(params, {"x": x, "n": numbers}, mask)
            return sum(jnp.sum(jnp.cos(3 * g)) for g in jax.tree.leaves(total))

        return lambda params, x: jax.tree.leaves(jax.grad(along, (0, 1))(params, x))

    clips[""] = lambda *given: (definition(*given),)
    every = {name: slopes(clip) for name, clip in clips.items()}
    found = jax.jit(lambda *given: {n: of(*given) for n, of in every.items()})(
        params, x
    )
    expected = found.pop("")
    assert len(found) == len(every) - 1 > (2 if loss is dense else 0)
    for name, slope in found.items():
        for got, right in zip(slope, expected, strict=True):
            size = np.max(np.abs(right))
            np.testing.assert_allclose(got, right, atol=1e-3 * size, err_msg=name)


@pytest.mark.parametrize("transformed", [jax.grad, jax.jacfwd])
def test_a_loss_that_holds_what_is_differentiated_outside(transformed):
    held = {}
    w = jnp.ones((3, 2))
    x = jnp.asarray(np.float32(np.random.default_rng(0).normal(size=(4, 3))))
    grad_fn = clipped_grad(
        lambda w, x: held["t"] * jnp.sum(jnp.tanh(x @ w)), clip_norm=C
    )

    def total(t):
        held["t"] = t
        return jnp.sum(grad_fn(w, x).sum)

    value = jax.jit(total)
    for t in (0.2, 30.0):
        near = (value(t + 1e-2) - value(t - 1e-2)) / 2e-2
        np.testing.assert_allclose(transformed(total)(t), near, atol=1e-3)


HALVED = [(False, "auto"), (True, "per_example")]
MORE = [(False, name) for name in ("bk", "bk_mixopt", "ghost", "per_example")]
MORE += [(True, name) for name in ("auto", "bk", "bk_mixopt", "ghost")]


@pytest.mark.parametrize("case", in_full(HALVED + MORE, *MORE), ids=str)
def test_low_memory_under_jit_vmap_and_grad_gives_the_same(case):
    keyed, strategy = case

    def plain(params, example):
        return jnp.sum(jnp.tanh(example @ params) ** 2)

    def with_key(params, example, key):
        return plain(
            params, example + jnp.sin(jnp.float32(jax.random.key_data(key)[0]))
        )

    normal = np.random.default_rng(0).normal
    params, rows = (jnp.asarray(np.float32(normal(size=s))) for s in ((6, 3), (18, 6)))
    mask = jnp.asarray(np.arange(18) % 3 > 0)
    given = {"keys": jax.random.split(jax.random.key(2), 18)} if keyed else {}
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

    def slope(grad_fn):
        return jax.grad(lambda params: jnp.sum(clipped(grad_fn)(params) ** 2))

    @jax.jit
    def every(params):
        return {
            "alone": [clipped(low)(params), clipped(default)(params)],
            "mapped": [
                jax.vmap(clipped(low))(params[None])[0],
                clipped(default)(params),
            ],
            "slopes": [slope(low)(params), slope(default)(params)],
        }

    for name, (found, expected) in every(params).items():
        assert np.max(np.abs(expected)) > 0.1
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=2e-5, err_msg=name)
