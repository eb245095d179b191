"""ConvNeXt against timm; references/make_references.py made the numbers."""

import re

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from references import draw, parity

from tanager import models
from tanager.models import convnext
from tanager.models.foreign.tables import FORMATS


REFERENCES = parity.read("convnext")
NAMES = FORMATS[models.ConvNeXt]["timm"].names


@pytest.mark.parametrize("name", REFERENCES)
def test_every_tensor_has_its_place_in_timm(name):
    model = eqx.filter_eval_shape(
        models.create,
        name,
        classes=1000,
        image_shape=(224, 224, 3),
        key=jax.random.key(0),
    )
    expected = REFERENCES[name]
    assert (
        draw.fingerprint(parity.shapes(model, NAMES(model)))
        == (expected["fingerprint"])
    )
    assert models.count_parameters(model) == expected["parameters"]


def test_features_and_logits_are_timms():
    """On an image of odd sides: what the stem and the stages leave out shows."""
    name = "convnext-tiny"
    assert parity.difference(name, REFERENCES[name], NAMES) < 1e-5


@pytest.mark.parametrize(
    ("variant", "image", "message"),
    [
        (((1, 1), (8,)), None, "widths (=(8,)) must be one for each of (1, 1)"),
        (((1, 0), (8, 8)), None, "depth (=0) must be at least 1"),
        (((1, 1), (8, 8)), (7, 8, 3), "image_height (=7) must be at least 8"),
    ],
)
def test_what_cannot_be_is_refused(variant, image, message):
    def call():
        model = convnext.ConvNeXt(convnext.Variant(*variant), 5, key=jax.random.key(0))
        return model(jnp.zeros(image))

    with pytest.raises(ValueError, match=re.escape(message)):
        eqx.filter_eval_shape(call)


def test_images_too_small_for_four_stages_are_refused_when_it_is_created():
    with pytest.raises(ValueError, match=r"image_width \(=31\) must be at least 32"):
        models.create(
            "convnext-tiny",
            classes=5,
            image_shape=(32, 31, 3),
            key=jax.random.key(0),
        )
