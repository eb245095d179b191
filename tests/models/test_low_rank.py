import functools
import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from references.parity import random
from test_tuning import names

from tanager.models import bit, layers, low_rank, nf_resnet, tuning, wide_resnet
from tanager.models.normaliser_free import Place, convolution
from tanager.models.small import SmallCNN
from tanager.models.vit import Variant, VisionTransformer


KEY = jax.random.key(0)
IMAGE = (16, 16, 3)


class OneBlock(eqx.Module):
    """A block of a network, and a head on the mean over its pixels."""

    blocks: tuple[Any, ...]
    head: layers.Linear

    def __init__(self, block):
        self.blocks = (block,)
        self.head = layers.Linear(16, 5, key=KEY)

    def __call__(self, image):
        return self.head(jnp.mean(self.blocks[0](image), axis=(0, 1)))


MODELS = {
    "transformer": lambda: VisionTransformer(Variant(12, 1, 3), 8, 5, IMAGE, key=KEY),
    "wide, not standardised": lambda: OneBlock(
        wide_resnet.Block(
            16,
            16,
            conv=functools.partial(layers.Conv, bias=True),
            stride=2,
            order="post-activation",
            key=KEY,
        )
    ),
    "normaliser-free": lambda: OneBlock(
        nf_resnet.Block(
            Place(16, 16, 2, 0.9),
            convolution(1e-8),
            skip_gain=1.0,
            shortcut="strided",
            gamma=1.7,
            key=KEY,
        )
    ),
}


def image(channels):
    return np.random.default_rng(0).standard_normal((16, 16, channels), np.float32)


@pytest.mark.parametrize("name", MODELS)
def test_it_starts_as_the_model_it_was_and_merges_to_one_that_does_the_same(name):
    before = jax.tree.map(jnp.asarray, random(MODELS[name]))
    tune = functools.partial(tuning.fine_tune, what="lora", key=KEY, rank=2, alpha=3.0)
    model, marks = eqx.filter_jit(tune)(before)
    trained = {name.rpartition(".")[2] for name in names(model, marks)}
    assert trained == {"down", "up", "weight", "bias"}
    draw = np.random.default_rng(1)
    parts, fixed = eqx.partition(model, marks)
    parts = jax.tree.map(
        lambda leaf: leaf + 0.1 * draw.standard_normal(leaf.shape, np.float32), parts
    )
    moved = eqx.combine(parts, fixed)
    merged = eqx.filter_jit(low_rank.merge)(moved)
    assert jax.tree.structure(merged) == jax.tree.structure(before)
    pixels = image(3 if name == "transformer" else 16)
    run = eqx.filter_jit(lambda model: model(jnp.asarray(pixels)))
    old, new, same = run(before), run(moved), run(merged)
    np.testing.assert_allclose(run(model), old, rtol=1e-5, atol=1e-5)
    size = float(np.abs(new).max())
    assert np.abs(np.asarray(new) - np.asarray(old)).max() > 0.01 * size
    np.testing.assert_allclose(same, new, rtol=0, atol=1e-4 * size)


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
    up = np.random.default_rng(0).standard_normal((1, 1, 2, 6), np.float32)
    pixels = np.random.default_rng(1).random((7, 9, 4), np.float32)

    @eqx.filter_jit
    def run(up, pixels):
        conv = layers.Conv(4, 6, 3, stride=2, groups=groups, key=KEY)
        layer = low_rank.LowRankConv(conv, 2, 3.0, key=KEY)
        layer = eqx.tree_at(lambda it: it.up, layer, up)
        merged = layer.merged()
        return layer, merged.kernel - conv.kernel, layer(pixels), merged(pixels)

    layer, added, output, merged_output = run(jnp.asarray(up), jnp.asarray(pixels))
    fan_in = 9 * 4 // groups
    added = np.asarray(added).reshape(fan_in, groups, -1)
    for number in range(groups):
        assert np.linalg.matrix_rank(added[:, number], tol=1e-4) == 2
    down = np.asarray(layer.down).reshape(fan_in, groups, 2)
    expected = 3 / 2 * down[:, 0] @ up[0, 0, :, : 6 // groups]
    np.testing.assert_allclose(added[:, 0], expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(output, merged_output, rtol=1e-4, atol=1e-5)
    narrow = jax.ShapeDtypeStruct(pixels.shape, jnp.bfloat16)
    assert eqx.filter_eval_shape(layer, narrow).dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("gain", "eps", "unit_variance"),
    [(1.0, 1e-8, True), (-0.5, 1e-2, False), (-0.5, 1e-2, True), (0.0, 1e-2, True)],
)
def test_a_standardised_convolution_stays_one(gain, eps, unit_variance):
    """Whatever its gain was: the sum's own size becomes the gain."""
    form = layers.Standardisation(eps, unit_variance)

    @jax.jit
    def run(up):
        conv = layers.StandardisedConv(3, 4, 3, gain=True, form=form, key=KEY)
        conv = eqx.tree_at(lambda it: it.gain, conv, jnp.full(4, gain))
        layer = low_rank.LowRankConv(conv, 2, 4.0, key=KEY)
        merged = eqx.tree_at(lambda it: it.up, layer, up).merged()
        assert isinstance(merged, layers.StandardisedConv)
        down = layers.standardise(layer.down, eps=eps)
        expected = conv.kernel + 2 * jnp.einsum("hwir,ro->hwio", down, up[0, 0])
        return merged.kernel, expected

    for up in (np.zeros((1, 1, 2, 4), np.float32), np.ones((1, 1, 2, 4), np.float32)):
        found, expected = run(up)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "make",
    [
        lambda: SmallCNN(5, IMAGE, key=KEY),
        lambda: bit.BiT(bit.Variant((1,), 1), 5, key=KEY),
    ],
)
def test_standardised_convolutions_without_a_gain_are_refused(make):
    with pytest.raises(ValueError, match=re.escape("fine_tune (='lora')")):
        eqx.filter_eval_shape(lambda: tuning.fine_tune(make(), "lora", key=KEY)[0])


def test_rank_and_alpha_have_limits():
    model = eqx.filter_eval_shape(MODELS["transformer"])
    with pytest.raises(ValueError, match="rank"):
        tuning.fine_tune(model, "lora", key=KEY, rank=0)
    with pytest.raises(ValueError, match="alpha"):
        tuning.fine_tune(model, "lora", key=KEY, alpha=-1.0)
