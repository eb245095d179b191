"""Write preprocessing.json: what timm's and transformers' transforms make of photos.

    python make_preprocessing.py PHOTO.jpg…    # timm, transformers, torch, torchvision

Not run by the tests. The photos are scikit-learn's china.jpg and flower.jpg.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import timm
import transformers
from PIL import Image
from timm.data import create_transform


CONFIGS = [
    {
        "pretrained_cfg": {
            "input_size": [3, side, side],
            "interpolation": interpolation,
            "crop_pct": crop,
            "crop_mode": mode,
            "mean": [0.485, 0.456, 0.406],
            "std": [0.229, 0.224, 0.225],
        }
    }
    for side, interpolation, crop, mode in (
        (224, "bicubic", 0.9, "center"),
        (260, "bilinear", 0.875, "center"),
        (127, "lanczos", 1.0, "center"),
        (96, "bicubic", 0.95, "squash"),
    )
]
PROCESSORS = [
    transformers.ViTImageProcessor(),
    transformers.BitImageProcessor(size={"shortest_edge": 250}),
    transformers.ConvNextImageProcessor(),
    transformers.ConvNextImageProcessor(size={"shortest_edge": 384}),
]


def samples(pixels: np.ndarray) -> list[float]:
    """Return some numbers of an image [H, W, C], at places that are always the same."""
    places = np.random.default_rng(0).integers(0, pixels.size, 24)
    return [round(float(value), 6) for value in pixels.ravel()[places]]


def main() -> None:
    """Write the file beside this one."""
    records = []
    for path in map(Path, sys.argv[1:]):
        photo = Image.open(path).convert("RGB")
        made = []
        for config in CONFIGS:
            wanted: dict[str, Any] = dict(config["pretrained_cfg"])
            wanted["input_size"] = tuple(wanted["input_size"])
            pixels = create_transform(**wanted)(photo).numpy().transpose(1, 2, 0)
            made.append((config, pixels))
        for processor in PROCESSORS:
            pixels = processor(photo, return_tensors="np")["pixel_values"][0]
            config = json.loads(processor.to_json_string())
            made.append((config, np.transpose(pixels, (1, 2, 0))))
        records += [
            {
                "photo": path.name,
                "config": config,
                "shape": list(pixels.shape),
                "samples": samples(pixels),
            }
            for config, pixels in made
        ]
    versions = {m.__name__: m.__version__ for m in (timm, transformers)}
    file = Path(__file__).with_name("preprocessing.json")
    file.write_text(json.dumps({"versions": versions, "records": records}, indent=1))


main()
