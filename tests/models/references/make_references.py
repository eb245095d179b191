"""Write what timm's models give for the weights and the image of `draw`.

    python tests/models/references/make_references.py [FILE ...]

needs PyTorch and timm, and nothing of this library. The tests need neither: they read
the files (``bit``, for example) that stand beside this one.
"""

import json
import pathlib
import sys

import draw
import timm
import torch
from torch.utils.flop_counter import FlopCounterMode


HERE = pathlib.Path(__file__).parent
IMAGE_SHAPE = (3, 65, 50)  # odd and not square, so that paddings show
GRIDS = {14: (3, 42, 28), 16: (3, 48, 32)}  # of patches, for transformers
CLASSES = 10

# name: (timm's name, options, conv_scale, whether to compute logits)
FILES = {
    "bit": {
        "bit-50x1": ("resnetv2_50x1_bit", {}, 0.01, True),
        "bit-101x1": ("resnetv2_101x1_bit", {}, 0.01, True),
        "bit-50x3": ("resnetv2_50x3_bit", {}, 0.01, True),
        "bit-101x3": ("resnetv2_101x3_bit", {}, 0.01, False),
        "bit-152x4": ("resnetv2_152x4_bit", {}, 0.01, False),
    },
    "vit": {
        "vit-tiny-16": ("vit_tiny_patch16_224", {}, 1.0, False),
        "vit-small-16": ("vit_small_patch16_224", {}, 1.0, False),
        "vit-base-16": ("vit_base_patch16_224", {}, 1.0, False),
        "vit-large-16": ("vit_large_patch16_224", {}, 1.0, False),
        "vit-huge-14": ("vit_huge_patch14_224", {}, 1.0, False),
    },
    "convnext": {
        f"convnext-{size}": (f"convnext_{size}", {}, 1.0, size == "tiny")
        for size in ("tiny", "small", "base", "large")
    },
    "efficientnet": {
        f"efficientnet-lite{n}": (f"tf_efficientnet_lite{n}", {}, 1.0, n in (0, 4))
        for n in range(5)
    },
    "dino": {
        **{
            f"dinov2-{size}{ours}": (
                f"vit_{size}_patch14{theirs}_dinov2",
                {},
                1.0,
                size == "small",
            )
            for ours, theirs in (("", ""), ("-reg4", "_reg4"))
            for size in ("small", "base", "large", "giant")
        },
        **{
            f"dinov3-{size}": (
                f"vit_{size.replace('-', '_')}_patch16_dinov3",
                {},
                1.0,
                size.startswith("small"),
            )
            for size in ("small", "small-plus", "base", "large", "huge-plus")
        },
    },
}


def outputs(name: str, options: dict, conv_scale: float) -> dict[str, object]:
    """Return features and logits in float64, of numbers drawn in float32."""
    patch = next((n for n in GRIDS if f"patch{n}" in name), None)
    shape = IMAGE_SHAPE if patch is None else GRIDS[patch]
    sized = {} if patch is None else {"img_size": shape[1:]}
    model = timm.create_model(name, num_classes=CLASSES, **sized, **options)
    for key, value in model.double().eval().state_dict().items():
        array = draw.tensor(key, tuple(value.shape), conv_scale=conv_scale)
        value.copy_(torch.from_numpy(array))
    image = torch.from_numpy(draw.image(shape)).double()[None]
    with torch.no_grad():
        features = model.forward_head(model.forward_features(image), pre_logits=True)
        return {
            "conv_scale": conv_scale,
            "image_shape": shape,
            "features": features[0, :: draw.EVERY].tolist(),
            "logits": model(image)[0].tolist(),
        }


def reference(
    name: str, options: dict, conv_scale: float, with_outputs: bool
) -> dict[str, object]:
    """Return what is to be known of one model."""
    sized = {"img_size": 224} if "patch" in name else {}
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        model = timm.create_model(name, num_classes=1000, **sized, **options).eval()
        model(torch.empty(1, 3, 224, 224))
    shapes = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    found = {
        "timm": name,
        "options": options,
        "weights": [] if options else timm.list_models(f"{name}.*", pretrained=True),
        "parameters": sum(p.numel() for p in model.parameters()),
        "fingerprint": draw.fingerprint(shapes),
        "flops": counter.get_total_flops(),
    }
    if with_outputs:
        found |= outputs(name, options, conv_scale)
    return found


def main() -> None:
    """Write the files that are named, or all."""
    for file in sys.argv[1:] or FILES:
        references = {ours: reference(*how) for ours, how in FILES[file].items()}
        text = json.dumps({"timm": timm.__version__, "models": references}, indent=1)
        (HERE / f"{file}.json").write_text(f"{text}\n")
        print(f"{file}.json: {', '.join(references)}")


if __name__ == "__main__":
    main()
