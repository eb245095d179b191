"""Colours against Pillow, colorsys, SciPy and torchvision's rules in float64.

The statistical tests reject at a false-alarm rate of 1e-6; their keys are fixed.
"""

import colorsys
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image, ImageEnhance
from scipy import ndimage, stats

from tanager.data import colour
from tanager.data.colour import ColourJitter


FALSE_ALARM = 1e-6


def picture(height=13, width=16):
    """Random pixels, and among them greys, black, white and pure colours."""
    random = np.random.default_rng(0)
    pixels = random.integers(0, 256, (height, width, 3), np.uint8)
    pixels[0] = random.integers(0, 256, (width, 1), np.uint8)
    pixels[1, :8] = 255 * np.array(list(itertools.product((0, 1), repeat=3)))
    return pixels


def changed(pixels, schedule=0, factors=(1.0, 1.0, 1.0), turn=0.0):
    """`colour.jitter` of an image [H, W, 3] on the 0..1 scale."""
    planes = jnp.moveaxis(jnp.asarray(pixels, jnp.float32), 2, 0)
    factors, turn = jnp.asarray(factors, jnp.float32), jnp.float32(turn)
    planes = jax.jit(colour.jitter)(planes, jnp.int32(schedule), factors, turn)
    return np.moveaxis(np.asarray(planes), 0, 2)


### float64, one pixel or one image at a time


def luma(image):
    return image @ np.array([0.299, 0.587, 0.114])


def turned(image, turn):
    def one(pixel):
        hue, saturation, value = colorsys.rgb_to_hsv(*pixel)
        return colorsys.hsv_to_rgb((hue + turn) % 1, saturation, value)

    return np.apply_along_axis(one, 2, image)


def blended(image, other, factor):
    return np.clip(factor * image + (1 - factor) * other, 0, 1)


def in_order(image, order, brightness, contrast, saturation, turn):
    image = np.asarray(image, np.float64)
    for change in order:
        if change == "brightness":
            image = blended(image, 0, brightness)
        elif change == "contrast":
            image = blended(image, luma(image).mean(), contrast)
        elif change == "saturation":
            image = blended(image, luma(image)[:, :, None], saturation)
        else:
            image = turned(image, turn)
    return image


CHANGES = ("brightness", "contrast", "saturation", "hue")
FACTORS = (1.7, 0.4, 1.5)


def test_all_orders_of_the_four_changes():
    image = picture() / 255
    expected = [
        in_order(image, order, *FACTORS, -0.17)
        for order in itertools.permutations(CHANGES)
    ]
    for one, two in itertools.combinations(expected, 2):
        assert np.max(np.abs(one - two)) > 1e-3
    for schedule, right in enumerate(expected):
        produced = changed(image, schedule, FACTORS, -0.17)
        np.testing.assert_allclose(produced, right, rtol=0, atol=5e-6)


@pytest.mark.parametrize("turn", [-0.5, -0.2, 0.0, 0.05, 1 / 6, 0.5])
def test_hue_is_colorsys(turn):
    image = picture() / 255
    produced = changed(image, turn=turn)
    np.testing.assert_allclose(produced, turned(image, turn), rtol=0, atol=5e-6)


@pytest.mark.parametrize("factor", [0.2, 0.7, 1.0, 1.8])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_one_change_alone_is_pillows(place, factor):
    """Pillow cuts fractions off and rounds its means, so a level or two may differ."""
    makers = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)
    image = picture()
    expected = np.asarray(makers[place](Image.fromarray(image)).enhance(factor))
    factors = [1.0, 1.0, 1.0]
    factors[place] = factor
    produced = 255 * changed(image / 255, factors=factors)
    assert np.max(np.abs(produced - expected)) < 1.6


def test_grey_is_pillows():
    image = picture()
    expected = np.asarray(Image.fromarray(image).convert("L"))
    produced = 255 * np.asarray(colour.grey(colour.planes(jnp.asarray(image))))[0]
    assert np.max(np.abs(produced - expected)) < 0.51


@pytest.mark.parametrize("size", [1, 3, 7])
@pytest.mark.parametrize("deviation", [0.6, 2.0])
def test_blur_is_scipys(size, deviation):
    image = picture() / 255
    steps = np.arange(size) - size // 2
    weights = np.exp(-(steps**2) / (2 * deviation**2))
    weights /= weights.sum()
    expected = image
    for axis in (0, 1):
        expected = ndimage.convolve1d(expected, weights, axis, mode="mirror")
    blur = jax.jit(colour.gaussian_blur, static_argnums=2)
    produced = blur(jnp.asarray(image, jnp.float32), jnp.float32(deviation), size)
    np.testing.assert_allclose(produced, expected, rtol=0, atol=1e-6)
    whole = blur(jnp.asarray(picture()), jnp.float32(deviation), size)
    assert whole.dtype == jnp.uint8
    assert np.max(np.abs(np.asarray(whole, float) - 255 * expected)) < 0.501


