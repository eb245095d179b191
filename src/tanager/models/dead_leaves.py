"""Patches of dead leaves: features that no photograph was needed to find.

Dead leaves are opaque shapes of random places, sizes and colours, drawn over each
other. Their edges and shading are like those of photographs. Random patches of them,
whitened, are the filters of one convolution. What passes a threshold is averaged over
the four quarters of an image, and whitened by the covariance it has over dead leaves.
All of this is drawn from a seed by `tools/dead_leaves.py`, so it costs no privacy.

References:
    Lee, Mumford and Huang 2001, "Occlusion models for natural images"; Coates, Lee and
    Ng 2011, "An analysis of single-layer networks in unsupervised feature learning":
    whitened patches and quarters; Coates and Ng 2011, "The importance of encoding
    versus training": random patches and a soft threshold; Baradad et al. 2021,
    "Learning to see by looking at noise", and Tang et al. 2023, "Differentially private
    image classification by learning priors from random processes".
"""

import functools
from pathlib import Path
from typing import NamedTuple

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, PRNGKeyArray

from tanager import _validate as validate
from tanager.models import layers
from tanager.models.model import FixedFront, check_image, check_sides


FILE = Path(__file__).with_name("dead_leaves.npz")
SIDE = 6
"""Pixels per side of a patch."""
QUARTERS = 4
THRESHOLD = 1.0
FLOOR = 0.0025
"""Added to the variance of a patch, where that of all pixels is about 1."""
_AT_ONCE = 200
"""Filters whose responses are in memory at once."""


class Constants(NamedTuple):
    """What `tools/dead_leaves.py` found.

    Attributes:
        filters: float32 [6, 6, 3, K].
        mean: float32 [2K], of the averages of `pooled` over dead leaves.
        deviation: float32 [2K], likewise.
        whitening: float32 [2K, components].
    """

    filters: np.ndarray
    mean: np.ndarray
    deviation: np.ndarray
    whitening: np.ndarray


@functools.cache
def constants() -> Constants:
    """Read the file of this package."""
    with np.load(FILE) as file:
        return Constants(*(file[name].astype(np.float32) for name in Constants._fields))


class DeadLeavesLinear(FixedFront):
    """One linear layer on whitened responses to random patches of dead leaves.

    Args:
        image_shape: (height, width, channels), each side at least 8, with one channel
            or three.
    """

    head: layers.Linear
    image_shape: tuple[int, int, int] = eqx.field(static=True)

    def __init__(
        self, classes: int, image_shape: tuple[int, int, int], *, key: PRNGKeyArray
    ):
        check_sides(image_shape, 8, "patches are of 6 × 6 pixels")
        if image_shape[2] not in (1, 3):
            validate.refuse("image_channels", image_shape[2], "must be 1 or 3")
        validate.whole(classes=classes, at_least=1)
        features = QUARTERS * constants().whitening.shape[1]
        self.head = layers.Linear(features, classes, key=key)
        self.image_shape = image_shape

    def front(self, image: Array) -> Float[Array, "4 f"]:
        check_image(image, self.image_shape[2], self.image_shape)
        found = constants()
        return whitened(pooled(image, found.filters), found).astype(image.dtype)


def pooled(
    image: Float[Array, "h w c"], filters: Float[Array | np.ndarray, "6 6 3 k"]
) -> Float[Array, "4 k2"]:
    """Average what each quarter of an image answers to filters and to their negatives.

    Each patch has its mean subtracted and is divided by its deviation. A grey image is
    repeated for three channels.

    Shapes: ``[H, W, C], [6, 6, 3, K] -> [4, 2·K]``, float32.
    """
    pixels = image.astype(jnp.float32)
    pixels = jnp.broadcast_to(pixels, (*image.shape[:2], filters.shape[2]))
    pixels = pixels - jnp.mean(pixels)  # exact variances: smaller squares

    def answers(values: Array, kernels: Array) -> Array:
        found = lax.conv_general_dilated(
            values[None],
            kernels,
            window_strides=(1, 1),
            padding="VALID",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            precision=lax.Precision.HIGHEST,
        )
        return found[0]

    share = jnp.full((*filters.shape[:3], 1), 1 / np.prod(filters.shape[:3]))
    mean, square = (answers(values, share) for values in (pixels, pixels**2))
    variance = jnp.maximum(square - mean**2, 0)
    scale = lax.rsqrt(variance + FLOOR)
    rows, columns = ((side + 1) // 2 for side in mean.shape[:2])
    halves = [(slice(0, half), slice(-half, None)) for half in (rows, columns)]

    def quarters(kernels: Array) -> Array:
        found = answers(pixels, kernels) * scale
        signs = [jnp.maximum(sign * found - THRESHOLD, 0) for sign in (1, -1)]
        means = [
            [jnp.mean(one[top, left], (0, 1)) for one in signs]
            for top in halves[0]
            for left in halves[1]
        ]
        return jnp.array(means)

    count = filters.shape[3]
    at_once = _AT_ONCE if count % _AT_ONCE == 0 else count
    parts = filters.reshape(*filters.shape[:3], -1, at_once)
    found = lax.map(quarters, jnp.moveaxis(parts, 3, 0))
    return jnp.moveaxis(found, 0, 2).reshape(QUARTERS, 2 * count)


def whitened(answers: Float[Array, "4 k2"], by: Constants) -> Float[Array, "4 f"]:
    """Standardise the averages of one image, scale them to norm 1, and whiten them."""
    values = (answers - by.mean[None]) / by.deviation[None]
    values = values / jnp.maximum(jnp.sqrt(jnp.sum(values**2)), 1e-12)
    return jnp.matmul(values, by.whitening, precision=lax.Precision.HIGHEST)
