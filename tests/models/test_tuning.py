import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from references.parity import random

import by_hand
from cases import in_full
from tanager import clipped_grad, models
from tanager.models import layers, tuning
from tanager.models.vit import Variant, VisionTransformer
from tanager.models.wide_resnet import WideResNet


KEY = jax.random.key(0)
IMAGE = (8, 8, 3)


def transformer(depth=2):
    variant = Variant(12, depth, 3)
    model = random(lambda: VisionTransformer(variant, 4, 5, IMAGE, key=KEY))
    return jax.tree.map(jnp.asarray, model)


def wide_resnet():
    return random(lambda: WideResNet(10, 1, 5, key=KEY))


class NormFree(eqx.Module):
    stem: layers.StandardisedConv
    head: layers.Linear

    def __init__(self):
        self.stem = layers.StandardisedConv(3, 4, 3, bias=True, gain=True, key=KEY)
        self.head = layers.Linear(4, 5, key=KEY)

    def features(self, image):
        return jnp.mean(self.stem(image), axis=(0, 1))

    def __call__(self, image):
        return self.head(self.features(image))


def names(model, marks):
    """Dotted names of the leaves that are trained."""
    found = set()
    for (path, leaf), mark in zip(
        jax.tree_util.tree_leaves_with_path(model),
        jax.tree.leaves(marks),
        strict=True,
    ):
        if mark:
            assert eqx.is_inexact_array(leaf)
            found.add(jax.tree_util.keystr(path, simple=True, separator="."))
    return found


def loss(model, example):
    logits = model(example["image"])
    return jax.nn.logsumexp(logits) - logits[example["label"]]


def batch(rows=3):
    pixels = np.random.default_rng(0).standard_normal((rows, *IMAGE), np.float32)
    return {
        "image": jnp.asarray(pixels),
        "label": jnp.asarray(np.arange(rows, dtype=np.int32)),
    }


def test_everything_or_the_head_alone():
    model = transformer()
    same, marks = tuning.fine_tune(model, "all", key=KEY)
    assert same is model
    assert len(names(model, marks)) == len(jax.tree.leaves(model))
    same, marks = tuning.fine_tune(model, "last-layer", key=KEY)
    assert names(same, marks) == {"head.weight", "head.bias"}


def test_a_head_of_zeros_gives_logits_of_zeros():
    model = tuning.with_zero_head(transformer())

    @eqx.filter_jit
    def run(model):
        features = model.features(jnp.ones(IMAGE))
        return features, model.head(features)

    features, logits = run(model)
    assert features.any() and not logits.any()


def test_biases_and_norms_of_a_transformer():
    model, marks = tuning.fine_tune(transformer(), "biases-and-norms", key=KEY)
    block = {
        f"blocks.{n}.{leaf}"
        for n in range(2)
        for leaf in (
            "norm1.scale",
            "norm1.bias",
            "norm2.scale",
            "norm2.bias",
            "attention.qkv.bias",
            "attention.projection.bias",
            "expand.bias",
            "contract.bias",
        )
    }
    rest = {"norm.scale", "norm.bias", "patches.bias", "head.weight", "head.bias"}
    assert names(model, marks) == block | rest


def test_film_is_the_norms_or_the_gains_where_there_are_none():
    model, marks = tuning.fine_tune(wide_resnet(), "film", key=KEY)
    norms = {
        f"blocks.{n}.norm{m}.{leaf}"
        for n in range(3)
        for m in (1, 2)
        for leaf in ("scale", "bias")
    }
    norms |= {
        f"blocks.{n}.shortcut_norm.{leaf}" for n in (1, 2) for leaf in ("scale", "bias")
    }
    head = {"head.weight", "head.bias"}
    found = names(model, marks)
    assert found - {"blocks.0.shortcut_norm.scale", "blocks.0.shortcut_norm.bias"} == (
        norms | head | {"norm.scale", "norm.bias"}
    )
    model, marks = tuning.fine_tune(NormFree(), "film", key=KEY)
    assert names(model, marks) == head | {"stem.gain", "stem.bias"}


@pytest.mark.parametrize("what", in_full(["last-layer", "film", "lora"], "last-layer"))
def test_clipping_sees_the_trained_leaves_only(what):
    model, marks = tuning.fine_tune(transformer(1), what, key=KEY, rank=2)
    trained, fixed = eqx.partition(model, marks)

    def of_trained(trained, example):
        return loss(eqx.combine(trained, fixed), example)

    expected, norms = by_hand.clipped(of_trained, trained, batch(), 0.3)
    grad_fn = clipped_grad(loss, clip_norm=0.3, strategy="bk_mixopt", trainable=marks)
    out = jax.jit(grad_fn)(model, batch())
    np.testing.assert_allclose(out.norms, norms, rtol=1e-5)
    assert jax.tree.structure(out.sum) == jax.tree.structure(trained)
    for one, other in zip(
        jax.tree.leaves(out.sum), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
    table = grad_fn.explain(model, batch())
    touched = {leaf for row in table.taps for leaf in row.leaves}
    assert touched == set(range(len(jax.tree.leaves(trained))))


def test_a_prefix_or_a_function_marks_leaves_and_another_structure_is_refused():
    model = NormFree()
    prefix = jax.tree.map(lambda _: False, model)
    prefix = eqx.tree_at(lambda tree: tree.head, prefix, True)
    for trainable in (prefix, lambda leaf: leaf.ndim == 1):
        grad_fn = clipped_grad(loss, clip_norm=1.0, strategy="bk", trainable=trainable)
        marked = eqx.filter(model, trainable)
        found = jax.eval_shape(grad_fn, model, batch()).sum
        assert jax.tree.structure(found) == jax.tree.structure(marked)
    grad_fn = clipped_grad(loss, clip_norm=1.0, trainable={"head": True})
    with pytest.raises(ValueError, match="trainable must be a function of a leaf"):
        grad_fn(model, batch())


@pytest.mark.parametrize(
    ("model", "what", "message"),
    [
        (
            NormFree,
            "lora",
            "needs linear layers or convolutions in blocks, and NormFree",
        ),
        (wide_resnet, "head", "must be one of all, last-layer"),
        (lambda: layers.Linear(2, 2, key=KEY), "all", "a linear layer called head"),
        (
            lambda: models.create(
                "linear", classes=3, image_shape=(4,), key=jax.random.key(0)
            ),
            "film",
            "fine_tune (='film') needs parameters that MLP lacks",
        ),
    ],
)
def test_what_cannot_be_is_refused(model, what, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        tuning.fine_tune(model(), what, key=KEY)
