"""ConvNeXt: a residual network built like a transformer, called on one image.

The structure is that of timm's `convnext_*`, so that its weights fit: patches of 4×4
pixels, depthwise convolutions of 7×7, and networks on each pixel's channels.
"""

import itertools
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from tanager import _validate as validate
from tanager.models import layers
from tanager.models.model import StagedModel, check_image
from tanager.models.vit import LayerNorm, LayerScale, patch_layer


class Variant(NamedTuple):
    """Blocks and channels of each stage."""

    depths: tuple[int, ...]
    widths: tuple[int, ...]


VARIANTS = {
    "tiny": Variant((3, 3, 9, 3), (96, 192, 384, 768)),
    "small": Variant((3, 3, 27, 3), (96, 192, 384, 768)),
    "base": Variant((3, 3, 27, 3), (128, 256, 512, 1024)),
    "large": Variant((3, 3, 27, 3), (192, 384, 768, 1536)),
}
"""Liu et al. 2022, "A ConvNet for the 2020s", section 3."""

_PATCH, _KERNEL, _MLP_RATIO, _LAYER_SCALE = 4, 7, 4, 1e-6


class Block(eqx.Module):
    """Depthwise convolution, then a network on each pixel, on a residual branch."""

    depthwise: layers.Conv
    norm: LayerNorm
    expand: layers.Linear
    contract: layers.Linear
    scale: LayerScale

    def __init__(self, width: int, *, key: PRNGKeyArray):
        keys = jax.random.split(key, 3)
        self.depthwise = layers.Conv(
            width, width, _KERNEL, groups=width, bias=True, key=keys[0]
        )
        self.norm = LayerNorm(width)
        self.expand = layers.Linear(width, _MLP_RATIO * width, key=keys[1])
        self.contract = layers.Linear(_MLP_RATIO * width, width, key=keys[2])
        self.scale = LayerScale(width, _LAYER_SCALE)

    def __call__(self, image: Float[Array, "h w c"]) -> Float[Array, "h w c"]:
        seen = self.depthwise(image)
        pixels = jax.vmap(self.norm)(seen.reshape(-1, seen.shape[-1]))
        hidden = layers.gelu(jax.vmap(self.expand)(pixels))
        pixels = jax.vmap(self.scale)(jax.vmap(self.contract)(hidden))
        return image + pixels.reshape(image.shape)


class Downsample(eqx.Module):
    """A norm of each pixel, and a convolution that halves the image."""

    norm: LayerNorm
    conv: layers.Conv

    def __init__(self, channels_in: int, channels_out: int, *, key: PRNGKeyArray):
        self.norm = LayerNorm(channels_in)
        self.conv = patch_layer(channels_in, channels_out, 2, key=key)

    def __call__(self, image: Float[Array, "h w c"]) -> Float[Array, "h2 w2 d"]:
        return self.conv(jax.vmap(jax.vmap(self.norm))(image))


class ConvNeXt(StagedModel):
    """ConvNeXt for one image `[H, W, channels_in]`, giving logits.

    Both sides are at least 32 pixels: the four stages divide them by 32.

    Args:
        variant: such as ``VARIANTS["tiny"]``.

    References:
        Liu et al. 2022, arXiv:2201.03545.
    """

    stem: layers.Conv
    stem_norm: LayerNorm
    stages: tuple[tuple[Block, ...], ...]
    downsamples: tuple[Downsample, ...]
    norm: LayerNorm
    head: layers.Linear
    channels_in: int = eqx.field(static=True)

    def __init__(
        self, variant: Variant, classes: int, channels_in: int = 3, *, key: PRNGKeyArray
    ):
        depths, widths = variant
        validate.whole(classes=classes, channels_in=channels_in, at_least=1)
        if len(depths) != len(widths) or not depths:
            validate.refuse("widths", widths, f"must be one for each of {depths}")
        for depth, width in zip(depths, widths, strict=True):
            validate.whole(depth=depth, width=width, at_least=1)
        keys = iter(jax.random.split(key, 2 + sum(depths) + len(depths) - 1))
        self.stem = patch_layer(channels_in, widths[0], _PATCH, key=next(keys))
        self.stem_norm = LayerNorm(widths[0])
        self.stages = tuple(
            tuple(Block(width, key=next(keys)) for _ in range(depth))
            for depth, width in zip(depths, widths, strict=True)
        )
        self.downsamples = tuple(
            Downsample(*pair, key=next(keys)) for pair in itertools.pairwise(widths)
        )
        self.norm = LayerNorm(widths[-1])
        self.head = layers.Linear(widths[-1], classes, key=next(keys))
        self.channels_in = channels_in

    @property
    def last_stage(self) -> PyTree:
        return self.stages[-1], self.norm

    def front(self, image: Array) -> Float[Array, "h w c"]:
        check_image(image, self.channels_in)
        height, width, _ = image.shape
        smallest = _PATCH * 2 ** (len(self.stages) - 1)
        validate.whole(image_height=height, image_width=width, at_least=smallest)
        image = jax.vmap(jax.vmap(self.stem_norm))(self.stem(image))
        for stage, downsample in zip(self.stages, self.downsamples, strict=False):
            for block in stage:
                image = block(image)
            image = downsample(image)
        return image

    def back(self, seen: Array) -> Float[Array, " features"]:
        for block in self.stages[-1]:
            seen = block(seen)
        return self.norm(jnp.mean(seen, axis=(0, 1)))
