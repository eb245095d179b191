"""A small network of each kind, by name."""

import functools
from typing import Any

import equinox as eqx
import jax
import numpy as np

from tanager import models
from tanager.models import (
    bit,
    convnext,
    dead_leaves,
    dino,
    efficientnet,
    nf_resnet,
    nfnet,
    vit,
)


KEY = jax.random.key(0)
# A stage of each kind: the published networks repeat these blocks.
TINY = {
    "bit": lambda: bit.BiT(bit.Variant((1, 1), 1), 10, key=KEY),
    "nf-resnet": lambda: nf_resnet.NFResNet((1, 2, 1, 1), 10, key=KEY),
    "nfnet": lambda: nfnet.NFNet((1, 1, 1, 1), 10, key=KEY),
    "convnext": lambda: convnext.ConvNeXt(
        convnext.Variant((1, 1, 1, 1), (8, 8, 16, 16)), 10, key=KEY
    ),
    "dinov2": lambda: dino.DINO(
        dino.Variant(vit.Variant(12, 2, 3), 8, 24), 10, (32, 32, 3), key=KEY
    ),
    "dinov3": lambda: dino.DINO(
        dino.Variant(vit.Variant(12, 2, 3), 8, 24, True, 2, rotary=True),
        10,
        (32, 32, 3),
        key=KEY,
    ),
    "efficientnet": lambda: efficientnet.EfficientNetLite(
        efficientnet.Variant(0.25, 0.3, 32), 10, key=KEY
    ),
    "lenet": lambda: models.LeNet(10, (28, 28, 1), key=KEY),
    "vit": lambda: vit.VisionTransformer(
        vit.Variant(12, 2, 3), 8, 10, (32, 32, 3), key=KEY
    ),
    "wrn": lambda: models.WideResNet(10, 1, 10, key=KEY),
}


@functools.cache
def shapes(name: str) -> Any:
    """Return a network of shapes."""
    return eqx.filter_eval_shape(TINY[name])


def few_filters() -> dead_leaves.Constants:
    """Return 8 of the 800 filters of dead leaves, and 5 of their components."""
    every = dead_leaves.constants()
    both = np.r_[:8, 800:808]
    return dead_leaves.Constants(
        every.filters[..., :8],
        every.mean[both],
        every.deviation[both],
        every.whitening[both, :5],
    )
