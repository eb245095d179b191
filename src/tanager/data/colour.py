"""Colours changed at random: jitter, grey and blur, as torchvision defines them.

Colours are changed in planes, [C, H, W] on the 0..1 scale, float32 or wider, so that
processors work on many pixels of one channel at once; `planes` and `image_of` convert.
The reference rounds uint8 images after every operation; here planes never are.

References:
    torchvision's ``ColorJitter``, ``RandomGrayscale`` and ``GaussianBlur``; Chen et al.
    2020, "A simple framework for contrastive learning of visual representations",
    appendix A.
"""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, PRNGKeyArray

from tanager import _validate as validate
from tanager.data.crops import Range, View, mixed, rounded_to, working_dtype


Colours = Float[Array, "3 h w"]
_LUMA = (0.299, 0.587, 0.114)  # ITU-R 601-2, as in Pillow
_BRIGHTNESS, _CONTRAST, _SATURATION, _NOTHING, _HUE = range(5)


def _schedules() -> np.ndarray:
    """The 24 orders of four changes, as three blends before the hue and three after."""
    rows = np.full((24, 2, 3), _NOTHING, np.int32)
    changes = (_BRIGHTNESS, _CONTRAST, _SATURATION, _HUE)
    for row, order in zip(rows, itertools.permutations(changes), strict=True):
        turn = order.index(_HUE)
        row[0, :turn], row[1, : 3 - turn] = order[:turn], order[turn + 1 :]
    return rows.reshape(24, 6)


_SCHEDULES = _schedules()


def planes(image: View) -> Float[Array, "c h w"]:
    """Return a uint8 image, or a float one on the 0..1 scale, as planes."""
    values = jnp.moveaxis(image, 2, 0).astype(working_dtype(image.dtype))
    return values / 255 if image.dtype == jnp.uint8 else values


def image_of(planes: Float[Array, "c h w"], dtype: np.dtype) -> View:
    """Return planes as an image of `dtype`: uint8, rounded to nearest, or a float."""
    values = 255 * planes if dtype == jnp.uint8 else planes
    return jnp.moveaxis(rounded_to(values, dtype), 0, 2)


def grey(planes: Colours) -> Float[Array, "1 h w"]:
    """Return 0.299 R + 0.587 G + 0.114 B of each pixel."""
    red, green, blue = jnp.split(planes, 3)
    return _LUMA[0] * red + _LUMA[1] * green + _LUMA[2] * blue


def rotate_hue(planes: Colours, turn: Float[Array, ""]) -> Colours:
    """Return the colours with their hue in HSV moved by `turn` of a whole circle."""
    red, green, blue = planes
    value = jnp.maximum(jnp.maximum(red, green), blue)
    chroma = value - jnp.minimum(jnp.minimum(red, green), blue)
    divisor = jnp.where(chroma > 0, chroma, 1)
    sixth = jnp.where(
        value == red,
        (green - blue) / divisor,
        jnp.where(
            value == green, 2 + (blue - red) / divisor, 4 + (red - green) / divisor
        ),
    )
    sixth += 6 * turn

    def channel(offset: int) -> Array:
        place = (offset + sixth) / 6
        place = 6 * (place - jnp.floor(place))
        return value - chroma * jnp.clip(jnp.minimum(place, 4 - place), 0, 1)

    return jnp.stack([channel(5), channel(3), channel(1)])


def gaussian_blur(image: View, deviation: Float[Array, ""], size: int) -> View:
    """Return the image convolved with a normalised Gaussian cut to `size` pixels.

    Edges are mirrored without repeating the edge pixel. `size` is odd, and less than
    twice the image's size.
    """
    dtype = working_dtype(image.dtype)
    steps = np.arange(size) - size // 2
    weights = jnp.exp(-0.5 * (steps.astype(dtype) / deviation.astype(dtype)) ** 2)
    weights /= jnp.sum(weights)
    blurred = image
    for axis in (0, 1):
        last = image.shape[axis] - 1
        positions = np.abs(steps[:, None] + np.arange(last + 1)[None, :])
        positions = jnp.asarray(last - np.abs(last - positions), jnp.int32)
        each = jnp.broadcast_to(weights[:, None], positions.shape)
        blurred = mixed(blurred, axis, positions, each)
    return rounded_to(blurred, image.dtype)


