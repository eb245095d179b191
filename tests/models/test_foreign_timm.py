"""Models against timm; references/make_references.py made the numbers."""

import pytest
from references import draw, parity

from cases import in_full
from tanager import models
from tanager.models.pretrained import table_of


FILES = ("bit", "convnext", "dino", "vit")
REFERENCES = {name: one for file in FILES for name, one in parity.read(file).items()}
SMALL = ("bit-50x1", "convnext-tiny", "dinov2-small", "dinov2-small-reg4")
SMALL += ("dinov3-small", "dinov3-small-plus")


@pytest.mark.parametrize("name", REFERENCES)
def test_every_tensor_has_its_place(name):
    model = parity.named(name, classes=1000)
    theirs = parity.shapes(model, table_of(model, "timm"))
    assert models.count_parameters(model) == REFERENCES[name]["parameters"]
    if not name.startswith("bit"):  # whose file is older than fingerprints
        assert draw.fingerprint(theirs) == REFERENCES[name]["fingerprint"]


@pytest.mark.parametrize("name", in_full(SMALL, "dinov3-small"))
def test_features_and_logits_are_theirs(name):
    """On odd sides, and grids that are not square: paddings and swapped axes show.

    Kernels of BiT are drawn so small that a wrong eps would show.
    """
    most = 1e-4 if name.startswith("bit") else 1e-5
    reference = REFERENCES[name]
    assert parity.distance(parity.drawn(name, reference), reference) < most
