"""A white-box audit: gradient canaries in a real run of `tanager.train`.

The run is the one that users make: its sampler, its clipping, its noise. Beside the
model it trains a vector with a coordinate for each canary; a canary is an example whose
gradient lies on its own coordinate and nowhere else, longer than the clipping norm.
Half of them, by fair coins, are in the data. The attacker sees what the optimizer sees:
the noisy gradient of every update, and from a canary's coordinate of it the likelihood
ratio of the two worlds, in the data or not. That is the best test there is, and the
coordinates of many canaries are as good as as many runs.

References:
    Nasr et al. 2023, Tight Auditing of Differentially Private Machine Learning,
    sections 4 and 5 (Dirac canaries, white box). Steinke et al. 2023 (canaries that
    join by coin).
"""

import dataclasses
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
from tanager.audit.bounds import Audit, SubsampledEstimator, audit_scores
from tanager.data import Source, as_source
from tanager.data.source import ArraySource
from tanager.privacy import accountant
from tanager.privacy.mechanism import Adjacency, Mechanism
from tanager.seed import Seed
from tanager.training.loop import train
from tanager.training.run_folder import RunFolder


_LONG = 16.0
"""Gradient of a canary over the clipping norm."""


class Canaries(NamedTuple):
    """Parameters, for the audited run: a model and the canaries' coordinates.

    Attributes:
        model: the audited model.
        scores: float32[m], where the attacker adds up log-likelihood ratios.
    """

    model: PyTree
    scores: Array


@dataclasses.dataclass(frozen=True)
class WhiteBox:
    """What a white-box audit found.

    Attributes:
        claimed_epsilon: of the mechanism, by PLD.
        delta: of that ε and of the bound.
        confidence: that the bound is below the true ε, if noise is Gaussian.
        inside: float64[n] scores of canaries that were in the data, in random order.
        outside: float64[m − n] scores of those that were not.
        audit: the errors, and the bound that they prove for the steps that were run.
        noise_multiplier: the largest that is not refuted.
        epsilon_lower_bound: ε of the claimed mechanism with that noise.
    """

    claimed_epsilon: float
    delta: float
    confidence: float
    inside: np.ndarray
    outside: np.ndarray
    audit: Audit
    noise_multiplier: float
    epsilon_lower_bound: float

    @property
    def violated(self) -> bool:
        """Whether the bound is above what is claimed."""
        return self.epsilon_lower_bound > self.claimed_epsilon


def audit_white_box(
    loss: Callable[[Any, Any], Array],
    params: PyTree,
    data: Any,
    mechanism: Mechanism,
    *,
    delta: float,
    optimizer: optax.GradientTransformation | None = None,
    clip_norm: float = 1.0,
    canaries: int = 1000,
    confidence: float = 0.95,
    augment: Callable[[jax.Array, Any], Any] | None = None,
    trainable: PyTree | Callable[[Any], bool] | None = None,
    steps: int | None = None,
    out: str | Path | None = None,
    seed: int | None = None,
    **options: Any,
) -> WhiteBox:
    """Train once with canaries, and bound ε from what the optimizer saw.

    The bound is about the mechanism that is run, of which sample rate, noise and steps
    are those given; data can be a part of the real ones, and the fewer the quicker.

    Args:
        loss: as of `tanager.train`, for one example.
        params: as there.
        data: as there.
        mechanism: what is claimed, under add-or-remove-one.
        delta: of the claimed ε and of the bound.
        optimizer: what trains the model meanwhile; None leaves it as it is.
        clip_norm: C.
        canaries: m; about half of them join the data.
        confidence: of the bound.
        augment: as of `tanager.train`; canaries go through it as well.
        trainable: as of `tanager.train`, of `params`.
        steps: to run, at most the mechanism's, which are run by default. From fewer,
            what they prove of the noise is put into the whole mechanism.
        out: folder of the audited run; the same call goes on where it was killed.
        seed: None draws it from the operating system; a number repeats the audit.
        **options: of `tanager.train`, such as `physical_batch_size` or `strategy`.

    Raises:
        ValueError: an argument is out of range.
    """
    validate.whole(canaries=canaries, at_least=20)
    if mechanism.adjacency is not Adjacency.ADD_OR_REMOVE_ONE:
        validate.refuse(
            "adjacency",
            mechanism.adjacency,
            "is not what joining canaries test",
            f"audit under {Adjacency.ADD_OR_REMOVE_ONE}",
        )
    if mechanism.noise_multiplier == 0:
        validate.refuse(
            "noise_multiplier", 0, "claims nothing that could be audited", "add noise"
        )
    run = mechanism
    if steps is not None:
        validate.whole(steps=steps, at_least=1)
        run = dataclasses.replace(mechanism, steps=min(steps, mechanism.steps))
    estimator = SubsampledEstimator(delta, confidence, run)
    secret = _secret(out, seed)
    coins = secret.generator("canaries").random(canaries) < 0.5
    joined = _joined(as_source(data), np.flatnonzero(coins))
    frozen = optimizer or optax.set_to_zero()
    result = train(
        _with_canaries(loss, _LONG * clip_norm),
        Canaries(params, jnp.zeros(canaries, jnp.float32)),
        joined,
        run,
        delta=min(delta, 0.5 / len(joined)),  # told in its own report alone
        clip_norm=clip_norm,
        optimizer=_listening(frozen, mechanism, len(joined)),
        augment=None if augment is None else _augmenting(augment),
        trainable=_with_scores(trainable, params),
        out=out,
        seed=seed,
        progress=options.pop("progress", False),
        **options,
    )
    scores = np.asarray(result.params.scores, np.float64)
    inside, outside = scores[coins], scores[~coins]
    audit = audit_scores(inside, outside, estimator)
    noise_multiplier = estimator.noise_multiplier(audit.errors)
    whole = dataclasses.replace(estimator, claimed=mechanism)
    return WhiteBox(
        accountant.epsilon(mechanism, delta),
        delta,
        confidence,
        inside,
        outside,
        audit,
        noise_multiplier,
        whole.epsilon_at(noise_multiplier),
    )


