"""NFNets in timm (dm_nfnet_f0 … dm_nfnet_f6)."""

from tanager.models.foreign.layouts import LINEAR, POINTWISE, SAME, Foreign
from tanager.models.foreign.normaliser_free import block, blocks, convolution
from tanager.models.nfnet import NFNet


def timm_names(model: NFNet) -> dict[str, Foreign]:
    """Return timm's name and layout of each parameter of a model."""
    names = {}
    for number in range(len(model.stem)):
        names |= convolution(f"stem.{number}", f"stem.conv{number + 1}")
    for part, ours, theirs in blocks(model):
        names |= block(part, ours, theirs, ("conv1", "conv2", "conv2b", "conv3"))
        for mine, other in (("squeeze", "fc1"), ("expand", "fc2")):
            linear, pointwise = (
                f"{ours}.attention.{mine}",
                f"{theirs}.attn_last.{other}",
            )
            names[f"{linear}.weight"] = Foreign(f"{pointwise}.weight", POINTWISE)
            names[f"{linear}.bias"] = Foreign(f"{pointwise}.bias", SAME)
    names |= convolution("last", "final_conv")
    names["head.weight"] = Foreign("head.fc.weight", LINEAR)
    names["head.bias"] = Foreign("head.fc.bias", SAME)
    return names
