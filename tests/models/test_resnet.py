import pytest
from references import parity

from tanager.models.foreign.tables import FORMATS
from tanager.models.resnet import ResNet


REFERENCES = parity.read("resnet")


@pytest.mark.parametrize("name", REFERENCES)
def test_logits_are_timms(name):
    """Weights and image drawn by name; the reference was computed in float64."""
    assert (
        parity.difference(name, REFERENCES[name], FORMATS[ResNet]["timm"].names) < 5e-6
    )
