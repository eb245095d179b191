"""Augmentation: random views of one image, in JAX.

Everything is pure and takes ONE image; `vmap` makes a batch of them. Shapes are static,
so that a jitted training step contains its augmentation.

With augmentation multiplicity K the gradients of K views of an example are averaged
before they are clipped, so that the views share one unit of privacy: Unlocking
High-Accuracy DP Image Classification, equation (4).

============  =======================================================================
none          the image, or its middle
crop-flip     Unlocking, appendix C.2: on CIFAR, crops of the image with 4 mirrored
              pixels around it; on ImageNet, crops of an image of 1.2 times their size
rrc           TAN, section 4.2: random resized crops
tan           TAN, section 4.2, "Ours": crops with 20 mirrored pixels, colour jitter
simclr        TAN, section 4.2: jitter, grey, blur, random resized crops
inception     the distorted crops that BiT and ViT are trained with
============  =======================================================================

All but the first can flip left and right at random, as the papers do. Numbers that the
TAN paper leaves out are those of its released code (facebookresearch/tan: RRC is its
``random``, "Ours" its ``OursBest``); those of inception are big_vision's.
"""

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float32, Int32, PRNGKeyArray, UInt8

from tanager import _validate as validate
from tanager.data import colour, crops
from tanager.data.crops import Image, Range, View
from tanager.data.datasets import check_constants


_JITTER = colour.ColourJitter(0.8, 0.8, 0.8, hue=0.2, probability=0.3)  # TAN's


def standardise(
    image: UInt8[Array, "h w c"], mean: Sequence[float], std: Sequence[float]
) -> Float32[Array, "h w c"]:
    """Return (image / 255 − mean) / std, per channel.

    Args:
        image: uint8[H, W, C].
        mean: C numbers on the 0..1 scale. They must be public: computed from the
            private images, they would leak them.
        std: C positive numbers on the 0..1 scale, public likewise.

    Returns:
        float32[H, W, C].

    Raises:
        ValueError: `mean` or `std` does not have one number per channel.
    """
    if image.shape[-1] != len(mean):
        validate.channels_last(image.shape)
    check_constants(image.shape[-1], mean, std)
    # One multiply-add per pixel; the constants are rounded once, from float64.
    scale = 1 / (255 * np.asarray(std, np.float64))
    shift = -np.asarray(mean, np.float64) / np.asarray(std, np.float64)
    return image.astype(jnp.float32) * _row(scale) + _row(shift)


