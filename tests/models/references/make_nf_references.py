"""Write nf.json: what timm's NF-ResNets and NFNets are and compute.

Run it where PyTorch and timm are installed, in this folder:

    python -m venv torch && torch/bin/pip install torch timm
    torch/bin/python make_nf_references.py

Logits are computed in float64 from weights and an image that `draw` repeats; names and
shapes come from PyTorch's meta device, with the 1000 classes of the published weights.
"""

import json
from pathlib import Path

import draw
import timm
import torch


MODELS = {
    "nf-resnet-50": ("nf_resnet50", {}),
    "nf-resnet-101": ("nf_resnet101", {}),
    "nf-resnet-152": ("nf_resnet50", {"depths": (3, 8, 36, 3)}),
    "nf-resnet-200": ("nf_resnet50", {"depths": (3, 24, 36, 3)}),
    **{f"nfnet-f{size}": (f"dm_nfnet_f{size}", {}) for size in range(7)},
}
LOGITS = {
    "nf-resnet-50": ("nf_resnet50", {}, (45, 62)),
    "nf-resnet, skipinit": (
        "nf_resnet50",
        {"depths": (1, 2, 1, 1), "skipinit": True},
        (64, 33),
    ),
    "nfnet-f0": ("dm_nfnet_f0", {}, (45, 62)),
}
CLASSES = 10


def structure(name, options):
    """Return the number of parameters and a digest of their names and shapes."""
    with torch.device("meta"):
        model = timm.create_model(name, **options)
    shapes = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "fingerprint": draw.fingerprint(shapes),
    }


def logits(name, options, sides):
    """Return the logits of one image, in float64."""
    model = timm.create_model(name, num_classes=CLASSES, **options).eval()
    state = {
        key: torch.from_numpy(draw.tensor(key, value.shape))
        for key, value in model.state_dict().items()
    }
    model.load_state_dict(state)
    image = torch.from_numpy(draw.image((3, *sides))).double()
    with torch.no_grad():
        output = model.double()(image[None])
    return {"image": list(sides), "logits": output[0].tolist()}


if __name__ == "__main__":
    torch.use_deterministic_algorithms(True)
    written = {
        "made by": f"timm {timm.__version__}, PyTorch {torch.__version__}",
        "structures": {key: structure(*value) for key, value in MODELS.items()},
        "logits": {key: logits(*value) for key, value in LOGITS.items()},
    }
    path = Path(__file__).with_name("nf.json")
    path.write_text(json.dumps(written, indent=1) + "\n")
