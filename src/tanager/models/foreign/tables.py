"""Which libraries' files each architecture can be read from and written to.

A new architecture is one entry of `FORMATS`; loading, exporting and the hub follow.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from tanager.models.bit import BiT
from tanager.models.foreign import bit, nf_resnet, nfnet, resnet, vit
from tanager.models.foreign.layouts import Table
from tanager.models.nf_resnet import NFResNet
from tanager.models.nfnet import NFNet
from tanager.models.resnet import ResNet
from tanager.models.vit import VisionTransformer


class Format(NamedTuple):
    """How the files of one library name the tensors of one architecture.

    Attributes:
        names: from a model to its table.
        unused: tensors that such files may hold besides, and that no logit depends on.
    """

    names: Callable[[Any], Table]
    unused: tuple[str, ...] = ()


FORMATS: Mapping[type, Mapping[str, Format]] = {
    VisionTransformer: {
        "timm": Format(vit.timm_names),
        "huggingface": Format(
            vit.hf_names, ("vit.pooler.dense.weight", "vit.pooler.dense.bias")
        ),
        "huggingface-backbone": Format(
            lambda model: vit.hf_names(model, prefix=""),
            ("pooler.dense.weight", "pooler.dense.bias"),
        ),
    },
    ResNet: {"timm": Format(resnet.timm_names)},
    NFResNet: {"timm": Format(nf_resnet.timm_names)},
    NFNet: {"timm": Format(nfnet.timm_names)},
    BiT: {"timm": Format(bit.timm_names), "google": Format(bit.google_names)},
}
"""By class of model and by name of the format, besides ``"tanager"``, our own."""
