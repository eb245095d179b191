"""Normaliser-free residual networks (NF-ResNets), called on one image."""

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
    HEAD_DEVIATION,
    RELU_GAMMA,
    Place,
    convolution,
    places_of,
)


DEPTHS = {
    50: (3, 4, 6, 3),
    101: (3, 4, 23, 3),
    152: (3, 8, 36, 3),
    200: (3, 24, 36, 3),
}
"""Blocks of each stage, by the number of convolutions on the longest path: those of He
et al. 2016, "Deep residual learning" and "Identity mappings", table 1 of each."""

SHORTCUTS = ("strided", "average-pool")
"""How a skip path that is convolved halves the image: by the stride of its 1×1
convolution, or by the mean of each 2×2 pixels before it."""

IMPLEMENTATIONS: dict[str, dict[str, Any]] = {
    "deepmind": {},
    "timm": {
        "skip_gain": None,
        "shortcut": "average-pool",
        "padding": "SYMMETRIC",
        "eps": 1e-5,
    },
    "tan": {"shortcut": "average-pool", "padding": "SYMMETRIC", "gamma": 1.0},
}
"""The options of `NFResNet` that build what others train.

- ``"deepmind"``: nothing to change. Brock et al.'s code (deepmind-research, nfnets),
  and the Unlocking paper's (jax_privacy, imagenet_nfresnets.py and its configuration
  for ImageNet, which starts the skip gains at 1).
- ``"timm"``: nf_resnet50 and nf_resnet101, whose published weights need all of this.
- ``"tan"``: the TAN paper's (facebookresearch/tan, src/models/NFnet.py) on top of timm:
  skip gains from 1, and convolutions of its own that leave out γ. Its variances are
  n/(n − 1) of ours.
"""

_WIDTHS = (256, 512, 1024, 2048)
_STEM_CHANNELS = 64


class Block(eqx.Module):
    """Convolutions of 1×1, 3×3 and 1×1, each after a ReLU, on the residual branch.

    The first two have a quarter of the channels that the block returns. Where the block
    changes the shape, the skip path is a 1×1 convolution, of the means of 2×2 pixels if
    it `halves`.
    """

    conv1: layers.StandardisedConv
    conv2: layers.StandardisedConv
    conv3: layers.StandardisedConv
    shortcut: layers.StandardisedConv | None
    skip_gain: Float[Array, ""] | None
    halves: bool = eqx.field(static=True)
    beta: float = eqx.field(static=True)
    gamma: float = eqx.field(static=True)

    def __init__(
        self,
        place: Place,
        conv: Callable[..., layers.StandardisedConv],
        *,
        skip_gain: float | None,
        shortcut: str,
        gamma: float,
        key: PRNGKeyArray,
    ):
        keys = jax.random.split(key, 4)
        inner = place.channels_out // 4
        self.conv1 = conv(place.channels_in, inner, 1, key=keys[0])
        self.conv2 = conv(inner, inner, 3, stride=place.stride, key=keys[1])
        self.conv3 = conv(inner, place.channels_out, 1, key=keys[2])
        self.halves = shortcut == "average-pool" and place.stride > 1
        self.shortcut = None
        if place.projects:
            stride = 1 if self.halves else place.stride
            self.shortcut = conv(
                place.channels_in, place.channels_out, 1, stride=stride, key=keys[3]
            )
        self.skip_gain = None
        if skip_gain is not None:
            self.skip_gain = jnp.asarray(skip_gain, jnp.float32)
        self.beta = place.beta
        self.gamma = gamma

    def __call__(self, image: Float[Array, "h w i"]) -> Float[Array, "h2 w2 o"]:
        active = jax.nn.relu(image) * (self.gamma * self.beta)
        if self.shortcut is not None:
            image = self.shortcut(windows.halve(active) if self.halves else active)
        residual = self.conv1(active)
        residual = self.conv2(jax.nn.relu(residual) * self.gamma)
        residual = self.conv3(jax.nn.relu(residual) * self.gamma)
        if self.skip_gain is None:
            return residual * ALPHA + image
        return residual * (self.skip_gain.astype(image.dtype) * ALPHA) + image


class NFResNet(Model):
    """Normaliser-free ResNet for one image `[H, W, channels_in]`, giving logits.

    A 7×7 convolution to 64 channels and a 3×3 maximum, both at stride 2; four stages of
    bottleneck blocks with 256, 512, 1024 and 2048 channels at strides 1, 2, 2 and 2; a
    last ReLU; the mean over all pixels; one linear layer. All convolutions have
    standardised weights, a gain and a bias. No dropout, no stochastic depth.

    Args:
        depths: blocks of each stage, such as ``DEPTHS[50]``.
        skip_gain: initial value of every block's SkipInit gain. 1 as in the Unlocking
            paper, appendix C.1, which trains from scratch with DP-SGD so; Brock et al.
            start at 0. None for no such parameters.
        shortcut: one of `SHORTCUTS`.
        padding: of every convolution and of the maximum: ``"SAME"`` or ``"SYMMETRIC"``,
            see `windows.Padding`.
        gamma: γ, what every ReLU is multiplied by.
        eps: of the standardised weights.

    References:
        Brock, De and Smith 2021, "Characterizing signal propagation to close the
        performance gap in unnormalized ResNets", arXiv:2101.08692. SkipInit: De and
        Smith 2020, "Batch normalization biases residual blocks towards the identity
        function in deep networks".
    """

    stem: layers.StandardisedConv
    blocks: tuple[Block, ...]
    head: layers.Linear
    channels_in: int = eqx.field(static=True)
    shortcut: str = eqx.field(static=True)
    padding: windows.Padding = eqx.field(static=True)
    gamma: float = eqx.field(static=True)
    eps: float = eqx.field(static=True)

    def __init__(
        self,
        depths: Sequence[int],
        classes: int,
        channels_in: int = 3,
        *,
        skip_gain: float | None = 1.0,
        shortcut: str = "strided",
        padding: str = "SAME",
        gamma: float = RELU_GAMMA,
        eps: float = EPS,
        key: PRNGKeyArray,
    ):
        validate.whole(classes=classes, channels_in=channels_in, at_least=1)
        validate.one_of(SHORTCUTS, shortcut=shortcut)
        validate.one_of(("SAME", "SYMMETRIC"), padding=padding)
        validate.positive(gamma=gamma)
        places = list(places_of(_STEM_CHANNELS, depths, _WIDTHS))
        stem_key, head_key, *block_keys = jax.random.split(key, 2 + len(places))
        conv = convolution(eps, padding=padding)
        self.stem = conv(channels_in, _STEM_CHANNELS, 7, stride=2, key=stem_key)
        block = functools.partial(
            Block, conv=conv, skip_gain=skip_gain, shortcut=shortcut, gamma=gamma
        )
        self.blocks = tuple(
            block(place, key=block_key)
            for place, block_key in zip(places, block_keys, strict=True)
        )
        self.head = layers.Linear(
            _WIDTHS[-1], classes, deviation=HEAD_DEVIATION, key=head_key
        )
        self.channels_in = channels_in
        self.shortcut = shortcut
        self.padding = padding
        self.gamma = gamma
        self.eps = eps

    def features(self, image: Array) -> Float[Array, " features"]:
        check_image(image, self.channels_in)
        image = self.stem(image)
        image = windows.max_pool(image, 3, stride=2, padding=self.padding)
        for block in self.blocks:
            image = block(image)
        return jnp.mean(jax.nn.relu(image), axis=(0, 1)) * self.gamma
