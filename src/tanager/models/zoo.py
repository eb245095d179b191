"""Models by name."""

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import equinox as eqx
from jaxtyping import PRNGKeyArray

from tanager import _validate as validate
from tanager.models import (
    bit,
    convnext,
    dino,
    efficientnet,
    nf_resnet,
    nfnet,
    vit,
    wide_resnet,
)
from tanager.models.dead_leaves import DeadLeavesLinear
from tanager.models.layers import HEAD_INPUTS, ScaledHead
from tanager.models.model import Model, check_sides, mirrored
from tanager.models.scattering import ScatteringCNN, ScatteringLinear
from tanager.models.small import MLP, LeNet, SmallCNN
from tanager.models.wide_resnet import NORMALISATION_ORDERS, WideResNet


_WIDE_RESNET_NAME = re.compile(r"wrn-([1-9]\d*)-([1-9]\d*)")


@dataclass(frozen=True)
class ModelEntry:
    """A named model.

    Attributes:
        name: for `create`.
        builder: builds it from ``classes``, ``image_shape`` and ``key``.
        family: ``"convolutional"``, ``"transformer"``, or ``"flat"``, which takes
            feature vectors too.
        source: paper and table.
        image_side: of its usual square images, in pixels.
        channels: of these images.
        classes: their usual number.
        implementations: by name, the options of other implementations.
        has_norm_options: whether the builder takes ``normalisation_order`` and
            ``weight_standardisation``.
    """

    name: str
    builder: Callable[..., Model]
    family: str
    source: str
    image_side: int
    channels: int = 3
    classes: int = 1000
    implementations: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    has_norm_options: bool = False

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(height, width, channels) of its usual images."""
        return (self.image_side, self.image_side, self.channels)


def _convolutional(
    name: str,
    source: str,
    make: Callable[..., Model],
    *sizes: Any,
    side: int = 224,
    smallest_side: int = 8,
    classes: int = 1000,
    **options: Any,
) -> ModelEntry:
    def build(*, image_shape: tuple[int, int, int], **given: Any) -> Model:
        why = "convolutional models halve them"
        *_, channels = check_sides(image_shape, smallest_side, why)
        return make(*sizes, channels_in=channels, **given)

    return ModelEntry(
        name, build, "convolutional", source, side, classes=classes, **options
    )


def _family(
    prefix: str,
    source: str,
    make: Callable[..., Model],
    variants: Mapping[Any, Any],
    **options: Any,
) -> list[ModelEntry]:
    """Return a convolutional model for each variant, named by its key."""
    return [
        _convolutional(f"{prefix}{name}", source, make, variant, **options)
        for name, variant in variants.items()
    ]


def _wide_resnet(depth: int, width: int, source: str) -> ModelEntry:
    return _convolutional(
        f"wrn-{depth}-{width}",
        source,
        WideResNet,
        depth,
        width,
        side=32,
        classes=10,
        implementations=wide_resnet.IMPLEMENTATIONS,
        has_norm_options=True,
    )


def _vit(size: str, patch: int, source: str) -> ModelEntry:
    build = functools.partial(vit.VisionTransformer, vit.VARIANTS[size], patch)
    return ModelEntry(f"vit-{size}-{patch}", build, "transformer", source, 224)


_small = functools.partial(ModelEntry, source="this library", image_side=32, classes=10)
_DEIT, _VIT = "Touvron et al. 2021, table 1", "Dosovitskiy et al. 2021, table 1"
_SCATTERING = "Bruna and Mallat 2013; Tramèr and Boneh 2021, table 6"
_DINO = {
    "dinov2": "Oquab et al. 2024, appendix B",
    "dinov3": "Siméoni et al. 2025, section 5",
}

ENTRIES = {
    entry.name: entry
    for entry in (
        _small("small-cnn", SmallCNN, "convolutional", has_norm_options=True),
        _wide_resnet(16, 4, "De et al. 2022, table 3"),
        _wide_resnet(40, 4, "De et al. 2022, table 3"),
        _wide_resnet(28, 10, "De et al. 2022, table 5"),
        *_family(
            "bit-",
            "Kolesnikov et al. 2020; Rodriguez Beltran et al. 2024, table 1",
            bit.BiT,
            bit.VARIANTS,
        ),
        *_family(
            "nf-resnet-",
            "Brock et al. 2021a, section 4; De et al. 2022, section 3.3",
            nf_resnet.NFResNet,
            nf_resnet.DEPTHS,
            implementations=nf_resnet.IMPLEMENTATIONS,
        ),
        *_family(
            "nfnet-f",
            "Brock et al. 2021b, table 1",
            nfnet.NFNet,
            nfnet.DEPTHS,
            implementations=nfnet.IMPLEMENTATIONS,
        ),
        *(
            _convolutional(
                f"efficientnet-{size}",
                "Tan and Le 2019, table 1, as TensorFlow's lite release",
                efficientnet.EfficientNetLite,
                variant,
                side=variant.image_side,
            )
            for size, variant in efficientnet.VARIANTS.items()
        ),
        *_family(
            "convnext-",
            "Liu et al. 2022, section 3",
            convnext.ConvNeXt,
            convnext.VARIANTS,
            smallest_side=32,
        ),
        _vit("tiny", 16, _DEIT),
        _vit("small", 16, _DEIT),
        _vit("base", 16, _VIT),
        _vit("large", 16, _VIT),
        _vit("huge", 14, _VIT),
        *(
            ModelEntry(
                name,
                functools.partial(dino.DINO, variant),
                "transformer",
                _DINO[name.partition("-")[0]],
                224,
            )
            for name, variant in dino.VARIANTS.items()
        ),
        _small(
            "scattering-linear", ScatteringLinear, "convolutional", source=_SCATTERING
        ),
        _small("scattering-cnn", ScatteringCNN, "convolutional", source=_SCATTERING),
        _small(
            "dead-leaves-linear",
            DeadLeavesLinear,
            "convolutional",
            source="Coates et al. 2011; Lee et al. 2001",
        ),
        _small(
            "lenet",
            LeNet,
            "convolutional",
            source="Papernot et al. 2021; Tramèr and Boneh 2021",
            image_side=28,
            channels=1,
            implementations={"jax-privacy": {"as_jax_privacy": True}},
        ),
        _small("mlp", MLP, "flat"),
        _small("linear", functools.partial(MLP, hidden=()), "flat"),
    )
}
"""Every named model; `create` builds any other `wrn-DEPTH-WIDTH` too."""


def find(name: str) -> ModelEntry:
    """Return the entry of a model; any ``wrn-DEPTH-WIDTH`` has one.

    Raises:
        ValueError: unknown name.
    """
    sizes = _WIDE_RESNET_NAME.fullmatch(name)
    if name not in ENTRIES and sizes:
        depth, width = map(int, sizes.groups())
        if depth > 1000 or width > 1000:
            validate.refuse("model", name, "must have a depth and width up to 1000")
        source = "Zagoruyko and Komodakis 2016, table 1"
        return _wide_resnet(depth, width, source)
    remedy = "or any wrn-DEPTH-WIDTH with a depth of 6n + 4"
    validate.one_of(ENTRIES, model=name, remedy=remedy)
    return ENTRIES[name]


def create(
    name: str,
    *,
    classes: int,
    image_shape: tuple[int, ...],
    key: PRNGKeyArray,
    implementation: str | None = None,
    normalisation_order: str | None = None,
    weight_standardisation: bool | None = None,
    head_input: str = "features",
    mirror: bool = False,
) -> Model:
    """Build a model by name, with initial weights drawn from `key`.

    Args:
        name: one of `ENTRIES`, or ``"wrn-DEPTH-WIDTH"`` with a depth of 6n + 4.
        classes: number of logits, at least 2.
        image_shape: (height, width, channels) of one image: at least 8×8 for the
            convolutional models (16×16 for ``"lenet"``, 32×32 for ConvNeXt), multiples
            of the patch for transformers. ``"mlp"`` and ``"linear"`` also take a
            feature vector: (features,).
        key: JAX key; the same key gives the same weights.
        implementation: ``"timm"`` or ``"tan"``, for example, builds exactly the model
            of that code; None for ours, see `ModelEntry.implementations`.
        normalisation_order: of ``"small-cnn"`` and the Wide-ResNets,
            ``"pre-activation"`` (norm, then ReLU), ``"post-activation"`` (ReLU, then
            norm) or ``"none"`` (no norms); None for the implementation's. Other models
            ignore this argument and the next.
        weight_standardisation: whether to standardise the weights of convolutions; None
            for the implementation's choice.
        head_input: one of `layers.HEAD_INPUTS`: what the last layer sees of the
            features.
        mirror: whether it sees the mean of the features of an image and of its mirror
            image.

    Returns:
        A module from one image `[H, W, C]` to logits `[classes]`.

    Raises:
        ValueError: unknown name, implementation or order, or an impossible size.
    """
    validate.whole(classes=classes, at_least=2)
    if normalisation_order is not None:
        validate.one_of(NORMALISATION_ORDERS, normalisation_order=normalisation_order)
    entry = find(name)
    shape = tuple(image_shape)
    if entry.family != "flat" and len(shape) != 3:
        rule = "must be (height, width, channels)"
        validate.refuse("image_shape", shape, rule, "no batch axis")
    options: dict[str, Any] = {}
    if implementation is not None:
        if not entry.implementations:
            rule = f"must be left out for {name}"
            validate.refuse("implementation", implementation, rule, "give None")
        validate.one_of(entry.implementations, implementation=implementation)
        options |= entry.implementations[implementation]
    if entry.has_norm_options:
        if normalisation_order is not None:
            options["normalisation_order"] = normalisation_order
        if weight_standardisation is not None:
            options["weight_standardisation"] = weight_standardisation
    model = entry.builder(classes=classes, image_shape=shape, key=key, **options)
    validate.one_of(HEAD_INPUTS, head_input=head_input)
    if head_input != "features":
        head = ScaledHead(model.head.weight.shape[0], classes, head_input, key=key)
        model = eqx.tree_at(lambda tree: tree.head, model, head)
    if mirror and len(shape) != 3:
        validate.refuse("mirror", mirror, "needs images", "leave it out for features")
    return mirrored(model) if mirror else model
