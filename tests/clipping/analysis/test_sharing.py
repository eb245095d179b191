"""Parameters that are used several times, or meet constants, against the oracle."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from oracle import assert_close, cast, check, curve, draw, exact, kinds, read

from cases import in_full
from switch import FULL
from tanager.clipping import clipped_grad
from tanager.clipping.rules.groups import Joint, Single
from tanager.clipping.rules.masked import Masked


ROWS = 3


# Shared parameters


def test_a_layer_that_is_applied_three_times():
    w, x = draw(0, (4, 4), (ROWS, 4))

    def loss(w, x):
        for _ in range(3):
            x = jnp.tanh(w @ x)
        return curve(x)

    assert kinds(loss, w, x) == [Single]
    check(loss, w, x, methods=True)


def test_an_embedding_tied_to_the_output_head():
    table, w = draw(1, (7, 4), (4, 4))
    tokens = np.random.default_rng(1).integers(0, 7, (ROWS, 5))

    def loss(params, tokens):
        hidden = jnp.tanh(params["table"][tokens] @ params["w"])
        return curve(hidden @ params["table"].T)

    params = {"table": table, "w": w}
    assert sorted(kinds(loss, params, tokens), key=str) == [Joint, Single]
    check(loss, params, tokens, methods=True)


def by_split(w, x):
    return [x @ part for part in jnp.split(w, 3, axis=1)]


def by_slices(w, x):
    return [x @ w[:, :4], x @ w[:, 4:8], x @ w[:, 8:]]


def by_moved_slices(w, x):
    heads = w.reshape(4, 3, 4).transpose(1, 0, 2)
    return [x @ heads[0], x @ heads[1], x @ heads[2]]


def by_strided_slices(w, x):
    return [x @ w[:, 0:6:2], x @ w[:, 6::2]]


@pytest.mark.parametrize(
    "parts",
    in_full([by_split, by_slices, by_moved_slices, by_strided_slices], by_slices),
)
def test_disjoint_parts_of_a_matrix_stay_apart(parts):
    w, x = draw(2, (4, 12), (ROWS, 5, 4))

    def loss(w, x):
        query, key, *value = parts(w, x)
        attention = jax.nn.softmax(query @ key.T)
        return curve(attention @ (value[0] if value else x))

    found = read(loss, w, x)[1]
    assert {type(group) for group in found} == {Single}
    assert all(group.grams() for group in found)
    check(loss, w, x, methods=True)


def overlapping(w, x):
    return x @ w[:, :5] + x @ w[:, 4:9]


def interleaved(w, x):
    return x @ w[:, 0:8:2] + x @ w[:, 1:8:2]


def sliced_differently(w, x):
    return x @ w[:, :4] + x @ w.T[:4].T


def whole_and_part(w, x):
    return jnp.sum(x @ w, axis=1, keepdims=True) + x @ w[:, 2:6]


def part_of_a_part(w, x):
    return x @ w[:, :6][:, :4] + x @ w[:, :6][:, 2:6]


MEET = [overlapping, sliced_differently, whole_and_part, interleaved, part_of_a_part]


@pytest.mark.parametrize("meet", in_full(MEET, interleaved, part_of_a_part))
def test_cross_terms_of_parts_that_may_overlap(meet):
    w, x = draw(3, (4, 12), (ROWS, 5, 4))

    def loss(w, x):
        return curve(meet(w, x))

    assert kinds(loss, w, x) == [Joint]
    check(loss, w, x, methods=True)


# Parameters that meet constants, or values without a gradient


def mask(w):
    numbers = np.tri(4, 5) * np.linspace(-2, 3, 20).reshape(4, 5)
    return jnp.asarray(numbers, w.dtype)


def times_mask(w, x):
    return x @ (w * mask(w))


def mask_of_a_transpose(w, x):
    return x @ (mask(w).T * w.T).T


def over_constants(w, x):
    return x @ (w / (1 + mask(w) ** 2))


def where_allowed(w, x):
    return x @ jnp.where(mask(w) > 0, w, 0.0)


def pruned(w, x):
    return x @ (w * (jnp.abs(w) > 0.5).astype(w.dtype))


def pruned_by_choice(w, x):
    return x @ jnp.where(jnp.abs(w) > 0.5, w, 0.0)


def over_itself(w, x):
    return x @ (w / lax.stop_gradient(1 + w * w))


def added_to_constants(w, x):
    return x @ ((1.0 - w) + mask(w))


def quantised(w, x):
    return x @ (w + lax.stop_gradient(jnp.round(4 * w) / 4 - w))


def quantised_less_itself(w, x):
    still = lax.stop_gradient(w)
    return x @ ((w - still) + jnp.round(4 * still) / 4)


@pytest.mark.parametrize(
    ("apply", "shape"),
    [
        pytest.param(apply, (4,) if one else (3, 4), marks=[pytest.mark.full] * more)
        for apply, full in [
            *((times_mask, ()), (mask_of_a_transpose, (True,))),
            *((over_constants, (False,)), (where_allowed, (True,))),
            *((pruned, ()), (pruned_by_choice, (True, False)), (over_itself, (True,))),
            *((added_to_constants, (True,)), (quantised, (True,))),
            (quantised_less_itself, (True, False)),
        ]
        for one in (True, False)
        for more in [one in full]
    ],
)
def test_a_parameter_that_meets_a_constant_is_not_shared(apply, shape):
    w, x = draw(21, (4, 5), (ROWS, *shape))

    def loss(w, x):
        return curve(apply(w, x))

    masked = times_mask, mask_of_a_transpose, over_constants, where_allowed
    masked += pruned, pruned_by_choice, over_itself
    (group,) = read(loss, w, x)[1]
    assert isinstance(group, Single) and len(group.gradients()) + len(group.grams()) > 0
    assert bool(group.grams()) == (len(shape) == 1 or apply not in masked)
    narrow = ["float32"] * (FULL or apply is times_mask)
    check(loss, w, x, methods=True, dtypes=("float64", *narrow))


def test_a_mask_among_the_parameters_changes_from_call_to_call():
    w, mask, x = draw(23, (4, 5), (4, 5), (ROWS, 4))

    def loss(p, x):
        return curve(x @ (p["w"] * lax.stop_gradient(p["mask"])))

    assert kinds(loss, {"w": w, "mask": mask}, x) == [Masked]
    counted = np.arange(ROWS) != 1
    with jax.enable_x64(True):
        grad_fn = clipped_grad(loss, clip_norm=1.0, strategy="bk")
        for own in (mask, np.tri(4, 5)):
            params = cast({"w": w, "mask": own}, np.float64)
            expected = exact(loss, params, x, counted, 1.0)
            out = grad_fn(params, jnp.asarray(x), counted)
            assert_close("bk", (out.sum, out.norms, out.losses), expected, 1e-6)
            assert not np.any(out.sum["mask"])
            check(loss, params, x, methods=True)


def test_a_masked_convolution():
    w, x = draw(22, (3, 3, 2, 4), (ROWS, 1, 5, 5, 2))
    seen = np.ones((3, 3, 1, 1))
    seen[2] = seen[1, 2:] = 0

    def loss(w, x):
        layout = ("NHWC", "HWIO", "NHWC")
        kernel = w * seen
        y = lax.conv_general_dilated(
            x, kernel, (1, 1), "SAME", dimension_numbers=layout
        )
        return curve(y)

    assert set(read(loss, w, x)[1][0].gradients()) == {"vmap", "patches", "crossed"}
    check(loss, w, x, methods=True)


# Uses together


def called_twice(p, x):
    def encode(x):
        return jnp.tanh(x @ p["v"] + p["b"][None]) @ p["w"]

    return curve(encode(x[:2]) * encode(x[2:])[:2])


def of_vectors(p, x):
    return curve(jnp.tanh(x[0] @ p["v"]) * jnp.tanh(p["v"].T @ x[1]))


def convolved_twice(p, x):
    def encode(x):
        return lax.conv(
            jnp.tanh(lax.conv(x, p["k"], (1, 1), "SAME")), p["l"], (2, 2), "SAME"
        )

    return curve(encode(x[:, None, :4, None]) * encode(x[:, None, 1:, None]))


def looked_up_twice(p, x):
    rows = jnp.int32(jnp.abs(x[0]) * 2) % 4
    return curve(p["v"][rows] * x[0, 0]) + curve(p["v"][rows[::-1]])


@pytest.mark.parametrize(
    ("loss", "singles"),
    [(called_twice, 2), (convolved_twice, 2), (looked_up_twice, 1)],
)
def test_uses_alike_are_clipped_as_one(loss, singles):
    v, w, b, x = draw(23, (5, 4), (4, 3), (4,), (ROWS, 5, 5))
    k, kernel = draw(24, (2, 1, 3, 1), (3, 2, 2, 1))
    p = {"v": v, "w": w, "b": b, "k": k, "l": kernel}
    own = [g for g in read(loss, p, x)[1] if type(g) is Single]
    assert len(own) == singles and all(len(group.uses) == 2 for group in own)
    narrow = ["float32"] * (FULL or loss is called_twice)
    check(loss, p, x, methods="few", dtypes=("float64", *narrow))


def test_uses_that_are_not_alike_share():
    v, x = draw(23, (5, 4), (ROWS, 2, 5))

    def loss(v, x):
        return of_vectors({"v": v}, x)

    check(loss, v, x, methods=True)
