"""Write jax_privacy.json: names and shapes of jax_privacy's networks, and their logits.

Run it where haiku is installed, in this folder, with a clone of
github.com/google-deepmind/jax_privacy at version 0.3.0:

    git clone https://github.com/google-deepmind/jax_privacy
    git -C jax_privacy checkout 8c284ce
    python make_jax_privacy.py

Logits are computed in float64 from weights and an image that `draw` repeats.
"""

import json
import sys
import types
from pathlib import Path
from unittest import mock

import draw
import haiku as hk
import jax


# Its models use nothing of these, nor of what the package itself imports.
for unused in ("jaxline", "jaxline.utils", "orbax", "orbax.checkpoint"):
    sys.modules[unused] = mock.MagicMock()
sys.modules["jax_privacy"] = package = types.ModuleType("jax_privacy")
package.__path__ = ["jax_privacy/jax_privacy"]

from jax_privacy.experiments.image_classification.models import (  # noqa: E402
    cifar,
    imagenet_nfnets,
    imagenet_nfresnets,
)


CLASSES = 10
MODELS = {
    **{
        f"wrn-{depth}-{width}": (cifar.WideResNet, {"depth": depth, "width": width}, 32)
        for depth, width in ((16, 4), (40, 4), (28, 10))
    },
    "nf-resnet-50": (imagenet_nfresnets.NFResNet, {"variant": "ResNet50"}, 64),
    **{
        f"nfnet-f{size}": (imagenet_nfnets.NFNet, {"variant": f"F{size}"}, 64)
        for size in (0, 1, 3)
    },
}
LOGITS = ("wrn-16-4", (3, 12, 10))


def network(name):
    """Return a network of their code as a pair of functions."""
    build, options, _ = MODELS[name]
    return hk.without_apply_rng(
        hk.transform(lambda image: build(CLASSES, **options)(image, is_training=False))
    )


def shapes(name, sides):
    """Return the shapes of the parameters by ``module/name``."""
    image = jax.ShapeDtypeStruct((1, *sides, 3), "float32")
    params = jax.eval_shape(network(name).init, jax.random.key(0), image)
    return {f"{m}/{n}": leaf.shape for m, d in params.items() for n, leaf in d.items()}


def logits(name, image_shape):
    """Return the logits of one image, in float64."""
    image = draw.image(image_shape).transpose(1, 2, 0)
    params = {}
    for full, shape in shapes(name, image.shape[:2]).items():
        module, _, parameter = full.rpartition("/")
        params.setdefault(module, {})[parameter] = draw.tensor(full, shape[::-1]).T
    with jax.enable_x64(True):
        params = jax.tree.map(lambda leaf: leaf.astype("float64"), params)
        return network(name).apply(params, image[None].astype("float64"))[0].tolist()


name, image_shape = LOGITS
reference = {
    "fingerprints": {
        name: draw.fingerprint(shapes(name, (side, side)))
        for name, (_, _, side) in MODELS.items()
    },
    "name": name,
    "image_shape": image_shape,
    "logits": logits(name, image_shape),
}
(Path(__file__).parent / "jax_privacy.json").write_text(
    json.dumps(reference, indent=1) + "\n"
)
