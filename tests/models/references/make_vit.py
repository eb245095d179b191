"""Write what timm and transformers give for vision transformers drawn by a rule.

    python tests/models/references/make_vit.py

needs PyTorch, timm and transformers, and nothing of this library. The tests need none
of them: they draw the same weights and read vit_parity.json, which stands beside.
"""

import json
import math
import pathlib
import tempfile
import zlib
from collections.abc import Sequence

import numpy as np


CLASSES = 10
IMAGE_SHAPE = (3, 32, 48)  # not square, so that a swapped grid shows
GRIDS = {"finer": (3, (4, 5)), "coarser": (7, (4, 2)), "mixed": (4, (2, 6))}


def draw(name: str, shape: Sequence[int]) -> np.ndarray:
    """Return a float32 tensor that depends on its name and shape alone."""
    generator = np.random.default_rng(zlib.crc32(name.encode()))
    normal = generator.standard_normal(tuple(shape), np.float32)
    if len(shape) == 1:
        return 0.2 * normal + float(name.endswith("weight"))
    if shape[0] == 1:  # embeddings
        return 0.5 * normal
    return normal / np.float32(math.sqrt(math.prod(shape[1:])))


def image() -> np.ndarray:
    """Return a float32 image [channels, height, width]."""
    return np.random.default_rng(0).standard_normal(IMAGE_SHAPE, np.float32)


def main() -> None:
    """Write the file."""
    import timm
    import torch
    import transformers
    from safetensors.torch import load_file, save_file
    from timm.layers import resample_abs_pos_embed

    pixels = torch.from_numpy(image())[None].double()

    def drawn(names_and_tensors):
        return {
            name: torch.from_numpy(draw(name, tuple(tensor.shape)))
            for name, tensor in names_and_tensors.items()
        }

    def logits(model) -> list[float]:
        with torch.no_grad():
            found = model.double().eval()(pixels)
        return getattr(found, "logits", found)[0].tolist()

    tiny = timm.create_model(
        "vit_tiny_patch16_224", num_classes=CLASSES, img_size=IMAGE_SHAPE[1:]
    )
    tiny.load_state_dict(drawn(tiny.state_dict()), strict=True)

    by_eps = {}
    for eps in (1e-6, 1e-12):
        config = transformers.ViTConfig(
            hidden_size=192,
            num_hidden_layers=12,
            num_attention_heads=3,
            intermediate_size=768,
            image_size=IMAGE_SHAPE[1:],
            patch_size=16,
            layer_norm_eps=eps,
            num_labels=CLASSES,
        )
        with tempfile.TemporaryDirectory() as folder:
            model = transformers.ViTForImageClassification(config)
            model.save_pretrained(folder)
            # In memory the tensors have other names than in files.
            path = f"{folder}/model.safetensors"
            save_file(drawn(load_file(path)), path, {"format": "pt"})
            model, told = transformers.ViTForImageClassification.from_pretrained(
                folder, output_loading_info=True
            )
            assert not any(told.values()), told
        by_eps[str(eps)] = logits(model)

    resized = {}
    for name, (side, grid) in GRIDS.items():
        before = draw(f"positions {name}", (1, 1 + side * side, 2))
        after = resample_abs_pos_embed(torch.from_numpy(before), list(grid))
        resized[name] = after[0].tolist()

    record = {
        "timm": timm.__version__,
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "timm_logits": logits(tiny),
        "huggingface_logits": by_eps,
        "positions": resized,
    }
    target = pathlib.Path(__file__).with_name("vit_parity.json")
    target.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
