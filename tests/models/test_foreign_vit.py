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


def theirs(model, format):
    return parity.shapes(model, FORMATS[VisionTransformer][format].names(model))


@pytest.mark.parametrize(
    ("format", "reference"),
    [
        ("timm", RECORD["timm_logits"]),
        ("huggingface", RECORD["huggingface_logits"]["1e-06"]),
    ],
)
def test_the_logits_are_theirs(tmp_path, format, reference):
    model = parity.named("vit-tiny-16", (HEIGHT, WIDTH, CHANNELS), RULE["CLASSES"])
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
