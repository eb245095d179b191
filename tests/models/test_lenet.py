import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_layers import textbook_conv

from tanager import models


def _wide(numbers):
    return np.asarray(numbers, np.float64)


def _textbook_forward(model, image):
    """The tutorials' layers one after the other, in float64."""
    pads = (((3, 3), (3, 3)), ((0, 0), (0, 0)))
    for conv, pad in zip(model.convs, pads, strict=True):
        image = textbook_conv(image, conv.weight, 2, pad) + _wide(conv.bias)
        image = np.tanh(image)
        below, rows = image[1:], image[:-1]
        parts = (rows[:, :-1], rows[:, 1:], below[:, :-1], below[:, 1:])
        image = np.max(parts, axis=0)
    hidden = image.reshape(-1) @ _wide(model.hidden.weight) + _wide(model.hidden.bias)
    return np.tanh(hidden) @ _wide(model.head.weight) + _wide(model.head.bias)


def _shaken(model, seed=1):
    """Move every parameter, so that biases of 0 cannot hide."""
    leaves, tree = jax.tree.flatten(model)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    return tree.unflatten(
        leaf + 0.1 * jax.random.normal(key, leaf.shape)
        for leaf, key in zip(leaves, keys, strict=True)
    )


@pytest.mark.parametrize("shape", [(28, 28, 1), (16, 21, 3)])
def test_logits_are_the_textbook_networks(shape):
    model = _shaken(models.LeNet(10, shape, key=jax.random.key(0)))
    pixels = np.random.default_rng(0).standard_normal(shape)
    expected = _textbook_forward(model, pixels)
    actual = eqx.filter_jit(model)(jnp.asarray(pixels, jnp.float32))
    assert np.abs(expected).max() > 0.1
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


def test_it_is_the_tutorials_network_on_mnist():
    """TensorFlow Privacy's and Opacus's: 26 010 parameters, 14, 13, 5, 4 pixels."""
    model = eqx.filter_eval_shape(models.LeNet, 10, (28, 28, 1), key=jax.random.key(0))
    assert models.count_parameters(model) == 26_010
    assert model.hidden.weight.shape == (32 * 4 * 4, 32)
    products = 14**2 * 16 * 64 + 5**2 * 32 * 16 * 16 + 512 * 32 + 32 * 10
    assert models.count_flops(model, (28, 28, 1)) == 2 * products


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((15, 28, 1), "image_height (=15) must be at least 16: enlarge the images"),
        ((28, 8, 1), "image_width (=8) must be at least 16"),
    ],
)
def test_images_that_would_vanish_are_refused(shape, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        models.create("lenet", classes=10, image_shape=shape, key=jax.random.key(0))
