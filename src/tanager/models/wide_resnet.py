"""Wide residual networks with group norm, called on one image."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from tanager import _validate as validate
from tanager.models import layers


NORMALISATION_ORDERS = ("pre-activation", "post-activation")
"""Norm before the ReLU (CONV-GN-ReLU), or after it (CONV-ReLU-GN)."""


class Convolutions(NamedTuple):
    """What all convolutions of a network share.

    Attributes:
        gain: whether standardised ones have a gain.
        bias: whether they have a bias.
        padding: ``"SAME"`` or ``"SYMMETRIC"``, see `windows.Padding`.
    """

    gain: bool = True
    bias: bool = True
    padding: str = "SAME"


IMPLEMENTATIONS: dict[str, dict[str, Any]] = {
    "unlocking": {},
    "tan": {
        "weight_standardisation": False,
        "convolutions": Convolutions(padding="SYMMETRIC"),
    },
    "zagoruyko": {
        "normalisation_order": "pre-activation",
        "weight_standardisation": False,
        "shortcut_norm": False,
        "convolutions": Convolutions(bias=False, padding="SYMMETRIC"),
    },
}
"""The options of `WideResNet` that build what others train.

- ``"unlocking"``: nothing to change. The Unlocking paper's code (jax_privacy,
  models/cifar.py and common.py), alike from its first commit to its last. Not in its
  text: the order, gains, biases, and a norm of its own before a convolved skip path.
- ``"tan"``: the TAN paper's (facebookresearch/tan, src/models/wideresnet.py with its
  default orders of 0): the same without weight standardisation.
