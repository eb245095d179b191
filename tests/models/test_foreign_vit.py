"""Vision transformers against timm and transformers, by weights drawn from a rule.

references/make_vit.py made the numbers, with PyTorch; nothing here needs it.
"""

import json
import runpy
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from references import parity

from tanager import models
from tanager.models import weights
from tanager.models.foreign.tables import FORMATS
from tanager.models.vit import Variant, VisionTransformer, fit_positions


REFERENCES = Path(__file__).parent / "references"
RULE = runpy.run_path(str(REFERENCES / "make_vit.py"))
RECORD = json.loads((REFERENCES / "vit_parity.json").read_text())
CHANNELS, HEIGHT, WIDTH = RULE["IMAGE_SHAPE"]


def shapes_of(name, classes, image_shape):
    return eqx.filter_eval_shape(
        models.create,
        name,
        classes=classes,
        image_shape=image_shape,
        key=jax.random.key(0),
    )


def theirs(model, format):
    return parity.shapes(model, FORMATS[VisionTransformer][format].names(model))


@pytest.mark.parametrize("name", RECORD["variants"])
def test_timm_has_these_tensors_and_no_others(name):
    reference = RECORD["variants"][name]
    side = 16 * 14 if name.endswith("14") else 224
    shapes = theirs(shapes_of(name, 1000, (side, side, 3)), "timm")
    assert len(shapes) == reference["tensors"]
    assert sum(map(np.prod, shapes.values())) == reference["parameters"]
    assert RULE["fingerprint"](shapes) == reference["fingerprint"]


@pytest.mark.parametrize(
    ("format", "reference"),
    [
        ("timm", RECORD["timm_logits"]),
        ("huggingface", RECORD["huggingface_logits"]["1e-06"]),
    ],
)
def test_the_logits_are_theirs(tmp_path, format, reference):
    model = shapes_of("vit-tiny-16", RULE["CLASSES"], (HEIGHT, WIDTH, CHANNELS))
    drawn = {
        name: RULE["draw"](name, shape) for name, shape in theirs(model, format).items()
    }
    weights.save(drawn, tmp_path / "model.safetensors")
    loaded = models.load_weights(model, tmp_path / "model.safetensors")
    assert loaded.origin["format"] == format
    assert loaded.origin["changes"] == []
    image = jnp.asarray(RULE["image"]().transpose(1, 2, 0))
    ours = eqx.filter_jit(loaded.model)(image)
    # Theirs are in float64. Measured: at most 2e-6 off.
    np.testing.assert_allclose(ours, reference, atol=1e-5)
    assert np.abs(reference).max() > 1


def test_transformers_own_eps_changes_the_logits_by_less_than_1e_6():
    """docs/pretrained.md says so."""
    by_eps = RECORD["huggingface_logits"]
    difference = np.subtract(by_eps["1e-06"], by_eps["1e-12"])
    assert 0 < np.abs(difference).max() < 1e-6


@pytest.mark.parametrize("name", RULE["GRIDS"])
def test_positions_are_resized_as_in_timm(name):
    side, (height, width) = RULE["GRIDS"][name]
    before = RULE["draw"](f"positions {name}", (1, 1 + side * side, 2))[0]
    shape, key = (4 * height, 4 * width, 3), jax.random.key(0)
    model = parity.random(
        lambda: VisionTransformer(Variant(2, 1, 1), 4, 2, shape, key=key)
    )
    after = fit_positions(before, model)
    assert after.dtype == np.float32
    np.testing.assert_allclose(after, RECORD["positions"][name], atol=2e-6)
    np.testing.assert_array_equal(after[0], before[0])
