"""From an image to what a network was trained to see.

One object says all of it, in the order of events. It is saved with a model, and
training, evaluation, prediction and export use it:

1. An image is read: mode and size as `tanager.data.decoding` changes them.
2. Its view for evaluation is taken, where the network was trained on crops.
3. It is resized, cropped and standardised, as the network's pretraining did.

Images are resized as Pillow does it, to the last bit, so that a network sees what it
saw where it was trained. The second and third step work inside a jitted step, so that
the views of an augmentation can be resized too.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float32, UInt8

from tanager import _validate as validate
from tanager.data import crops
from tanager.data.augment import standardise
from tanager.data.datasets import check_constants
from tanager.data.given import read_image


def _keys(x: np.ndarray) -> np.ndarray:
    """Keys's cubic with a = −1/2."""
    x = np.abs(x)
    inner, outer = (1.5 * x - 2.5) * x * x + 1, ((-0.5 * x + 2.5) * x - 4) * x + 2
    return np.where(x < 1, inner, np.where(x < 2, outer, 0))


_FILTERS: dict[str, tuple[Callable[[np.ndarray], np.ndarray], float]] = {
    "bilinear": (lambda x: np.maximum(1 - np.abs(x), 0), 1.0),
    "bicubic": (_keys, 2.0),
    "lanczos": (
        lambda x: np.where(np.abs(x) < 3, np.sinc(x) * np.sinc(x / 3), 0),
        3.0,
    ),
}
"""Each filter of `INTERPOLATIONS`, and how far from 0 it reaches."""

INTERPOLATIONS = tuple(_FILTERS)
"""How pixels are interpolated: names of timm, and of Pillow's filters."""

_BITS = 22  # of a weight's fraction, as in Pillow's Resample.c


