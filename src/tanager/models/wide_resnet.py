"""Wide residual networks with group norm, called on one image."""

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from tanager import _validate as validate
from tanager.models import layers
from tanager.models.model import StagedModel, check_image


NORMALISATION_ORDERS = ("pre-activation", "post-activation", "none")
"""Norm before the ReLU (CONV-GN-ReLU), after it (CONV-ReLU-GN), or no norms."""


IMPLEMENTATIONS: dict[str, dict[str, Any]] = {
    "unlocking": {},
    "tan": {"weight_standardisation": False, "padding": "SYMMETRIC"},
}
"""The options of `WideResNet` that build what others train.

- ``"unlocking"``: nothing to change. The Unlocking paper's code (jax_privacy,
  models/cifar.py and common.py), alike from its first commit to its last. Not in its
  text: the order, gains, biases, and a norm of its own before a convolved skip path.
- ``"tan"``: the TAN paper's (facebookresearch/tan, src/models/wideresnet.py with its
  default orders of 0): the same without weight standardisation.
"""

_STEM_CHANNELS = 16


def group_norm(order: str, *sizes: int) -> layers.GroupNorm | None:
    """Return a norm of these sizes, unless the order is ``"none"``."""
    return None if order == "none" else layers.GroupNorm(*sizes)


def normalise(norm: layers.GroupNorm | None, image: Array, order: str) -> Array:
    """Return norm and ReLU of an image, in an order of `NORMALISATION_ORDERS`."""
    if norm is None:
        return jax.nn.relu(image)
    if order == "pre-activation":
        return jax.nn.relu(norm(image))
    return norm(jax.nn.relu(image))


class Block(eqx.Module):
    """Two 3×3 convolutions on the residual branch, each after norm and ReLU.

    The skip path carries the input untouched. Where the block changes the shape, it
    carries a 1×1 convolution of the input instead, after ReLU and a norm of its own.
    """

    norm1: layers.GroupNorm | None
    conv1: layers.Conv
    norm2: layers.GroupNorm | None
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
        order: str,
        key: PRNGKeyArray,
    ):
        key1, key2, key3 = jax.random.split(key, 3)
        self.norm1 = group_norm(order, channels_in)
        self.conv1 = conv(channels_in, channels_out, 3, stride=stride, key=key1)
        self.norm2 = group_norm(order, channels_out)
        self.conv2 = conv(channels_out, channels_out, 3, key=key2)
        self.shortcut_norm = self.shortcut = None
        if stride != 1 or channels_in != channels_out:
            self.shortcut_norm = group_norm(order, channels_in)
            self.shortcut = conv(channels_in, channels_out, 1, stride=stride, key=key3)
        self.order = order

    def __call__(self, image: Float[Array, "h w i"]) -> Float[Array, "h2 w2 o"]:
        residual = self.conv1(normalise(self.norm1, image, self.order))
        residual = self.conv2(normalise(self.norm2, residual, self.order))
        if self.shortcut is not None:
            image = self.shortcut(normalise(self.shortcut_norm, image, self.order))
        return image + residual


class WideResNet(StagedModel):
    """WRN-`depth`-`width` for one image `[H, W, channels_in]`, giving logits.

    A 3×3 convolution to 16 channels; three stages of (depth − 4)/6 blocks with 16k,
    32k and 64k channels at strides 1, 2 and 2 (k is the width); a last norm and ReLU;
    the mean over all pixels; one linear layer. No dropout.

    Args:
        depth: convolutions on the longest path, 6n + 4 with n of at least 1.
        width: the factor k.
        normalisation_order: ``"post-activation"``: ReLU, then norm, then convolution
            (CONV-ReLU-GN), as both papers' code has it and Sander et al. 2023, section
            4.4, find better and more robust under DP-SGD; ``"pre-activation"``: norm,
            then ReLU, then convolution (CONV-GN-ReLU); ``"none"``: no norms, as the
            baseline of De et al. 2022, table 2.
        weight_standardisation: whether every convolution's weights are standardised.
        padding: of every convolution: ``"SAME"`` or ``"SYMMETRIC"``, see
            `windows.Padding`.

    References:
        Zagoruyko and Komodakis 2016, "Wide residual networks", table 1; group norm and
        weight standardisation as De et al. 2022, section 3.1 and appendix C.1; orders
        as Sander et al. 2023, "TAN Without a Burn", section 4.4.
    """

    stem: layers.Conv
    blocks: tuple[Block, ...]
    norm: layers.GroupNorm | None
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
        weight_standardisation: bool = True,
        padding: str = "SAME",
        key: PRNGKeyArray,
    ):
        validate.whole(
            width=width, classes=classes, channels_in=channels_in, at_least=1
        )
        validate.whole(depth=depth, at_least=10, remedy="the smallest is 10 = 6·1 + 4")
        if (depth - 4) % 6:
            near = 6 * ((depth - 4) // 6) + 4
            remedy = f"the nearest are {near}, {near + 6}"
            validate.refuse("depth", depth, "must be 6n + 4", remedy)
        validate.one_of(NORMALISATION_ORDERS, normalisation_order=normalisation_order)
        validate.one_of(("SAME", "SYMMETRIC"), padding=padding)
        conv = functools.partial(layers.Conv, bias=True, padding=padding)
        if weight_standardisation:
            conv = functools.partial(
                layers.StandardisedConv, gain=True, bias=True, padding=padding
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
                order=normalisation_order,
                key=block_key,
            )
            blocks.append(block)
            channels = channels_out
        self.blocks = tuple(blocks)
        self.norm = group_norm(normalisation_order, channels)
        self.head = layers.Linear(channels, classes, key=head_key)
        self.channels_in = channels_in
        self.order = normalisation_order

    @property
    def last_stage(self) -> PyTree:
        return self._last_blocks, self.norm

    def front(self, image: Array) -> Float[Array, "h w c"]:
        check_image(image, self.channels_in)
        image = self.stem(image)
        for block in self.blocks[: -len(self._last_blocks)]:
            image = block(image)
        return image

    def back(self, seen: Array) -> Float[Array, " features"]:
        for block in self._last_blocks:
            seen = block(seen)
        return jnp.mean(normalise(self.norm, seen, self.order), axis=(0, 1))

    @property
    def _last_blocks(self) -> tuple[Block, ...]:
        return self.blocks[2 * len(self.blocks) // 3 :]