def views(
    augment: Callable[[PRNGKeyArray, Any], Any],
    key: PRNGKeyArray,
    example: Any,
    multiplicity: int,
) -> Any:
    """Return K independent views of one example; view k depends on (`key`, k) alone.

    Args:
        augment: from a key and an example (a pytree, or an image alone) to one view,
            such as an `Augmentation`.
        key: one random key.
        example: a pytree of arrays.
        multiplicity: K, at least 1. Without augmentation (the papers' K = 0) use the
            example itself.

    Returns:
        The example's pytree, each leaf with a leading axis of K.

    Raises:
        ValueError: `multiplicity` is not a whole number of at least 1.

    References:
        Unlocking High-Accuracy DP Image Classification, equation (4).
    """
    validate.whole(
        multiplicity=multiplicity,
        at_least=1,
        remedy="without augmentation, use the example itself",
    )

    def view(number: Int32[Array, ""]) -> Any:
        return augment(jax.random.fold_in(key, number), example)

    # One after another: the intermediate results of one view stay in a CPU's caches.
    return lax.map(view, jnp.arange(multiplicity, dtype=jnp.int32))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Augmentation(abc.ABC):
    """Random views of one image for training, and one fixed view for evaluation.

    Called with one key and one image, uint8 or float (on the 0..1 scale where colours
    change), it returns one view, of the image's dtype.

    Attributes:
        kind: its name in a recipe.
        eval_by: how what is evaluated gets a view's size, one of `crops.FIXED_VIEWS`.
        crop_size: pixels of a view each way; None for the image's own size.

    Raises:
        ValueError: a field is out of range; or, when called, the image does not suit.
    """

    kind: ClassVar[str]
    eval_by: ClassVar[str] = "crop"
    crop_size: int | None = None

    def __post_init__(self):
        if self.crop_size is not None:
            validate.whole(crop_size=self.crop_size, at_least=1)

    def __call__(self, key: PRNGKeyArray, image: Image) -> View:
        """Return one view of an image."""
        self.check(image.shape)
        return self._view(key, image)

    @abc.abstractmethod
    def _view(self, key: PRNGKeyArray, image: Image) -> View:
        """Return one view of an image that suits."""

    def eval_view(self, image: Image) -> View:
        """Return what is evaluated, of a view's size: see `crops.fixed_view`."""
        return crops.fixed_view(image, self.size(image.shape), self.eval_by)

    def size(self, image_shape: tuple[int, ...]) -> tuple[int, int]:
        """Return (h, w) of the views of images of a shape [H, W, C].

        Raises:
            ValueError: the images are too small.
        """
        validate.channels_last(image_shape)
        height, width, _ = image_shape
        if self.crop_size is None:
            return height, width
        if self.crop_size > min(height, width):
            rule = f"must be at most the image's {height} × {width}"
            remedy = "a view cannot be larger than its image"
            validate.refuse("crop_size", self.crop_size, rule, remedy)
        return self.crop_size, self.crop_size

    def check(self, image_shape: tuple[int, ...]) -> None:
        """Refuse images of a shape [H, W, C] that this augmentation cannot be used on.

        Raises:
            ValueError: they are too small, or it changes colours and they have none.
        """
        self.size(image_shape)

    def _check_colours(self, image_shape: tuple[int, ...]) -> None:
        if image_shape[-1] != 3:
            rule = f"needs images of 3 channels; these have {image_shape[-1]}"
            remedy = "it changes colours: use crop-flip, rrc or inception"
            validate.refuse("augmentation", self.kind, rule, remedy)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Unchanged(Augmentation):
    """No augmentation: every view is the middle of the image."""

    kind: ClassVar[str] = "none"

    def _view(self, key: PRNGKeyArray, image: Image) -> View:
        return self.eval_view(image)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CropFlip(Augmentation):
    """A random crop and then a random flip: both papers' for CIFAR.

    With `crop_size` and without padding it is the Unlocking paper's for ImageNet and
    Places-365, on images of 1.2 times that size. The whole image, resized to a view's
    size, is evaluated.

    Attributes:
        crop_padding: pixels mirrored onto each edge before the crop; 0 for crops inside
            the image.
        padding_mode: how, as in ``numpy.pad``: symmetric repeats the pixel at the edge,
            as the Unlocking paper's released code does; the TAN paper's does not.
        flip: whether to flip at random. Leave it out where left and right differ in
            meaning, as in digits.
    """

    kind: ClassVar[str] = "crop-flip"
    eval_by: ClassVar[str] = "resize"
    crop_padding: int = 4
    padding_mode: str = "reflect"
    flip: bool = True

    def __post_init__(self):
        super().__post_init__()
        validate.whole(crop_padding=self.crop_padding, at_least=0)
        validate.one_of(crops.PADDING_MODES, padding_mode=self.padding_mode)

    def _view(self, key: PRNGKeyArray, image: Image) -> View:
        size = self.size(image.shape)
        crop_key, flip_key = jax.random.split(key)
        if self.crop_padding or size != image.shape[:2]:
            how = self.crop_padding, size, self.padding_mode
            image = crops.random_crop(crop_key, image, *how)
        return crops.random_flip(flip_key, image) if self.flip else image

    def check(self, image_shape: tuple[int, ...]) -> None:
        """See `Augmentation.check`."""
        super().check(image_shape)
        if self.crop_padding >= min(image_shape[:2]):
            height, width, _ = image_shape
            rule = f"must be smaller than the image, {height} × {width}"
            remedy = "a mirror shows each pixel once"
            validate.refuse("crop_padding", self.crop_padding, rule, remedy)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tan(CropFlip):
    """The middle of the image, cropped with mirrored edges, flipped and jittered.

    Attributes:
        jitter: of the colours.
    """

    kind: ClassVar[str] = "tan"
    eval_by: ClassVar[str] = "crop"
    crop_padding: int = 20
    jitter: colour.ColourJitter = _JITTER

    def _view(self, key: PRNGKeyArray, image: Image) -> View:
        crop_key, flip_key, jitter_key = jax.random.split(key, 3)
        view, size = self.eval_view(image), self.size(image.shape)
        how = self.crop_padding, size, self.padding_mode
        view = crops.random_crop(crop_key, view, *how)
        if self.flip:
            view = crops.random_flip(flip_key, view)
        planes = self.jitter(jitter_key, colour.planes(view))
        return colour.image_of(planes, image.dtype)

    def check(self, image_shape: tuple[int, ...]) -> None:
        """See `Augmentation.check`."""
        self._check_colours(image_shape)
        super().check((*self.size(image_shape), 3))


