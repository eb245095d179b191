"""Gradient canaries: examples whose gradient has one coordinate of its own.

Beside the model a real run trains a vector; a canary's gradient is longer than the
clipping norm and has one coordinate of that vector. Only noise hides it, and only noise
is there while it is not sampled.

References:
    Nasr et al. 2023, Tight Auditing of Differentially Private Machine Learning,
    section 4.2 (Dirac canaries).
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, PyTree

from tanager import _validate as validate
from tanager.clipping.transform import split
from tanager.data import Source
from tanager.data.grouped import Grouped
from tanager.data.source import ArraySource
from tanager.seed import Seed
from tanager.training.problem import Problem
from tanager.training.run_folder import RunFolder


_LONG = 16.0
"""Gradient of a canary over the clipping norm."""


class Canaries(NamedTuple):
    """Parameters of an audited run: a model, and what is heard of the canaries."""

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
    return Canaries(trainable, True)  # pyrefly: ignore[bad-argument-type]


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
    """Refuse canaries that no update shows: of a short gradient or a frozen leaf."""
    trained, fixed = split(params, trainable)
    canary = jax.tree.map(jnp.asarray, (example[0], np.int32(0)))
    of_trained = jax.grad(lambda leaves: loss(eqx.combine(leaves, fixed), canary))
    own = of_trained(trained).scores
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
    """Return an optimizer that adds what it hears of the canaries to `scores`.

    The noisy sum was divided by the `examples` expected in a batch: times that, a
    canary that was sampled adds 1 to noise of deviation σ. `hear` is given the step and
    the canaries' coordinates of the sum.
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
        update,  # pyrefly: ignore[bad-argument-type]
    )


def secret_of(out: str | Path | None, seed: int | None) -> Seed:
    """Return an audit's secret: its folder's, or one that is kept nowhere."""
    if out is not None:
        return RunFolder(out).seed(seed)
    return Seed.from_os() if seed is None else Seed.from_int(seed)


def require_like(name: str, canary: Any, example: Any) -> None:
    """Refuse a canary whose shapes are not those of an example."""
    given, wanted = (jax.tree.map(np.shape, each) for each in (canary, example))
    if given != wanted:
        validate.refuse(name, given, f"must be like an example: {wanted}")


def joined(problem: Problem, source: Source, canaries: int, each: int = 1) -> Any:
    """Return a source of a problem's examples and of canaries after them as data.

    Where the unit of privacy is a person, every canary is one, with `each` examples.
    """
    groups = problem.groups
    if groups is None:
        return source
    owners = groups.joined(canaries, each).numbers
    return Grouped(source, owners, groups.examples_per_group)


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
