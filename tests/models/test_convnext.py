import re

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from references import parity

from tanager.models import convnext


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
        parity.named("convnext-tiny", (32, 31, 3))