@dataclasses.dataclass(frozen=True, kw_only=True)
class RandomResizedCrop(Augmentation):
    """A random part of the image, resized to a view, and then a random flip.

    As torchvision's ``RandomResizedCrop`` and ``RandomHorizontalFlip``, of images from
    Pillow: antialiased.

    Attributes:
        flip: as `CropFlip`.
        area: least and largest share of the image's area.
        aspect: least and largest aspect ratio, width over height.
    """

    kind: ClassVar[str] = "rrc"
    flip: bool = True
    area: Range = (0.08, 1.0)
    aspect: Range = (3 / 4, 4 / 3)
    _box: ClassVar[Callable] = staticmethod(crops.random_box)
    _antialias: ClassVar[bool] = True

    def __post_init__(self):
        super().__post_init__()
        validate.positive(area=self.area[0], aspect=self.aspect[0])
        _check_order(area=self.area, aspect=self.aspect)
        if self.area[1] > 1:
            validate.refuse("area", self.area, "must be at most 1, the whole image")

    def _view(self, key: PRNGKeyArray, image: Image) -> View:
        box_key, flip_key = jax.random.split(key)
        box = self._box(box_key, *image.shape[:2], self.area, self.aspect)
        size = self.size(image.shape)
        view = crops.resized_crop(image, box, size, self._antialias)
        return crops.random_flip(flip_key, view) if self.flip else view


@dataclasses.dataclass(frozen=True, kw_only=True)
class InceptionCrop(RandomResizedCrop):
    """A distorted crop of the image, resized to a view, and then a random flip.

    As big_vision's ``inception_crop`` and ``flip_lr``: with TensorFlow's boxes and
    without antialiasing. Levels are rounded, where big_vision cuts the fraction off.
    """

    kind: ClassVar[str] = "inception"
    area: Range = (0.05, 1.0)
    aspect: Range = (0.75, 1.33)
    _box: ClassVar[Callable] = staticmethod(crops.distorted_box)
    _antialias: ClassVar[bool] = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class SimCLR(RandomResizedCrop):
    """Colour jitter, grey, blur, and then a random resized crop and a random flip.

    With the numbers and the order of the TAN paper's code. Chen et al. 2020 crop and
    flip first, jitter with probability 0.8, and blur with 0.5, a deviation of 0.1 to 2
    and a kernel of a tenth of the view.

    Attributes:
        jitter: of the colours.
        grey_probability: of losing the colours.
        blur_probability: of a Gaussian blur.
        blur_deviations: bounds of its standard deviation, in pixels of the image.
        blur_size: pixels of its kernel each way, odd.
    """

    kind: ClassVar[str] = "simclr"
    jitter: colour.ColourJitter = _JITTER
    grey_probability: float = 0.2
    blur_probability: float = 0.2
    blur_deviations: Range = (1.0, 2.0)
    blur_size: int = 3

    def __post_init__(self):
        super().__post_init__()
        validate.share(
            grey_probability=self.grey_probability,
            blur_probability=self.blur_probability,
        )
        validate.positive(blur_deviations=self.blur_deviations[0])
        _check_order(blur_deviations=self.blur_deviations)
        validate.whole(blur_size=self.blur_size, at_least=1)
        if self.blur_size % 2 == 0:
            validate.refuse("blur_size", self.blur_size, "must be odd")

    def _view(self, key: PRNGKeyArray, image: Image) -> View:
        jitter_key, grey_key, blur_key, crop_key = jax.random.split(key, 4)
        planes = self.jitter(jitter_key, colour.planes(image))
        planes = colour.random_grey(grey_key, planes, self.grey_probability)
        blurred = colour.random_blur(
            blur_key,
            colour.image_of(planes, image.dtype),
            self.blur_probability,
            self.blur_deviations,
            self.blur_size,
        )
        return super()._view(crop_key, blurred)

    def check(self, image_shape: tuple[int, ...]) -> None:
        """See `Augmentation.check`."""
        super().check(image_shape)
        self._check_colours(image_shape)
        if self.blur_size // 2 >= min(image_shape[:2]):
            rule = "must be less than twice the image's size"
            validate.refuse("blur_size", self.blur_size, rule)


KINDS: dict[str, type[Augmentation]] = {
    each.kind: each
    for each in (Unchanged, CropFlip, RandomResizedCrop, Tan, SimCLR, InceptionCrop)
}
"""Augmentations by their name in a recipe."""


def _row(numbers: np.ndarray) -> Float32[Array, "1 1 c"]:
    return jnp.asarray(numbers, jnp.float32)[None, None, :]


def _check_order(**ranges: Range) -> None:
    for name, (low, high) in ranges.items():
        if low > high:
            validate.refuse(name, (low, high), "must be (least, largest)")
