"""Big Transfer (BiT): residual networks of the second kind, called on one image.

Every norm and ReLU stands before its convolution, whose weights are standardised to
variance 1. The structure is that of Google's `big_transfer` and of timm's
`resnetv2_*_bit`, so that the weights of both fit.
"""

import functools
import itertools
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from tanager import _validate as validate
from tanager.models import layers, windows
from tanager.models.model import StagedModel, check_image


class Variant(NamedTuple):
    """Number of blocks of each stage, and the factor of all channels."""

    blocks: tuple[int, ...]
    width: int


VARIANTS = {
    "50x1": Variant((3, 4, 6, 3), 1),
    "101x1": Variant((3, 4, 23, 3), 1),
    "50x3": Variant((3, 4, 6, 3), 3),
    "101x3": Variant((3, 4, 23, 3), 3),
    "152x4": Variant((3, 8, 36, 3), 4),
}
"""Kolesnikov et al. 2020, "Big Transfer (BiT): general visual representation learning":
depth and width by name; blocks as He et al. 2016, table 1.
"""

_STEM_CHANNELS = 64
_GROUPS = 32
_EXPANSION = 4


_conv = functools.partial(
    layers.StandardisedConv,
    padding="SYMMETRIC",
    form=layers.Standardisation(1e-8, unit_variance=True),
)


class Block(eqx.Module):
    """1×1, 3×3 and 1×1 convolutions, each after norm and ReLU, plus the skip path.

    The skip path carries the input untouched. Where the block changes the shape, it
    carries a 1×1 convolution of the input after the first norm and ReLU instead.
    """

    norms: tuple[layers.GroupNorm, ...]
    convs: tuple[layers.StandardisedConv, ...]
    shortcut: layers.StandardisedConv | None

    def __init__(self, channels_in: int, width: int, *, stride: int, key: PRNGKeyArray):
        keys = jax.random.split(key, 4)
        channels_out = _EXPANSION * width
        self.norms = tuple(
            layers.GroupNorm(channels, _GROUPS)
            for channels in (channels_in, width, width)
        )
        self.convs = (
            _conv(channels_in, width, 1, key=keys[0]),
            _conv(width, width, 3, stride=stride, key=keys[1]),
            _conv(width, channels_out, 1, key=keys[2]),
        )
        self.shortcut = None
        if stride != 1 or channels_in != channels_out:
            self.shortcut = _conv(
                channels_in, channels_out, 1, stride=stride, key=keys[3]
            )

    def __call__(self, image: Float[Array, "h w i"]) -> Float[Array, "h2 w2 o"]:
        residual = jax.nn.relu(self.norms[0](image))
        skip = image if self.shortcut is None else self.shortcut(residual)
        residual = self.convs[0](residual)
        for norm, conv in zip(self.norms[1:], self.convs[1:], strict=True):
            residual = conv(jax.nn.relu(norm(residual)))
        return skip + residual


class BiT(StagedModel):
    """BiT ResNet-v2 for one image `[H, W, channels_in]`, giving logits.

    A 7×7 convolution to 64 channels at stride 2, a 3×3 maximum at stride 2 over the
    image with a border of zeros; four stages of width 64, 128, 256 and 512, all but
    the first at stride 2, all channels times the width factor; norm and ReLU; the mean
    over all pixels; one linear layer. Convolutions have no bias; norms have 32 groups.

    Weights are standardised with eps = 1e-8, as timm does; Google's code has 1e-10.

    Args:
        variant: blocks and width factor, such as ``VARIANTS["50x1"]``.

    References:
        Kolesnikov et al. 2020, arXiv:1912.11370; Qiao et al. 2019, "Weight
        standardization"; group norm as Wu and He 2018, "Group normalization".
    """

    stem: layers.StandardisedConv
    stages: tuple[tuple[Block, ...], ...]
    norm: layers.GroupNorm
    head: layers.Linear
    channels_in: int = eqx.field(static=True)

    def __init__(
        self, variant: Variant, classes: int, channels_in: int = 3, *, key: PRNGKeyArray
    ):
        validate.whole(
            width=variant.width, classes=classes, channels_in=channels_in, at_least=1
        )
        stem_key, head_key, key = jax.random.split(key, 3)
        channels = _STEM_CHANNELS * variant.width
        self.stem = _conv(channels_in, channels, 7, stride=2, key=stem_key)
        stages = []
        for stage, count in enumerate(variant.blocks):
            width = _STEM_CHANNELS * variant.width * 2**stage
            blocks = []
            for place in range(count):
                key, block_key = jax.random.split(key)
                stride = 2 if stage > 0 and place == 0 else 1
                blocks.append(Block(channels, width, stride=stride, key=block_key))
                channels = _EXPANSION * width
            stages.append(tuple(blocks))
        self.stages = tuple(stages)
        self.norm = layers.GroupNorm(channels, _GROUPS)
        self.head = layers.Linear(channels, classes, key=head_key)
        self.channels_in = channels_in

    @property
    def last_stage(self) -> PyTree:
        return self.stages[-1], self.norm

    def front(self, image: Array) -> Float[Array, "h w c"]:
        check_image(image, self.channels_in)
        image = self.stem(image)
        # Zeros and not −∞: nothing keeps the convolution's outputs above 0.
        image = jnp.pad(image, ((1, 1), (1, 1), (0, 0)))
        image = windows.max_pool(image, 3, stride=2, padding="VALID")
        for block in itertools.chain(*self.stages[:-1]):
            image = block(image)
        return image

    def back(self, seen: Array) -> Float[Array, " features"]:
        for block in self.stages[-1]:
            seen = block(seen)
        return jnp.mean(jax.nn.relu(self.norm(seen)), axis=(0, 1))