@dataclasses.dataclass(frozen=True, kw_only=True)
class Preprocessing:
    """Resize, crop and standardise one image, as a network's images were.

    `read` makes uint8 `[H, W, C]` of any image. Called with that, it returns float32
    `[h, w, c]`. The image is resized so that it covers the size divided by `crop`, and
    its middle is taken: as timm and torchvision evaluate. A grey image is repeated for
    a network that sees colours.

    Attributes:
        mean: one number per channel of the network, on the 0..1 scale.
        std: likewise, positive.
        size: (height, width) that the network sees; None for the image's own, whole.
        interpolation: one of `INTERPOLATIONS`.
        crop: share of each side that is kept, in (0, 1]; 1 keeps all of a square.
        squash: resize both sides to the size at once, whatever their ratio.
        read_shape: (height, width, channels) of every image that training read; None
            if that is not known.
        view: (height, width) of the view of such an image that is evaluated; None for
            all of it.
        view_by: how the view is taken, one of `crops.FIXED_VIEWS`.

    Raises:
        ValueError: a field is out of range; or, when called, not one uint8 image, or
            one with other channels or of a size that training never read.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    size: tuple[int, int] | None = None
    interpolation: str = "bicubic"
    crop: float = 1.0
    squash: bool = False
    read_shape: tuple[int, int, int] | None = None
    view: tuple[int, int] | None = None
    view_by: str = "crop"

    def __post_init__(self):
        check_constants(len(self.mean), self.mean, self.std)
        validate.one_of(crops.FIXED_VIEWS, view_by=self.view_by)
        for name in ("read_shape", "view"):
            for side in getattr(self, name) or ():
                validate.whole(**{name: side}, at_least=1)
        validate.one_of(INTERPOLATIONS, interpolation=self.interpolation)
        validate.share(crop=self.crop)
        validate.positive(crop=self.crop)
        if self.size is None:
            for name, value in (("crop", self.crop != 1), ("squash", self.squash)):
                if value:
                    remedy = f"give size=(height, width), or leave {name} out"
                    validate.refuse(name, getattr(self, name), "needs a size", remedy)
        else:
            validate.whole(height=self.size[0], width=self.size[1], at_least=1)

    def __call__(self, image: UInt8[Array, "H W C"]) -> Float32[Array, "h w c"]:
        """Return what the network sees of one image, of the size that was read."""
        shape = self.seen(image.shape)
        if image.dtype != jnp.uint8:
            validate.refuse("image dtype", str(image.dtype), "must be uint8")
        if self.read_shape and image.shape[:2] not in (self.read_shape[:2], self.view):
            remedy = "make it so with Preprocessing.read, outside of jax.jit"
            rule = f"must be {self.read_shape}, as training read it"
            validate.refuse("image shape", tuple(image.shape), rule, remedy)
        if self.view:
            image = crops.fixed_view(image, self.view, self.view_by)
        image = resize(image, self._before_crop(image.shape), self.interpolation)
        top, left = (
            round((whole - side) / 2)
            for whole, side in zip(image.shape, shape[:2], strict=False)
        )
        image = image[top : top + shape[0], left : left + shape[1]]
        return standardise(jnp.broadcast_to(image, shape), self.mean, self.std)

    def read(self, image: Any) -> UInt8[np.ndarray, "H W C"]:
        """Return an image as training read it: in mode, channels and size.

        Where `read_shape` is not known, the image is brought to the size that it is
        cropped from.

        Args:
            image: path or bytes of a file, a Pillow image, or an array, see
                `tanager.data.given`.

        Raises:
            ValueError: it cannot be read as an image.
        """
        return read_image(image, self.shape_read)

    @property
    def shape_read(self) -> tuple[int, int, int]:
        """The (height, width, channels) that `read` brings an image to."""
        if self.read_shape is not None:
            return self.read_shape
        if self.size is None:
            rule = "is needed to read images of any size"
            validate.refuse("size", None, rule, "give size=(height, width)")
        rows, columns = (math.floor(side / self.crop) for side in self.size)
        return rows, columns, len(self.mean)

    def seen(self, image_shape: tuple[int, ...]) -> tuple[int, int, int]:
        """Return (height, width, channels) of what the network sees of an image.

        Raises:
            ValueError: its shape is not [H, W, C] with the channels of the mean, or 1.
        """
        channels = len(self.mean)
        if len(image_shape) != 3 or image_shape[-1] not in (1, channels):
            validate.channels_last(image_shape)
            rule = f"must be (height, width, {channels})"
            validate.refuse("image shape", tuple(image_shape), rule)
        return (*(self.size or self.view or image_shape[:2]), channels)

    def _before_crop(self, image_shape: tuple[int, ...]) -> tuple[int, int]:
        height, width = image_shape[:2]
        if self.size is None:
            return height, width
        rows, columns = (math.floor(side / self.crop) for side in self.size)
        if self.squash:
            return rows, columns
        if rows == columns:  # torchvision's, of the shorter side
            short = min(height, width)
            return int(rows * height / short), int(rows * width / short)
        scale = max(rows / height, columns / width)
        return round(height * scale), round(width * scale)

    def to_json(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return dataclasses.asdict(self)


def resize(
    image: UInt8[Array, "H W C"], size: tuple[int, int], interpolation: str = "bicubic"
) -> UInt8[Array, "h w C"]:
    """Resize one image to (height, width) as Pillow does, to the last bit.

    Weights are whole multiples of 2⁻²², antialiased for a smaller image; columns come
    before rows, and levels are rounded after each (Resample.c of Pillow up to 12;
    Pillow 13 takes rows first where they shrink by more than columns do).
    """
    for axis in (1, 0):
        if size[axis] != image.shape[axis]:
            taps = _taps(image.shape[axis], size[axis], interpolation)
            positions, weights = map(jnp.asarray, taps)
            total = crops.mixed(image, axis, positions, weights)
            levels = lax.shift_right_arithmetic(total + (1 << (_BITS - 1)), _BITS)
            image = jnp.clip(levels, 0, 255).astype(jnp.uint8)
    return image


@functools.lru_cache(maxsize=64)
def _taps(before: int, after: int, interpolation: str) -> tuple[np.ndarray, np.ndarray]:
    """Return positions and whole weights of what each new row is mixed from.

    Both are int32[taps, after].
    """
    function, support = _FILTERS[interpolation]
    scale = before / after
    stretch = max(scale, 1.0)
    reach = support * stretch
    centre = (np.arange(after) + 0.5) * scale
    first = np.maximum((centre - reach + 0.5).astype(np.int64), 0)
    last = np.minimum((centre + reach + 0.5).astype(np.int64), before)
    positions = first + np.arange(int((last - first).max()))[:, None]
    weights = function((positions - centre + 0.5) / stretch)
    weights = np.where(positions < last, weights, 0)
    weights /= weights.sum(axis=0)
    whole = np.trunc(weights * (1 << _BITS) + np.copysign(0.5, weights))
    return np.minimum(positions, before - 1).astype(np.int32), whole.astype(np.int32)
