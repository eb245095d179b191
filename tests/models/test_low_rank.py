import functools
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tanager
from tanager.models import bit, layers, low_rank, nf_resnet, nfnet, tuning
from tanager.models.small import SmallCNN
from tanager.models.vit import Variant, VisionTransformer
from tanager.models.wide_resnet import WideResNet


KEY = jax.random.key(0)
IMAGE = (16, 16, 3)
ONE_EACH = (1, 1, 1, 1)

MODELS = {
    "transformer": lambda: VisionTransformer(Variant(12, 2, 3), 8, 5, IMAGE, key=KEY),
    "wide": lambda: WideResNet(10, 1, 5, key=KEY),
    "wide, not standardised": lambda: WideResNet(
        10, 1, 5, weight_standardisation=False, key=KEY
    ),
    "normaliser-free": lambda: nf_resnet.NFResNet(ONE_EACH, 5, key=KEY),
    "grouped": lambda: nfnet.NFNet(ONE_EACH, 5, skip_gain=1.0, key=KEY),
}


def image():
    pixels = np.random.default_rng(0).standard_normal(IMAGE)
    return jnp.asarray(pixels, jnp.float32)


@functools.cache
def made(name):
    return MODELS[name]()


@functools.cache
def result_of(name):
    return run(made(name))


def run(model):
    arrays, rest = eqx.partition(model, eqx.is_array)
    call = jax.jit(lambda arrays, image: eqx.combine(arrays, rest)(image))
    return call(arrays, image())


def with_trained_products(before, rank=2, alpha=3.0):
    """The model with products that are not 0, as after training."""
    model, marks = tuning.fine_tune(before, "lora", key=KEY, rank=rank, alpha=alpha)
    draw = np.random.default_rng(1)
    trained, fixed = eqx.partition(model, marks)
    trained = jax.tree.map(
        lambda leaf: leaf + 0.1 * draw.standard_normal(leaf.shape, np.float32), trained
    )
    return eqx.combine(trained, fixed), marks


@pytest.mark.parametrize("name", MODELS)
def test_it_starts_as_the_model_it_was(name):
    model, marks = tuning.fine_tune(made(name), "lora", key=KEY, rank=2)
    np.testing.assert_allclose(run(model), result_of(name), rtol=1e-5, atol=1e-5)
    trained = {
        jax.tree_util.keystr(path, simple=True, separator=".").rpartition(".")[2]
        for path, mark in jax.tree_util.tree_leaves_with_path(marks)
        if mark
    }
    assert trained == {"down", "up", "weight", "bias"}


@pytest.mark.parametrize("name", MODELS)
def test_a_merged_model_does_the_same_and_has_the_old_leaves(name):
    model, _ = with_trained_products(made(name))
    merged = low_rank.merge(model)
    assert jax.tree.structure(merged) == jax.tree.structure(made(name))
    out, same, old = run(model), run(merged), result_of(name)
    size = float(jnp.max(jnp.abs(out)))
    assert float(jnp.max(jnp.abs(out - old))) > 0.01 * size
    np.testing.assert_allclose(same, out, rtol=0, atol=1e-4 * size)


def test_a_linear_layer_is_x_w_plus_alpha_over_r_x_a_b():
    linear = layers.Linear(4, 3, key=KEY)
    layer = low_rank.LowRankLinear(linear, 2, 5.0, key=KEY)
    layer = eqx.tree_at(lambda it: it.up, layer, jnp.ones((2, 3)))
    x = jnp.arange(4.0)
    assert linear.bias is not None
    expected = x @ linear.weight + linear.bias + 5 / 2 * (x @ layer.down @ layer.up)
    np.testing.assert_allclose(layer(x), expected, rtol=1e-6)
    assert layer(x.astype(jnp.bfloat16)).dtype == jnp.bfloat16


