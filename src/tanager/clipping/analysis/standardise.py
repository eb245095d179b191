"""Weight standardisation, and norms of its gradient without differentiating it.

Per output unit o with fan-in n: v = W − mean(W), s² = mean(v²) + eps and
Ŵ = a·v with a = gain/sqrt(n s²). With G = ∂loss/∂Ŵ of one example,

    ∂loss/∂W    = a·[G − mean(G) − v·(vᵀG)/(n s²)]
    ‖∂loss/∂W‖² = a²·[‖G‖² − (1ᵀG)²/n − (vᵀG)²/(n s²)·(2 − mean(v²)/s²)]
    ∂loss/∂gain = vᵀG/sqrt(n s²)

so that three sums over the fan-in of G give the norm. They come from gradients or,
where none is formed, from the layer's own input and output.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from tanager.clipping.analysis.dtypes import accumulation_dtype, widen
from tanager.clipping.analysis.jaxprs import aval
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
    operands = (weight,) if gain is None else (weight, gain)
    return _standardise(*operands, jnp.asarray(eps, accumulation_dtype(weight.dtype)))


def _tanager_standardise(weight: Array, *rest: Array) -> Array:
    *gain, eps = rest
    parts = statistics(weight, *gain, eps=eps)
    factor = parts.factor.reshape((1,) * (weight.ndim - 1) + parts.factor.shape)
    return (parts.centred * factor).astype(weight.dtype)


_standardise = jax.jit(_tanager_standardise)


class Statistics(NamedTuple):
    """What a weight's standardisation is made of; all but `centred` per output unit.

    v = W − mean(W), 1/sqrt(n s²), a, and (2 − mean(v²)/s²)/(n s²).
    """

    centred: Array
    root: Array
    factor: Array
    curb: Array


def statistics(weight: Array, gain: Array | None = None, *, eps: Array) -> Statistics:
    """Return the parts of a standardisation, in float32 or wider."""
    axes = tuple(range(weight.ndim - 1))
    wide = weight.astype(accumulation_dtype(weight.dtype))
    centred = wide - jnp.mean(wide, axis=axes, keepdims=True)
    return _from_centred(centred, jnp.mean(jnp.square(centred), axis=axes), gain, eps)


def _from_centred(
    centred: Array, variance: Array, gain: Array | None, eps: Array
) -> Statistics:
    fan_in = math.prod(centred.shape[:-1])
    shifted = variance + eps.astype(centred.dtype)
    root = lax.rsqrt(fan_in * shifted)
    factor = root if gain is None else root * gain.astype(centred.dtype)
    curb = (2 - variance / shifted) / (fan_in * shifted)
    return Statistics(centred, root, factor, curb)


def recognised(equation: jex.JaxprEqn) -> bool:
    """Whether an equation is a call of `standardise`, by its name and by its body."""
    if equation.params.get("name") != _tanager_standardise.__name__:
        return False
    avals = tuple((aval(atom).shape, aval(atom).dtype) for atom in equation.invars)
    return str(equation.params["jaxpr"]) == _own_jaxpr(avals)


@functools.cache
def _own_jaxpr(avals: tuple) -> str:
    shapes = [jax.ShapeDtypeStruct(*shaped) for shaped in avals]
    return str(jax.make_jaxpr(_standardise)(*shapes).eqns[0].params["jaxpr"])


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
    axes = tuple(axis + 1 for axis in range(centred.ndim) if axis not in units)
    gradient, rows = widen(gradient), gradient.shape[0]
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
    less = jnp.square(total) / fan_in + jnp.square(projection) * parts.curb[None]
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


def pull_back(
    fan_in: int, parts: Statistics, gradient: Float[Array, "*fan_in o"]
) -> Float[Array, "*fan_in o"]:
    """Return ∂loss/∂W from G, wrong by 2·`run_steps` + 12 roundings of a∘G."""
    flat = widen(gradient).reshape(fan_in, -1)
    centred = parts.centred.reshape(fan_in, -1)
    mean = sum_of_runs(flat)[None] / fan_in
    projection = (sum_of_runs(flat * centred) * jnp.square(parts.root))[None]
    back = parts.factor[None] * (flat - mean - centred * projection)
    return back.reshape(gradient.shape)


def parts_of(values: Sequence[Any]) -> Statistics:
    """Return the statistics from the values of a recognised equation's operands.

    More precise than those of the model, whose mean may leave a little of itself in the
    centred weights: a gradient that cancels in one of the two would not in the other.
    """
    weight, *gain, eps = values
    weight = widen(weight)
    axes = tuple(range(weight.ndim - 1))
    fan_in = math.prod(weight.shape[:-1])
    centred = weight
    for _ in range(2):
        centred -= jnp.mean(centred, axis=axes, keepdims=True)
    centred = centred.reshape(fan_in, -1)
    centred -= sum_of_runs(centred)[None] / fan_in
    variance = sum_of_runs(jnp.square(centred)) / fan_in
    own = gain[0] if gain else None
    return _from_centred(centred.reshape(weight.shape), variance, own, jnp.asarray(eps))
