"""NF-ResNets in timm."""

from tanager import _validate as validate
from tanager.models.foreign.layouts import GAIN, LINEAR, SAME, Foreign, scaled
from tanager.models.foreign.normaliser_free import block, blocks, convolution
from tanager.models.nf_resnet import IMPLEMENTATIONS, NFResNet
from tanager.models.normaliser_free import RELU_GAMMA


def timm_names(model: NFResNet) -> dict[str, Foreign]:
    """Return timm's name and layout of each parameter of a model.

    timm multiplies by γ in each convolution, here each activation does. The two differ
    where a convolution follows no activation and an activation no convolution: at the
    stem, whose gain is γ times theirs, and at the head, whose weight is a γ-th.

    Args:
        model: built with ``IMPLEMENTATIONS["timm"]``, with any `skip_gain`: timm's
            published weights have none, its ``skipinit=True`` does.

    Raises:
        ValueError: a model that computes something else from the same weights.
    """
    for name, value in (IMPLEMENTATIONS["timm"] | {"gamma": RELU_GAMMA}).items():
        if name != "skip_gain" and getattr(model, name) != value:
            validate.refuse(
                name,
                getattr(model, name),
                f"must be {value!r} for timm's weights",
                'build the model with the options of IMPLEMENTATIONS["timm"]',
            )
    names = convolution("stem", "stem.conv", gain=scaled(GAIN, RELU_GAMMA))
    for part, ours, theirs in blocks(model):
        names |= block(part, ours, theirs, ("conv1", "conv2", "conv3"))
    names["head.weight"] = Foreign("head.fc.weight", scaled(LINEAR, 1 / RELU_GAMMA))
    names["head.bias"] = Foreign("head.fc.bias", SAME)
    return names
