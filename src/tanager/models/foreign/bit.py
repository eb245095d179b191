"""BiT ResNet-v2: names in timm (`resnetv2_*_bit`) and in Google's `.npz` files."""

from tanager.models.bit import BiT
from tanager.models.foreign.layouts import (
    CONV,
    FIRST_TWO_AXES,
    POINTWISE,
    SAME,
    Foreign,
    Layout,
)


def timm_names(model: BiT) -> dict[str, Foreign]:
    """Return timm's tensor for each of ours."""
    convs = {"stem": "stem.conv"}
    norms = {"norm": "norm"}
    for i, stage in enumerate(model.stages):
        for j, block in enumerate(stage):
            ours, theirs = f"stages.{i}.{j}", f"stages.{i}.blocks.{j}"
            for n in range(len(block.convs)):
                convs[f"{ours}.convs.{n}"] = f"{theirs}.conv{n + 1}"
                norms[f"{ours}.norms.{n}"] = f"{theirs}.norm{n + 1}"
            if block.shortcut is not None:
                convs[f"{ours}.shortcut"] = f"{theirs}.downsample.conv"
    return {
        **_convs(convs, ".weight", CONV),
        **_norms(norms, ".weight", ".bias"),
        "head.weight": Foreign("head.fc.weight", POINTWISE),
        "head.bias": Foreign("head.fc.bias", SAME),
    }


def google_names(model: BiT) -> dict[str, Foreign]:
    """Return the tensor of Google's files (``BiT-M-R50x1.npz``) for each of ours.

    References:
        `load_from` in github.com/google-research/big_transfer, bit_pytorch/models.py.
    """
    convs = {"stem": "resnet/root_block"}
    norms = {"norm": "resnet"}
    for i, stage in enumerate(model.stages):
        for j, block in enumerate(stage):
            ours, theirs = f"stages.{i}.{j}", f"resnet/block{i + 1}/unit{j + 1:02d}"
            for n, letter in enumerate("abc"):
                convs[f"{ours}.convs.{n}"] = f"{theirs}/{letter}"
                norms[f"{ours}.norms.{n}"] = f"{theirs}/{letter}"
            if block.shortcut is not None:
                convs[f"{ours}.shortcut"] = f"{theirs}/a/proj"
    return {
        **_convs(convs, "/standardized_conv2d/kernel", SAME),
        **_norms(norms, "/group_norm/gamma", "/group_norm/beta"),
        "head.weight": Foreign("resnet/head/conv2d/kernel", FIRST_TWO_AXES),
        "head.bias": Foreign("resnet/head/conv2d/bias", SAME),
    }


def _convs(names: dict[str, str], weight: str, layout: Layout) -> dict[str, Foreign]:
    return {
        f"{ours}.weight": Foreign(f"{theirs}{weight}", layout)
        for ours, theirs in names.items()
    }


def _norms(names: dict[str, str], scale: str, bias: str) -> dict[str, Foreign]:
    table = {}
    for ours, theirs in names.items():
        table[f"{ours}.scale"] = Foreign(f"{theirs}{scale}", SAME)
        table[f"{ours}.bias"] = Foreign(f"{theirs}{bias}", SAME)
    return table
