"""Residual networks with group norm, called on one image.

The structure is that of timm's `resnet50_gn`, so that its weights fit: the networks of
He et al. 2016 with the stride on the 3×3 convolution of a bottleneck ("v1.5"), and
group norm in the place of batch norm.
"""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from tanager import _validate as validate
from tanager.models import layers, windows


class Variant(NamedTuple):
    """The size of a residual network.

    Attributes:
        blocks: number of blocks of each stage.
        bottleneck: whether a block is 1×1, 3×3, 1×1 convolutions, the last to four
            times the channels; else two of 3×3.
    """

    blocks: tuple[int, ...]
    bottleneck: bool


VARIANTS = {
    "18": Variant((2, 2, 2, 2), bottleneck=False),
    "50": Variant((3, 4, 6, 3), bottleneck=True),
}
"""By depth: He et al. 2016, "Deep residual learning for image recognition", table 1."""

_STEM_CHANNELS = 64
_GROUPS = 32
_EXPANSION = 4


def _conv(
    channels_in: int,
    channels_out: int,
    kernel_size: int,
    *,
    stride: int = 1,
    key: PRNGKeyArray,
) -> layers.Conv:
    side = (kernel_size // 2, kernel_size // 2)
    return layers.Conv(
        channels_in,
        channels_out,
        kernel_size,
        stride=stride,
        padding=(side, side),
        key=key,
    )


class Block(eqx.Module):
    """Convolutions, each followed by its norm, plus the skip path; ReLU between all.

    The skip path carries the input untouched. Where the block changes the shape, it
    carries a 1×1 convolution of the input and its norm instead.
    """

    convs: tuple[layers.Conv, ...]
    norms: tuple[layers.GroupNorm, ...]
    shortcut: layers.Conv | None
    shortcut_norm: layers.GroupNorm | None

    def __init__(
        self,
        channels_in: int,
        width: int,
        *,
        stride: int,
        bottleneck: bool,
        key: PRNGKeyArray,
    ):
        keys = jax.random.split(key, 4)
        if bottleneck:
            channels_out = _EXPANSION * width
            self.convs = (
                _conv(channels_in, width, 1, key=keys[0]),
                _conv(width, width, 3, stride=stride, key=keys[1]),
                _conv(width, channels_out, 1, key=keys[2]),
            )
        else:
            channels_out = width
            self.convs = (
                _conv(channels_in, width, 3, stride=stride, key=keys[0]),
                _conv(width, width, 3, key=keys[1]),
            )
        self.norms = tuple(
            layers.GroupNorm(conv.weight.shape[-1], _GROUPS) for conv in self.convs
        )
        self.shortcut = self.shortcut_norm = None
        if stride != 1 or channels_in != channels_out:
            self.shortcut = _conv(
                channels_in, channels_out, 1, stride=stride, key=keys[3]
            )
            self.shortcut_norm = layers.GroupNorm(channels_out, _GROUPS)

    def __call__(self, image: Float[Array, "h w i"]) -> Float[Array, "h2 w2 o"]:
        """Return skip path plus residual branch, after a last ReLU."""
        skip = image
        if self.shortcut is not None and self.shortcut_norm is not None:
            skip = self.shortcut_norm(self.shortcut(image))
        residual = self.norms[0](self.convs[0](image))
        for conv, norm in zip(self.convs[1:], self.norms[1:], strict=True):
            residual = norm(conv(jax.nn.relu(residual)))
        return jax.nn.relu(skip + residual)


class ResNet(eqx.Module):
    """ResNet with group norm for one image `[H, W, channels_in]`, giving logits.

    A 7×7 convolution to 64 channels at stride 2, norm, ReLU, a 3×3 maximum at stride 2;
    four stages of width 64, 128, 256 and 512, all but the first at stride 2; the mean
    over all pixels; one linear layer. Convolutions have no bias; norms have 32 groups.

    Attributes:
        stem, norm, stages, head: the parts, in this order.
        channels_in: channels of the image.

    Args:
        variant: blocks and their kind, such as ``VARIANTS["50"]``.
        classes: number of logits.
        channels_in: channels of the image.
        key: JAX key of the initial weights.

    Raises:
        ValueError: a size is not a whole number of at least 1, or, when called, what
            is not one floating-point image with `channels_in` channels.

    References:
        He et al. 2016, table 1; group norm as Wu and He 2018, "Group normalization".
    """

    stem: layers.Conv
    norm: layers.GroupNorm
    stages: tuple[tuple[Block, ...], ...]
    head: layers.Linear
    channels_in: int = eqx.field(static=True)

    def __init__(
        self, variant: Variant, classes: int, channels_in: int = 3, *, key: PRNGKeyArray
    ):
        validate.whole(classes=classes, channels_in=channels_in, at_least=1)
        stem_key, head_key, key = jax.random.split(key, 3)
        self.stem = _conv(channels_in, _STEM_CHANNELS, 7, stride=2, key=stem_key)
        self.norm = layers.GroupNorm(_STEM_CHANNELS, _GROUPS)
        stages = []
        channels = _STEM_CHANNELS
        for stage, count in enumerate(variant.blocks):
            blocks = []
            for place in range(count):
                key, block_key = jax.random.split(key)
                block = Block(
                    channels,
                    _STEM_CHANNELS * 2**stage,
                    stride=2 if stage > 0 and place == 0 else 1,
                    bottleneck=variant.bottleneck,
                    key=block_key,
                )
                blocks.append(block)
                channels = block.convs[-1].weight.shape[-1]
            stages.append(tuple(blocks))
        self.stages = tuple(stages)
        self.head = layers.Linear(channels, classes, key=head_key)
        self.channels_in = channels_in

    def features(self, image: Array) -> Float[Array, " features"]:
        """Return what the head sees of one image: the mean over all pixels."""
        layers.check_image(image, self.channels_in)
        image = jax.nn.relu(self.norm(self.stem(image)))
        image = windows.max_pool(image, 3, stride=2, padding=1)
        for stage in self.stages:
            for block in stage:
                image = block(image)
        return jnp.mean(image, axis=(0, 1))

    def __call__(self, image: Array) -> Float[Array, " classes"]:
        """Return the logits of one image, in the image's dtype."""
        return self.head(self.features(image))
