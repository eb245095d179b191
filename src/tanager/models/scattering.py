"""Wavelet scattering: features that no image was needed to find.

Morlet wavelets of two scales and eight angles split an image; the moduli of the fine
scale are split once more by the coarse one; everything is averaged over about four
pixels. Nothing is learned, so the features cost no privacy, and a small network on them
needs few updates.

References:
    Bruna and Mallat 2013, "Invariant scattering convolution networks"; filters and
    order of features as in Kymatio 0.3 with J = 2 and L = 8 (Andreux et al. 2020,
    "Kymatio: scattering transforms in Python"); networks like those of Tramèr and Boneh
    2021, "Differentially private learning needs better features (or much more data)".
"""

import functools
import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from tanager import _validate as validate
from tanager.models import layers, windows
from tanager.models.model import FixedFront, StagedModel, check_image, check_sides


PATHS = 81
"""Features of one channel: an average, 2·8 moduli, and 8·8 moduli of moduli."""

_SCALES = 2
_ANGLES = 8
_STRIDE = 2**_SCALES
_CHANNELS = 64
_EPS = 1e-5


def _random() -> tuple[np.ndarray, np.ndarray]:
    """Return the mean and deviation of each feature over random images.

    These are Gaussian, of variance 1 and a 1/f spectrum, which photographs have, too.
    Of moduli of moduli they depend on the angle between the two wavelets.
    """
    angles = np.arange(_ANGLES)
    apart = np.abs(angles[:, None] - angles)
    apart = np.minimum(apart, _ANGLES - apart).ravel()
    second = (
        (0.0154, 0.0138, 0.0110, 0.0092, 0.0087),
        (65e-4, 55e-4, 44e-4, 37e-4, 36e-4),
    )
    first = ((0.0, 0.127, 0.124), (0.73, 0.031, 0.046))
    means, deviations = (
        np.concatenate([np.repeat(one, (1, _ANGLES, _ANGLES)), np.take(two, apart)])
        for one, two in zip(first, second, strict=True)
    )
    return means.astype(np.float32), deviations.astype(np.float32)


_RANDOM = _random()


class Scattering(StagedModel):
    """What the networks on scattering features share: the features, normalised."""

    image_shape: eqx.AbstractVar[tuple[int, int, int]]

    def front(self, image: Array) -> Float[Array, "h2 w2 f"]:
        check_image(image, self.image_shape[2], self.image_shape)
        return normalise(scatter(image))


class ScatteringLinear(FixedFront, Scattering):
    """One linear layer on normalised scattering features.

    Args:
        image_shape: (height, width, channels), each side at least 8.
    """

    head: layers.Linear
    image_shape: tuple[int, int, int] = eqx.field(static=True)

    def __init__(
        self, classes: int, image_shape: tuple[int, int, int], *, key: PRNGKeyArray
    ):
        height, width, planes = _features_shape(image_shape, classes)
        self.head = layers.Linear(height * width * planes, classes, key=key)
        self.image_shape = image_shape


