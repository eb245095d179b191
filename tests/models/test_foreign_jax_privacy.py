"""jax_privacy's networks: references/make_jax_privacy.py ran its code."""

import json
import pickle
from pathlib import Path

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest
from references import draw, parity

from tanager import models
from tanager.models import weights
from tanager.models.foreign.tables import FORMATS


REFERENCE = json.loads((Path(draw.__file__).parent / "jax_privacy.json").read_text())


def jax_privacy(model):
    return FORMATS[type(model)]["jax-privacy"].names(model)


@pytest.mark.parametrize("name", REFERENCE["fingerprints"])
def test_every_parameter_has_its_place(name):
    model = parity.named(name, (64, 64, 3))
    theirs = parity.shapes(model, jax_privacy(model))
    assert draw.fingerprint(theirs) == REFERENCE["fingerprints"][name]


@pytest.mark.parametrize("method", ["", "~{kind}_fn/"])
def test_a_released_file_computes_what_their_code_computes(tmp_path, method):
    """Files of before their first release have names of methods in those of layers."""
    height, width = REFERENCE["image_shape"][1:]
    model = parity.named(REFERENCE["name"], (height, width, 3))
    params = {}
    for name, shape in parity.shapes(model, jax_privacy(model)).items():
        module, _, parameter = name.rpartition("/")
        kind = "norm" if "norm" in module else "conv"
        older = module.replace("net/", "net/" + method.format(kind=kind))
        params.setdefault(older, {})[parameter] = draw.tensor(name, shape[::-1]).T
    file = tmp_path / "WRN_16_4.dill"
    file.write_bytes(pickle.dumps({"params": params, "network_state": {}}))
    loaded, origin = models.load_weights(model, file)
    assert origin["format"] == "jax-privacy"
    count = len(weights.named_tensors(model))
    renamed = f"{count} tensors named without the prefixes of wrappers"
    assert origin["changes"] == ([renamed] if method else [])
    if method:
        return
    image = np.moveaxis(draw.image(REFERENCE["image_shape"]), 0, -1)
    logits = eqx.filter_jit(loaded)(jnp.asarray(image))
    np.testing.assert_allclose(logits, REFERENCE["logits"], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("wrn-16-4", {"implementation": "tan"}, "padding .* must be 'SAME' for jax_pr"),
        ("wrn-16-4", {"weight_standardisation": False}, "weight_standardisation"),
        ("wrn-16-4", {"normalisation_order": "pre-activation"}, "normalisation_order"),
        ("wrn-16-1", {}, "width .* must be at least 2 for jax_privacy's weights"),
        (
            "nf-resnet-50",
            {"implementation": "timm"},
            "must be 'strided' for deepmind's",
        ),
    ],
)
def test_a_model_that_computes_something_else_is_refused(name, options, message):
    with pytest.raises(ValueError, match=message):
        jax_privacy(parity.named(name, (64, 64, 3), **options))
