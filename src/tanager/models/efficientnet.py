"""EfficientNet-Lite: mobile networks with frozen batch norm, called on one image.

The structure is that of TensorFlow's release and of timm's `tf_efficientnet_lite*`:
EfficientNet's blocks without squeeze-and-excitation, ReLU6, padding as TensorFlow pads.
"""

import itertools
import math
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from tanager import _validate as validate
from tanager.models import layers
from tanager.models.model import StagedModel, check_image


class Variant(NamedTuple):
    """Factors of the channels and of the number of blocks, and the usual image side."""

    width: float
    depth: float
    image_side: int


VARIANTS = {
    "lite0": Variant(1.0, 1.0, 224),
    "lite1": Variant(1.0, 1.1, 240),
    "lite2": Variant(1.1, 1.2, 260),
    "lite3": Variant(1.2, 1.4, 280),
    "lite4": Variant(1.4, 1.8, 300),
}
"""github.com/tensorflow/tpu, models/official/efficientnet/lite."""


class Stage(NamedTuple):
    """Blocks, kernel side, stride of the first, expansion, and channels out."""

    blocks: int
    kernel_size: int
    stride: int
    expansion: int
    channels: int


_STAGES = (
    Stage(1, 3, 1, 1, 16),
    Stage(2, 3, 2, 6, 24),
    Stage(2, 5, 2, 6, 40),
    Stage(3, 3, 2, 6, 80),
    Stage(3, 5, 1, 6, 112),
    Stage(4, 5, 2, 6, 192),
    Stage(1, 3, 1, 6, 320),
)
"""Tan and Le 2019, table 1."""

_STEM_CHANNELS, _FEATURES = 32, 1280
BATCH_NORM_EPS = 1e-3
"""Added to the variance by the batch norms of the published weights."""


class Block(eqx.Module):
    """1×1 expansion, depthwise convolution and 1×1 projection, each with its norm.

    The input is added where the block keeps its shape. Without `expand` the depthwise
    convolution comes first.
    """

    expand: layers.Conv | None
    expand_norm: layers.FrozenBatchNorm | None
    depthwise: layers.Conv
    depthwise_norm: layers.FrozenBatchNorm
    project: layers.Conv
    project_norm: layers.FrozenBatchNorm

    def __init__(
        self,
        channels_in: int,
        channels_out: int,
        stage: Stage,
        *,
        stride: int,
        key: PRNGKeyArray,
    ):
        keys = jax.random.split(key, 3)
        inner, side = channels_in * stage.expansion, stage.kernel_size
        self.expand = self.expand_norm = None
        if stage.expansion != 1:
            self.expand = layers.Conv(channels_in, inner, 1, key=keys[0])
            self.expand_norm = layers.FrozenBatchNorm(inner)
        self.depthwise = layers.Conv(
            inner, inner, side, stride=stride, groups=inner, key=keys[1]
        )
        self.depthwise_norm = layers.FrozenBatchNorm(inner)
        self.project = layers.Conv(inner, channels_out, 1, key=keys[2])
        self.project_norm = layers.FrozenBatchNorm(channels_out)

    def __call__(self, image: Float[Array, "h w i"]) -> Float[Array, "h2 w2 o"]:
        hidden = image
        if self.expand is not None and self.expand_norm is not None:
            hidden = jax.nn.relu6(self.expand_norm(self.expand(hidden)))
        hidden = jax.nn.relu6(self.depthwise_norm(self.depthwise(hidden)))
        output = self.project_norm(self.project(hidden))
        return image + output if output.shape == image.shape else output


class EfficientNetLite(StagedModel):
    """EfficientNet-Lite for one image `[H, W, channels_in]`, giving logits.

    Batch norm is what it is in inference, a scale and a shift of each channel
    (`layers.FrozenBatchNorm`): images are not mixed, and no statistic is learned.

    Args:
        variant: such as ``VARIANTS["lite0"]``.

    References:
        Tan and Le 2019, "EfficientNet", arXiv:1905.11946.
    """

    stem: layers.Conv
    stem_norm: layers.FrozenBatchNorm
    stages: tuple[tuple[Block, ...], ...]
    last: layers.Conv
    last_norm: layers.FrozenBatchNorm
    head: layers.Linear
    channels_in: int = eqx.field(static=True)

    def __init__(
        self, variant: Variant, classes: int, channels_in: int = 3, *, key: PRNGKeyArray
    ):
        validate.whole(classes=classes, channels_in=channels_in, at_least=1)
        validate.positive(width=variant.width, depth=variant.depth)
        stem_key, last_key, head_key, key = jax.random.split(key, 4)
        channels = _STEM_CHANNELS
        self.stem = layers.Conv(channels_in, channels, 3, stride=2, key=stem_key)
        self.stem_norm = layers.FrozenBatchNorm(channels)
        stages = []
        for number, stage in enumerate(_STAGES):
            # The lite release leaves the first and the last stage their one block.
            inside = 0 < number < len(_STAGES) - 1
            count = math.ceil(stage.blocks * variant.depth) if inside else stage.blocks
            channels_out = _rounded(stage.channels * variant.width)
            blocks = []
            for place in range(count):
                key, block_key = jax.random.split(key)
                stride = stage.stride if place == 0 else 1
                blocks.append(
                    Block(channels, channels_out, stage, stride=stride, key=block_key)
                )
                channels = channels_out
            stages.append(tuple(blocks))
        self.stages = tuple(stages)
        self.last = layers.Conv(channels, _FEATURES, 1, key=last_key)
        self.last_norm = layers.FrozenBatchNorm(_FEATURES)
        self.head = layers.Linear(_FEATURES, classes, key=head_key)
        self.channels_in = channels_in

    @property
    def last_stage(self) -> PyTree:
        return self.stages[-1], self.last, self.last_norm

    def front(self, image: Array) -> Float[Array, "h w c"]:
        check_image(image, self.channels_in)
        image = jax.nn.relu6(self.stem_norm(self.stem(image)))
        for block in itertools.chain(*self.stages[:-1]):
            image = block(image)
        return image

    def back(self, seen: Array) -> Float[Array, " features"]:
        for block in self.stages[-1]:
            seen = block(seen)
        seen = jax.nn.relu6(self.last_norm(self.last(seen)))
        return jnp.mean(seen, axis=(0, 1))


def _rounded(channels: float) -> int:
    """Return the nearest multiple of 8 that is not more than a tenth below."""
    rounded = max(8, int(channels + 4) // 8 * 8)
    return rounded + 8 if rounded < 0.9 * channels else rounded
