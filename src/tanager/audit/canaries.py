"""Gradient canaries: examples that lie on a coordinate of their own, and on no other.

They ride on a real run of `tanager.train`: beside the model it trains a vector, and a
canary's gradient is longer than the clipping norm and lies on one coordinate of that
vector. So nothing but noise hides it, and nothing but noise is on its coordinate
while it is not sampled.

References:
    Nasr et al. 2023, Tight Auditing of Differentially Private Machine Learning,
    section 4.2 (Dirac canaries).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, PyTree

from tanager.clipping.transform import split
from tanager.data import Source
from tanager.data.source import ArraySource


_LONG = 16.0
"""Gradient of a canary over the clipping norm."""


class Canaries(NamedTuple):
    """Parameters, for the audited run: a model and the canaries' coordinates.

    Attributes:
        model: the audited model.
        scores: float32, where the attacker keeps what was heard. Canary k lies on its
            k-th coordinate.
    """

    model: PyTree
    scores: Array


def trained_with(
    trainable: PyTree | Callable[[Any], bool] | None, params: PyTree
) -> Any:
    """Return which leaves are trained: those of the model, and the canaries'."""
    if trainable is None:
        return None
    if callable(trainable):
        numbers = eqx.filter(params, eqx.is_inexact_array)
        trainable = jax.tree.map(trainable, numbers)
    return Canaries(trainable, True)  # pyright: ignore[reportArgumentType]


def with_canaries(loss: Callable[[Any, Any], Array], clip_norm: float) -> Callable:
    """Return the loss of an example that may be a canary."""

    def either(params: Canaries, example: tuple[Any, Array]) -> Array:
        inner, canary = example
        # Linear: its gradient does not depend on what the attacker wrote there.
        scores = params.scores.reshape(-1)
        own = _LONG * clip_norm * scores[jnp.maximum(canary, 0)]
        return jnp.where(canary < 0, loss(params.model, inner), own)

    return either


def require_heard(
    loss: Callable[[Any, Any], Array],
    params: Canaries,
    trainable: Any,
    example: tuple[Any, Any],
    clip_norm: float,
) -> None:
    """Refuse canaries whose gradient nothing is trained by: nobody would hear them.

    Args:
        loss: of an example that may be a canary.
        params: the model and the canaries' coordinates.
        trainable: which leaves are trained.
        example: any one.
        clip_norm: C, which a canary's gradient must exceed.

    Raises:
        RuntimeError: the gradient of a canary is too short, or its leaf is frozen.
    """
    trained, fixed = split(params, trainable)
    canary = jax.tree.map(jnp.asarray, (example[0], np.int32(0)))
    gradient = jax.grad(lambda leaves: loss(eqx.combine(leaves, fixed), canary))(
        trained
    )
    own = gradient.scores
    if own is None or not jnp.abs(own[0, 0]) > clip_norm:
        raise RuntimeError(
            "no canary can be heard: their coordinates are not trained, or a canary's "
            "gradient is shorter than the clipping norm; this audit would say nothing"
        )


def augmenting(augment: Callable[[jax.Array, Any], Any]) -> Callable:
    """Return views of an example that may be a canary."""
    return lambda key, example: (augment(key, example[0]), example[1])


def listening(
    optimizer: optax.GradientTransformation,
    examples: float,
    hear: Callable[[Array, Array], Array],
) -> optax.GradientTransformation:
    """Return an optimizer that writes what it hears of the canaries into `scores`.

    It is given the noisy sum of gradients of norm 1, divided by the expected batch
    size: multiplied by that again, a canary that was sampled adds 1 to noise of
    deviation σ.

    Args:
        optimizer: of the model.
        examples: expected in a batch, q·N.
        hear: from the step and the canaries' coordinates of the noisy sum to what is
            added to `scores`.
    """

    def init(params: Any) -> PyTree:
        return jnp.zeros((), jnp.int32), optimizer.init(params.model)

    def update(
        gradient: Canaries, state: PyTree, params: Canaries | None = None
    ) -> tuple[Canaries, PyTree]:
        step, inner = state
        told = hear(step, gradient.scores * examples)
        own = None if params is None else params.model
        updates, inner = optimizer.update(gradient.model, inner, own)
        told = told.astype(gradient.scores.dtype)
        return Canaries(updates, told), (step + 1, inner)

    return optax.GradientTransformation(
        init,
        update,  # pyright: ignore[reportArgumentType]
    )


def joined(source: Source, numbers: np.ndarray) -> "_Joined | ArraySource":
    """Return examples and canaries as one source: (example, −1) or (any, number)."""
    if not isinstance(source, ArraySource):
        return _Joined(source, numbers)
    rows = np.zeros(len(numbers), np.int64)
    own = np.full(len(source), -1, np.int32)
    return ArraySource(
        (
            jax.tree.map(
                lambda leaf: np.concatenate([leaf, np.asarray(leaf)[rows]]), source.tree
            ),
            np.concatenate([own, numbers.astype(np.int32)]),
        )
    )


class _Joined:
    """Examples that are read when they are asked for, then canaries.

    A canary travels with the first example, which contributes nothing to it.
    """

    def __init__(self, source: Source, numbers: np.ndarray):
        self._source, self._numbers = source, numbers

    def __len__(self) -> int:
        return len(self._source) + len(self._numbers)

    def __getitem__(self, index: int) -> tuple[Any, np.ndarray]:
        own = index - len(self._source)
        if own < 0:
            return self._source[index], np.array(-1, np.int32)
        return self._source[0], np.array(self._numbers[own], np.int32)