def jitter(
    planes: Colours,
    schedule: Int[Array, ""],
    factors: Float[Array, "3"],
    turn: Float[Array, ""],
) -> Colours:
    """Return the planes with brightness, contrast, saturation and hue changed.

    Each of the first three is a blend, clip(f·x + (1 − f)·other, 0, 1), with black,
    with the mean of the grey image, or with the grey image. For the contrast, the mean
    is taken after the changes before it. `schedule` is one of the 24 orders, `factors`
    are the three f, and `turn` is of the hue, in whole circles.
    """
    changes = jnp.asarray(_SCHEDULES)[schedule]
    blends = jnp.append(factors, jnp.ones(1, factors.dtype))[changes]
    blends = blends.astype(planes.dtype)

    def blend(place: Array, planes: Array) -> Array:
        change, factor = changes[place], blends[place]
        light = grey(planes)
        other = jnp.where(change == _CONTRAST, jnp.mean(light), light)
        other = jnp.where((change == _BRIGHTNESS) | (change == _NOTHING), 0, other)
        return jnp.clip(factor * planes + (1 - factor) * other, 0, 1)

    # Loops, because XLA repeats the work of earlier blends in each later one otherwise.
    planes = lax.fori_loop(0, 3, blend, planes)
    planes = rotate_hue(planes, turn.astype(planes.dtype))
    return lax.fori_loop(3, 6, blend, planes)


@dataclasses.dataclass(frozen=True)
class ColourJitter:
    """Brightness, contrast, saturation and hue changed at random, in random order.

    Called with a key and planes of three channels. The factors of the first three are
    uniform in [max(0, 1 − b), 1 + b], the turn of the hue is uniform in [−h, h], with h
    at most 0.5, and the 24 orders are equally likely. `probability` is that of any
    change.
    """

    brightness: float
    contrast: float
    saturation: float
    hue: float
    probability: float = 1.0

    def __post_init__(self):
        validate.not_negative(
            brightness=self.brightness,
            contrast=self.contrast,
            saturation=self.saturation,
            hue=self.hue,
        )
        if self.hue > 0.5:
            validate.refuse("hue", self.hue, "must be at most 0.5, half a circle")
        validate.share(probability=self.probability)

    def __call__(self, key: PRNGKeyArray, planes: Colours) -> Colours:
        """Return the planes, changed with the given probability."""
        strengths = np.array([self.brightness, self.contrast, self.saturation])
        low = np.array([*np.maximum(1 - strengths, 0), -self.hue, 0, 0])
        high = np.array([*(1 + strengths), self.hue, len(_SCHEDULES), 1])
        # One call for all numbers: each is slow to compile.
        draws = jax.random.uniform(key, (6,), jnp.float32)
        draws = jnp.float32(low) + jnp.float32(high - low) * draws
        schedule = jnp.floor(draws[4]).astype(jnp.int32)
        changed = jitter(planes, schedule, draws[:3], draws[3])
        return jnp.where(draws[5] < self.probability, changed, planes)


def random_grey(key: PRNGKeyArray, planes: Colours, probability: float) -> Colours:
    """Return the planes, all three replaced by the grey image with `probability`."""
    changed = jnp.broadcast_to(grey(planes), planes.shape)
    return jnp.where(jax.random.bernoulli(key, probability), changed, planes)


def random_blur(
    key: PRNGKeyArray, image: View, probability: float, deviations: Range, size: int
) -> View:
    """Return the image, blurred with `probability` by a deviation uniform in bounds."""
    whether, where = jax.random.uniform(key, (2,), jnp.float32)
    deviation = deviations[0] + (deviations[1] - deviations[0]) * where
    changed = gaussian_blur(image, deviation, size)
    return jnp.where(whether < probability, changed, image)