@pytest.mark.parametrize("groups", [1, 2])
def test_a_convolution_gets_a_kernel_of_low_rank_in_each_group(groups):
    conv = layers.Conv(4, 6, 3, stride=2, groups=groups, key=KEY)
    layer = low_rank.LowRankConv(conv, 2, 3.0, key=KEY)
    up = np.random.default_rng(0).standard_normal((1, 1, 2, 6), np.float32)
    layer = eqx.tree_at(lambda it: it.up, layer, jnp.asarray(up))
    fan_in = 9 * 4 // groups
    added = (layer.merged().kernel - conv.kernel).reshape(fan_in, groups, -1)
    for number in range(groups):
        assert np.linalg.matrix_rank(added[:, number], tol=1e-4) == 2
    down = np.asarray(layer.down).reshape(fan_in, groups, 2)
    expected = 3 / 2 * down[:, 0] @ up[0, 0, :, : 6 // groups]
    np.testing.assert_allclose(added[:, 0], expected, rtol=1e-4, atol=1e-5)
    pixels = jnp.asarray(np.random.default_rng(1).random((7, 9, 4)), jnp.float32)
    np.testing.assert_allclose(
        layer(pixels), layer.merged()(pixels), rtol=1e-4, atol=1e-5
    )
    assert layer(pixels.astype(jnp.bfloat16)).dtype == jnp.bfloat16


@pytest.mark.parametrize("unit_variance", [False, True])
@pytest.mark.parametrize("eps", [1e-8, 1e-2])
@pytest.mark.parametrize("gain", [1.0, -0.5, 0.0])
def test_a_standardised_convolution_stays_one(gain, eps, unit_variance):
    """Whatever its gain was: the sum's own size becomes the gain."""
    conv = layers.StandardisedConv(
        3, 4, 3, gain=True, form=layers.Standardisation(eps, unit_variance), key=KEY
    )
    conv = eqx.tree_at(lambda it: it.gain, conv, jnp.full(4, gain))
    layer = low_rank.LowRankConv(conv, 2, 4.0, key=KEY)
    for up in (jnp.zeros((1, 1, 2, 4)), jnp.ones((1, 1, 2, 4))):
        merged = eqx.tree_at(lambda it: it.up, layer, up).merged()
        assert isinstance(merged, layers.StandardisedConv)
        down = layers.standardise(layer.down, eps=eps)
        expected = conv.kernel + 2 * jnp.einsum("hwir,ro->hwio", down, up[0, 0])
        np.testing.assert_allclose(merged.kernel, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", [name for name in MODELS if name != "transformer"])
def test_every_product_meets_data_on_a_fast_rule(name):
    model, marks = with_trained_products(made(name))
    batch = {"image": jnp.stack([image(), -image()])}

    def loss(model, example):
        return jnp.sum(jnp.square(model(example["image"])))

    tables = []

    def trace(model, batch):
        grad_fn = tanager.clipped_grad(
            loss, clip_norm=1.0, strategy="bk", trainable=marks
        )
        tables.append(grad_fn.explain(model, batch))

    eqx.filter_eval_shape(trace, model, batch)
    trained = jax.tree.leaves(eqx.filter(model, marks))
    rows = [row for row in tables[0].taps if trained[row.leaves[0]].ndim > 1]
    assert len(rows) == len([leaf for leaf in trained if leaf.ndim > 1])
    for row in rows:
        assert row.norm.endswith("gram"), row
        assert row.total != "retained", row


@pytest.mark.parametrize(
    "make",
    [
        lambda: SmallCNN(5, IMAGE, key=KEY),
        lambda: bit.BiT(bit.VARIANTS["50x1"]._replace(blocks=ONE_EACH), 5, key=KEY),
    ],
)
def test_standardised_convolutions_without_a_gain_are_refused(make):
    with pytest.raises(ValueError, match=re.escape("fine_tune (='lora')")):
        tuning.fine_tune(make(), "lora", key=KEY)


def test_rank_and_alpha_have_limits():
    model = made("wide")
    with pytest.raises(ValueError, match="rank"):
        tuning.fine_tune(model, "lora", key=KEY, rank=0)
    with pytest.raises(ValueError, match="alpha"):
        tuning.fine_tune(model, "lora", key=KEY, alpha=-1.0)
