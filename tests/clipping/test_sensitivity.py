"""Adversarial examples: no one example moves the sum by more than its share.

The bound is C for adding, masking or spoiling an example and 2C for replacing one,
times 1.001: `tanager.clipping.analysis.rounding` allows for half of that.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from oracle import alone, cast, draw, norms_of

from tanager.clipping import clipped_grad
from tanager.clipping.analysis.standardise import standardise
from trees import distance


C = 0.5
SLACK = 1.001
ROWS = 4
LAST = ROWS - 1
strategies = pytest.mark.parametrize(
    "strategy", ["per_example", "bk", "bk_mixed", "bk_mixopt"]
)
"""Of the losses here, auto takes the methods of one of these."""


def network(params, example):
    """A standardised grouped convolution, norm, a product over positions, a head."""
    kernel = standardise(params["kernel"], params["gain"])
    image = example["image"]
    y = lax.conv_general_dilated(
        image[None],
        kernel,
        (1, 1),
        "SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=2,
    )[0]
    y = jax.nn.relu(y + params["bias"][None, None]).reshape(16, 6)
    hidden = y @ params["mix"] + params["place"]
    hidden = hidden + params["table"][example["word"]][None]
    out = jnp.mean(jnp.tanh(hidden), axis=0) @ params["head"]
    return jnp.sum((out - example["target"]) ** 2)


@functools.cache
def problem():
    generator = np.random.default_rng(0)
    shapes = {
        "kernel": (3, 3, 2, 6),
        "gain": (6,),
        "bias": (6,),
        "mix": (6, 5),
        "place": (16, 5),
        "table": (4, 5),
        "head": (5, 2),
    }
    params = {k: generator.standard_normal(s) for k, s in shapes.items()}
    batch = {
        "image": 0.5 * generator.standard_normal((ROWS, 4, 4, 4)),
        "target": generator.standard_normal((ROWS, 2)),
        "word": np.arange(ROWS, dtype=np.int32),
    }
    return cast(params, "float32"), cast(batch, "float32")


@functools.cache
def compiled(loss, strategy, clip_norm=C):
    grad_fn = clipped_grad(loss, clip_norm=clip_norm, strategy=strategy)
    return jax.jit(grad_fn)


def last_row(batch, **values):
    def spoil(leaf, value):
        return jnp.asarray(leaf).at[LAST].set(value)

    return {**batch, **{k: spoil(batch[k], value) for k, value in values.items()}}


def mixed_scales(shape, exponents, seed=1):
    generator = np.random.default_rng(seed)
    sizes = 10.0 ** generator.choice(exponents, shape)
    return sizes * generator.choice([-1, 1], shape)


IMAGE = (4, 4, 4)
POISON = {
    "nan": {"image": np.nan},
    "one nan": {"image": np.where(np.arange(64).reshape(IMAGE) == 7, np.nan, 0.1)},
    "infinite": {"image": np.inf},
    "minus infinite": {"image": -np.inf},
    "infinite target": {"target": np.inf},
    "nan target": {"target": np.nan},
    "huge": {"image": 1e30},
    "largest": {"image": 3e38},
    "huge target": {"target": 1e30},
    "squares overflow": {"image": 3e19, "target": 1e10},
    "tiny": {"image": 1e-30, "target": 1e-30},
    "mixed scales": {"image": mixed_scales(IMAGE, [-30, -20, 0, 18, 30])},
    "mixed moderate scales": {"image": mixed_scales(IMAGE, [-12, -3, 0, 3, 9])},
    "large and tiny": {"image": 1e18, "target": 1e-18},
}


@strategies
def test_no_example_moves_the_sum_by_more_than_its_share(strategy):
    params, batch = problem()
    grad_fn = compiled(network, strategy)
    everyone = jnp.ones(ROWS, bool)
    others = everyone.at[LAST].set(False)
    without = grad_fn(params, batch, others)
    with_it = grad_fn(params, batch, everyone)
    assert 0.9 * C < distance(with_it.sum, without.sum) <= SLACK * C
    for name, values in POISON.items():
        spoilt = last_row(batch, **values)
        out = grad_fn(params, spoilt, everyone)
        added = distance(out.sum, without.sum)
        assert added <= SLACK * C, (name, added)
        assert distance(out.sum, with_it.sum) <= 2 * SLACK * C, name
        if not np.isfinite(out.norms[LAST]):
            assert added == 0, name
        np.testing.assert_array_equal(out.norms[:LAST], with_it.norms[:LAST], name)
        masked = grad_fn(params, spoilt, others)
        assert distance(masked.sum, without.sum) == 0, name
        assert masked.norms[LAST] == masked.losses[LAST] == 0, name


@strategies
def test_each_row_can_be_the_one(strategy):
    params, batch = problem()
    grad_fn = compiled(network, strategy)
    everyone = np.ones(ROWS, bool)
    for number in range(ROWS):
        without = grad_fn(params, batch, np.arange(ROWS) != number).sum
        assert distance(grad_fn(params, batch, everyone).sum, without) <= SLACK * C
        image = np.array(batch["image"])
        image[number] = np.nan
        spoilt = grad_fn(params, {**batch, "image": image}, everyone).sum
        assert distance(spoilt, without) == 0


def logistic(w, x):
    return jax.nn.softplus(w @ x)


@jax.custom_vjp
def with_a_rule(w, x):
    return logistic(w, x)


with_a_rule.defvjp(
    lambda w, x: (logistic(w, x), (w, x)),
    lambda kept, gradient: (
        gradient * jax.nn.sigmoid(kept[0] @ kept[1]) * kept[1],
        gradient * jax.nn.sigmoid(kept[0] @ kept[1]) * kept[0],
    ),
)


@pytest.mark.parametrize("strategy", ["per_example", "bk"])
@pytest.mark.parametrize("loss", [logistic, with_a_rule])
def test_a_row_that_is_not_finite_changes_no_other_row(loss, strategy):
    """63 examples whose product cancels: rounded otherwise, each would move by C."""
    draw = np.random.default_rng(0)
    w = draw.normal(size=512).astype(np.float32)
    grad_fn = compiled(loss, strategy)
    for _ in range(5):
        x = draw.normal(size=512)
        x -= (x @ w) / (w.astype(np.float64) @ w) * w
        rows = np.repeat((1e7 * x).astype(np.float32)[None], 64, 0)
        sums = []
        for last in (0.0, np.nan, np.inf):
            batch = rows.copy()  # JAX may read NumPy's memory after the call
            batch[-1] = last
            everyone = np.ones(64, bool)
            sums += [grad_fn(jnp.asarray(w), jnp.asarray(batch), everyone).sum]
        np.testing.assert_array_equal(sums[0], sums[1])
        np.testing.assert_array_equal(sums[0], sums[2])


@strategies
def test_a_batch_of_nothing_but_padding_gives_exact_zeros(strategy):
    params, batch = problem()
    for value in (np.nan, np.inf, 0.0):
        spoilt = {**batch, "image": jnp.full_like(batch["image"], value)}
        out = compiled(network, strategy)(params, spoilt, jnp.zeros(ROWS, bool))
        assert all(not np.any(leaf) for leaf in jax.tree.leaves((*out,)))


def product_loss(w, example):
    # dy is given, so that x and dy can be chosen at will.
    return jnp.sum((example["x"] @ w) * example["dy"])


def kernel_loss(w, example):
    y = lax.conv_general_dilated(
        example["x"][None],
        w,
        (1,),
        "VALID",
        dimension_numbers=("NWC", "WIO", "NWC"),
    )[0]
    # An even number of positions and no padding, so that signs cancel everywhere.
    return jnp.sum(y * example["dy"][: T - 2])


def own_standardised_loss(w, example):
    return kernel_loss(standardise(w, eps=1e-8), example)


def table_loss(table, example):
    return jnp.sum(table[example["rows"]] * example["dy"])


def fixed_table_loss(table, example):
    # No example chooses the rows, so that they are taken before data is met.
    return jnp.sum(table[jnp.zeros(T, jnp.int32)] * example["dy"])


T = 8
LOSSES = {
    "product": (product_loss, (4, 4)),
    "kernel": (kernel_loss, (3, 4, 4)),
    "standardised": (own_standardised_loss, (3, 4, 4)),
    "table": (table_loss, (3, 4)),
    "fixed table": (fixed_table_loss, (3, 4)),
}


PLAIN = 16  # The first pair of `cancelling` in which nothing goes wrong.


def cancelling(seed):
    """x and dy of examples whose gradient is small against what it is made of."""
    generator = np.random.default_rng(seed)
    sign = np.where(np.arange(T) % 2 == 0, 1.0, -1.0)[:, None]
    constant = generator.standard_normal((1, 4))
    small = generator.standard_normal((T, 4))
    same = np.repeat(generator.standard_normal((1, 4)), T, axis=0)
    for size in (1e2, 1e4, 1e6, 1e8):
        # Positions ±M with equal dy: the gradient is what `small` leaves of it.
        yield size * sign * constant + small, same
        yield size * sign * constant + small, 1e-3 * same
        # Constant over the fan-in: standardisation takes nearly all of it away.
        yield np.full((T, 4), size) + small, same
        yield small, size * sign * same + small
    yield small, small[::-1]
    # Overflow of one side's squares and underflow of the other's.
    yield 1e20 * small, 1e-22 * same
    yield 1e-25 * small, 1e25 * same
    yield 1e30 * small, 1e-30 * same
    yield 1e12 * small, 1e-12 * small
    yield 1e19 * sign * constant, 1e-19 * same


@pytest.mark.parametrize("name", LOSSES)
def test_cancellation_overflow_and_underflow_in_norms(name):
    loss, shape = LOSSES[name]
    w = jnp.asarray(draw(3, shape)[0] + 0.1, jnp.float32)
    pairs = [pair for seed in range(3) for pair in cancelling(seed)]
    batch = {
        "x": jnp.asarray(np.stack([x for x, _ in pairs]), jnp.float32),
        "dy": jnp.asarray(np.stack([dy for _, dy in pairs]), jnp.float32),
        "rows": jnp.ones((len(pairs), T), jnp.int32),
    }
    exact = norms_of(loss, w, batch)[PLAIN]
    for strategy, (sizes, norms) in alone(loss, w, batch, C).items():
        assert np.max(sizes) <= SLACK * C, (strategy, np.argmax(sizes))
        # The norm of an example in which nothing cancels, over- or underflows is right.
        np.testing.assert_allclose(norms[PLAIN], exact, rtol=1e-4, err_msg=strategy)


@pytest.mark.parametrize("strategy", ["per_example", "bk"])
def test_a_scaled_parameter_whose_gradients_vanish_when_squared(strategy):
    def loss(w, example):
        return jnp.vdot(example["x"] @ (1e18 * w), example["dy"])

    batch = {"x": jnp.ones((2, 64)), "dy": jnp.full((2, 64), 1e-20)}
    out = clipped_grad(loss, clip_norm=0.1, strategy=strategy)(
        jnp.zeros((64, 64)), batch, jnp.array([True, False])
    )
    # Each of 64² entries is 0.01.
    np.testing.assert_allclose(out.norms[0], 0.64, rtol=1e-5)
    np.testing.assert_allclose(jnp.linalg.norm(out.sum), 0.1, rtol=1e-5)


def along(weight, count):
    """Images [count, 1, 1, n] in bfloat16 at small angles to the centred weights."""
    generator = np.random.default_rng(6)
    centred = np.asarray(weight, np.float64).ravel()
    centred = (centred - centred.mean()) / np.linalg.norm(centred - centred.mean())
    other = generator.standard_normal((count, centred.size))
    other -= other.mean(1, keepdims=True) + (other @ centred)[:, None] * centred
    other /= np.linalg.norm(other, axis=1, keepdims=True)
    angle = generator.uniform(0, 0.1, (count, 1))
    size = generator.uniform(1, 2, (count, 1))
    images = size * (np.cos(angle) * centred + np.sin(angle) * other)
    return jnp.asarray(images[:, None, None], jnp.bfloat16)


@pytest.mark.parametrize("gained", [False, True])
def test_outputs_rounded_to_bfloat16_do_not_pass_for_gradients(gained):
    # The gradient of the standardised weights lies along the centred weights, which
    # standardisation takes away: what is left is less than the rounding of an output.
    params = {"w": jnp.asarray(draw(5, (1, 1, 64, 1))[0], jnp.float32)}
    if gained:
        params["gain"] = jnp.full(1, 1e-3, jnp.float32)

    def loss(params, example):
        kernel = standardise(params["w"], params.get("gain"))
        y = lax.conv_general_dilated(
            example["x"][None],
            kernel.astype(example["x"].dtype),
            (1, 1),
            "VALID",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
        return jnp.sum(y.astype(example["dy"].dtype)) * example["dy"]

    images = along(params["w"], 100)
    for size in (1e2, 1e4):
        batch = {"x": images, "dy": jnp.full(len(images), size, jnp.float32)}
        for strategy, (sizes, _) in alone(loss, params, batch, C).items():
            assert np.max(sizes) <= SLACK * C, strategy


@pytest.mark.parametrize("times", [1.0, 2.0])
def test_shared_parameters_that_nearly_cancel(times):
    # The same matrix meets x and −x + δ: only cross terms make the gradient small.
    w, x, small = draw(4, (4, 4), (6, 4), (6, 4))
    batch = {"x": 1e3 * x, "other": (-1e3 * x + small) / times}

    def loss(w, example):
        return jnp.sum(example["x"] @ w) + jnp.sum(example["other"] @ (times * w))

    w, batch = cast((w, batch), "float32")
    exact = 2 * np.linalg.norm(small, axis=1)
    # Uses alike are positions of one tap, whose Gram norms are raised by η·A².
    terms = 2 * (np.linalg.norm(batch["x"], axis=1) * 2)
    for name, (sizes, norms) in alone(loss, w, batch, C).items():
        assert np.max(sizes) <= SLACK * C
        raised = 0 if name == "per_example" or times != 1 else 2e-3 * terms
        assert np.all(norms >= exact * (1 - 1e-3))
        assert np.all(norms <= exact * (1 + 1e-3) + raised), name


def two_positions(w, example):
    return jnp.sum((example["x"] @ w.astype(example["x"].dtype)) * example["dy"])


def two_pixels(w, example):
    y = lax.conv_general_dilated(
        example["x"][None, :, None],
        w.astype(example["x"].dtype)[None, None],
        (1, 1),
        "VALID",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    return jnp.sum(y[0, :, 0] * example["dy"])


@pytest.mark.parametrize("loss", [two_positions, two_pixels])
def test_positions_that_cancel_in_bfloat16_cancel_when_scaled(loss):
    # One unit in the last place is left of dy. Scaled by c and rounded to bfloat16
    # again, two were: twice what the norm allows.
    larger = np.random.default_rng(0).uniform(1, 2, 512)
    dy = jnp.asarray(np.stack([larger, larger + 2**-7], 1)[..., None], jnp.bfloat16)
    x = jnp.broadcast_to(jnp.asarray([[1.0], [-1.0]], jnp.bfloat16), dy.shape)

    for norm in (1e-3, 1.23e-3):
        batch = {"x": x, "dy": dy}
        for strategy, (sizes, _) in alone(loss, jnp.ones((1, 1)), batch, norm).items():
            assert np.max(sizes) <= SLACK * norm, strategy
