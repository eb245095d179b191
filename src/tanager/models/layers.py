"""Layers for ONE image `[H, W, C]`: convolution, weight standardisation, norm.

Batching is `vmap`.

A layer computes in the dtype of its input and casts its parameters to it: a bfloat16
image runs a float32 model in bfloat16. Statistics (of group norm and of weight
standardisation) are taken in float32, or in float64 where the input is float64.

Initialisation: Gaussian weights of variance 1/fan-in, not truncated (De et al.,
"Unlocking High-Accuracy Differentially Private Image Classification through Scale",
2022, appendix C.1); biases 0; norm scale and gain 1.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, PRNGKeyArray

from tanager import _validate as validate
from tanager.clipping.analysis.dtypes import accumulation_dtype
from tanager.clipping.analysis.standardise import standardise
from tanager.models.windows import Padding, check_padding, convolve


def gaussian(key: PRNGKeyArray, shape: Sequence[int]) -> Array:
    """Draw weights of variance 1/fan-in; the last axis holds the output units."""
    fan_in = math.prod(shape[:-1])
    # In one dimension the same numbers compile in half the time, for every new shape.
    drawn = jax.random.normal(key, (math.prod(shape),), jnp.float32)
    return drawn.reshape(tuple(shape)) / math.sqrt(fan_in)


class Conv(eqx.Module):
    """Convolution of one image.

    Shapes: ``[H, W, channels_in] -> [H', W', channels_out]``.

    Attributes:
        weight: float32 ``[kernel_size, kernel_size, fan_in, channels_out]`` with a
            fan_in of channels_in/groups.
        bias: float32 ``[channels_out]``, or None.
        stride: step in pixels, the same both ways.
        padding: see `Padding`.
        groups: the outputs of one group of consecutive channels see that group alone.

    Raises:
        ValueError: a size is not a whole number of at least 1, groups do not divide the
            channels in and out, or an unknown padding.
    """

    weight: Float[Array, "kh kw i o"]
    bias: Float[Array, " o"] | None
    stride: int = eqx.field(static=True)
    padding: Padding = eqx.field(static=True)
    groups: int = eqx.field(static=True)

    def __init__(
        self,
        channels_in: int,
        channels_out: int,
        kernel_size: int,
        *,
        stride: int = 1,
        padding: Padding = "SAME",
        groups: int = 1,
        bias: bool = False,
        key: PRNGKeyArray,
    ):
        validate.whole(
            channels_in=channels_in,
            channels_out=channels_out,
            kernel_size=kernel_size,
            stride=stride,
            groups=groups,
            at_least=1,
        )
        check_padding(padding)
        if channels_in % groups or channels_out % groups:
            rule = f"must divide the {channels_in} channels in and {channels_out} out"
            divisor = math.gcd(channels_in, channels_out, groups)
            remedy = f"use {divisor}, or change the width"
            validate.refuse("groups", groups, rule, remedy)
        shape = (kernel_size, kernel_size, channels_in // groups, channels_out)
        self.weight = gaussian(key, shape)
        self.bias = jnp.zeros(channels_out, jnp.float32) if bias else None
        self.stride = stride
        self.padding = padding
        self.groups = groups

    def __call__(self, image: Float[Array, "h w i"]) -> Float[Array, "h2 w2 o"]:
        how = {"stride": self.stride, "padding": self.padding, "groups": self.groups}
        return convolve(image, self.kernel, self.bias, **how)

    @property
    def kernel(self) -> Float[Array, "kh kw i o"]:
        """What images are convolved with."""
        return self.weight


class Standardisation(NamedTuple):
    """A form of weight standardisation.

    Attributes:
        eps: added to the weights' variance.
        unit_variance: whether each output unit's weights have variance 1, as in Qiao et
            al. 2019, "Weight standardization"; else their squares sum to 1, a factor
            sqrt(fan-in) less.
    """

    eps: float = 1e-8
    unit_variance: bool = False


class StandardisedConv(Conv):
    """Convolution of one image with standardised weights, see `standardise`.

    `Conv`, whose weights are parameters before standardisation; gradients flow through
    it.

    Attributes:
        gain: float32 ``[channels_out]``, or None for a gain fixed at 1.
        form: how the weights are standardised.

    Raises:
        ValueError: as `Conv`, an `eps` that is not positive, or a fan-in of a single
            weight, which standardisation would turn into 0.
    """

    gain: Float[Array, " o"] | None
    form: Standardisation = eqx.field(static=True)

    def __init__(
        self,
        channels_in: int,
        channels_out: int,
        kernel_size: int,
        *,
        gain: bool = False,
        form: Standardisation = Standardisation(),
        key: PRNGKeyArray,
        **options: Any,
    ):
        super().__init__(channels_in, channels_out, kernel_size, key=key, **options)
        validate.positive(eps=form.eps)
        if math.prod(self.weight.shape[:-1]) == 1:
            rule = "must give a fan-in of at least 2 weights"
            remedy = "a single weight minus its own mean is 0; use Conv"
            validate.refuse("kernel_size", kernel_size, rule, remedy)
        self.gain = jnp.ones(channels_out, jnp.float32) if gain else None
        self.form = form

    @property
    def kernel(self) -> Float[Array, "kh kw i o"]:
        """What images are convolved with: the standardised weights."""
        kernel = standardise(self.weight, self.gain, eps=self.form.eps)
        if self.form.unit_variance:
            kernel = kernel * math.sqrt(math.prod(kernel.shape[:-1]))
        return kernel


class GroupNorm(eqx.Module):
    """Group normalisation of one image, in one pass of sums.

    Per group of channels, y = scale · (x − μ)/sqrt(σ² + eps) + bias with μ and σ² over
    the group's channels and all pixels. It is computed as x·a + b, where a and b are
    one number per channel found from Σd and Σd² of d = x − s.

    The shift s is the mean of the group's first row of pixels. As a mean over one part
    in H of the group, it lies within σ·sqrt(H − 1) of μ whatever the image holds, so
    the cancellation in σ² = Σd²/n − (Σd/n)² loses at most a factor H of precision.
    The result does not depend on s, so no gradient flows through it.

    Shapes: ``[H, W, channels] -> [H, W, channels]``.

    Attributes:
        scale: float32 ``[channels]``.
        bias: float32 ``[channels]``.
        groups: number of groups; consecutive channels belong together.
        eps: added to the variance.

    Raises:
        ValueError: `groups` does not divide `channels`, a size is not a whole number
            of at least 1, or `eps` is not positive.

    References:
        Wu and He 2018, "Group normalization"; 16 groups as De et al. 2022, section 3.1.
    """

    scale: Float[Array, " c"]
    bias: Float[Array, " c"]
    groups: int = eqx.field(static=True)
    eps: float = eqx.field(static=True)

    def __init__(self, channels: int, groups: int = 16, *, eps: float = 1e-5):
        validate.whole(channels=channels, groups=groups, at_least=1)
        validate.positive(eps=eps)
        if channels % groups:
            rule = f"must divide the {channels} channels"
            remedy = f"use {math.gcd(channels, groups)}, or change the width"
            validate.refuse("groups", groups, rule, remedy)
        self.scale = jnp.ones(channels, jnp.float32)
        self.bias = jnp.zeros(channels, jnp.float32)
        self.groups = groups
        self.eps = eps

    def _group_mean(self, per_channel: Float[Array, " c"]) -> Float[Array, " c"]:
        grouped = per_channel.reshape(self.groups, -1)
        means = jnp.mean(grouped, axis=1, keepdims=True)
        return jnp.broadcast_to(means, grouped.shape).reshape(per_channel.shape)

    def __call__(self, image: Float[Array, "h w c"]) -> Float[Array, "h w c"]:
        wide = image.astype(accumulation_dtype(image.dtype))
        shift = lax.stop_gradient(self._group_mean(jnp.mean(wide[0], axis=0)))
        shifted = wide - shift[None, None, :]
        mean = self._group_mean(jnp.mean(shifted, axis=(0, 1)))
        square = self._group_mean(jnp.mean(jnp.square(shifted), axis=(0, 1)))
        # Rounding can leave a group of equal values a variance just below 0.
        variance = jnp.maximum(square - jnp.square(mean), 0.0)
        a = self.scale.astype(wide.dtype) * lax.rsqrt(variance + self.eps)
        b = self.bias.astype(wide.dtype) - (mean + shift) * a
        # On `wide`, not on `shifted`, which the backward pass would have to keep.
        return (wide * a[None, None, :] + b[None, None, :]).astype(image.dtype)


class FrozenBatchNorm(eqx.Module):
    """Scale and shift each channel, as batch norm does in inference.

    Shapes: ``[H, W, channels] -> [H, W, channels]``. Running statistics are folded into
    the two when weights are loaded, so nothing of a batch enters.

    Attributes:
        scale: float32 ``[channels]``, γ/sqrt(σ² + eps).
        bias: float32 ``[channels]``, β − μ·γ/sqrt(σ² + eps).

    Raises:
        ValueError: `channels` is not a whole number of at least 1.
    """

    scale: Float[Array, " c"]
    bias: Float[Array, " c"]

    def __init__(self, channels: int):
        validate.whole(channels=channels, at_least=1)
        self.scale = jnp.ones(channels, jnp.float32)
        self.bias = jnp.zeros(channels, jnp.float32)

    def __call__(self, image: Float[Array, "h w c"]) -> Float[Array, "h w c"]:
        scale, bias = (part.astype(image.dtype) for part in (self.scale, self.bias))
        return image * scale[None, None, :] + bias[None, None, :]


class Linear(eqx.Module):
    """Affine map of one vector.

    Shapes: ``[features_in] -> [features_out]``.

    Attributes:
        weight: float32 ``[features_in, features_out]``.
        bias: float32 ``[features_out]``, or None.

    Args:
        deviation: standard deviation of the initial weights; None for 1/sqrt(fan-in).

    Raises:
        ValueError: a size is not a whole number of at least 1.
    """

    weight: Float[Array, "i o"]
    bias: Float[Array, " o"] | None

    def __init__(
        self,
        features_in: int,
        features_out: int,
        *,
        bias: bool = True,
        deviation: float | None = None,
        key: PRNGKeyArray,
    ):
        validate.whole(features_in=features_in, features_out=features_out, at_least=1)
        self.weight = gaussian(key, (features_in, features_out))
        if deviation is not None:
            self.weight = self.weight * (deviation * math.sqrt(features_in))
        self.bias = jnp.zeros(features_out, jnp.float32) if bias else None

    def __call__(self, features: Float[Array, " i"]) -> Float[Array, " o"]:
        output = features @ self.weight.astype(features.dtype)
        return output if self.bias is None else output + self.bias.astype(output.dtype)


HEAD_INPUTS = ("features", "norm", "root")
"""What a head is given: features as they are, or as a `ScaledHead` sees them."""


class ScaledHead(Linear):
    """Linear head on features of norm 1, without bias.

    Noise is drawn for the largest gradient, so examples whose features are longer than
    others' would drown them; a bias would only add to the norm. Every example is scaled
    by itself.

    Attributes:
        scaling: ``"norm"``: x/‖x‖. ``"root"``: the square roots of features that are
            not negative, minus their mean over the features, scaled to norm 1.

    References:
        Perronnin et al. 2010, "Improving the Fisher kernel": square roots of features.
    """

    scaling: str = eqx.field(static=True)

    def __init__(
        self, features_in: int, features_out: int, scaling: str, *, key: PRNGKeyArray
    ):
        validate.one_of(HEAD_INPUTS[1:], scaling=scaling)
        super().__init__(features_in, features_out, bias=False, key=key)
        self.scaling = scaling

    def scaled(self, features: Float[Array, " i"]) -> Float[Array, " i"]:
        """Return what the weight is multiplied by."""
        wide = features.astype(accumulation_dtype(features.dtype))
        if self.scaling == "root":
            wide = jnp.sqrt(jnp.maximum(wide, 1e-6))  # at 0 its slope is infinite
            wide = wide - jnp.mean(wide)
        norm = jnp.sqrt(jnp.sum(jnp.square(wide)))
        return (wide / jnp.maximum(norm, 1e-12)).astype(features.dtype)

    def __call__(self, features: Float[Array, " i"]) -> Float[Array, " o"]:
        return super().__call__(self.scaled(features))


def gelu(values: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Return x·Φ(x), Φ the normal distribution function, as timm and PyTorch have it.

    By erf, where `jax.nn.gelu` uses erfc, which takes a CPU more than twice as long for
    relative precision of values that are themselves nearly 0.
    """
    return values * (0.5 * (1 + lax.erf(values * math.sqrt(0.5))))
