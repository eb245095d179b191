import math
import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from tanager.models import layers


EPS32 = float(np.finfo(np.float32).eps)


def same_padding(size, kernel, stride):
    out = -(-size // stride)
    total = max((out - 1) * stride + kernel - size, 0)
    return total // 2, total - total // 2


def textbook_conv(image, weight, stride, padding):
    """Cross-correlation by loops over output pixels, in float64."""
    image, weight = np.asarray(image, float), np.asarray(weight, float)
    kernel = weight.shape[0]
    if padding == "SAME":
        padding = tuple(same_padding(n, kernel, stride) for n in image.shape[:2])
    elif padding == "VALID":
        padding = ((0, 0), (0, 0))
    elif padding == "SYMMETRIC":
        padding = ((kernel // 2, kernel // 2),) * 2
    image = np.pad(image, (*padding, (0, 0)))
    rows = (image.shape[0] - kernel) // stride + 1
    columns = (image.shape[1] - kernel) // stride + 1
    output = np.zeros((rows, columns, weight.shape[-1]))
    for row in range(rows):
        for column in range(columns):
            top, left = row * stride, column * stride
            patch = image[top : top + kernel, left : left + kernel]
            output[row, column] = np.einsum("hwi,hwio->o", patch, weight)
    return output


def textbook_standardise(weight, eps, gain: Any = 1.0):
    """Unlocking, appendix C.1, one output unit at a time, in float64."""
    output = np.empty(weight.shape)
    for unit in range(weight.shape[-1]):
        column = np.float64(weight[..., unit])
        spread = math.sqrt(column.var() + eps)
        gains = np.broadcast_to(np.float64(gain), weight.shape[-1:])
        output[..., unit] = (
            gains[unit] * (column - column.mean()) / (spread * math.sqrt(column.size))
        )
    return output


def textbook_group_norm(image, groups, scale, bias, eps):
    """Two passes over each group, in float64."""
    image = np.asarray(image, float)
    height, width, channels = image.shape
    grouped = image.reshape(height, width, groups, channels // groups)
    mean = grouped.mean((0, 1, 3), keepdims=True)
    variance = ((grouped - mean) ** 2).mean((0, 1, 3), keepdims=True)
    normal = ((grouped - mean) / np.sqrt(variance + eps)).reshape(image.shape)
    return normal * np.float64(scale) + np.float64(bias)


def _normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize(
    ("stride", "padding", "standardised"),
    [
        (1, "SAME", False),
        (2, "SAME", True),
        (1, "VALID", False),
        (2, "SYMMETRIC", True),
        (2, "SYMMETRIC", False),
        (2, ((0, 2), (1, 0)), False),
    ],
)
def test_convolution_is_the_textbook_one(stride, padding, standardised):
    make = layers.StandardisedConv if standardised else layers.Conv
    conv = make(
        2, 5, 3, stride=stride, padding=padding, bias=True, key=jax.random.key(0)
    )
    conv = eqx.tree_at(lambda c: c.bias, conv, jnp.asarray(_normal(1, 5)))
    image = _normal(2, 7, 6, 2)
    weight = np.asarray(conv.weight)
    if standardised:
        weight = textbook_standardise(weight, conv.form.eps)
    expected = textbook_conv(image, weight, stride, padding) + np.asarray(conv.bias)
    actual = eqx.filter_jit(conv)(image)
    assert actual.dtype == jnp.float32
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("standardised", [False, True])
def test_groups_are_convolutions_side_by_side(standardised):
    make = layers.StandardisedConv if standardised else layers.Conv
    conv = make(6, 4, 3, stride=2, groups=2, key=jax.random.key(0))
    assert conv.weight.shape == (3, 3, 3, 4)
    image, weight = _normal(2, 7, 6, 6), np.asarray(conv.weight)
    if isinstance(conv, layers.StandardisedConv):
        weight = textbook_standardise(weight, conv.form.eps)
    halves = [
        textbook_conv(
            image[..., 3 * n : 3 * n + 3], weight[..., 2 * n : 2 * n + 2], 2, "SAME"
        )
        for n in range(2)
    ]
    expected = np.concatenate(halves, axis=-1)
    actual = eqx.filter_jit(conv)(jnp.asarray(image))
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("eps", [1e-8, 0.3])
def test_standardise_follows_appendix_c1_with_eps_on_the_variance(eps):
    weight, gain = _normal(0, 3, 3, 4, 6) * 3 + 2, _normal(1, 6)
    for gains in (None, gain):
        expected = textbook_standardise(weight, eps, 1.0 if gains is None else gains)
        device_gain = None if gains is None else jnp.asarray(gains)
        actual = layers.standardise(jnp.asarray(weight), device_gain, eps=eps)
        np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=1e-6)


def test_standardise_gradient_is_the_formula_of_the_clipping_rule():
    """dW = a·[G − mean(G) − v·(vᵀG)/(n s²)], with eps large enough to matter."""
    eps = 0.2
    with jax.enable_x64(True):
        weight = np.float64(_normal(0, 3, 3, 2, 4))
        gain, upstream = np.float64(_normal(1, 4)), np.float64(_normal(2, 3, 3, 2, 4))
        _, pull = jax.vjp(
            lambda w: layers.standardise(w, jnp.asarray(gain), eps=eps),
            jnp.asarray(weight),
        )
        (actual,) = pull(jnp.asarray(upstream))
    flat, g = weight.reshape(-1, 4), upstream.reshape(-1, 4)
    n = len(flat)
    v = flat - flat.mean(0)
    s2 = (v**2).mean(0) + eps
    expected = gain / np.sqrt(n * s2) * (g - g.mean(0) - v * (v * g).sum(0) / (n * s2))
    np.testing.assert_allclose(actual, expected.reshape(weight.shape), rtol=1e-12)


def test_gain_and_bias_are_there_only_on_request():
    bare = layers.StandardisedConv(3, 4, 3, key=jax.random.key(0))
    full = layers.StandardisedConv(3, 4, 3, gain=True, bias=True, key=jax.random.key(0))
    assert bare.gain is None and bare.bias is None
    np.testing.assert_array_equal(full.gain, np.ones(4))
    np.testing.assert_array_equal(full.bias, np.zeros(4))
    doubled = eqx.tree_at(lambda c: c.gain, full, jnp.full(4, 2.0))
    image, run = _normal(0, 5, 5, 3), eqx.filter_jit(lambda conv, image: conv(image))
    once = np.asarray(run(full, image))
    np.testing.assert_allclose(run(doubled, image), 2 * once, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(run(bare, image), once)


@pytest.mark.parametrize(("mean", "groups"), [(0.0, 1), (1e3, 4), (-1e3, 8)])
def test_group_norm_is_the_textbook_form_even_at_large_means(mean, groups):
    norm = layers.GroupNorm(8, groups)
    scale, bias = _normal(1, 8), _normal(2, 8)
    norm = eqx.tree_at(
        lambda n: (n.scale, n.bias), norm, (jnp.asarray(scale), jnp.asarray(bias))
    )
    image = _normal(0, 6, 5, 8) + np.float32(mean)
    expected = textbook_group_norm(image, groups, scale, bias, norm.eps)
    # One float32 rounding of a product as large as mean·scale/σ is allowed, thrice.
    tolerance = 3 * EPS32 * max(abs(mean) * 2.5, 4.0)
    actual = eqx.filter_jit(norm)(image)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance)


def test_group_norm_bears_an_image_whose_first_row_is_far_from_the_rest():
    image = _normal(0, 32, 32, 8)
    image[0] += 1e4
    norm = layers.GroupNorm(8, 4)
    expected = textbook_group_norm(image, 4, 1.0, 0.0, norm.eps)
    # The docstring's bound: cancellation loses at most the height, 32, in precision.
    tolerance = float(32 * EPS32 * np.abs(expected).max())
    actual = eqx.filter_jit(norm)(jnp.asarray(image))
    np.testing.assert_allclose(actual, expected, atol=tolerance)


@pytest.mark.parametrize("value", [0.0, 0.1, 1e4])
def test_group_norm_of_a_constant_image_is_its_bias(value):
    norm = layers.GroupNorm(4, 2)
    image = np.full((5, 3, 4), value, np.float32)
    rounding = abs(value) / math.sqrt(norm.eps) * EPS32

    @jax.jit
    def run(image):
        output, pull = jax.vjp(norm, image)
        return output, pull(jnp.zeros_like(output).at[0, 0].set(1))[0]

    output, gradient = run(image)
    np.testing.assert_allclose(output, 0.0, atol=4 * rounding + 1e-7)
    assert np.isfinite(gradient).all()


def test_group_norm_gradient_by_finite_differences():
    with jax.enable_x64(True):
        norm = jax.tree.map(lambda a: a.astype(jnp.float64), layers.GroupNorm(4, 2))
        image = np.float64(_normal(0, 3, 4, 4)) + 5.0
        mix = np.float64(_normal(1, 3, 4, 4))
        loss = jax.jit(jax.value_and_grad(lambda x: jnp.sum(norm(x) * mix)))
        gradient = np.asarray(loss(image)[1])
        step = 1e-6
        for place in [(0, 0, 0), (0, 3, 2), (1, 2, 3), (2, 3, 1)]:
            nudge = np.zeros_like(image)
            nudge[place] = step
            up, down = (loss(image + change)[0] for change in (nudge, -nudge))
            slope = (up - down) / (2 * step)
            np.testing.assert_allclose(gradient[place], slope, rtol=1e-6, atol=1e-8)


def test_norm_statistics_are_float32_for_bfloat16_and_float64_for_float64():
    norm = layers.GroupNorm(16, 4)
    image = jnp.asarray(_normal(0, 16, 16, 16) + 3, jnp.bfloat16)
    actual = eqx.filter_jit(norm)(image)
    assert actual.dtype == jnp.bfloat16
    exact = textbook_group_norm(np.asarray(image, np.float64), 4, 1.0, 0.0, norm.eps)
    # Only the final rounding to bfloat16 (8 significant bits) may show.
    np.testing.assert_allclose(
        np.asarray(actual, np.float64), exact, rtol=1.01 * 2**-8, atol=1e-5
    )
    with jax.enable_x64(True):
        wide = np.float64(_normal(0, 5, 5, 16)) + 1e6
        result = eqx.filter_jit(norm)(jnp.asarray(wide))
        assert result.dtype == jnp.float64
        expected = textbook_group_norm(wide, 4, 1.0, 0.0, norm.eps)
        np.testing.assert_allclose(result, expected, atol=1e-8)


def test_unit_variance_is_the_other_form_of_standardisation():
    form = layers.Standardisation(unit_variance=True)
    conv = layers.StandardisedConv(3, 4, 3, form=form, key=jax.random.key(0))
    image = _normal(0, 6, 5, 3)
    weight = textbook_standardise(conv.weight, conv.form.eps) * math.sqrt(27)
    np.testing.assert_allclose(np.var(weight, axis=(0, 1, 2)), 1.0, rtol=1e-5)
    expected = textbook_conv(image, weight, 1, "SAME")
    actual = eqx.filter_jit(conv)(jnp.asarray(image))
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)


def test_linear_is_an_affine_map():
    linear = layers.Linear(5, 3, key=jax.random.key(0))
    linear = eqx.tree_at(lambda m: m.bias, linear, jnp.asarray(_normal(1, 3)))
    vector = _normal(2, 5)
    expected = np.asarray(vector, float) @ np.asarray(linear.weight, float)
    expected = expected + np.asarray(linear.bias, float)
    np.testing.assert_allclose(linear(jnp.asarray(vector)), expected, rtol=1e-5)
    assert layers.Linear(5, 3, bias=False, key=jax.random.key(0)).bias is None


@pytest.mark.statistical
@pytest.mark.parametrize(
    ("make", "fan_in"),
    [
        (lambda key: layers.Conv(16, 64, 3, key=key), 144),
        (lambda key: layers.StandardisedConv(32, 64, 3, key=key), 288),
        (lambda key: layers.StandardisedConv(32, 64, 3, groups=2, key=key), 144),
        (lambda key: layers.Linear(100, 200, key=key), 100),
        (lambda key: layers.Linear(100, 200, deviation=0.5, key=key), 4),
    ],
)
def test_initial_weights_are_gaussian_of_variance_one_over_fan_in(make, fan_in):
    """Mean, variance and shape; false alarm 1e-6 each (fixed keys, so all or never)."""
    alarm = 1e-6
    weights = np.float64(make(jax.random.key(0)).weight).ravel() * math.sqrt(fan_in)
    n = weights.size
    limit = stats.norm.isf(alarm / 2)
    assert abs(weights.mean()) * math.sqrt(n) < limit
    low, high = stats.chi2.ppf([alarm / 2, 1 - alarm / 2], n)
    assert low < (weights**2).sum() < high
    assert stats.kstest(weights, "norm").pvalue > alarm
    # Not truncated: the chance that all n stay within 2.5 σ is far below the alarm.
    assert n * stats.norm.logcdf(2.5) < math.log(alarm)
    assert np.abs(weights).max() > 2.5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        *(
            ({name: 0}, f"{name} (=0) must be at least 1")
            for name in (
                "channels_in",
                "channels_out",
                "kernel_size",
                "stride",
                "groups",
            )
        ),
        ({"groups": 2}, "groups (=2) must divide the 3 channels in and 4 out: use 1"),
        ({"padding": "SYMETRIC"}, "did you mean SYMMETRIC?"),
        ({"channels_in": 1, "kernel_size": 1}, "a single weight minus its own mean"),
    ],
)
def test_convolutions_refuse_impossible_sizes(change, message):
    sizes = {"channels_in": 3, "channels_out": 4, "kernel_size": 3} | change
    with pytest.raises(ValueError, match=re.escape(message)):
        layers.StandardisedConv(**sizes, key=jax.random.key(0))


def test_groups_that_do_not_divide_the_channels_are_refused():
    message = "groups (=16) must divide the 24 channels: use 8, or change the width"
    with pytest.raises(ValueError, match=re.escape(message)):
        layers.GroupNorm(24, 16)


def test_gelu_is_x_times_the_normal_distribution_function():
    values = np.linspace(-12, 12, 4801)
    exact = values * stats.norm.cdf(values)
    run = jax.jit(jax.vmap(jax.value_and_grad(layers.gelu)))
    got, slope = run(np.float32(values))
    np.testing.assert_allclose(np.float64(got), exact, rtol=1e-6, atol=1e-6)
    wanted = stats.norm.cdf(values) + values * stats.norm.pdf(values)
    np.testing.assert_allclose(slope, wanted, rtol=1e-5, atol=1e-5)
