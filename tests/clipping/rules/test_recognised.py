"""Weights standardised or normalised in any spelling, against explicit gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from oracle import alone, cast, check, draw
from rule_cases import BOTH, ROWS, conv, curve, only_group

from cases import in_full, tuples_in_full
from switch import FULL, ON_CPU
from tanager.clipping.analysis import reading
from tanager.clipping.rules.groups import Joint
from tanager.clipping.rules.standardised import Standardised


FAN_IN, UNIT = (0, 1, 2), (1, 1, 1, 3)


def mean(w):
    return jnp.mean(w, FAN_IN, keepdims=True)


def by_variance(w, _):
    return (w - mean(w)) / jnp.sqrt(jnp.var(w, FAN_IN, keepdims=True) + 0.05)


def by_deviation(w, _):
    """Eps in two places."""
    spread = jnp.sqrt(jnp.var(w, FAN_IN, keepdims=True) + 0.03)
    return (w - mean(w)) / (spread + 0.02)


def by_std(w, _):
    return (w - mean(w)) / (jnp.std(w, FAN_IN, keepdims=True) + 0.02)


def by_the_sample(w, _):
    return (w - mean(w)) / jnp.std(w, FAN_IN, keepdims=True, ddof=1)


def by_inverse_root(w, gain):
    """As NFNets are written: fused."""
    spread = jnp.maximum(jnp.var(w, FAN_IN, keepdims=True) * 18, 1e-4)
    scale = lax.rsqrt(spread) * gain.reshape(UNIT)
    return w * scale - mean(w) * scale


def by_squares(w, gain):
    """The mean of squares less the square of the mean."""
    m = mean(w)
    variance = jnp.sum(w * w, FAN_IN, keepdims=True) / 18 - m**2
    return -1.5 * gain.reshape(UNIT) * ((w - m) * (variance + 0.05) ** -0.5)


def by_flax(w, _):
    return jax.nn.standardize(w, axis=FAN_IN, epsilon=0.05)


def by_matrix(w, gain):
    flat = w.reshape(-1, 3)
    length = jnp.linalg.norm(flat - jnp.mean(flat, 0, keepdims=True), axis=0)
    return gain.reshape(UNIT) * (w - mean(w)) / length.reshape(UNIT)


def centred_alone(w, _):
    return (w - mean(w)) / 3


def weight_norm(w, gain):
    length = jnp.sqrt(jnp.sum(w**2, FAN_IN, keepdims=True))
    return gain.reshape(UNIT) * w / length


def unit_length(w, _):
    length = jnp.sqrt(jnp.sum(jnp.square(w), FAN_IN, keepdims=True))
    return w / jnp.maximum(length, 1e-6)


def gain_alone(w, gain):
    return w * gain.reshape(UNIT)


KNOWN = [
    *(by_variance, by_deviation, by_std, by_the_sample, by_inverse_root, by_squares),
    by_flax,
    *(by_matrix, centred_alone, weight_norm, unit_length, gain_alone),
]


def applied(kernel, shape=(3, 3, 2, 3)):
    """Return a loss of one example, its parameters and a batch."""
    w, gain, x = draw(31, shape, (3,), (ROWS, 1, 5, 4, shape[2]))
    params = [0.4 * w + 0.3, gain + 0.2]
    if kernel.__code__.co_varnames[1] == "_":
        params[1:] = []

    def loss(params, x):
        own = kernel(params[0], params[-1])
        return curve(conv(x, own, ("NHWC", "HWIO", "NHWC"), (1, 1), "SAME"))

    return loss, params, x


@pytest.mark.parametrize("kernel", KNOWN)
def test_weights_are_recognised_however_they_are_spelt(kernel):
    loss, params, x = applied(kernel)
    group = only_group(loss, params, x)
    assert isinstance(group, Standardised) and bool(group.grams()) == ON_CPU
    if FULL or kernel not in (by_flax, gain_alone):
        every = kernel in (by_variance, weight_norm)
        check(loss, params, x, methods=True if every else "few")


def fixed_spread(w, _):
    spread = lax.stop_gradient(jnp.std(w, FAN_IN, keepdims=True))
    return (w - mean(w)) / spread


def test_a_centred_weight_over_what_has_no_gradient():
    loss, params, x = applied(fixed_spread, (3, 3, 3, 3))
    group = only_group(loss, params, x)
    assert isinstance(group, Standardised) and not group.grams()
    check(loss, params, x, methods=True)


def fixed_mean(w, _):
    return (w - lax.stop_gradient(mean(w))) / jnp.std(w, FAN_IN, keepdims=True)


def by_input(w, _):
    """The mean of a unit, the deviation of an input."""
    return (w - mean(w)) / jnp.std(w, (0, 1, 3), keepdims=True)


def by_part_of_a_unit(w, _):
    return (w - mean(w)) / jnp.std(w, (0, 1), keepdims=True)


def over_the_variance(w, _):
    return (w - mean(w)) / jnp.var(w, FAN_IN, keepdims=True)


def over_less(w, _):
    return (w - mean(w)) / (jnp.std(w, FAN_IN, keepdims=True) - 0.02)


def centred_over_all_of_it(w, _):
    return (w - mean(w)) / jnp.sqrt(jnp.sum(w**2, FAN_IN, keepdims=True))


def by_largest(w, _):
    return (w - mean(w)) / jnp.max(jnp.abs(w), FAN_IN, keepdims=True)


def half_a_mean(w, _):
    return (w - 0.5 * mean(w)) / jnp.std(w, FAN_IN, keepdims=True)


def gain_of_inputs(w, gain):
    return by_variance(w, None) * gain.reshape(1, 1, 3, 1)


def gain_of_exponents(w, gain):
    return by_variance(w, None) * jnp.exp(gain).reshape(UNIT)


def gain_that_is_added(w, gain):
    return by_variance(w, None) + gain.reshape(UNIT)


def gain_twice(w, gain):
    return by_variance(w, None) * gain.reshape(UNIT) ** 2


@jax.custom_jvp
def straight(w):
    return jnp.sign(w)


straight.defjvp(lambda w, t: (straight(*w), *t))


def straight_through(w, _):
    return by_variance(straight(w) + w, None)


def spectral(w, _):
    left, right = draw(5, (1, 27), (3, 1))
    cast = lambda one: jnp.asarray(one, w.dtype)  # noqa: E731
    return w / (cast(left) @ w.reshape(27, 3) @ cast(right)).reshape(1, 1, 1, 1)


UNKNOWN = [
    *(fixed_mean, by_input, by_part_of_a_unit, over_the_variance, spectral),
    *(over_less, centred_over_all_of_it, by_largest, half_a_mean, gain_of_inputs),
    *(gain_of_exponents, gain_that_is_added, gain_twice, straight_through),
]


@pytest.mark.parametrize("kernel", UNKNOWN)
def test_what_is_like_it_is_not_taken_for_it(kernel):
    loss, params, x = applied(kernel, (3, 3, 3, 3))
    group = only_group(loss, params, x)
    assert isinstance(group, Joint) and group.unit.form is None


# What is not recognised is clipped alike: by the gradients of what it is made of.
FEW = (by_input, gain_twice, straight_through)


@pytest.mark.parametrize("kernel", in_full(UNKNOWN, *{*UNKNOWN} - {*FEW}))
def test_what_is_not_recognised_is_clipped_all_the_same(kernel):
    check(*applied(kernel, (3, 3, 3, 3)), strategies=("bk", "bk_mixopt"))


def test_a_wrong_recognition_bends_the_sum_and_bounds_it(monkeypatch):
    # Taken for `by_variance`, of the same leaves. What an example adds is then another
    # vector than its gradient, but not a longer one than its norm.
    form = only_group(*applied(by_variance)).unit.form
    assert form is not None
    loss, params, x = applied(by_largest)
    params, x = cast((params, x), "float32")

    def wrong(equations, anchor, leaves, constants):
        return form._replace(weight=leaves[0])

    monkeypatch.setattr(reading, "recognise", wrong)
    for strategy, (moved, norms) in alone(loss, params, x, 1e6).items():
        assert np.all(moved <= norms * (1 + 1e-6)), strategy
    with pytest.raises(AssertionError, match="sum of leaf 0"):
        check(loss, params, x, strategies=("bk",))


@pytest.mark.parametrize(
    "kernel", in_full([by_std, by_squares, unit_length, weight_norm], by_squares)
)
def test_gradients_that_normalisation_takes_away(kernel):
    # Images along the weights of a unit, whose gradient is all but lost.
    _, params, _ = applied(kernel)
    params = cast(params, "float32")

    def loss(params, example):
        own = kernel(params[0], params[-1])
        layout = "NHWC", "HWIO", "NHWC"
        y = conv(example["x"][None], own, layout, (1, 1), "VALID")
        return jnp.sum(y * example["dy"][None, None, None])

    w = np.moveaxis(params[0] - (mean(params[0]) if kernel is by_std else 0), 3, 0)
    (other,) = draw(6, (40, *w.shape[1:]), scale=1e-4)
    units = np.arange(40) % 3
    batch = {"x": 1e2 * (w[units] + other), "dy": 1e3 * np.eye(3)[units]}
    for strategy, (moved, norms) in alone(loss, params, cast(batch, "float32")).items():
        assert np.all(moved <= 1 + 2**-11), strategy
        assert np.all(moved <= norms * (1 + 1e-6)), strategy


def test_channels_first_and_transposed_weights():
    w, x = draw(33, (3, 2, 3, 3), (ROWS, 1, 2, 5, 4))

    def own(w):
        m = jnp.mean(w, (1, 2, 3), keepdims=True)
        return (w - m) / jnp.sqrt(jnp.var(w, (1, 2, 3), keepdims=True) + 0.05)

    def first(w, x):
        return curve(conv(x, own(w), ("NCHW", "OIHW", "NCHW"), (1, 1), "SAME"))

    def moved_after(w, x):
        kernel = jnp.transpose(own(w), (2, 3, 1, 0))
        return curve(conv(x, kernel, ("NCHW", "HWIO", "NCHW"), (1, 1), "SAME"))

    def moved_before(w, x):
        kernel = by_variance(jnp.transpose(w, (2, 3, 1, 0)), None)
        return curve(conv(x, kernel, ("NCHW", "HWIO", "NCHW"), (1, 1), "SAME"))

    for loss, fast in ((first, True), (moved_after, False), (moved_before, True)):
        group = only_group(loss, w + 0.3, x)
        assert isinstance(group, Standardised)
        assert bool(group.grams()) == (fast and ON_CPU)
        check(loss, w + 0.3, x, methods="few")


@pytest.mark.parametrize(
    ("shape", "right"),
    tuples_in_full(
        [((4,), False), ((3, 4), False), ((4,), True), ((3, 4), True)],
        *[((4,), False), ((3, 4), True)],
    ),
)
def test_normalised_dense_layers(shape, right):
    w, gain, x = draw(34, (4, 5) if right else (5, 4), (5,), (ROWS, *shape))
    axis = 0 if right else 1

    def loss(params, x):
        w, gain = params
        gain = jnp.expand_dims(gain, axis)
        kernel = gain * w / jnp.linalg.norm(w, axis=axis, keepdims=True)
        return curve(x @ kernel if right else kernel @ x.T)

    group = only_group(loss, (w, gain), x)
    assert isinstance(group, Standardised) and bool(group.grams()) == ON_CPU
    narrow = ["float32"] * (FULL or len(shape) > 1)
    check(loss, (w, gain), x, methods=True, dtypes=("float64", *narrow))


def test_a_normalised_layer_that_is_called_twice():
    w, x = draw(35, (4, 4), (ROWS, 4))

    def loss(w, x):
        kernel = w / jnp.linalg.norm(w, axis=0, keepdims=True)
        return curve(jnp.tanh(x @ kernel) @ kernel)

    group = only_group(loss, w, x)
    assert isinstance(group, Standardised) and len(group.uses) == 2
    check(loss, w, x, methods=True, dtypes=BOTH if FULL else ("float64",))


def low_rank(p, x):
    return curve(x @ (p["a"] @ p["b"]))


def sum_of_two(p, x):
    return curve(x @ (p["w"] + p["delta"]))


def tied(p, x):
    return curve(jnp.tanh(x @ p["w"]) @ p["w"].T)


def changed_low_rank(p, x):
    return curve(x @ by_columns(p["w"] + 0.5 * p["a"] @ p["b"]))


def by_columns(w):
    return w / jnp.linalg.norm(w, axis=0, keepdims=True)


@pytest.mark.parametrize("loss", [low_rank, sum_of_two, tied, changed_low_rank])
@pytest.mark.parametrize("shape", in_full([(4,), (3, 4)], (4,)))
def test_functions_of_parameters(loss, shape):
    w, delta, a, b, x = draw(36, (4, 5), (4, 5), (4, 2), (2, 5), (ROWS, *shape))
    check(loss, {"w": w, "delta": delta, "a": a, "b": b}, x, strategies=("bk_mixopt",))