class ScatteringCNN(Scattering):
    """Two 3×3 convolutions with tanh and a linear layer on scattering features.

    64 channels each, with a 2×2 maximum between them; 187 210 parameters on CIFAR-10.

    Args:
        image_shape: (height, width, channels), each side at least 8.
    """

    convs: tuple[layers.Conv, layers.Conv]
    head: layers.Linear
    image_shape: tuple[int, int, int] = eqx.field(static=True)

    def __init__(
        self, classes: int, image_shape: tuple[int, int, int], *, key: PRNGKeyArray
    ):
        height, width, planes = _features_shape(image_shape, classes)
        one, two, three = jax.random.split(key, 3)
        self.convs = (
            layers.Conv(planes, _CHANNELS, 3, padding=1, bias=True, key=one),
            layers.Conv(_CHANNELS, _CHANNELS, 3, padding=1, bias=True, key=two),
        )
        positions = (height // 2) * (width // 2)
        self.head = layers.Linear(positions * _CHANNELS, classes, key=three)
        self.image_shape = image_shape

    @property
    def last_stage(self) -> PyTree:
        return self.convs

    def back(self, seen: Array) -> Float[Array, " features"]:
        first, second = self.convs
        values = jnp.tanh(first(seen))
        values = windows.max_pool(values, 2, stride=2, padding="VALID")
        return jnp.tanh(second(values)).reshape(-1)


def _features_shape(
    image_shape: tuple[int, int, int], classes: int
) -> tuple[int, int, int]:
    """Return the shape of the features of one image; refuse impossible sizes."""
    why = "scattering makes a quarter of them"
    height, width, channels = check_sides(image_shape, 8, why)
    validate.whole(classes=classes, at_least=1)
    return height // _STRIDE, width // _STRIDE, PATHS * channels


def normalise(features: Float[Array, "h w f"]) -> Float[Array, "h w f"]:
    """Bring the features of one image to one scale, without parameters.

    First each by its mean and deviation over random images, then those of each channel
    of the image together to mean 0 and variance 1.
    """
    height, width, _ = features.shape
    values = features.reshape(height, width, -1, PATHS).astype(jnp.float32)
    means, deviations = (moments[None, None, None] for moments in _RANDOM)
    values = (values - means) / deviations
    mean = jnp.mean(values, (0, 1, 3), keepdims=True)
    variance = jnp.var(values, (0, 1, 3), keepdims=True)
    values = (values - mean) * lax.rsqrt(variance + _EPS)
    return values.reshape(features.shape).astype(features.dtype)


def scatter(image: Float[Array, "h w c"]) -> Float[Array, "h2 w2 f"]:
    """Compute the scattering features of one image.

    Shapes: ``[H, W, C] -> [H // 4, W // 4, 81·C]``, in the image's dtype; the features
    of one channel are consecutive. H and W are at least 8.
    """
    shape = image.shape[:2]
    planes = jnp.moveaxis(image.astype(jnp.float32), -1, 0)
    margins = [divmod(_padded(side) - side, 2) for side in shape]
    edges = [(half, half + odd) for half, odd in margins]
    planes = jnp.pad(planes, [(0, 0), *edges], mode="reflect")
    fine, coarse = _wavelets(shape)

    def moduli(spectra: Array, filters: np.ndarray, step: int) -> Array:
        filters = np.expand_dims(filters, tuple(range(spectra.ndim - 2)))
        split = spectra[..., None, :, :] * filters
        *front, rows, columns = split.shape
        folded = split.reshape(*front, step, rows // step, step, columns // step)
        return jnp.abs(jnp.fft.ifft2(jnp.mean(folded, (-4, -2))))

    def average(planes: Array, step: int) -> Array:
        down, across = (_averages(side, step) for side in shape)
        averaged = jnp.einsum(
            "hr,...rc,wc->...hw", down, planes, across, precision=lax.Precision.HIGHEST
        )
        return averaged.reshape(image.shape[2], -1, *averaged.shape[-2:])

    spectra = jnp.fft.fft2(planes)
    first = moduli(spectra, fine, 1)
    features = [
        average(planes, 1),
        average(first, 1),
        average(moduli(spectra, coarse, 2), 2),
        average(moduli(jnp.fft.fft2(first), coarse, 2), 2),
    ]
    joined = jnp.concatenate(features, axis=1)
    joined = joined.reshape(-1, *joined.shape[-2:])
    return jnp.moveaxis(joined, 0, -1).astype(image.dtype)


def _padded(side: int) -> int:
    return (side // _STRIDE + 2) * _STRIDE


@functools.cache
def _wavelets(shape: tuple[int, int]) -> np.ndarray:
    """Return the wavelets' Fourier transforms, complex64 ``[2, 8, H', W']``."""
    found = [
        _morlet(shape, scale, (_ANGLES // 2 - 1 - angle) * math.pi / _ANGLES)
        for scale in range(_SCALES)
        for angle in range(_ANGLES)
    ]
    stacked = np.stack(found).astype(np.complex64)
    return stacked.reshape(_SCALES, _ANGLES, *stacked.shape[1:])


def _morlet(shape: tuple[int, int], scale: int, angle: float) -> np.ndarray:
    """Return the transform of a Gaussian times a wave along an angle, of mean zero."""
    height, width = map(_padded, shape)
    rows = np.arange(-2.0 * height, 3 * height)[:, None]
    columns = np.arange(-2.0 * width, 3 * width)[None, :]
    along = math.cos(angle) * rows + math.sin(angle) * columns
    across = math.cos(angle) * columns - math.sin(angle) * rows
    deviation, slant = 0.8 * 2**scale, 4 / _ANGLES
    envelope = np.exp(-(along**2 + (slant * across) ** 2) / (2 * deviation**2))
    wave = envelope * np.exp(0.75j * math.pi / 2**scale * along)
    envelope, wave = (
        values.reshape(5, height, 5, width).sum((0, 2)) for values in (envelope, wave)
    )
    wave = wave - wave.sum() / envelope.sum() * envelope
    return np.real(np.fft.fft2(wave)) * slant / (2 * math.pi * deviation**2)


@functools.cache
def _averages(side: int, step: int) -> np.ndarray:
    """Return the matrix from every `step`-th pixel of a line to its local averages.

    float32 ``[side // 4, padded // step]``: a Gaussian around every fourth pixel.
    """
    padded = _padded(side)
    deviation = 0.8 * 2 ** (_SCALES - 1)
    places = np.arange(-2 * padded, 3 * padded)
    line = np.exp(-(places**2) / (2 * deviation**2)).reshape(5, padded).sum(0)
    spectrum = np.real(np.fft.fft(line)) / (math.sqrt(2 * math.pi) * deviation)
    length = padded // step
    if step > 1:
        spectrum[length // 2 : padded - length // 2] = 0
        spectrum = spectrum.reshape(step, length).sum(0)
    kernel = np.real(np.fft.ifft(spectrum))
    centres = np.arange(_STRIDE, padded - _STRIDE, _STRIDE) // step
    return kernel[(centres[:, None] - np.arange(length)) % length].astype(np.float32)
