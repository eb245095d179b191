import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from references import parity
from test_tuning import names

import by_hand
from cases import in_full
from tanager import clipped_grad, models
from tanager.models import dino, tuning, vit


TINY = vit.Variant(width=12, depth=2, heads=3)
SHAPE = (8, 12, 3)
KEY = jax.random.key(0)
KINDS = {
    "v2": dino.Variant(TINY, 4, 16),
    "v2, registers": dino.Variant(TINY, 4, 16, registers=2),
    "v3, gated": dino.Variant(TINY, 4, 16, True, 2, rotary=True),
}


def _make(kind, shape=SHAPE, depth=2):
    variant = KINDS[kind]._replace(sizes=TINY._replace(depth=depth))
    return jax.tree.map(
        jnp.asarray, parity.random(lambda: dino.DINO(variant, 5, shape, key=KEY))
    )


def test_the_gated_network_of_dinov2_is_timms_packed_swiglu():
    """The giant's: SiLU of the first half of fc1, times the second."""
    block = parity.random(lambda: vit.Block(TINY, 16, gated=True, scale=1e-5, key=KEY))
    gains = np.zeros(12, np.float32), np.ones(12, np.float32)
    silent = eqx.tree_at(lambda b: (b.scale1.gain, b.scale2.gain), block, gains)
    tokens = np.random.default_rng(0).standard_normal((3, 12), np.float32)
    found, normal = eqx.filter_jit(lambda b, x: (b(x), jax.vmap(b.norm2)(x)))(
        silent, tokens
    )
    packed = np.asarray(normal) @ block.expand.weight + block.expand.bias
    gate, value = np.split(np.asarray(packed), 2, axis=1)
    hidden = gate / (1 + np.exp(-gate)) * value
    expected = tokens + hidden @ block.contract.weight + block.contract.bias
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", in_full(KINDS, "v2", "v2, registers"))
def test_clipped_gradients_are_those_of_vmap(kind):
    model = _make(kind, depth=1)
    images = np.random.default_rng(0).standard_normal((3, *SHAPE), np.float32)

    def loss(model, image):
        return jax.nn.logsumexp(model(image))

    right, norms = by_hand.clipped(loss, model, images, 0.5)
    grad_fn = clipped_grad(loss, clip_norm=0.5, strategy="bk")
    fast, bounds = jax.jit(grad_fn)(model, images)[:2]
    assert np.all(norms > 0.5) and np.all(bounds >= norms * (1 - 1e-4))
    for one, other in zip(jax.tree.leaves(fast), jax.tree.leaves(right), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-3, atol=1e-5)


def test_film_trains_the_norms_and_biases_train_the_factors_of_branches_too():
    model = _make("v3, gated")
    film, both = (
        names(*tuning.fine_tune(model, what, key=KEY))
        for what in ("film", "biases-and-norms")
    )
    assert not any("scale1" in name for name in film)
    assert "blocks.0.norm1.scale" in film
    assert "blocks.1.scale2.gain" in both
    assert film < both


@pytest.mark.parametrize(
    ("kind", "first"), [("v2", 1), ("v2, registers", 0), ("v3, gated", None)]
)
def test_weights_of_another_grid_fit(kind, first, tmp_path):
    path = tmp_path / "model.safetensors"
    before, target = _make(kind, (12, 12, 3)), _make(kind, (8, 16, 3))
    models.save_weights(before, path, format="timm")
    loaded, origin = models.load_weights(target, path)
    assert origin["format"] == "timm"
    image = jax.ShapeDtypeStruct((8, 16, 3), jnp.float32)
    assert eqx.filter_eval_shape(loaded, image).shape == (5,)
    if first is None:  # nothing of DINOv3 depends on the grid
        assert origin["changes"] == []
        return
    sizes = f"{9 + first} to {8 + first}"
    assert origin["changes"] == [f"positions resized from {sizes} (bicubic)"]
    assert loaded.positions.shape == target.positions.shape
    np.testing.assert_array_equal(loaded.positions[:first], before.positions[:first])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"registers": -1}, "registers (=-1) must be at least 0"),
        ({"hidden": 0}, "hidden (=0) must be at least 1"),
        (
            {"sizes": vit.Variant(18, 1, 3), "rotary": True},
            "width (=18) must give heads of a multiple of 4 channels",
        ),
        ({"patch": 3}, "image_height (=8) must be a multiple of the patch side 3"),
    ],
)
def test_what_cannot_be_is_refused(change, message):
    variant = KINDS["v2"]._replace(**change)
    with pytest.raises(ValueError, match=re.escape(message)):
        eqx.filter_eval_shape(dino.DINO, variant, 5, SHAPE, key=KEY)
