"""ResNet with group norm: names in timm (`resnet50_gn`) and torchvision."""

from tanager.models.foreign.layouts import CONV, LINEAR, SAME, Foreign
from tanager.models.resnet import ResNet


def timm_names(model: ResNet) -> dict[str, Foreign]:
    """Return timm's tensor for each of ours; its norms are called ``bn``."""
    table = {
        "stem.weight": Foreign("conv1.weight", CONV),
        "head.weight": Foreign("fc.weight", LINEAR),
        "head.bias": Foreign("fc.bias", SAME),
    }
    norms = {"norm": "bn1"}
    for i, stage in enumerate(model.stages):
        for j, block in enumerate(stage):
            ours, theirs = f"stages.{i}.{j}", f"layer{i + 1}.{j}"
            for n in range(len(block.convs)):
                weight = Foreign(f"{theirs}.conv{n + 1}.weight", CONV)
                table[f"{ours}.convs.{n}.weight"] = weight
                norms[f"{ours}.norms.{n}"] = f"{theirs}.bn{n + 1}"
            if block.shortcut is not None:
                weight = Foreign(f"{theirs}.downsample.0.weight", CONV)
                table[f"{ours}.shortcut.weight"] = weight
                norms[f"{ours}.shortcut_norm"] = f"{theirs}.downsample.1"
    for ours, theirs in norms.items():
        table[f"{ours}.scale"] = Foreign(f"{theirs}.weight", SAME)
        table[f"{ours}.bias"] = Foreign(f"{theirs}.bias", SAME)
    return table