@pytest.mark.parametrize("dtype", [np.uint8, np.float32, jnp.bfloat16])
def test_planes_there_and_back(dtype):
    image = jnp.asarray(np.arange(256).reshape(16, 16, 1).repeat(3, 2), jnp.uint8)
    if dtype != np.uint8:
        image = (image.astype(jnp.float32) / 255).astype(dtype)
    planes = colour.planes(image)
    assert planes.shape == (3, 16, 16)
    assert planes.dtype == jnp.float32
    assert float(planes.max()) == 1
    back = colour.image_of(planes, image.dtype)
    assert back.dtype == dtype
    np.testing.assert_array_equal(back, image)


### Distributions


def many(call, count, seed=0):
    keys = jax.random.split(jax.random.key(seed), count)
    return np.asarray(jax.jit(jax.vmap(call))(keys))


@pytest.mark.statistical
def test_the_jitter_draws_what_torchvision_does(monkeypatch):
    """Orders and factors as `jitter` gets them."""
    monkeypatch.setattr(
        colour,
        "jitter",
        lambda planes, schedule, factors, turn: jnp.stack(
            [schedule.astype(jnp.float32), *factors, turn]
        )[None, None, :],
    )
    jitter = ColourJitter(0.8, 0.3, 1.5, 0.2)
    count = 24_000
    drawn = many(lambda key: jitter(key, jnp.zeros((3, 1, 5))), count)[:, 0, 0]
    orders = np.bincount(drawn[:, 0].astype(int), minlength=24)
    assert len(orders) == 24
    assert stats.chisquare(orders).pvalue > FALSE_ALARM
    bounds = ((0.2, 1.8), (0.7, 1.3), (0.0, 2.5), (-0.2, 0.2))
    for values, (low, high) in zip(drawn[:, 1:].T, bounds, strict=True):
        law = stats.uniform(low, high - low)
        assert stats.kstest(values, law.cdf).pvalue > FALSE_ALARM
    for one, two in itertools.combinations(drawn.T, 2):
        p = stats.pearsonr(one, two).pvalue
        assert p > FALSE_ALARM


@pytest.mark.statistical
@pytest.mark.parametrize(
    "probability", [0.3, *(pytest.param(p, marks=pytest.mark.full) for p in (0.0, 1.0))]
)
def test_a_change_comes_with_its_probability(probability):
    image = jnp.asarray(picture())
    planes = colour.planes(image)
    jitter = ColourJitter(0.8, 0.8, 0.8, 0.2, probability)
    calls = (
        (planes, jitter),
        (planes, lambda key, planes: colour.random_grey(key, planes, probability)),
        (
            image,
            lambda key, image: colour.random_blur(
                key, image, probability, (1.0, 2.0), 3
            ),
        ),
    )
    for one, call in calls:
        kept = many(
            lambda key, one=one, call=call: jnp.all(call(key, one) == one), 2000
        )
        happened = int(np.sum(~kept))
        assert stats.binomtest(happened, 2000, probability).pvalue > FALSE_ALARM


@pytest.mark.statistical
def test_the_deviation_of_the_blur_is_uniform():
    """A single bright pixel tells it: its neighbours' share is exp(−1/2σ²)."""
    point = jnp.zeros((9, 9, 1)).at[4, 4].set(1)
    blurred = many(
        lambda key: colour.random_blur(key, point, 1.0, (1.0, 2.0), 3), 5000
    )[..., 0]
    deviations = np.sqrt(-0.5 / np.log(blurred[:, 4, 5] / blurred[:, 4, 4]))
    law = stats.uniform(1, 1)
    assert stats.kstest(deviations, law.cdf).pvalue > FALSE_ALARM


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ((-0.1, 0.0, 0.0, 0.0), "brightness (=-0.1) must be finite and not negative"),
        ((0.0, 0.0, 0.0, 0.6), "hue (=0.6) must be at most 0.5, half a circle"),
        ((0.0, 0.0, 0.0, 0.0, 1.5), "probability (=1.5) must be at most 1"),
    ],
)
def test_bad_strengths_are_refused(fields, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        ColourJitter(*fields)
