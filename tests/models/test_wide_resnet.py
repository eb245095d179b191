import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_layers import textbook_conv, textbook_group_norm, textbook_standardise

from tanager import models
from tanager.models import wide_resnet
from tanager.models.wide_resnet import Convolutions


def _images(*shape):
    pixels = np.random.default_rng(0).standard_normal(shape)
    return jnp.asarray(pixels.astype(np.float32))


def _shaken(model, seed=1):
    """Move every parameter, so that scales of 1 and biases of 0 cannot hide."""
    leaves, tree = jax.tree.flatten(model)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    return tree.unflatten(
        leaf + 0.3 * jax.random.normal(key, leaf.shape)
        for leaf, key in zip(leaves, keys, strict=True)
    )


def _tiny(seed=0, **options):
    return models.WideResNet(10, 1, 5, 3, key=jax.random.key(seed), **options)


def _expected_count(depth, width, classes, channels_in, *, per_output, norms):
    """Zagoruyko and Komodakis, table 1, with two numbers per normalised channel.

    Convolutions have `per_output` numbers for each output besides their weights, and a
    convolved skip path has `norms` norms of its own.
    """

    def conv(kernel, channels, out):
        return kernel * kernel * channels * out + per_output * out

    n = (depth - 4) // 6
    count, channels = conv(3, channels_in, 16), 16
    for out in (16 * width, 32 * width, 64 * width):
        for _ in range(n):
            count += 2 * channels + conv(3, channels, out) + 2 * out + conv(3, out, out)
            if channels != out:
                count += conv(1, channels, out) + 2 * norms * channels
            channels = out
    return count + 2 * channels + channels * classes + classes


@pytest.mark.parametrize(
    ("name", "per_output", "norms"),
    [("zagoruyko", 0, 0), ("tan", 1, 1), ("unlocking", 2, 1)],
)
@pytest.mark.parametrize(
    ("depth", "width", "millions"), [(16, 4, 2.7), (40, 4, 8.9), (28, 10, 36.5)]
)
def test_parameter_counts_of_the_published_networks(
    depth, width, millions, name, per_output, norms
):
    options = wide_resnet.IMPLEMENTATIONS[name]
    model = eqx.filter_eval_shape(
        models.WideResNet, depth, width, 10, 3, key=jax.random.key(0), **options
    )
    count = models.count_parameters(model)
    assert count == _expected_count(
        depth, width, 10, 3, per_output=per_output, norms=norms
    )
    if name == "zagoruyko":  # as printed in the paper's table 4
        assert abs(count / 1e6 - millions) <= 0.05


@pytest.mark.parametrize(
    ("name", "count"), [("unlocking", 2_753_818), ("tan", 2_751_562)]
)
def test_parameter_counts_of_the_released_code(name, count):
    """Counted in the modules of jax_privacy and of facebookresearch/tan themselves."""
    options = wide_resnet.IMPLEMENTATIONS[name]
    model = eqx.filter_eval_shape(
        models.WideResNet, 16, 4, 10, key=jax.random.key(0), **options
    )
    assert models.count_parameters(model) == count


