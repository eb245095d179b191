import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from references.parity import random
from test_layers import textbook_conv, textbook_group_norm, textbook_standardise

from tanager import models
from tanager.models import wide_resnet


KEY = jax.random.key(0)
IMAGE = (8, 12, 3)


def _shapes(depth, width, **options):
    return eqx.filter_eval_shape(
        models.WideResNet, depth, width, 10, key=KEY, **options
    )


def _expected_count(depth, width, *, per_output):
    """Zagoruyko and Komodakis, table 1, with two numbers per normalised channel.

    Convolutions have `per_output` numbers for each output besides their weights, and a
    convolved skip path has a norm of its own.
    """

    def conv(kernel, channels, out):
        return kernel * kernel * channels * out + per_output * out

    count, channels = conv(3, 3, 16), 16
    for out in (16 * width, 32 * width, 64 * width):
        for _ in range((depth - 4) // 6):
            count += 2 * channels + conv(3, channels, out) + 2 * out + conv(3, out, out)
            if channels != out:
                count += conv(1, channels, out) + 2 * channels
            channels = out
    return count + 2 * channels + channels * 10 + 10


@pytest.mark.parametrize(
    ("name", "per_output", "released"),
    [("unlocking", 2, 2_753_818), ("tan", 1, 2_751_562)],
)
def test_parameter_counts_of_the_published_networks(name, per_output, released):
    """`released` of WRN-16-4: counted in jax_privacy's and facebookresearch/tan's."""
    options = wide_resnet.IMPLEMENTATIONS[name]
    for depth, width in ((16, 4), (28, 10)):
        count = models.count_parameters(_shapes(depth, width, **options))
        assert count == _expected_count(depth, width, per_output=per_output)
    assert models.count_parameters(_shapes(16, 4, **options)) == released


def _textbook_forward(model, image, order, symmetric):
    def conv(layer, image):
        weight = np.float64(layer.weight)
        if hasattr(layer, "gain"):  # standardised
            weight = textbook_standardise(weight, layer.form.eps, layer.gain)
        padding = "SYMMETRIC" if symmetric else "SAME"
        return textbook_conv(image, weight, layer.stride, padding) + layer.bias

    def normalise(layer, image):
        def norm(image):
            return textbook_group_norm(image, 16, layer.scale, layer.bias, 1e-5)

        if order == "none":
            return np.maximum(image, 0)
        if order == "pre-activation":
            return np.maximum(norm(image), 0)
        return norm(np.maximum(image, 0))

    image = conv(model.stem, image)
    for block in model.blocks:
        skip = image
        if block.shortcut is not None:
            skip = conv(block.shortcut, normalise(block.shortcut_norm, image))
        hidden = conv(block.conv1, normalise(block.norm1, image))
        image = skip + conv(block.conv2, normalise(block.norm2, hidden))
    features = normalise(model.norm, image).mean((0, 1))
    return features @ model.head.weight + model.head.bias


@pytest.mark.parametrize(
    "options",
    [
        *wide_resnet.IMPLEMENTATIONS.values(),
        {"normalisation_order": "pre-activation"},
        {"normalisation_order": "none"},
    ],
)
def test_logits_are_the_textbook_networks(options):
    model = random(lambda: models.WideResNet(10, 1, 5, key=KEY, **options))
    pixels = np.random.default_rng(0).standard_normal(IMAGE)
    expected = _textbook_forward(
        jax.tree.map(np.float64, model),
        pixels,
        options.get("normalisation_order", "post-activation"),
        options.get("padding") == "SYMMETRIC",
    )
    actual = eqx.filter_jit(model)(jnp.asarray(pixels, jnp.float32))
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)


def test_stages_have_the_published_widths_strides_and_shortcuts():
    model = _shapes(22, 2)
    widths = [block.conv2.weight.shape[-1] for block in model.blocks]
    strides = [block.conv1.stride for block in model.blocks]
    shortcuts = [block.shortcut is not None for block in model.blocks]
    assert widths == [32] * 3 + [64] * 3 + [128] * 3
    assert strides == [1, 1, 1, 2, 1, 1, 2, 1, 1]
    assert shortcuts == [True, False, False] * 3
    tiny = _shapes(10, 1)  # width 1: the first stage changes nothing
    assert [block.shortcut is not None for block in tiny.blocks] == [False, True, True]


def test_vmap_is_one_batched_convolution_per_layer():
    model = _shapes(10, 1)
    images = jax.ShapeDtypeStruct((4, *IMAGE), jnp.float32)
    arrays, rest = eqx.partition(model, lambda leaf: hasattr(leaf, "shape"))
    traced = jax.make_jaxpr(
        lambda arrays, images: jax.vmap(eqx.combine(arrays, rest))(images)
    )(arrays, images)
    found = [
        equation
        for equation in traced.jaxpr.eqns
        if equation.primitive.name == "conv_general_dilated"
    ]
    assert len(found) == 9  # stem, 2 in each of 3 blocks, 2 shortcuts
    for equation in found:
        assert equation.invars[0].aval.shape[0] == 4
        assert equation.params["feature_group_count"] == 1
        assert equation.params["batch_group_count"] == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"depth": 17}, "depth (=17) must be 6n + 4: the nearest are 16, 22"),
        ({"depth": 4}, "depth (=4) must be at least 10: the smallest is 10 = 6·1 + 4"),
        ({"width": 0}, "width (=0) must be at least 1"),
        ({"padding": "VALID"}, "padding (='VALID') must be one of SAME, SYMMETRIC"),
        ({"normalisation_order": "pre-activaton"}, "did you mean pre-activation?"),
    ],
)
def test_impossible_networks_are_refused(change, message):
    options = {"depth": 10, "width": 1, "classes": 5} | change
    with pytest.raises(ValueError, match=re.escape(message)):
        models.WideResNet(**options, key=KEY)
