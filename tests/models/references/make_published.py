"""Write what timm says of the weights it publishes for the architectures named here.

    python tests/models/references/make_published.py

needs timm, and nothing of this library.
"""

import json
import pathlib


ARCHITECTURES = (
    "vit_tiny_patch16_224",
    "vit_small_patch16_224",
    "vit_base_patch16_224",
    "vit_large_patch16_224",
    "vit_huge_patch14_224",
    "nf_resnet50",
    "resnet50_gn",
    *(f"dm_nfnet_f{size}" for size in range(7)),
    *(f"resnetv2_{size}_bit" for size in ("50x1", "101x1", "50x3", "101x3", "152x4")),
    *(f"convnext_{size}" for size in ("tiny", "small", "base", "large")),
    *(f"tf_efficientnet_lite{size}" for size in range(5)),
    *(
        f"vit_{size}_patch14{registers}_dinov2"
        for size in ("small", "base", "large", "giant")
        for registers in ("", "_reg4")
    ),
    *(
        f"vit_{size}_patch16_dinov3"
        for size in ("small", "small_plus", "base", "large", "huge_plus")
    ),
)
FIELDS = ("architecture", "num_classes", "input_size", "mean", "std", "license")


def main() -> None:
    """Write the file."""
    import timm

    weights = {}
    for architecture in ARCHITECTURES:
        for name in timm.list_models(f"{architecture}.*", pretrained=True):
            known = timm.get_pretrained_cfg(name)
            weights[known.hf_hub_id] = {key: getattr(known, key) for key in FIELDS}
    lines = [f"{json.dumps(name)}: {json.dumps(weights[name])}" for name in weights]
    text = ",\n  ".join(lines)
    target = pathlib.Path(__file__).with_name("published.json")
    version = json.dumps(timm.__version__)
    target.write_text(f'{{"timm": {version}, "weights": {{\n  {text}\n}}}}\n')


if __name__ == "__main__":
    main()