def _textbook_forward(model, image, order, symmetric):
    def conv(layer, image):
        weight = np.float64(layer.weight)
        if isinstance(layer, models.StandardisedConv):
            gain = 1.0 if layer.gain is None else layer.gain
            weight = textbook_standardise(weight, layer.form.eps, gain)
        side = (layer.weight.shape[0] // 2,) * 2
        padding = (side, side) if symmetric else "SAME"
        output = textbook_conv(image, weight, layer.stride, padding)
        return output if layer.bias is None else output + np.float64(layer.bias)

    def normalise(layer, image):
        def norm(image):
            return textbook_group_norm(image, 16, layer.scale, layer.bias, 1e-5)

        if order == "pre-activation":
            return np.maximum(norm(image), 0)
        return norm(np.maximum(image, 0))

    image = conv(model.stem, image)
    for block in model.blocks:
        hidden = normalise(block.norm1, image)
        skip = image
        if block.shortcut is not None:
            norm = block.shortcut_norm or block.norm1
            skip = conv(block.shortcut, normalise(norm, image))
        hidden = conv(block.conv1, hidden)
        image = skip + conv(block.conv2, normalise(block.norm2, hidden))
    features = normalise(model.norm, image).mean((0, 1))
    return features @ np.float64(model.head.weight) + np.float64(model.head.bias)


OPTIONS = {
    **wide_resnet.IMPLEMENTATIONS,
    "pre-activation": {"normalisation_order": "pre-activation"},
    "standardised alone": {"convolutions": Convolutions(False, False, "SYMMETRIC")},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_logits_are_the_textbook_networks(name):
    options = OPTIONS[name]
    model = _shaken(_tiny(**options))
    image = _images(8, 12, 3)
    order = options.get("normalisation_order", "post-activation")
    symmetric = options.get("convolutions", Convolutions()).padding == "SYMMETRIC"
    expected = _textbook_forward(model, np.float64(image), order, symmetric)
    actual = eqx.filter_jit(model)(image)
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)


def test_stages_have_the_published_widths_strides_and_shortcuts():
    model = eqx.filter_eval_shape(
        models.WideResNet, 22, 2, 10, 3, key=jax.random.key(0)
    )
    widths = [block.conv2.weight.shape[-1] for block in model.blocks]
    strides = [block.conv1.stride for block in model.blocks]
    shortcuts = [block.shortcut is not None for block in model.blocks]
    assert widths == [32] * 3 + [64] * 3 + [128] * 3
    assert strides == [1, 1, 1, 2, 1, 1, 2, 1, 1]
    assert shortcuts == [True, False, False] * 3
    tiny = _tiny()  # width 1: the first stage changes nothing
    assert [block.shortcut is not None for block in tiny.blocks] == [False, True, True]


def _primitives(jaxpr):
    """Yield the primitives of a jaxpr in order, but those that standardise weights."""
    for equation in jaxpr.eqns:
        if equation.params.get("name") == "_tanager_standardise":
            continue
        inner = [
            getattr(value, "jaxpr", value)
            for value in equation.params.values()
            if hasattr(getattr(value, "jaxpr", value), "eqns")
        ]
        if inner:
            for part in inner:
                yield from _primitives(part)
        else:
            yield equation.primitive.name, equation


def _layer_sequence(model, image):
    """The order of convolutions, norms and ReLUs that touch [H, W, C] arrays."""
    sequence = []
    for name, equation in _primitives(jax.make_jaxpr(model)(image).jaxpr):
        rank = len(equation.outvars[0].aval.shape)
        if name == "conv_general_dilated":
            sequence.append("conv")
        elif name == "max" and rank == 3:
            sequence.append("relu")
        elif name == "rsqrt" and rank == 1:
            sequence.append("norm")
    return sequence


@pytest.mark.parametrize(
    ("order", "pair"),
    [("pre-activation", ["norm", "relu"]), ("post-activation", ["relu", "norm"])],
)
def test_the_order_of_layers_is_the_one_asked_for(order, pair):
    identity = [*pair, "conv", *pair, "conv"]
    for own, shortcut in ((True, [*pair, "conv"]), (False, ["conv"])):
        projection = [*pair, *shortcut, "conv", *pair, "conv"]
        expected = ["conv", *identity, *projection, *projection, *pair]
        model = _tiny(normalisation_order=order, shortcut_norm=own)
        assert _layer_sequence(model, _images(8, 8, 3)) == expected


def test_gradients_by_finite_differences():
    """Every leaf of a WRN-10-1, along a random direction, in float64."""
    narrow, narrow_image = _shaken(_tiny()), _images(8, 8, 3)
    with jax.enable_x64(True):
        model = jax.tree.map(lambda a: a.astype(jnp.float64), narrow)
        image = narrow_image.astype(jnp.float64)

        @jax.jit
        def loss(model):
            return jax.nn.logsumexp(model(image)) - model(image)[2]

        leaves, tree = jax.tree.flatten(model)
        gradient = jax.tree.leaves(jax.jit(jax.grad(loss))(model))
        rng = np.random.default_rng(3)
        step = 1e-7
        for index, leaf in enumerate(leaves):
            direction = jnp.asarray(rng.standard_normal(leaf.shape))

            def at(t, index=index, direction=direction):
                moved = [*leaves]
                moved[index] = moved[index] + t * direction
                return loss(tree.unflatten(moved))

            slope = float(at(step) - at(-step)) / (2 * step)
            expected = float(jnp.vdot(gradient[index], direction))
            np.testing.assert_allclose(slope, expected, rtol=1e-5, atol=1e-7)


def test_vmap_is_one_batched_convolution_per_layer():
    model, images = _tiny(), _images(4, 8, 8, 3)
    layers = sum(leaf.ndim == 4 for leaf in jax.tree.leaves(model))
    assert layers == 9  # stem, 2 in each of 3 blocks, 2 shortcuts

    traced = [
        equation
        for name, equation in _primitives(jax.make_jaxpr(jax.vmap(model))(images).jaxpr)
        if name == "conv_general_dilated"
    ]
    assert len(traced) == layers
    for equation in traced:
        assert equation.invars[0].aval.shape[0] == 4
        assert equation.params["feature_group_count"] == 1
        assert equation.params["batch_group_count"] == 1

    run = jax.jit(lambda model, images: jax.vmap(model)(images))
    compiled = run.lower(model, images).compile().as_text()
    assert compiled is not None
    convolutions = re.findall(
        r"= f32\[([\d,]+)\]\S* (?:convolution|custom-call)\(.*"
        r"op_name=\"[^\"]*conv_general_dilated\"",
        compiled,
    )
    assert len(convolutions) == layers
    assert all("4" in shape.split(",") for shape in convolutions)
    assert "_group_count" not in compiled  # no grouped convolution


def test_vmap_equals_one_image_at_a_time():
    model, images = _shaken(_tiny()), _images(3, 8, 8, 3)
    single = eqx.filter_jit(model)
    expected = np.stack([single(image) for image in images])
    actual = eqx.filter_jit(eqx.filter_vmap(model))(images)
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"depth": 17}, "depth (=17) must be 6n + 4: the nearest are 16, 22"),
        ({"depth": 4}, "depth (=4) must be at least 10: the smallest is 10 = 6·1 + 4"),
        ({"width": 0}, "width (=0) must be at least 1"),
        ({"classes": 0}, "classes (=0) must be at least 1"),
        ({"groups": 3}, "groups (=3) must divide the 16 channels"),
        ({"groups": 32}, "groups (=32) must divide the 16 channels: use 16"),
        (
            {"convolutions": Convolutions(padding="VALID")},
            "padding (='VALID') must be one of SAME, SYMMETRIC",
        ),
        (
            {"normalisation_order": "pre-activaton"},
            "did you mean pre-activation?",
        ),
    ],
)
def test_impossible_networks_are_refused(change, message):
    options = {"depth": 10, "width": 1, "classes": 5} | change
    with pytest.raises(ValueError, match=re.escape(message)):
        models.WideResNet(**options, key=jax.random.key(0))
