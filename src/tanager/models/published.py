"""Published weights of the named models, and the models' names in timm.

All are trained on public data: ImageNet-1k (1000 classes of ILSVRC-2012) or
ImageNet-21k. The facts are those of timm 1.0.31 (``timm.get_pretrained_cfg``).
"""

from collections.abc import Mapping
from typing import NamedTuple


class Published(NamedTuple):
    """Weights on the Hugging Face Hub.

    Attributes:
        weights: their name, for `load_weights`.
        classes: of their head; 0 without a head.
        image_size: side of the images of their last training, in pixels.
        mean: their images were standardised with it; per channel, on the 0..1 scale.
        std: likewise.
        licence: identifier of their licence on the hub.
    """

    weights: str
    classes: int
    image_size: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    licence: str = "apache-2.0"


_HALF = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
_IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def _timm(name: str, classes: int, size: int = 224, scale=_HALF, **more) -> Published:
    return Published(f"hf:timm/{name}", classes, size, scale[0], scale[1], **more)


def _tuned(name: str, size: int = 224) -> tuple[Published, ...]:
    """Weights of ImageNet-21k, and those tuned on ImageNet-1k from them."""
    return (_timm(name, 21843), _timm(f"{name}_ft_in1k", 1000, size))


def _vit(size: str) -> tuple[Published, ...]:
    return _tuned(f"vit_{size}_patch16_224.augreg_in21k")


def _dino(size: str) -> Published:
    return _timm(f"vit_{size}_patch16_224.dino", 0, scale=_IMAGENET)


def _convnext(size: str) -> tuple[Published, ...]:
    kinds = {"fb_in22k": 21841, "fb_in22k_ft_in1k": 1000, "fb_in1k": 1000}
    return tuple(
        _timm(f"convnext_{size}.{kind}", classes, scale=_IMAGENET)
        for kind, classes in kinds.items()
    )


def _dino_v2(size: str, registers: str = "") -> tuple[Published, ...]:
    name = f"vit_{size}_patch14{registers}_dinov2.lvd142m"
    return (_timm(name, 0, 518, _IMAGENET),)


def _dino_v3(size: str) -> tuple[Published, ...]:
    name = f"vit_{size.replace('-', '_')}_patch16_dinov3.lvd1689m"
    return (_timm(name, 0, 256, _IMAGENET, licence="dinov3-license"),)


_DINO_V2_SIZES = ("small", "base", "large", "giant")

PUBLISHED: Mapping[str, tuple[Published, ...]] = {
    "vit-tiny-16": _vit("tiny"),
    "vit-small-16": (*_vit("small"), _dino("small")),
    "vit-base-16": (*_vit("base"), _dino("base")),
    "vit-large-16": _vit("large"),
    "vit-huge-14": (_timm("vit_huge_patch14_224.orig_in21k", 0),),
    "nf-resnet-50": (_timm("nf_resnet50.ra2_in1k", 1000, 256, _IMAGENET),),
    **{
        f"nfnet-f{size}": (_timm(f"dm_nfnet_f{size}.dm_in1k", 1000, pixels, _IMAGENET),)
        for size, pixels in enumerate((192, 224, 256, 320, 384, 416, 448))
    },
    **{
        f"bit-{size}": _tuned(f"resnetv2_{size}_bit.goog_in21k", 448)
        for size in ("50x1", "101x1", "50x3", "101x3")
    },
    "bit-152x4": _tuned("resnetv2_152x4_bit.goog_in21k", 480),
    **{
        f"efficientnet-lite{size}": (
            _timm(f"tf_efficientnet_lite{size}.in1k", 1000, pixels),
        )
        for size, pixels in enumerate((224, 240, 260, 300, 380))
    },
    **{
        f"convnext-{size}": _convnext(size)
        for size in ("tiny", "small", "base", "large")
    },
    **{f"dinov2-{size}": _dino_v2(size) for size in _DINO_V2_SIZES},
    **{f"dinov2-{size}-reg4": _dino_v2(size, "_reg4") for size in _DINO_V2_SIZES},
    **{
        f"dinov3-{size}": _dino_v3(size)
        for size in ("small", "small-plus", "base", "large", "huge-plus")
    },
}
"""By name of the model; start from the first."""

_WITHOUT_WEIGHTS = {"nf-resnet-101": "nf_resnet101"}


def timm_architecture(name: str) -> str | None:
    """Return timm's name for the architecture of a model; None if it has none."""
    if name in PUBLISHED:
        repository = PUBLISHED[name][0].weights.partition("/")[2]
        return repository.partition(".")[0]
    return _WITHOUT_WEIGHTS.get(name)