def _secret(out: str | Path | None, seed: int | None) -> Seed:
    if out is not None:
        return RunFolder(out).seed(seed)
    return Seed.from_os() if seed is None else Seed.from_int(seed)


def _with_scores(
    trainable: PyTree | Callable[[Any], bool] | None, params: PyTree
) -> Any:
    if trainable is None:
        return None
    if callable(trainable):
        numbers = eqx.filter(params, eqx.is_inexact_array)
        trainable = jax.tree.map(trainable, numbers)
    return Canaries(trainable, True)  # pyright: ignore[reportArgumentType]


def _with_canaries(loss: Callable[[Any, Any], Array], length: float) -> Callable:
    """Return the loss of an example that may be a canary."""

    def either(params: Canaries, example: tuple[Any, Array]) -> Array:
        inner, canary = example
        # Linear: its gradient does not depend on what the attacker wrote there.
        own = length * params.scores[jnp.maximum(canary, 0)]
        return jnp.where(canary < 0, loss(params.model, inner), own)

    return either


def _augmenting(augment: Callable[[jax.Array, Any], Any]) -> Callable:
    return lambda key, example: (augment(key, example[0]), example[1])


def _listening(
    optimizer: optax.GradientTransformation, mechanism: Mechanism, examples: int
) -> optax.GradientTransformation:
    """Return an optimizer that tells the canaries' coordinates what it hears there.

    It is given the noisy sum of gradients of norm 1, over q·N: times q·N, a canary that
    was sampled adds 1 to noise of deviation σ.
    """
    rate, sigma = mechanism.sample_rate, mechanism.noise_multiplier

    def update(
        gradient: Canaries, state: PyTree, params: Canaries | None = None
    ) -> tuple[Canaries, PyTree]:
        heard = gradient.scores * (rate * examples)
        ratio = (2 * heard - 1) / (2 * sigma**2)
        score = ratio
        if rate < 1:
            score = jnp.logaddexp(np.log1p(-rate), np.log(rate) + ratio)
        own = None if params is None else params.model
        updates, state = optimizer.update(gradient.model, state, own)
        return Canaries(updates, score.astype(gradient.scores.dtype)), state

    def init(params: Any) -> PyTree:
        return optimizer.init(params.model)

    return optax.GradientTransformation(
        init,
        update,  # pyright: ignore[reportArgumentType]
    )


def _joined(source: Source, numbers: np.ndarray) -> "_Joined | ArraySource":
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
