"""Models by name."""

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxtyping import PRNGKeyArray

from tanager import _validate as validate
from tanager.models import bit, nf_resnet, nfnet, vit, wide_resnet
from tanager.models.layers import Model
from tanager.models.lenet import LeNet
from tanager.models.mlp import MLP
from tanager.models.small_cnn import SmallCNN
from tanager.models.wide_resnet import NORMALISATION_ORDERS, WideResNet


NORMALISATIONS = ("group",)

_WIDE_RESNET_NAME = re.compile(r"wrn-([1-9]\d*)-([1-9]\d*)")
_SMALLEST_SIDE = 8


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


def _any_size(make: Callable[..., Model], *arguments: Any) -> Callable[..., Model]:
    """Return a builder of a model for images of at least 8×8 pixels."""

    def build(*, image_shape: tuple[int, int, int], **options: Any) -> Model:
        height, width, channels = image_shape
        validate.whole(
            image_height=height,
            image_width=width,
            at_least=_SMALLEST_SIDE,
            remedy="enlarge the images: convolutional models halve them",
        )
        return make(*arguments, channels_in=channels, **options)

    return build


_small = functools.partial(ModelEntry, image_side=32, classes=10)
_large = functools.partial(ModelEntry, image_side=224)


def _wide_resnet(name: str, depth: int, width: int, source: str) -> ModelEntry:
    build = _any_size(WideResNet, depth, width)
    return _small(
        name,
        build,
        "convolutional",
        source,
        implementations=wide_resnet.IMPLEMENTATIONS,
        has_norm_options=True,
    )


def _bit(size: str) -> ModelEntry:
    build = _any_size(bit.BiT, bit.VARIANTS[size])
    source = "Kolesnikov et al. 2020; Rodriguez Beltran et al. 2024, table 1"
    return _large(f"bit-{size}", build, "convolutional", source)


def _nf_resnet(depth: int) -> ModelEntry:
    return _large(
        f"nf-resnet-{depth}",
        _any_size(nf_resnet.NFResNet, nf_resnet.DEPTHS[depth]),
        "convolutional",
        "Brock et al. 2021a, section 4; De et al. 2022, section 3.3",
        implementations=nf_resnet.IMPLEMENTATIONS,
    )


def _nfnet(size: int) -> ModelEntry:
    return _large(
        f"nfnet-f{size}",
        _any_size(nfnet.NFNet, nfnet.DEPTHS[size]),
        "convolutional",
        "Brock et al. 2021b, table 1",
        implementations=nfnet.IMPLEMENTATIONS,
    )


def _vit(size: str, patch: int, source: str) -> ModelEntry:
    build = functools.partial(vit.VisionTransformer, vit.VARIANTS[size], patch)
    return _large(f"vit-{size}-{patch}", build, "transformer", source)


_OWN = "this library"
_LENET = "Papernot et al. 2021; Tramèr and Boneh 2021"
_LINEAR = functools.partial(MLP, hidden=())
_DEIT, _VIT = "Touvron et al. 2021, table 1", "Dosovitskiy et al. 2021, table 1"

ENTRIES = {
    entry.name: entry
    for entry in (
        _small("small-cnn", SmallCNN, "convolutional", _OWN, has_norm_options=True),
        _wide_resnet("wrn-16-4", 16, 4, "De et al. 2022, table 3"),
        _wide_resnet("wrn-40-4", 40, 4, "De et al. 2022, table 3"),
        _wide_resnet("wrn-28-10", 28, 10, "De et al. 2022, table 5"),
        *map(_bit, bit.VARIANTS),
        *map(_nf_resnet, nf_resnet.DEPTHS),
        *map(_nfnet, nfnet.DEPTHS),
        _vit("tiny", 16, _DEIT),
        _vit("small", 16, _DEIT),
        _vit("base", 16, _VIT),
        _vit("large", 16, _VIT),
        _vit("huge", 14, _VIT),
        ModelEntry("lenet", LeNet, "convolutional", _LENET, 28, channels=1, classes=10),
        _small("mlp", MLP, "flat", _OWN),
        _small("linear", _LINEAR, "flat", _OWN),
    )
}
"""Every named model."""

MODELS = {name: entry.builder for name, entry in ENTRIES.items()}
"""Builders of the named models; `create` builds any other ``wrn-DEPTH-WIDTH`` too."""


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
        return _wide_resnet(name, depth, width, source)
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
    normalisation: str = "group",
    normalisation_order: str | None = None,
    weight_standardisation: bool | None = None,
) -> Model:
    """Build a model by name, with initial weights drawn from `key`.

    Args:
        name: one of `MODELS`, or ``"wrn-DEPTH-WIDTH"`` with a depth of 6n + 4.
        classes: number of logits, at least 2.
        image_shape: (height, width, channels) of one image: at least 8×8 for the
            convolutional models (16×16 for ``"lenet"``), multiples of the patch for
            transformers. ``"mlp"`` and ``"linear"`` also take a feature vector:
            (features,).
        key: JAX key; the same key gives the same weights.
        implementation: ``"timm"`` or ``"tan"``, for example, builds exactly the model
            of that code; None for ours, see `ModelEntry.implementations`.
        normalisation: ``"group"``. Batch norm is refused.
        normalisation_order: of ``"small-cnn"`` and the Wide-ResNets,
            ``"pre-activation"`` (norm, then ReLU) or ``"post-activation"`` (ReLU, then
            norm); None for the implementation's. Other models ignore this argument and
            the next.
        weight_standardisation: whether to standardise the weights of convolutions; None
            for the implementation's choice.

    Returns:
        A module from one image `[H, W, C]` to logits `[classes]`.

    Raises:
        ValueError: unknown name, implementation, normalisation or order, or an
            impossible size.
    """
    if normalisation == "batch":
        validate.refuse(
            "normalisation",
            normalisation,
            "mixes the examples of a batch, so the influence of one example on the"
            " gradient is not bounded",
            "use group",
        )
    validate.one_of(NORMALISATIONS, normalisation=normalisation)
    validate.whole(classes=classes, at_least=2)
    if normalisation_order is not None:
        validate.one_of(NORMALISATION_ORDERS, normalisation_order=normalisation_order)
    entry = find(name)
    shape = tuple(image_shape)
    if entry.family != "flat":
        _check_image_shape(shape)
    options: dict[str, Any] = {}
    if implementation is not None:
        if not entry.implementations:
            validate.refuse(
                "implementation", implementation, f"must be left out for {name}"
            )
        validate.one_of(entry.implementations, implementation=implementation)
        options |= entry.implementations[implementation]
    if entry.has_norm_options:
        given = {
            "normalisation_order": normalisation_order,
            "weight_standardisation": weight_standardisation,
        }
        options |= {key: value for key, value in given.items() if value is not None}
    return entry.builder(classes=classes, image_shape=shape, key=key, **options)


def _check_image_shape(shape: tuple[int, ...]) -> None:
    if len(shape) != 3:
        validate.refuse(
            "image_shape", shape, "must be (height, width, channels)", "no batch axis"
        )
    validate.whole(image_channels=shape[2], at_least=1)
