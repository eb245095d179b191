"""NF-ResNets and NFNets: against timm, against the papers, and how they are clipped."""

import functools
import json
import re
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from references import draw, parity
from test_layers import same_padding, textbook_conv, textbook_standardise
from test_windows import textbook_pool

import by_hand
from cases import in_full
from tanager import clipped_grad, models
from tanager.models import nf_resnet, nfnet
from tanager.models.foreign.tables import FORMATS
from tanager.models.normaliser_free import Place, convolution


REFERENCE = json.loads((Path(draw.__file__).parent / "nf.json").read_text())
BUILDERS = {
    name: entry.builder
    for name, entry in models.ENTRIES.items()
    if name.startswith(("nf-resnet", "nfnet"))
}
SHAPE = (64, 64, 3)
KEY = jax.random.key(0)


def _image(height, width):
    return np.moveaxis(draw.image((3, height, width)), 0, -1)


def _run(model, image):
    """Call a float64 model."""
    arrays, rest = eqx.partition(model, eqx.is_array)
    call = jax.jit(lambda arrays, image: eqx.combine(arrays, rest)(image))
    with jax.enable_x64(True):
        return call(arrays, jnp.asarray(image, jnp.float64))


def _timm(module, build, **options):
    """Shapes of a model as timm computes it, and its table."""
    usual = {"classes": 10, "image_shape": SHAPE} | module.IMPLEMENTATIONS["timm"]
    model = eqx.filter_eval_shape(build, key=KEY, **usual | options)
    return model, FORMATS[type(model)]["timm"].names(model)


def _module(name):
    return nfnet if name.startswith("nfnet") else nf_resnet


BETWEEN = [f"nfnet-f{number}" for number in range(2, 6)]


@pytest.mark.parametrize("name", in_full(REFERENCE["structures"], *BETWEEN))
def test_every_tensor_has_its_place_in_timm(name):
    expected = REFERENCE["structures"][name]
    model, table = _timm(_module(name), BUILDERS[name], classes=1000)
    theirs = parity.shapes(model, table)
    assert draw.fingerprint(theirs) == expected["fingerprint"]
    assert models.count_parameters(model) == expected["parameters"]


def _tiny_nf_resnet(*, image_shape, **options):
    return nf_resnet.NFResNet((1, 2, 1, 1), channels_in=image_shape[2], **options)


@pytest.mark.parametrize(
    ("case", "build", "options"),
    [
        pytest.param(
            *("nf-resnet-50", BUILDERS["nf-resnet-50"], {}), marks=pytest.mark.full
        ),
        ("nf-resnet, skipinit", _tiny_nf_resnet, {"skip_gain": 1.0}),
        pytest.param(*("nfnet-f0", BUILDERS["nfnet-f0"], {}), marks=pytest.mark.full),
    ],
)
def test_logits_are_timms_from_the_same_weights(case, build, options):
    expected = REFERENCE["logits"][case]
    shapes, table = _timm(_module(case), build, **options)
    with jax.enable_x64(True):
        # In float64 before their layouts scale them.
        model = parity.fill(
            shapes,
            table,
            lambda name, shape: np.asarray(draw.tensor(name, shape), np.float64),
        )
        logits = _run(model, _image(*expected["image"]))
    assert logits.dtype == jnp.float64
    np.testing.assert_allclose(logits, expected["logits"], rtol=1e-9, atol=1e-11)
    narrow = jax.ShapeDtypeStruct((64, 64, 3), jnp.bfloat16)
    found = eqx.filter_eval_shape(lambda model, image: model(image), shapes, narrow)
    assert (found.shape, found.dtype) == ((10,), jnp.bfloat16)


def _conv(layer, image, padding="SAME"):
    """Group after group, in float64."""
    weight = textbook_standardise(layer.weight, layer.form.eps, layer.gain)
    parts = [
        textbook_conv(pixels, units, layer.stride, padding)
        for pixels, units in zip(
            np.split(image, layer.groups, axis=-1),
            np.split(weight, layer.groups, axis=-1),
            strict=True,
        )
    ]
    return np.concatenate(parts, axis=-1) + layer.bias


def _halve(image):
    edges = tuple((0, side % 2) for side in image.shape[:2])
    return textbook_pool(image, 2, 2, edges, np.mean)


