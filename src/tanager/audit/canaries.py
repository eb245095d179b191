"""Gradient canaries: examples whose gradient has one coordinate of its own.

They take part in a real run of `tanager.train`. Beside the model it trains a vector; a
canary's gradient is longer than the clipping norm and has one coordinate of that
vector. Only noise hides it, and only noise is there while it is not sampled.

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
from tanager.seed import Seed
from tanager.training.run_folder import RunFolder


_LONG = 16.0
"""Gradient of a canary over the clipping norm."""


class Canaries(NamedTuple):
    """Parameters, for the audited run: a model and the canaries' coordinates.

    Attributes:
        model: the audited model.
        scores: float32, where the attacker writes what it sees. Canary k has the k-th
            coordinate.
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
    """Refuse canaries whose gradient would not show in the updates.

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
            "no canary shows in the updates: its coordinate is not trained, or its "
            "gradient is shorter than the clipping norm; this audit can prove nothing"
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
        heard = hear(step, gradient.scores * examples)
        own = None if params is None else params.model
        updates, inner = optimizer.update(gradient.model, inner, own)
        heard = heard.astype(gradient.scores.dtype)
        return Canaries(updates, heard), (step + 1, inner)

    return optax.GradientTransformation(
        init,
        update,  # pyright: ignore[reportArgumentType]
    )


def secret_of(folder: RunFolder | None, seed: int | None) -> Seed:
    """Return an audit's secret: its folder's, or one that is kept nowhere."""
    if folder is not None:
        return folder.seed(seed)
    return Seed.from_os() if seed is None else Seed.from_int(seed)


def numbered(source: Source, numbers: np.ndarray) -> Source:
    """Return examples and canaries as one source: (example, −1) or (any, number)."""
    numbers = numbers.astype(np.int32)
    if isinstance(source, ArraySource):
        none = np.full(len(source), -1, np.int32)
        rows = np.zeros(len(numbers), np.int64)
        return appended((source.tree, none), (source.gather(rows), numbers))

    def read(index: int) -> tuple[Any, np.ndarray]:
        own = index - len(source)
        if own < 0:
            return source[index], np.array(-1, np.int32)
        # A canary comes with the first example, which contributes nothing to it.
        return source[0], numbers[own]

    return Rows(read, len(source) + len(numbers))


def appended(examples: PyTree, more: PyTree) -> ArraySource:
    """Return arrays of examples and more of them, in the dtypes of the first."""
    return ArraySource(
        jax.tree.map(
            lambda leaf, other: np.concatenate([leaf, other.astype(leaf.dtype)]),
            examples,
            more,
        )
    )


class Rows:
    """A source that a function reads, one example at a time."""

    def __init__(self, read: Callable[[int], Any], count: int):
        self._read, self._count = read, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Any:
        return self._read(index)
