"""Scattering features against Kymatio's, and the networks on them."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from references import parity
from references.make_scattering import SHAPES, draw
from references.parity import random

from tanager import models
from tanager.models import scattering
from tanager.models.model import StagedModel


REFERENCES = parity.read("scattering")
KEY = jax.random.key(0)


@pytest.mark.parametrize(("shape", "step"), [(SHAPES[0], 1), (SHAPES[1], 3)])
def test_features_are_those_of_kymatio(shape, step):
    """Kymatio computes in complex64 and takes π for 3.1415: 5e-5 apart at most."""
    expected = np.array(REFERENCES["x".join(map(str, shape))])
    found = jax.jit(scattering.scatter)(jnp.asarray(draw(shape)))
    assert found.shape == (shape[0] // 4, shape[1] // 4, 81 * shape[2])
    assert expected.std() > 0.05
    np.testing.assert_allclose(found[::step, ::step], expected, rtol=1e-4, atol=5e-5)


def test_features_of_random_images_have_the_moments_that_are_divided_out():
    """Within what directions differ by; another angle differs by a deviation."""
    side, draws = 64, np.random.default_rng(0)
    rows = np.fft.fftfreq(side)
    frequency = np.hypot(rows[:, None], rows)
    frequency[0, 0] = 1 / side
    white = np.fft.fft2(draws.standard_normal((200, side, side)))
    images = np.real(np.fft.ifft2(white / frequency))[:, :32, :32, None]
    images = np.float32(images / images.std())
    found = np.asarray(jax.jit(jax.vmap(scattering.scatter))(images), np.float64)
    means, deviations = scattering._RANDOM
    apart = np.abs(found.mean((0, 1, 2)) - means)
    assert (apart < 0.5 * deviations).all()
    np.testing.assert_allclose(found.std((0, 1, 2)), deviations, rtol=0.35)


def test_normalised_features_of_a_channel_have_mean_0_and_variance_1():
    image = 3 + draw((12, 9, 2))
    run = jax.jit(lambda image: scattering.normalise(scattering.scatter(image)))
    features = np.float64(run(jnp.asarray(image)))
    groups = features.reshape(3 * 2, 2, 81)
    np.testing.assert_allclose(groups.mean((0, 2)), 0, atol=1e-5)
    np.testing.assert_allclose(groups.var((0, 2)), 1, rtol=1e-3)


@pytest.mark.parametrize("name", ["scattering-linear", "scattering-cnn"])
def test_a_network_is_its_layers_on_the_transform(name):
    shape = (9, 17, 2)
    model = random(lambda: models.create(name, classes=3, image_shape=shape, key=KEY))
    assert isinstance(model, StagedModel)

    @eqx.filter_jit
    def run(model, image):
        values = scattering.normalise(scattering.scatter(image))
        return model.front(image), values, model.head(model.back(values)), model(image)

    front, values, logits, whole = run(model, jnp.asarray(draw(shape)))
    np.testing.assert_array_equal(front, values)
    np.testing.assert_allclose(whole, logits, rtol=1e-5, atol=1e-5)
    narrow = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    assert eqx.filter_eval_shape(model.front, narrow).dtype == jnp.bfloat16


@pytest.mark.parametrize("shape", [(7, 8, 3), (8, 7, 3)])
def test_an_image_too_small_is_refused(shape):
    with pytest.raises(ValueError, match=r"must be at least 8.*enlarge the images"):
        models.create("scattering-cnn", classes=2, image_shape=shape, key=KEY)
