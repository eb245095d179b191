"""Normaliser-free networks F0 to F6 (NFNets), called on one image."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from tanager import _validate as validate
from tanager.models import layers, windows
from tanager.models.model import Model, check_image
from tanager.models.normaliser_free import (
    ALPHA,
    EPS,
    GELU_GAMMA,
    HEAD_DEVIATION,
    Place,
    convolution,
    places_of,
)


DEPTHS = {size: tuple((size + 1) * n for n in (1, 2, 6, 3)) for size in range(7)}
"""Blocks of each stage of F0 to F6 (Brock et al. 2021, arXiv:2102.06171, table 1)."""

IMPLEMENTATIONS: dict[str, dict[str, Any]] = {
    "deepmind": {},
    "timm": {"approximate_gelu": False, "eps": 1e-5},
}
"""The options of `NFNet` that compute what others compute.

- ``"deepmind"``: nothing to change. Brock et al.'s code (deepmind-research, nfnets) and
  the Unlocking paper's (jax_privacy, imagenet_nfnets.py).
- ``"timm"``: dm_nfnet_f0 … dm_nfnet_f6. Their published weights are DeepMind's, trained
  with the GELU and the eps of ``"deepmind"``: load them with those, unless timm's own
  logits are wanted.
"""

_WIDTHS = (256, 512, 1536, 1536)
_STEM_CHANNELS = (16, 32, 64, 128)
_STEM_STRIDES = (2, 1, 1, 2)
_GROUP_CHANNELS = 128
_FEATURES = 3072


def _gelu(image: Array, approximate: bool) -> Array:
    return jax.nn.gelu(image) if approximate else layers.gelu(image)


class SqueezeExcite(eqx.Module):
    """One factor between 0 and 2 for each channel, from the mean over all pixels.

    Shapes: ``[H, W, channels] -> [channels]`` through channels/2.

    References:
        Hu, Shen and Sun 2018, "Squeeze-and-excitation networks"; the factor of 2 as
        Brock et al. 2021, arXiv:2102.06171, appendix C.
    """

    squeeze: layers.Linear
    expand: layers.Linear

    def __init__(self, channels: int, *, key: PRNGKeyArray):
        squeeze_key, expand_key = jax.random.split(key)
        self.squeeze = layers.Linear(channels, channels // 2, key=squeeze_key)
        self.expand = layers.Linear(channels // 2, channels, key=expand_key)

    def __call__(self, image: Float[Array, "h w c"]) -> Float[Array, " c"]:
        hidden = jax.nn.relu(self.squeeze(jnp.mean(image, axis=(0, 1))))
        return 2 * jax.nn.sigmoid(self.expand(hidden))


class Block(eqx.Module):
    """Convolutions of 1×1, 3×3, 3×3 and 1×1, each after a GELU, on the residual branch.

    All but the last have half the channels that the block returns; the 3×3 convolutions
    work on groups of 128. The branch is multiplied by `attention` and `skip_gain`.
    Where the block changes the shape, the skip path is a 1×1 convolution, of the means
    of 2×2 pixels if it `halves`.
    """

    conv1: layers.StandardisedConv
    conv2: layers.StandardisedConv
    conv2b: layers.StandardisedConv
    conv3: layers.StandardisedConv
    attention: SqueezeExcite
    shortcut: layers.StandardisedConv | None
    skip_gain: Float[Array, ""]
    halves: bool = eqx.field(static=True)
    beta: float = eqx.field(static=True)
    approximate_gelu: bool = eqx.field(static=True)

    def __init__(
        self,
        place: Place,
        conv: Callable[..., layers.StandardisedConv],
        *,
        skip_gain: float,
        approximate_gelu: bool,
        key: PRNGKeyArray,
    ):
        keys = jax.random.split(key, 6)
        inner = place.channels_out // 2
        grouped = functools.partial(
            conv, inner, inner, 3, groups=inner // _GROUP_CHANNELS
        )
        self.conv1 = conv(place.channels_in, inner, 1, key=keys[0])
        self.conv2 = grouped(stride=place.stride, key=keys[1])
        self.conv2b = grouped(key=keys[2])
        self.conv3 = conv(inner, place.channels_out, 1, key=keys[3])
        self.attention = SqueezeExcite(place.channels_out, key=keys[4])
        self.shortcut = None
        if place.projects:
            self.shortcut = conv(place.channels_in, place.channels_out, 1, key=keys[5])
        self.skip_gain = jnp.asarray(skip_gain, jnp.float32)
        self.halves = place.stride > 1
        self.beta = place.beta
        self.approximate_gelu = approximate_gelu

    def __call__(self, image: Float[Array, "h w i"]) -> Float[Array, "h2 w2 o"]:
        def activate(image: Array, factor: float = GELU_GAMMA) -> Array:
            return _gelu(image, self.approximate_gelu) * factor

        active = activate(image, GELU_GAMMA * self.beta)
        if self.shortcut is not None:
            image = self.shortcut(windows.halve(active) if self.halves else active)
        residual = self.conv1(active)
        residual = self.conv2(activate(residual))
        residual = self.conv2b(activate(residual))
        residual = self.conv3(activate(residual))
        # The gain meets one number per channel here, not every pixel.
        gain = self.skip_gain.astype(image.dtype) * ALPHA
        factors = self.attention(residual) * gain
        return residual * factors[None, None, :] + image


class NFNet(Model):
    """NFNet for one image `[H, W, channels_in]`, giving logits.

    Four 3×3 convolutions to 16, 32, 64 and 128 channels, the first and the last at
    stride 2; four stages of blocks with 256, 512, 1536 and 1536 channels at strides 1,
    2, 2 and 2; a 1×1 convolution to 3072 channels; a last GELU; the mean over all
    pixels; one linear layer. All convolutions have standardised weights, a gain and a
    bias. No dropout, no stochastic depth.

    Args:
        depths: blocks of each stage, such as ``DEPTHS[3]`` for F3.
        skip_gain: initial value of every block's SkipInit gain. 0 as in Brock et al.:
            the residual branches, but for these gains, then have no gradient in the
            first step. The Unlocking paper starts at 1 where it trains NF-ResNets from
            scratch.
        approximate_gelu: GELU by tanh, as JAX has it by default, or exact.
        eps: of the standardised weights.

    References:
        Brock, De, Smith and Simonyan 2021, "High-performance large-scale image
        recognition without normalization", arXiv:2102.06171, section 4.
    """

    stem: tuple[layers.StandardisedConv, ...]
    blocks: tuple[Block, ...]
    last: layers.StandardisedConv
    head: layers.Linear
    channels_in: int = eqx.field(static=True)
    approximate_gelu: bool = eqx.field(static=True)

    def __init__(
        self,
        depths: Sequence[int],
        classes: int,
        channels_in: int = 3,
        *,
        skip_gain: float = 0.0,
        approximate_gelu: bool = True,
        eps: float = EPS,
        key: PRNGKeyArray,
    ):
        validate.whole(classes=classes, channels_in=channels_in, at_least=1)
        places = list(places_of(_STEM_CHANNELS[-1], depths, _WIDTHS))
        keys = jax.random.split(key, 6 + len(places))
        channels = (channels_in, *_STEM_CHANNELS)
        conv = convolution(eps)
        self.stem = tuple(
            conv(before, after, 3, stride=stride, key=stem_key)
            for before, after, stride, stem_key in zip(
                channels[:-1], channels[1:], _STEM_STRIDES, keys[:4], strict=True
            )
        )
        block = functools.partial(
            Block, conv=conv, skip_gain=skip_gain, approximate_gelu=approximate_gelu
        )
        self.blocks = tuple(
            block(place, key=block_key)
            for place, block_key in zip(places, keys[6:], strict=True)
        )
        self.last = conv(_WIDTHS[-1], _FEATURES, 1, key=keys[4])
        self.head = layers.Linear(
            _FEATURES, classes, deviation=HEAD_DEVIATION, key=keys[5]
        )
        self.channels_in = channels_in
        self.approximate_gelu = approximate_gelu

    def features(self, image: Array) -> Float[Array, " features"]:
        check_image(image, self.channels_in)
        first, *others = self.stem
        image = first(image)
        for conv in others:
            image = conv(_gelu(image, self.approximate_gelu) * GELU_GAMMA)
        for block in self.blocks:
            image = block(image)
        image = _gelu(self.last(image), self.approximate_gelu)
        return jnp.mean(image, axis=(0, 1)) * GELU_GAMMA