# Of stages of 1, 2, 1 and 1 blocks: a stage's first block sees what the last stage
# left, 1 and α² = 0.04 for each of its blocks; then the variance starts at 1 again.
DEPTHS = (1, 2, 1, 1)
BETAS = 1 / np.sqrt([1, 1.04, 1.04, 1.08, 1.04])


def _nf_resnet(model, image, *, gamma, strided, padding):
    def activate(image):
        return gamma * np.maximum(image, 0)

    image = _conv(model.stem, image, padding)
    edges = ((1, 1), (1, 1))
    if padding == "SAME":
        edges = tuple(same_padding(side, 3, 2) for side in image.shape[:2])
    image = textbook_pool(image, 3, 2, edges, np.max)
    for number, (block, beta) in enumerate(zip(model.blocks, BETAS, strict=True)):
        active = activate(image) * beta
        if number != 2:  # the second of a stage
            halves = number > 0 and not strided
            image = _conv(block.shortcut, _halve(active) if halves else active)
        residual = _conv(block.conv1, active)
        residual = _conv(block.conv2, activate(residual), padding)
        residual = _conv(block.conv3, activate(residual))
        image = image + 0.2 * block.skip_gain * residual
    return activate(image).mean((0, 1)) @ model.head.weight + model.head.bias


@pytest.mark.parametrize(
    ("name", "gamma"), [("deepmind", 1.7139588594436646), ("tan", 1.0)]
)
def test_nf_resnets_of_the_papers_are_the_textbook_ones(name, gamma, monkeypatch):
    """Much narrower than the published ones."""
    monkeypatch.setattr(nf_resnet, "_WIDTHS", (8, 16, 16, 24))
    options = nf_resnet.IMPLEMENTATIONS[name]
    make = functools.partial(nf_resnet.NFResNet, DEPTHS, 5, key=KEY, **options)
    model = jax.tree.map(np.float64, parity.random(make))
    image = np.float64(_image(33, 40))
    ours = name == "deepmind"
    padding = "SAME" if ours else "SYMMETRIC"
    expected = _nf_resnet(model, image, gamma=gamma, strided=ours, padding=padding)
    np.testing.assert_allclose(_run(model, image), expected, rtol=1e-9)


def _nfnet(model, image):
    def activate(image):
        # GELU by tanh: Hendrycks and Gimpel 2016, section 2.
        tanh = np.tanh(np.sqrt(2 / np.pi) * (image + 0.044715 * image**3))
        return 1.7015043497085571 * 0.5 * image * (1 + tanh)

    image = _conv(model.stem[0], image)
    for conv in model.stem[1:]:
        image = _conv(conv, activate(image))
    for number, (block, beta) in enumerate(zip(model.blocks, BETAS, strict=True)):
        residual = active = activate(image) * beta
        if number != 2:  # the second of a stage
            image = _conv(block.shortcut, active if number == 0 else _halve(active))
        for conv in (block.conv1, block.conv2, block.conv2b, block.conv3):
            residual = _conv(conv, active)
            active = activate(residual)
        squeeze, expand = block.attention.squeeze, block.attention.expand
        hidden = np.maximum(residual.mean((0, 1)) @ squeeze.weight + squeeze.bias, 0)
        factors = 2 / (1 + np.exp(-(hidden @ expand.weight + expand.bias)))
        image = image + 0.2 * block.skip_gain * factors * residual
    features = activate(_conv(model.last, image)).mean((0, 1))
    return features @ model.head.weight + model.head.bias


def test_an_nfnet_is_the_textbook_one(monkeypatch):
    """Of 1, 2 or 3 groups, and much narrower than the published ones."""
    monkeypatch.setattr(nfnet, "_GROUP_CHANNELS", 4)
    monkeypatch.setattr(nfnet, "_WIDTHS", (8, 16, 16, 24))
    make = functools.partial(nfnet.NFNet, DEPTHS, 5, key=KEY)
    model = jax.tree.map(np.float64, parity.random(make))
    assert [block.conv2.groups for block in model.blocks] == [1, 2, 2, 2, 3]
    image = np.float64(_image(33, 40))
    expected = _nfnet(model, image)
    np.testing.assert_allclose(_run(model, image), expected, rtol=1e-9)


