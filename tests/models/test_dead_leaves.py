"""Features by patches of dead leaves: what they compute, and the file they are from."""

import importlib.util
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from references.parity import random

from tanager import models
from tanager.models import dead_leaves


ROOT = Path(__file__).parents[2]
KEY = jax.random.key(0)


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location(
        "drawing", ROOT / "tools/dead_leaves.py"
    )
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def slow(image, filters):
    """Return the averages patch by patch, in float64."""
    image = np.broadcast_to(np.float64(image), (*image.shape[:2], 3))
    side = dead_leaves.SIDE
    high, wide = (n - side + 1 for n in image.shape[:2])
    answers = np.empty((high, wide, filters.shape[-1]))
    for row in range(high):
        for column in range(wide):
            patch = image[row : row + side, column : column + side]
            patch = patch - patch.mean()
            patch = patch / np.sqrt(patch.var() + dead_leaves.FLOOR)
            answers[row, column] = np.einsum("abc,abck->k", patch, filters)
    both = np.concatenate([answers, -answers], axis=-1)
    passed = np.maximum(both - dead_leaves.THRESHOLD, 0)
    tops = slice(0, -(-high // 2)), slice(high // 2, None)
    lefts = slice(0, -(-wide // 2)), slice(wide // 2, None)
    return np.stack([passed[t, c].mean((0, 1)) for t in tops for c in lefts])


@pytest.mark.parametrize("shape", [(9, 12, 3), (8, 8, 1)])
@pytest.mark.parametrize("count", [7, 2 * dead_leaves._AT_ONCE])
def test_averages_are_those_of_every_patch(shape, count):
    rng = np.random.default_rng(0)
    image = 3 + rng.standard_normal(shape).astype(np.float32)
    filters = rng.standard_normal((6, 6, 3, count)).astype(np.float32) / 5
    filters -= filters.mean((0, 1, 2))
    expected = slow(image, filters)
    assert (expected > 0.01).mean() > 0.5
    found = jax.jit(dead_leaves.pooled)(jnp.asarray(image), filters)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_features_are_standardised_scaled_and_whitened():
    model = random(
        lambda: models.create(
            "dead-leaves-linear", classes=3, image_shape=(8, 9, 3), key=KEY
        )
    )
    image = np.random.default_rng(1).random((8, 9, 3)).astype(np.float32)
    by = dead_leaves.constants()
    values = (slow(image, np.float64(by.filters)) - by.mean) / by.deviation
    expected = values / np.linalg.norm(values) @ np.float64(by.whitening)
    found = jax.jit(lambda image: model.features(image))(image)
    np.testing.assert_allclose(found, expected.ravel(), rtol=1e-3, atol=1e-3)
    assert expected.std() > 0.3
    assert isinstance(model, models.DeadLeavesLinear)
    narrow = jax.ShapeDtypeStruct(image.shape, jnp.bfloat16)
    assert jax.eval_shape(model.front, narrow).dtype == jnp.bfloat16


def test_filters_do_not_see_brightness_and_the_file_is_small():
    by = dead_leaves.constants()
    assert dead_leaves.FILE.stat().st_size <= 5e6
    assert np.abs(by.filters.mean((0, 1, 2))).max() < 1e-2 * by.filters.std()
    assert all(np.isfinite(array).all() for array in by)


@pytest.mark.slow
@pytest.mark.statistical
def test_features_of_other_dead_leaves_are_white(script):
    """Largest components of 150 images of another seed: deviations of about 1.

    Of a Gaussian component the mean square of 600 quarters would be within 0.22 of its
    mean with probability 0.9998; these have longer tails.
    """
    images = (
        script.draw(150, np.random.default_rng(1)) - script.MEAN
    ) / script.DEVIATION
    by = dead_leaves.constants()

    def front(image):
        both = [dead_leaves.pooled(one, by.filters) for one in (image, image[:, ::-1])]
        return dead_leaves.whitened((both[0] + both[1]) / 2, by)

    found = jax.jit(jax.vmap(front))(images)
    found = np.float64(found).reshape(-1, found.shape[-1])
    squares = (found[:, :20] ** 2).mean(0)
    assert np.median(squares) == pytest.approx(0.95, abs=0.1)
    assert squares.min() > 0.6 and squares.max() < 1.5
    apart = np.corrcoef(found[:, :20].T) - np.eye(20)
    assert np.abs(apart).max() < 0.35


def test_the_script_draws_the_same_again(script, monkeypatch):
    monkeypatch.setattr(script, "PATCHES", 1000)
    first, second = (script.made(5, 3, 6, np.random.default_rng(7)) for _ in range(2))
    shapes = {name: array.shape for name, array in first.items()}
    assert shapes == {
        "filters": (6, 6, 3, 5),
        "mean": (10,),
        "deviation": (10,),
        "whitening": (10, 3),
    }
    for name, array in first.items():
        np.testing.assert_array_equal(array, second[name])


@pytest.mark.parametrize(
    ("shape", "match"),
    [
        ((7, 8, 3), r"image_height \(=7\) must be at least 8.*enlarge the images"),
        ((8, 8, 2), r"image_channels \(=2\)"),
    ],
)
def test_images_that_do_not_fit_are_refused(shape, match):
    with pytest.raises(ValueError, match=match):
        models.create("dead-leaves-linear", classes=2, image_shape=shape, key=KEY)
