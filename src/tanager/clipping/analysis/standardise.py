"""Weight standardisation, and norms of its gradient without differentiating it.

Per output unit o with fan-in n: v = W − mean(W), s² = mean(v²) + eps and
Ŵ = a·v with a = gain/sqrt(n s²). With G = ∂loss/∂Ŵ of one example,

    ∂loss/∂W    = a·[G − mean(G) − v·(vᵀG)·p]
    ‖∂loss/∂W‖² = a²·[‖G‖² − (1ᵀG)²/n − (vᵀG)²·p·(2 − p·‖v‖²)]
    ∂loss/∂gain = vᵀG·a/gain

with p = 1/(n s²), so that three sums over the fan-in of G give the norm. They come from
gradients or, where none is formed, from the layer's own input and output.

The same holds for a = gain·φ(‖v‖²) with p = −2φ'/φ, whatever φ is; and for v = W, as in
weight norm, without what is of the mean. That is what `recognise` looks for.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from tanager.clipping.analysis.dtypes import accumulation_dtype, widen
from tanager.clipping.analysis.recognise import Standardisation
from tanager.clipping.analysis.rounding import CANCELLATION, root, sum_of_runs


def standardise(
    weight: Float[Array, "*fan_in o"],
    gain: Float[Array, " o"] | None = None,
    *,
    eps: float = 1e-8,
) -> Float[Array, "*fan_in o"]:
    """Standardise each output unit's weights over its fan-in, differentiably.

    Ŵ = gain · (W − μ) / sqrt(n · (σ² + eps)), with μ and σ² the mean and the (biased)
    variance over the n weights that feed one output unit. Each unit's weights then sum
    to 0 and their squares to gain² · σ²/(σ² + eps).

    `eps` is added to the variance, before the product with n. At initialisation
    σ² ≈ 1/n, so eps changes Ŵ by a relative n · eps / 2: 1e-8 stays below 3e-5 for
    every convolution of WRN-28-10 (n ≤ 5760).

    Args:
        weight: the last axis holds the output units, all others are the fan-in.
        gain: one factor per output unit, 1 where absent.
        eps: keeps the quotient finite where all of a unit's weights are equal.

    Returns:
        The standardised weights, in the dtype of `weight`.

    References:
        De et al. 2022, appendix C.1; with the gain, Brock et al. 2021,
        "Characterizing signal propagation to close the performance gap in
        unnormalized ResNets", section 4.
    """
    axes = tuple(range(weight.ndim - 1))
    wide = weight.astype(accumulation_dtype(weight.dtype))
    centred = wide - jnp.mean(wide, axis=axes, keepdims=True)
    variance = jnp.mean(jnp.square(centred), axis=axes)
    fan_in = math.prod(weight.shape[:-1])
    factor = lax.rsqrt(fan_in * (variance + jnp.asarray(eps, wide.dtype)))
    if gain is not None:
        factor = factor * gain.astype(wide.dtype)
    factor = factor.reshape((1,) * (weight.ndim - 1) + factor.shape)
    return (centred * factor).astype(weight.dtype)


class Statistics(NamedTuple):
    """What a weight's standardisation is made of, per output unit.

    v as `[n, o]`, a/gain, a, p and p·(2 − p·‖v‖²); and whether a mean was taken away.
    """

    centred: Array
    root: Array
    factor: Array
    pull: Array
    curb: Array
    mean: bool

    def astype(self, dtype: Any) -> "Statistics":
        """Return the same in another dtype."""
        centred, root, factor, pull, curb = (part.astype(dtype) for part in self[:-1])
        return Statistics(centred, root, factor, pull, curb, self.mean)


def from_gradient(
    gradient: Float[Array, "b *own"],
    centred: Float[Array, "*own"],
    outputs: Sequence[int],
    lift: Float[Array, ""],
) -> tuple[Float[Array, "b o"], Float[Array, "b o"], Float[Array, "b o"]]:
    """Return ‖lift·G‖², 1ᵀG and vᵀG of each example and output unit.

    `outputs` are the axes of G along which output units lie. v has its entries in the
    order of G.
    """
    units = {axis % centred.ndim for axis in outputs}
    # XLA on a CPU would copy what has axes of length 1.
    left = [axis for axis, size in enumerate(centred.shape) if size != 1]
    axes = tuple(n + 1 for n, axis in enumerate(left) if axis not in units)
    centred, rows = jnp.squeeze(centred), gradient.shape[0]
    gradient = widen(gradient).reshape(rows, *centred.shape)
    sums = (jnp.square(gradient * lift), gradient, gradient * centred[None])
    square, total, projection = (
        jnp.sum(each, axis=axes).reshape(rows, -1) for each in sums
    )
    return square, total, projection


def squared_norms(
    fan_in: int,
    parts: Statistics,
    scaled_square: Float[Array, " b"],
    total: Float[Array, "b o"],
    projection: Float[Array, "b o"],
    relative: float,
    slip: Float[Array, " b"] | float = 0.0,
) -> Float[Array, " b"]:
    """Return ‖∂loss/∂W‖² of each example, or more; ∞ where it overflows.

    `scaled_square` is Σ_o a²‖G‖², or more. `relative` is what rounding may have taken,
    as a part of that, or of what is subtracted where it is larger. `slip` is how far
    (a·1ᵀG/√n, a·vᵀG/‖v‖) may be wrong beside that, as one vector. Of its square S² that
    is 2·S·slip + slip².
    """
    less = jnp.square(projection) * parts.curb[None]
    if parts.mean:
        less += jnp.square(total) / fan_in
    taken = jnp.sum(less * jnp.square(parts.factor)[None], axis=-1)
    weight = scaled_square - taken
    error = relative * jnp.maximum(scaled_square, taken)
    error += slip * (2 * root(taken) + slip)
    least = scaled_square / cancellation(weight.dtype) ** 2
    # What is taken away may overflow alone, and infinity less infinity is small.
    return jnp.where(
        jnp.isfinite(weight),
        jnp.maximum(jnp.maximum(weight, 0) + error, least),
        jnp.inf,
    )


def cancellation(dtype: Any) -> float:
    """Return κ: a norm counts as ‖a∘G‖/κ at least (`rounding.CANCELLATION`)."""
    return CANCELLATION if jnp.finfo(dtype).bits == 32 else 2.0**13


def pull_back(parts: Statistics, gradient: Float[Array, "n o"]) -> Float[Array, "n o"]:
    """Return ∂loss/∂W from G, wrong by 2·`run_steps` + 12 roundings of a∘G."""
    flat, centred = widen(gradient), parts.centred
    projection = (sum_of_runs(flat * centred) * parts.pull)[None]
    back = flat - centred * projection
    if parts.mean:
        back -= sum_of_runs(flat)[None] / flat.shape[0]
    return parts.factor[None] * back


def parts_of(form: Standardisation, weight: Array, gain: Array | None) -> Statistics:
    """Return the statistics of a recognised weight.

    More precise than those of the model, whose mean may leave a little of itself in the
    centred weights: a gradient that cancels in one of the two would not in the other.

    p is kept within 0 and 1/‖v‖², where it is whatever the weight (`recognise`).
    """
    centred = by_unit(form, jnp.transpose(widen(weight), form.order))
    if form.centred:
        for _ in range(2):
            centred -= jnp.mean(centred, axis=0, keepdims=True)
        centred -= sum_of_runs(centred)[None] / centred.shape[0]
    spread = sum_of_runs(jnp.square(centred))
    root, derivative = jax.jvp(form.size, (spread,), (jnp.ones_like(spread),))
    part = jnp.clip(-2 * spread * derivative / root, 0, 1)
    pull = jnp.where(spread > 0, part / jnp.where(spread > 0, spread, 1), 0)
    own = root if gain is None else root * gain.reshape(-1).astype(root.dtype)
    return Statistics(centred, root, own, pull, pull * (2 - part), form.centred)


def by_unit(form: Standardisation, kernel: Array) -> Float[Array, "n o"]:
    """Return an array like the anchor by output unit."""
    moved = jnp.moveaxis(kernel, form.unit, -1)
    return moved.reshape(-1, moved.shape[-1])
