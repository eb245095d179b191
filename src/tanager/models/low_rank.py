"""Low-rank products beside the layers of a pretrained model (LoRA).

A layer keeps its weights W, and a product AB of two thin matrices, which alone is
trained, is added to what it does. Afterwards the product becomes part of W again, so
that the model that is handed over is of the architecture it was.

For a convolution, A is a convolution of the same window to a few channels and B one of
1×1, as in Hugging Face's peft. Where the weights are standardised, A is standardised
too: its columns then sum to 0 over the fan-in, so does the sum of the two kernels, and
there is a standardised weight and a gain that give exactly this sum.

References:
    Hu et al. 2021, "LoRA: low-rank adaptation of large language models",
    arXiv:2106.09685, section 4.1.
"""

import math
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from tanager import _validate as validate
from tanager.models import layers
from tanager.models.windows import convolve


Model = TypeVar("Model", bound=eqx.Module)


class LowRankLinear(eqx.Module):
    """A linear layer with a trained product of two thin matrices beside its weight.

    Shapes: ``[features_in] -> [features_out]``: y = xW + b + (α/r)·(xA)B.

    Attributes:
        linear: W and b, as they were.
        down: A, float32 ``[features_in, rank]``, Gaussian of variance 1/features_in.
        up: B, float32 ``[rank, features_out]``, 0 at first, so that nothing changes.
        scale: α/r.
    """

    linear: layers.Linear
    down: Float[Array, "i r"]
    up: Float[Array, "r o"]
    scale: float = eqx.field(static=True)

    def __init__(
        self, linear: layers.Linear, rank: int, alpha: float, *, key: PRNGKeyArray
    ):
        features_in, features_out = linear.weight.shape
        self.linear = linear
        self.down = layers.gaussian(key, (features_in, rank))
        self.up = jnp.zeros((rank, features_out), jnp.float32)
        self.scale = alpha / rank

    def __call__(self, features: Float[Array, " i"]) -> Float[Array, " o"]:
        inner = (features @ self.down.astype(features.dtype)) * self.scale
        return self.linear(features) + inner @ self.up.astype(features.dtype)

    def merged(self) -> layers.Linear:
        """Return the one linear layer that does the same."""
        weight = self.linear.weight
        added = (self.down @ self.up) * self.scale
        return eqx.tree_at(
            lambda layer: layer.weight, self.linear, weight + added.astype(weight.dtype)
        )


class LowRankConv(eqx.Module):
    """A convolution with a trained product of two thin kernels beside its own.

    Shapes: ``[H, W, channels_in] -> [H', W', channels_out]``: the convolution, plus α/r
    times a 1×1 convolution with B of a convolution with A. In each group of a grouped
    convolution the product has rank r.

    Attributes:
        conv: the convolution as it was.
        down: A, float32 ``[kernel_size, kernel_size, fan_in, groups·rank]``, Gaussian
            of variance 1/(kernel_size²·fan_in); standardised before it is used where
            `conv` is.
        up: B, float32 ``[1, 1, rank, channels_out]``, 0 at first, so that nothing
            changes.
        scale: α/r.

    Raises:
        ValueError: `conv` is standardised and has no gain, so that no standardised
            weight could hold the sum.
    """

    conv: layers.Conv
    down: Float[Array, "kh kw i gr"]
    up: Float[Array, "1 1 r o"]
    scale: float = eqx.field(static=True)

    def __init__(
        self, conv: layers.Conv, rank: int, alpha: float, *, key: PRNGKeyArray
    ):
        if isinstance(conv, layers.StandardisedConv) and conv.gain is None:
            rule = (
                "needs a gain on every standardised convolution, to hold the size of "
                "the weights with the product, and the model has none"
            )
            validate.refuse("fine_tune", "lora", rule, "use film or biases-and-norms")
        *window, channels_out = conv.weight.shape
        self.conv = conv
        self.down = layers.gaussian(key, (*window, conv.groups * rank))
        self.up = jnp.zeros((1, 1, rank, channels_out), jnp.float32)
        self.scale = alpha / rank

    def _down(self) -> Array:
        if isinstance(self.conv, layers.StandardisedConv):
            return layers.standardise(self.down, eps=self.conv.form.eps)
        return self.down

    def __call__(self, image: Float[Array, "h w i"]) -> Float[Array, "h2 w2 o"]:
        conv = self.conv
        options = {"padding": conv.padding, "groups": conv.groups}
        inner = convolve(image, self._down(), stride=conv.stride, **options)
        added = convolve(inner * self.scale, self.up, groups=conv.groups)
        return conv(image) + added

    def merged(self) -> layers.Conv:
        """Return the one convolution that does the same."""
        groups, rank = self.conv.groups, self.up.shape[2]
        window = self.down.shape[:3]
        down = self._down().reshape(*window, groups, rank)
        up = self.up.reshape(rank, groups, -1)
        added = jnp.einsum("hwigr,rgo->hwigo", down, up) * self.scale
        kernel = self.conv.kernel + added.reshape(self.conv.weight.shape)
        return _with_kernel(self.conv, kernel)


def with_low_rank(model: Model, rank: int, alpha: float, *, key: PRNGKeyArray) -> Model:
    """Return a model with low-rank products beside the layers of its blocks.

    These are the linear layers and convolutions in ``blocks`` or ``stages``.
    """

    def is_layer(part: Any) -> bool:
        return isinstance(part, layers.Linear | layers.Conv)

    name = next((name for name in ("blocks", "stages") if hasattr(model, name)), "")
    blocks = getattr(model, name, None)
    found = sum(map(is_layer, jax.tree.leaves(blocks, is_leaf=is_layer)))
    if not found:
        kind = type(model).__name__
        rule = f"needs linear layers or convolutions in blocks, and {kind} has none"
        validate.refuse("fine_tune", "lora", rule, "use all or last-layer")
    keys = iter(jax.random.split(key, found))

    def one(part: Any) -> Any:
        if isinstance(part, layers.Linear):
            return LowRankLinear(part, rank, alpha, key=next(keys))
        if isinstance(part, layers.Conv):
            return LowRankConv(part, rank, alpha, key=next(keys))
        return part

    blocks = jax.tree.map(one, blocks, is_leaf=is_layer)
    return eqx.tree_at(lambda tree: getattr(tree, name), model, blocks)


def merge(model: Model) -> Model:
    """Return the model with every low-rank product made part of its layer."""

    def is_low_rank(part: Any) -> bool:
        return isinstance(part, LowRankLinear | LowRankConv)

    return jax.tree.map(
        lambda part: part.merged() if is_low_rank(part) else part,
        model,
        is_leaf=is_low_rank,
    )


def _with_kernel(conv: layers.Conv, kernel: Array) -> layers.Conv:
    """Return the convolution with another kernel, which sums to 0 if standardised.

    Standardised with a gain of the root of its squares' sum (and of eps), such a kernel
    is itself.
    """
    if not isinstance(conv, layers.StandardisedConv):
        return eqx.tree_at(lambda layer: layer.weight, conv, kernel)
    fan_in = math.prod(kernel.shape[:-1])
    weight = kernel / math.sqrt(fan_in) if conv.form.unit_variance else kernel
    squares = jnp.sum(jnp.square(weight), axis=(0, 1, 2))
    gain = jnp.sqrt(squares + fan_in * conv.form.eps)
    return eqx.tree_at(lambda layer: (layer.weight, layer.gain), conv, (weight, gain))
