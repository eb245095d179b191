"""Squared norms from Gram matrices, as upper bounds.

‖Σ_t x_t·dy_tᵀ‖² = Σ_{t,s} <x_t, x_s>·<dy_t, dy_s> is a difference of large numbers
where positions cancel. Rounding can take η·A² from it at most, and that much is added:
A = Σ_t ‖x_t‖·‖dy_t‖, and η is of the order of (K + N)·u for K inputs and N outputs.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from tanager.clipping.analysis.rounding import gamma, levels, pairwise


class Gram(NamedTuple):
    """A squared norm that no gradient was formed for, and A², or more of each.

    A = Σ_t ‖x_t‖·‖dy_t‖ is what the rounding of g is relative to. With several groups,
    A² is the sum of theirs.
    """

    squares: Float[Array, " b"]
    terms: Float[Array, " b"]


_LARGEST = 2.0**66
_TINY = float(jnp.finfo(jnp.float32).tiny)


def terms_of(left: Array, right: Array, summands: tuple[int, int]) -> Array:
    """Return Σ_g (Σ_t ‖x_t‖·‖dy_t‖)², rounded up, from squared lengths `[B, G, T]`.

    Each of the summands of a squared length may have vanished.
    """
    dtype = left.dtype
    vanished = float(jnp.finfo(dtype).tiny)
    lengths = [
        jnp.sqrt(side + count * vanished)
        for side, count in zip((left, right), summands, strict=True)
    ]
    sums = jnp.sum(lengths[0] * lengths[1], axis=-1)
    steps = sum(summands) + 2 * left.shape[-1] + left.shape[-2] + 8
    return jnp.sum(jnp.square(sums), axis=-1) * (1 + gamma(steps, dtype, product=True))


def gram_excess(shape: tuple[int, int], summands: tuple[int, int], dtype: Any) -> float:
    """Return η: Σ left·right of Gram matrices is wrong by η·A² at most.

    An entry of `left` is wrong by γ(K)·‖x_t‖·‖x_s‖, one of `right` by γ(N) of its own.
    The shape is (G, T), the summands are (K, N).
    """
    groups, positions = shape
    adding = positions + levels(positions) + levels(groups)
    return gamma(sum(summands) + adding + 4, dtype, product=True)


def gram_of(
    left: Array, right: Array, summands: tuple[int, int], excess: float
) -> Gram:
    """Return Σ_{g,t,s} left·right of Gram matrices `[B, G, T, T]`, as squared norms.

    Raised by what rounding can have taken from it, and guarded against underflow and
    overflow (`guarded`).
    """
    left_diagonal = jnp.diagonal(left, axis1=-2, axis2=-1)
    right_diagonal = jnp.diagonal(right, axis1=-2, axis2=-1)
    terms = terms_of(left_diagonal, right_diagonal, summands)
    sums = jnp.sum(left * right, axis=-1)
    squares = jnp.maximum(pairwise(pairwise(sums, -1), -1), 0)
    squares += excess * terms
    return Gram(guarded(squares, left_diagonal, right_diagonal, summands), terms)


def guarded(
    squares: Array, left: Array, right: Array, summands: tuple[int, int]
) -> Float[Array, " b"]:
    """Return squared norms, infinite where the terms they come from are too large.

    What products of small numbers lost to underflow, and others are large enough to
    make matter, is added: at most 2·tiny for each summand of a squared length `[B, G,
    T]`.
    """
    if squares.dtype != jnp.float32:
        return squares
    axes, positions = (1, 2), left.shape[-1]
    largest = jnp.maximum(jnp.max(left, axis=axes), jnp.max(right, axis=axes))
    sums = jnp.sum(right, axis=axes), jnp.sum(left, axis=axes)
    tiny = 2 * positions * _TINY
    lost = sum(
        tiny * count * total for count, total in zip(summands, sums, strict=True)
    )
    # `~(<)` and not `>=`, so that NaN is too large as well.
    return jnp.where(~(largest < _LARGEST), jnp.inf, squares + lost)