BLOCKS = {
    "nf-resnet": lambda: nf_resnet.Block(
        Place(6, 16, 2, 0.9),
        convolution(1e-8),
        skip_gain=1.0,
        shortcut="strided",
        gamma=1.7,
        key=KEY,
    ),
    "nfnet": lambda: nfnet.Block(  # 2 groups of 128 channels
        Place(4, 512, 2, 0.9),
        convolution(1e-8),
        skip_gain=1.0,
        approximate_gelu=True,
        key=KEY,
    ),
}


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        ("nf-resnet", "bk"),
        pytest.param("nf-resnet", "bk_mixopt", marks=pytest.mark.full),
        pytest.param("nfnet", "bk", marks=pytest.mark.full),
        pytest.param("nfnet", "bk_mixopt", marks=pytest.mark.full),
    ],
)
def test_a_blocks_clipped_gradients_are_those_of_vmap(name, strategy):
    model = jax.tree.map(jnp.asarray, parity.random(BLOCKS[name]))
    channels = model.conv1.weight.shape[2]
    images = np.random.default_rng(2).standard_normal((3, 5, 6, channels))
    batch = np.float32(images), np.array([0.01, 1.0, 1.0], np.float32)

    def loss(model, example):
        image, size = example
        return jnp.sum(jnp.sin(model(image))) * size

    right, norms = by_hand.clipped(loss, model, batch, 20.0)
    assert np.min(norms) < 20 < np.max(norms)
    grad_fn = clipped_grad(loss, clip_norm=20.0, strategy=strategy)
    out = eqx.filter_jit(grad_fn)(model, batch)
    # Gram matrices give upper bounds; formed gradients are as exact as these.
    assert np.all(out.norms > norms * (1 - 1e-4))
    assert np.all(out.norms < norms * (1 + 1e-3))
    for leaf, other in zip(
        jax.tree.leaves(out.sum), jax.tree.leaves(right), strict=True
    ):
        np.testing.assert_allclose(leaf, other, rtol=1e-3, atol=1e-4)


def test_nfnets_of_the_papers_differ_from_timms_in_eps():
    model = eqx.filter_eval_shape(nfnet.NFNet, DEPTHS, 5, key=KEY)
    convs = (*model.stem, *(block.conv2b for block in model.blocks), model.last)
    assert {conv.form.eps for conv in convs} == {1e-8}


def test_initial_values_are_the_papers():
    @jax.jit
    def made():  # compiled without what is not returned
        model = nf_resnet.NFResNet((1, 1, 1, 1), 100, key=KEY)
        return [block.skip_gain for block in model.blocks], model.head.weight

    gains, head = made()
    assert all(gain == 1 for gain in gains)
    assert abs(np.std(head) - 0.01) < 1e-4

    @jax.jit
    def run(image):
        other = nfnet.Block(
            Place(4, 256, 1, 1.0),
            convolution(1e-8),
            skip_gain=0.0,
            approximate_gelu=True,
            key=KEY,
        )
        assert other.shortcut is not None
        return other(image), other.shortcut(jax.nn.gelu(image) * 1.7015043497085571)

    # A residual branch behind a skip gain of 0 is not there yet.
    found, skip = run(_image(3, 3)[..., [0, 1, 2, 0]])
    np.testing.assert_allclose(found, skip, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("make", "change", "message"),
    [
        (nf_resnet.NFResNet, {"depths": (3, 4, 6)}, "must be 4 whole numbers"),
        (nfnet.NFNet, {"depths": (1, 0, 6, 3)}, "depths (=0) must be at least 1"),
        (nf_resnet.NFResNet, {"shortcut": "stride"}, "did you mean strided?"),
        (nf_resnet.NFResNet, {"padding": "VALID"}, "must be one of SAME, SYMMETRIC"),
        (nf_resnet.NFResNet, {"gamma": 0.0}, "gamma (=0.0) must be positive"),
        (nfnet.NFNet, {"eps": -1.0}, "eps (=-1.0) must be positive"),
        (nfnet.NFNet, {"classes": 0}, "classes (=0) must be at least 1"),
    ],
)
def test_impossible_networks_are_refused(make, change, message):
    options = {"depths": (1, 1, 1, 1), "classes": 5} | change
    with pytest.raises(ValueError, match=re.escape(message)):
        eqx.filter_eval_shape(make, key=KEY, **options)


@pytest.mark.parametrize("name", ["deepmind", "tan"])
def test_timms_weights_are_refused_where_they_would_compute_something_else(name):
    model = parity.named("nf-resnet-50", SHAPE, implementation=name)
    with pytest.raises(ValueError, match="for timm's weights: build the model with"):
        FORMATS[type(model)]["timm"].names(model)
