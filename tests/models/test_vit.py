import functools
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from references.parity import random
from scipy import special

from tanager.models import vit


SHAPE, PATCH, CLASSES = (8, 12, 3), 4, 5
TINY = vit.Variant(width=12, depth=2, heads=3)


def _model():
    return vit.VisionTransformer(TINY, PATCH, CLASSES, SHAPE, key=jax.random.key(0))


def _image():
    pixels = np.random.default_rng(2).standard_normal(SHAPE)
    return jnp.asarray(pixels, jnp.float32)


def _wide(numbers):
    return np.asarray(numbers, np.float64)


def _textbook_forward(model, image):
    """Dosovitskiy et al. 2021, equations 1 to 4, token by token in float64."""

    def affine(layer, x):
        return x @ _wide(layer.weight) + _wide(layer.bias)

    def norm(layer, x):
        deviation = np.sqrt(x.var() + 1e-6)
        return (x - x.mean()) / deviation * _wide(layer.scale) + np.float64(layer.bias)

    def attend(layer, tokens):
        width, heads = TINY.width, TINY.heads
        size = width // heads
        rows = affine(layer.qkv, np.stack(tokens))
        mixed = np.zeros((len(tokens), width))
        for head in range(heads):
            part = slice(head * size, (head + 1) * size)
            query, key, value = (rows[:, n * width :][:, part] for n in range(3))
            weights = np.exp(query @ key.T / np.sqrt(size))
            mixed[:, part] = weights / weights.sum(axis=1, keepdims=True) @ value
        return affine(layer.projection, mixed)

    image = _wide(image)
    kernel = _wide(model.patches.weight).reshape(-1, TINY.width)
    tokens = [_wide(model.class_token)]
    for top in range(0, SHAPE[0], PATCH):
        for left in range(0, SHAPE[1], PATCH):
            patch = image[top : top + PATCH, left : left + PATCH].reshape(-1)
            tokens.append(patch @ kernel + _wide(model.patches.bias))
    x = np.stack(tokens) + _wide(model.positions)
    for block in model.blocks:
        x = x + attend(block.attention, [norm(block.norm1, token) for token in x])
        hidden = affine(block.expand, np.stack([norm(block.norm2, t) for t in x]))
        hidden = hidden * 0.5 * (1 + special.erf(hidden / np.sqrt(2)))
        x = x + affine(block.contract, hidden)
    return affine(model.head, norm(model.norm, x[0]))


def test_the_forward_pass_is_the_papers():
    model, image = random(_model), _image()
    expected = _textbook_forward(model, image)
    assert np.abs(expected).max() > 0.1
    np.testing.assert_allclose(
        eqx.filter_jit(model)(image), expected, rtol=2e-5, atol=2e-5
    )


def test_a_model_in_bfloat16_has_a_float32_softmax():
    model, image = jax.tree.map(jnp.asarray, random(_model)), _image()
    text = str(jax.make_jaxpr(model)(image.astype(jnp.bfloat16)))
    softmaxes = re.findall(r":(\w+)\[3,(\d),7\] = exp ", text)
    # Of the last block only the class token's query is of use.
    assert softmaxes == [("f32", "7")] * (TINY.depth - 1) + [("f32", "1")]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"image_shape": (10, 12, 3)},
            "image_height (=10) must be a multiple of the patch side 4: use 8 or 12",
        ),
        ({"image_shape": (8, 3, 3)}, "image_width (=3) must be a multiple of the pa"),
        ({"image_shape": (0, 8, 3)}, "image_height (=0) must be a multiple of"),
        ({"patch": 0}, "patch (=0) must be at least 1"),
        (
            {"variant": vit.Variant(10, 2, 3)},
            "heads (=3) must divide the width of 10",
        ),
        ({"variant": vit.Variant(10, 0, 2)}, "depth (=0) must be at least 1"),
    ],
)
def test_impossible_sizes_are_refused(change, message):
    options = {"variant": TINY, "patch": 4, "classes": 5, "image_shape": SHAPE}
    with pytest.raises(ValueError, match=re.escape(message)):
        vit.VisionTransformer(**(options | change), key=jax.random.key(0))


def test_layer_norm_of_a_far_shifted_token_keeps_its_digits():
    token = 1e4 + np.random.default_rng(0).standard_normal(64)
    exact = _wide(np.float32(token))
    exact = (exact - exact.mean()) / np.sqrt(exact.var() + 1e-6)
    normal = vit.LayerNorm(64)(jnp.asarray(token, jnp.float32))
    # 1e4 has a last place of 1e-3 in float32: the mean may be off by that much.
    np.testing.assert_allclose(normal, exact, atol=4e-3)
    with pytest.raises(ValueError, match="eps"):
        vit.LayerNorm(64, eps=0.0)


def test_layer_norm_has_the_derivatives_of_the_textbook_form():
    def textbook(token):
        centred = token - jnp.mean(token)
        return centred / jnp.sqrt(jnp.mean(centred**2) + 0.3)

    with jax.enable_x64(True):
        draw = np.random.default_rng(0).standard_normal
        token, change, weight = (draw(7) for _ in range(3))
        ours = vit.LayerNorm(7, eps=0.3)

        def derivatives(f, token, change, weight):
            def weighted(token):
                return f(token) @ weight

            tangent = jax.jvp(f, (token,), (change,))[1]
            return (
                f(token),
                tangent,
                jax.grad(weighted)(token),
                jax.hessian(weighted)(token),
            )

        given = token, change, weight
        pairs = [
            jax.jit(functools.partial(derivatives, f))(*given) for f in (ours, textbook)
        ]
        for found, expected in zip(*pairs, strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-13)


def test_attention_bears_scores_that_would_overflow():
    attention = random(lambda: vit.Attention(12, 3, key=jax.random.key(0)))
    tokens = np.random.default_rng(0).standard_normal((5, 12), np.float32)
    run = jax.jit(jax.value_and_grad(lambda tokens: jnp.sum(attention(tokens))))
    total, gradient = run(1e3 * tokens)
    assert np.isfinite(total) and np.isfinite(gradient).all()