- ``"zagoruyko"``: as first published, with group norm.
"""

_STEM_CHANNELS = 16


def _normalise(norm: layers.GroupNorm, image: Array, order: str) -> Array:
    if order == "pre-activation":
        return jax.nn.relu(norm(image))
    return norm(jax.nn.relu(image))


class Block(eqx.Module):
    """Two 3×3 convolutions on the residual branch, each after norm and ReLU.

    The skip path carries the input untouched. Where the block changes the shape, it
    carries a 1×1 convolution of the input after norm and ReLU instead: after a norm of
    its own, or after the first one (Zagoruyko and Komodakis 2016, as in He et al. 2016,
    "Identity mappings").
    """

    norm1: layers.GroupNorm
    conv1: layers.Conv
    norm2: layers.GroupNorm
    conv2: layers.Conv
    shortcut_norm: layers.GroupNorm | None
    shortcut: layers.Conv | None
    order: str = eqx.field(static=True)

    def __init__(
        self,
        channels_in: int,
        channels_out: int,
        *,
        conv: Callable[..., layers.Conv],
        stride: int,
        groups: int,
        shortcut_norm: bool,
        order: str,
        key: PRNGKeyArray,
    ):
        key1, key2, key3 = jax.random.split(key, 3)
        self.norm1 = layers.GroupNorm(channels_in, groups)
        self.conv1 = conv(channels_in, channels_out, 3, stride=stride, key=key1)
        self.norm2 = layers.GroupNorm(channels_out, groups)
        self.conv2 = conv(channels_out, channels_out, 3, key=key2)
        self.shortcut_norm = self.shortcut = None
        if stride != 1 or channels_in != channels_out:
            if shortcut_norm:
                self.shortcut_norm = layers.GroupNorm(channels_in, groups)
            self.shortcut = conv(channels_in, channels_out, 1, stride=stride, key=key3)
        self.order = order

    def __call__(self, image: Float[Array, "h w i"]) -> Float[Array, "h2 w2 o"]:
        """Return skip path plus residual branch."""
        skip, normalised = image, _normalise(self.norm1, image, self.order)
        if self.shortcut is not None:
            skip = normalised
            if self.shortcut_norm is not None:
                skip = _normalise(self.shortcut_norm, image, self.order)
            skip = self.shortcut(skip)
        residual = self.conv1(normalised)
        residual = self.conv2(_normalise(self.norm2, residual, self.order))
        return skip + residual


class WideResNet(layers.Model):
    """WRN-`depth`-`width` for one image `[H, W, channels_in]`, giving logits.

    A 3×3 convolution to 16 channels; three stages of (depth − 4)/6 blocks with 16k,
    32k and 64k channels at strides 1, 2 and 2 (k is the width); a last norm and ReLU;
    the mean over all pixels; one linear layer. No dropout.

    Attributes:
        stem, blocks, norm, head: the parts, in this order.
        channels_in: channels of the image.
        order: ``"post-activation"``: ReLU, then norm, then convolution (CONV-ReLU-GN),
            as both papers' code has it and Sander et al. 2023, section 4.4, find better
            and more robust under DP-SGD; ``"pre-activation"``: norm, then ReLU, then
            convolution (CONV-GN-ReLU).

    Args:
        depth: convolutions on the longest path, 6n + 4 with n of at least 1.
        width: the factor k.
        classes: number of logits.
        channels_in: channels of the image.
        normalisation_order: see `order`.
        groups: groups of every group norm; must divide 16, hence all widths.
        weight_standardisation: whether every convolution's weights are standardised.
        convolutions: what all convolutions share.
        shortcut_norm: whether a convolved skip path has a norm of its own.
        key: JAX key of the initial weights.

    Raises:
        ValueError: an impossible depth, a size that is not a whole number of at least
            1, groups that do not divide the channels, an unknown order or padding, or,
            when called, the input is not one floating-point image with `channels_in`
            channels.

    References:
        Zagoruyko and Komodakis 2016, "Wide residual networks", table 1; group norm and
        weight standardisation as De et al. 2022, section 3.1 and appendix C.1; orders
        as Sander et al. 2023, "TAN without a burn", section 4.4.
    """

    stem: layers.Conv
    blocks: tuple[Block, ...]
    norm: layers.GroupNorm
    head: layers.Linear
    channels_in: int = eqx.field(static=True)
    order: str = eqx.field(static=True)

    def __init__(
        self,
        depth: int,
        width: int,
        classes: int,
        channels_in: int = 3,
        *,
        normalisation_order: str = "post-activation",
        groups: int = 16,
        weight_standardisation: bool = True,
        convolutions: Convolutions = Convolutions(),
        shortcut_norm: bool = True,
        key: PRNGKeyArray,
    ):
        validate.whole(
            width=width, classes=classes, channels_in=channels_in, at_least=1
        )
        validate.whole(depth=depth, at_least=10, remedy="the smallest is 10 = 6·1 + 4")
        if (depth - 4) % 6:
            near = 6 * ((depth - 4) // 6) + 4
            validate.refuse(
                "depth", depth, "must be 6n + 4", f"the nearest are {near}, {near + 6}"
            )
        validate.one_of(NORMALISATION_ORDERS, normalisation_order=normalisation_order)
        gain, bias, padding = convolutions
        validate.one_of(("SAME", "SYMMETRIC"), padding=padding)
        conv = functools.partial(layers.Conv, bias=bias, padding=padding)
        if weight_standardisation:
            conv = functools.partial(
                layers.StandardisedConv, gain=gain, bias=bias, padding=padding
            )
        per_stage = (depth - 4) // 6
        stem_key, head_key, *block_keys = jax.random.split(key, 2 + 3 * per_stage)
        self.stem = conv(channels_in, _STEM_CHANNELS, 3, key=stem_key)
        blocks = []
        channels = _STEM_CHANNELS
        for index, block_key in enumerate(block_keys):
            stage, place = divmod(index, per_stage)
            channels_out = _STEM_CHANNELS * width * 2**stage
            block = Block(
                channels,
                channels_out,
                conv=conv,
                stride=2 if stage > 0 and place == 0 else 1,
                groups=groups,
                shortcut_norm=shortcut_norm,
                order=normalisation_order,
                key=block_key,
            )
            blocks.append(block)
            channels = channels_out
        self.blocks = tuple(blocks)
        self.norm = layers.GroupNorm(channels, groups)
        self.head = layers.Linear(channels, classes, key=head_key)
        self.channels_in = channels_in
        self.order = normalisation_order

    def features(self, image: Array) -> Float[Array, " features"]:
        """Return the input of the head for one image: the mean over all pixels."""
        layers.check_image(image, self.channels_in)
        image = self.stem(image)
        for block in self.blocks:
            image = block(image)
        image = _normalise(self.norm, image, self.order)
        return jnp.mean(image, axis=(0, 1))
