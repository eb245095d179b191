"""Models by name."""

import functools
import re
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
from jaxtyping import PRNGKeyArray

from tanager import _validate as validate
from tanager.models.mlp import MLP
from tanager.models.small_cnn import SmallCNN
from tanager.models.vit import VARIANTS, VisionTransformer
from tanager.models.wide_resnet import NORMALISATION_ORDERS, WideResNet


NORMALISATIONS = ("group",)

_WIDE_RESNET_NAME = re.compile(r"wrn-([1-9]\d*)-([1-9]\d*)")
_SMALLEST_SIDE = 8


def _wide_resnet(depth: int, width: int) -> Callable[..., WideResNet]:
    def build(*, image_shape: tuple[int, int, int], **options: Any) -> WideResNet:
        return WideResNet(depth, width, channels_in=image_shape[2], **options)

    return build


def _vision_transformer(size: str, patch: int) -> Callable[..., VisionTransformer]:
    return functools.partial(VisionTransformer, VARIANTS[size], patch)


Model = SmallCNN | WideResNet | VisionTransformer | MLP

_CONVOLUTIONAL: dict[str, Callable[..., Model]] = {
    "small-cnn": SmallCNN,
    "wrn-16-4": _wide_resnet(16, 4),
    "wrn-40-4": _wide_resnet(40, 4),
    "wrn-28-10": _wide_resnet(28, 10),
}
_TRANSFORMERS: dict[str, Callable[..., Model]] = {
    "vit-tiny-16": _vision_transformer("tiny", 16),
    "vit-small-16": _vision_transformer("small", 16),
    "vit-base-16": _vision_transformer("base", 16),
    "vit-large-16": _vision_transformer("large", 16),
    "vit-huge-14": _vision_transformer("huge", 14),
}
_FLAT: dict[str, Callable[..., Model]] = {
    "mlp": MLP,
    "linear": functools.partial(MLP, hidden=()),
}

MODELS = _CONVOLUTIONAL | _TRANSFORMERS | _FLAT
"""Builders of the named models; `create` builds any other ``wrn-DEPTH-WIDTH`` too."""


def _check_image_shape(shape: tuple[int, ...]) -> None:
    if len(shape) != 3:
        validate.refuse(
            "image_shape", shape, "must be (height, width, channels)", "no batch axis"
        )
    validate.whole(image_channels=shape[2], at_least=1)


def _check_sides(shape: tuple[int, ...]) -> None:
    validate.whole(
        image_height=shape[0],
        image_width=shape[1],
        at_least=_SMALLEST_SIDE,
        remedy="enlarge the images: the convolutional models halve them twice",
    )


def create(
    name: str,
    *,
    classes: int,
    image_shape: tuple[int, ...],
    key: PRNGKeyArray,
    normalisation: str = "group",
    normalisation_order: str = "pre-activation",
    weight_standardisation: bool = True,
) -> Model:
    """Build a model by name, with initial weights drawn from `key`.

    Args:
        name: one of `MODELS`, or ``"wrn-DEPTH-WIDTH"`` with a depth of 6n + 4.
        classes: number of logits, at least 2.
        image_shape: (height, width, channels) of one image: at least 8×8 for the
            convolutional models, multiples of the patch for transformers. ``"mlp"``
            and ``"linear"`` also take a feature vector: (features,).
        key: JAX key; the same key gives the same weights.
        normalisation: ``"group"``. Batch norm is refused.
        normalisation_order: of the convolutional models, ``"pre-activation"`` (norm,
            then ReLU) or ``"post-activation"`` (ReLU, then norm). The others have no
            such choice: this and the next argument say nothing to them.
        weight_standardisation: whether the convolutions' weights are standardised.

    Returns:
        A module from one image `[H, W, C]` to logits `[classes]`.

    Raises:
        ValueError: unknown name, normalisation or order, or an impossible size.
    """
    if normalisation == "batch":
        validate.refuse(
            "normalisation",
            normalisation,
            "mixes the examples of a batch, so that one example's influence on the"
            " gradient has no bound",
            "use group",
        )
    validate.one_of(NORMALISATIONS, normalisation=normalisation)
    validate.whole(classes=classes, at_least=2)
    validate.one_of(NORMALISATION_ORDERS, normalisation_order=normalisation_order)
    shape = tuple(image_shape)
    wide_resnet = _WIDE_RESNET_NAME.fullmatch(name)
    if not wide_resnet:
        validate.one_of(
            MODELS, model=name, remedy="or any wrn-DEPTH-WIDTH with a depth of 6n + 4"
        )
    if name in _FLAT:
        return _FLAT[name](classes=classes, image_shape=shape, key=key)
    _check_image_shape(shape)
    if name in _TRANSFORMERS:
        return _TRANSFORMERS[name](classes=classes, image_shape=shape, key=key)
    _check_sides(shape)
    if wide_resnet:
        build = _wide_resnet(*map(int, wide_resnet.groups()))
    else:
        build = _CONVOLUTIONAL[name]
    return build(
        classes=classes,
        image_shape=shape,
        normalisation_order=normalisation_order,
        weight_standardisation=weight_standardisation,
        key=key,
    )


def count_parameters(model: Any) -> int:
    """Return how many numbers a model's arrays hold (shapes alone will do)."""
    return sum(
        leaf.size
        for leaf in jax.tree.leaves(model)
        if eqx.is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct)
    )
