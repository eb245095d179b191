"""Sums of gradients without clipping: for training that is NOT private."""

import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, PyTree

from tanager.clipping import ClippedGradient, Explanation
from tanager.clipping.analysis.dtypes import accumulation_dtype, widen
from tanager.clipping.analysis.rounding import FloatError
from tanager.clipping.transform import split


class PlainSums:
    """What `tanager.grid.Grid` is to private sums, in floats: these have no bound."""

    def shapes(self, params: PyTree) -> PyTree:
        """Return the shapes and dtypes of a sum."""
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(
                leaf.shape, accumulation_dtype(leaf.dtype)
            ),
            params,
        )

    def round(self, sums: PyTree) -> PyTree:
        """Return the sums as they are."""
        return sums

    carried = round

    def plus(self, one: PyTree, other: PyTree) -> PyTree:
        """Return the sum of two sums."""
        return jax.tree.map(jnp.add, one, other)


class PlainGrad:
    """What `tanager.clipped_grad` makes, but nothing is clipped: no sensitivity."""

    clip_norm = math.inf
    sensitivity = math.inf

    def __init__(self, loss: Callable, trainable: PyTree | Callable | None = None):
        self._loss = loss
        self._trainable = trainable

    def __call__(
        self, params: PyTree, batch: PyTree, mask: Bool[Array, " b"]
    ) -> ClippedGradient:
        """Add up the gradients of the examples; norms are not known, and are 0."""
        trained, fixed = split(params, self._trainable)

        def total(trained: PyTree) -> tuple[Array, Array]:
            model = eqx.combine(trained, fixed)
            losses = jax.vmap(lambda example: self._loss(model, example))(batch)
            losses = jnp.where(mask, losses, 0)
            return jnp.sum(losses), losses

        gradient, losses = jax.grad(total, has_aux=True)(trained)
        losses = widen(losses)
        gradient = jax.tree.map(widen, gradient)
        return ClippedGradient(gradient, jnp.zeros_like(losses), losses)

    def tune(self, *given: Any, **options: Any) -> bool:
        """Measure nothing: there is one way only."""
        return False

    def explain(self, params: PyTree, batch: PyTree) -> Explanation:
        """Return a table without taps."""
        rows = jax.tree.leaves(batch)[0].shape[0]
        return Explanation("none", rows, (), FloatError(rows, 0.0, 0.0, 0.0, 1.0))
