"""The small networks, against what their docstrings say and against NumPy."""

import re

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from references import parity
from references.parity import random
from test_layers import textbook_conv

from tanager import models
from tanager.models.small import MLP


KEY = jax.random.key(0)


def _textbook_lenet(model, image):
    """The tutorials' layers one after the other, in float64."""
    for conv, padding in zip(model.convs, (((3, 3), (3, 3)), "VALID"), strict=True):
        image = np.tanh(textbook_conv(image, conv.weight, 2, padding) + conv.bias)
        below, rows = image[1:], image[:-1]
        parts = (rows[:, :-1], rows[:, 1:], below[:, :-1], below[:, 1:])
        image = np.max(parts, axis=0)
    hidden = image.reshape(-1) @ model.hidden.weight + model.hidden.bias
    return np.tanh(hidden) @ model.head.weight + model.head.bias


def test_lenets_logits_are_the_textbook_networks():
    model = random(lambda: models.LeNet(10, (16, 21, 3), key=KEY))
    pixels = np.random.default_rng(0).standard_normal((16, 21, 3))
    expected = _textbook_lenet(jax.tree.map(np.float64, model), pixels)
    actual = eqx.filter_jit(model)(jnp.asarray(pixels, jnp.float32))
    assert np.abs(expected).max() > 0.1
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


def test_lenet_is_the_tutorials_network_on_mnist():
    """TensorFlow Privacy's and Opacus's: 26 010 parameters, 14, 13, 5, 4 pixels."""
    model = parity.named("lenet", (28, 28, 1))
    assert models.count_parameters(model) == 26_010
    assert model.hidden.weight.shape == (32 * 4 * 4, 32)
    products = 14**2 * 16 * 64 + 5**2 * 32 * 16 * 16 + 512 * 32 + 32 * 10
    assert models.count_flops(model, (28, 28, 1)) == 2 * products


@pytest.mark.parametrize("shape", [(28, 28, 1), (17, 23, 3)])
def test_the_other_lenet_is_jax_privacys_in_haiku(shape):
    def network(image):
        layers = [
            hk.Conv2D(16, 8, stride=2, padding="SAME" if shape[0] == 28 else [(3, 3)]),
            hk.Conv2D(32, 4, stride=2, padding="VALID"),
        ]
        for layer in layers:
            image = hk.max_pool(jax.nn.relu(layer(image)), (2, 2, 1), (2, 2, 1), "SAME")
        image = jax.nn.relu(hk.Linear(32)(image.reshape(-1)))
        return hk.Linear(10)(image)

    model = random(
        lambda: models.create(
            "lenet",
            classes=10,
            image_shape=shape,
            implementation="jax-privacy",
            key=KEY,
        )
    )
    names = ("conv2_d", "conv2_d_1", "linear", "linear_1")
    layers = (*model.convs, model.hidden, model.head)
    weights = {
        name: {"w": jnp.asarray(layer.weight), "b": jnp.asarray(layer.bias)}
        for name, layer in zip(names, layers, strict=True)
    }
    pixels = jnp.asarray(np.random.default_rng(0).standard_normal(shape), jnp.float32)
    expected = hk.without_apply_rng(hk.transform(network)).apply(weights, pixels)
    assert np.abs(expected).max() > 0.1
    actual = eqx.filter_jit(model)(pixels)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)
    if shape == (28, 28, 1):
        assert models.count_parameters(model) == 10_650


def test_an_mlps_logits_are_the_matrix_products_written_out():
    model = MLP(3, (2, 3, 2), hidden=(7, 4), key=KEY)
    image = np.random.default_rng(0).standard_normal((2, 3, 2))
    values = image.reshape(-1)
    for linear in model.hidden:
        values = np.maximum(values @ np.float64(linear.weight), 0)
    expected = values @ np.float64(model.head.weight)
    assert len(model.hidden) == 2
    np.testing.assert_allclose(
        model(jnp.asarray(image, jnp.float32)), expected, rtol=1e-5, atol=1e-6
    )


def test_the_named_mlps_have_the_stated_sizes():
    hidden = 784 * 1024 + 1024 + 1024 * 1024 + 1024
    for name, shape, classes, count in (
        ("mlp", (28, 28, 1), 10, hidden + 1024 * 10 + 10),
        ("linear", (2048,), 1000, 2048 * 1000 + 1000),
    ):
        assert models.count_parameters(parity.named(name, shape, classes)) == count


def test_feature_vectors_are_taken_and_other_inputs_refused():
    model = MLP(3, (5,), hidden=(), key=KEY)
    assert model(jnp.ones(5, jnp.float32)).shape == (3,)
    message = r"must be floating point of shape \(5,\): a model takes ONE example"
    for wrong in (jnp.ones((2, 5), jnp.float32), jnp.ones(5, jnp.int32)):
        with pytest.raises(ValueError, match=message):
            model(wrong)
    with pytest.raises(ValueError, match=re.escape("image_size (=0) must be at least")):
        MLP(3, (5, 0), key=KEY)


def test_the_small_cnn_has_the_stated_layers():
    for shape, stages, side in (
        ((8, 8, 1), 2, 4),
        ((28, 28, 1), 3, 7),
        ((32, 32, 3), 3, 8),
    ):
        model = parity.named("small-cnn", shape)
        features = 32 * side * side
        weights = 9 * 32 * (shape[2] + 32 * (stages - 1)) + 64 * stages
        assert (len(model.stages), model.head.weight.shape[0]) == (stages, features)
        assert models.count_parameters(model) == weights + features * 10 + 10


def test_the_small_cnn_normalises_in_the_order_asked_for():
    """After the last ReLU features are never negative; after the last norm, some."""
    image = np.random.default_rng(0).standard_normal((8, 8, 1))
    for order, negative in [("pre-activation", False), ("post-activation", True)]:
        model = models.SmallCNN(7, (8, 8, 1), normalisation_order=order, key=KEY)
        features = eqx.filter_jit(model.features)(jnp.asarray(image, jnp.float32))
        assert bool((features < 0).any()) == negative


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((15, 28, 1), "image_height (=15) must be at least 16: enlarge the images"),
        ((28, 8, 1), "image_width (=8) must be at least 16"),
    ],
)
def test_images_that_would_vanish_in_lenet_are_refused(shape, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        parity.named("lenet", shape)
