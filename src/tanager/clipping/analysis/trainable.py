"""Which leaves of parameters are trained."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from tanager.clipping.analysis.statistics import held_fixed, refuse_shared


def split(
    params: PyTree, trainable: PyTree | Callable | None = None
) -> tuple[PyTree, PyTree]:
    """Return the leaves that are trained and the others, None in each other's place.

    Running statistics and other state of layers is never trained (`held_fixed`).

    Args:
        params: pytree of arrays or their shapes, or an Equinox module.
        trainable: as of `clipped_grad`.

    Raises:
        ValueError: `trainable` does not fit `params`, or an NNX module holds one
            variable twice.
    """
    refuse_shared(params)
    trains = jax.tree.map(
        lambda leaf, held: _is_float(leaf) and not held, params, held_fixed(params)
    )
    numbers, others = eqx.partition(params, trains)
    if trainable is None:
        return numbers, others
    try:
        trained, frozen = eqx.partition(numbers, trainable)
    except ValueError as error:
        raise ValueError(
            "trainable must be a function of a leaf, or a pytree of booleans with the "
            f"structure of params or of a part of it: {error}"
        ) from error
    return trained, eqx.combine(frozen, others)


def _is_float(leaf: Any) -> bool:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jnp.issubdtype(leaf.dtype, jnp.inexact)
    return eqx.is_inexact_array(leaf)
