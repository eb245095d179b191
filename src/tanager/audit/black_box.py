"""A black-box audit from one run: examples as canaries, and a look at the final model.

The run is a real one of `tanager.train`. Each canary, an example such as a mislabelled
image, joins the data by a fair coin; the attacker sees the trained model alone and
guesses the coins of those canaries whose loss fell most, or least. What it proves is
what a stranger with the model could: far less than who sees the updates.

References:
    Steinke, Nasr and Jagielski 2023, Privacy Auditing with One (1) Training Run.
    Mahloujifar, Melis and Chaudhuri 2024, arXiv:2410.22235.
"""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, PyTree

from tanager import _validate as validate
from tanager.audit.bounds import advantage, auc, require_joining
from tanager.audit.one_run import Guesses, guess, one_run, one_run_trade_off
from tanager.compiling import filter_jit
from tanager.data import as_source, gather
from tanager.data.source import ArraySource, Source
from tanager.privacy import accountant
from tanager.seed import Seed
from tanager.training.loop import train
from tanager.training.problem import DPSGD, Problem, Runtime
from tanager.training.run_folder import RunFolder


GUESSED = 0.1
"""Share of the canaries that are guessed about: settled before there is a score."""
_BATCH = 256
_WORST = 1e30


@dataclasses.dataclass(frozen=True)
class OneRun:
    """What one run with many canaries gave away.

    Attributes:
        claimed_epsilon: of the mechanism, by PLD.
        delta: of that ε and of the bounds.
        confidence: of each bound.
        guesses: made and right.
        inside: float64[n] scores, the fall of the loss, of canaries in the data.
        outside: float64[m − n] scores of the others.
        epsilon_lower_bound: that holds for any mechanism (Steinke et al.).
        trade_off_bound: by the trade-off curve of the mechanism, about its noise alone
            (Mahloujifar et al.).
        auc: of the scores.
        advantage: of the best threshold, told and not proven.
    """

    claimed_epsilon: float
    delta: float
    confidence: float
    guesses: Guesses
    inside: np.ndarray
    outside: np.ndarray
    epsilon_lower_bound: float
    trade_off_bound: float
    auc: float
    advantage: float

    @property
    def violated(self) -> bool:
        """Whether a bound is above what is claimed."""
        highest = max(self.epsilon_lower_bound, self.trade_off_bound)
        return highest > self.claimed_epsilon


def audit_one_run(
    problem: Problem,
    algorithm: DPSGD,
    canaries: Any,
    runtime: Runtime | None = None,
    *,
    confidence: float = 0.95,
    guessed: float = GUESSED,
    out: str | Path | None = None,
    seed: int | None = None,
) -> OneRun:
    """Train once on data that canaries joined by coin, and guess the coins.

    Args:
        problem: as of `tanager.train`.
        algorithm: as of `tanager.train`: what is claimed, under add-or-remove-one.
        canaries: m examples like those of the data, stacked or a source.
        runtime: as of `tanager.train`; by default without a progress bar.
        confidence: of each bound.
        guessed: share of the canaries that are guessed about, half of them in.
        out: folder of the audited run; the same call resumes it.
        seed: None draws it from the operating system; a number repeats the audit.

    Raises:
        ValueError: an argument is out of range, or nothing could be proven: δ is too
            large for so many canaries, or the guesses are too few.
    """
    mechanism, delta = algorithm.mechanism, algorithm.delta
    source, candidates = problem.source(), as_source(canaries)
    validate.whole(canaries=len(candidates), at_least=20)
    validate.fraction(guessed=guessed)
    require_joining(mechanism)
    made = max(2, math.floor(guessed * len(candidates)))
    # Refused before the run: guesses that could prove nothing.
    perfect = Guesses(len(candidates), made, made)
    one_run(perfect, delta=delta, confidence=confidence)
    if out is None:
        secret = Seed.from_os() if seed is None else Seed.from_int(seed)
    else:
        secret = RunFolder(out).seed(seed)
    included = secret.generator("canaries").random(len(candidates)) < 0.5
    data = _joined(source, candidates, np.flatnonzero(included))
    audited = dataclasses.replace(
        algorithm,
        declared_examples=len(source) + len(candidates) // 2,
        delta=min(delta, 0.5 / (len(source) + len(candidates))),
    )
    of_both = dataclasses.replace(problem, data=data)
    runtime = runtime or Runtime(progress=False)
    result = train(of_both, audited, runtime, out=out, seed=seed)
    loss, first = problem.loss, problem.finish(problem.params)
    before = _losses(loss, first, candidates)
    after = _losses(loss, result.params, candidates)
    scores = np.clip(np.nan_to_num(before - after, nan=-_WORST), -_WORST, _WORST)
    guesses = guess(scores, included, made)
    inside, outside = scores[included], scores[~included]
    return OneRun(
        accountant.epsilon(mechanism, delta),
        delta,
        confidence,
        guesses,
        inside,
        outside,
        one_run(guesses, delta=delta, confidence=confidence),
        one_run_trade_off(guesses, mechanism, delta=delta, confidence=confidence),
        auc(inside, outside),
        advantage(inside, outside),
    )


def _joined(source: Source, canaries: Source, chosen: np.ndarray) -> Any:
    own = gather(canaries, chosen) if len(chosen) else None
    if own is None:
        return source
    one = jax.tree.map(np.shape, source[0])
    given = jax.tree.map(lambda leaf: leaf.shape[1:], own)
    if one != given:
        validate.refuse("canaries", given, f"must be like an example: {one}")
    if isinstance(source, ArraySource):
        return jax.tree.map(
            lambda leaf, more: np.concatenate([leaf, more.astype(leaf.dtype)]),
            source.tree,
            own,
        )
    return _Both(source, own, len(chosen))


class _Both:
    """Examples that are read when they are asked for, then canaries."""

    def __init__(self, source: Source, canaries: Any, count: int):
        self._source, self._canaries, self._count = source, canaries, count

    def __len__(self) -> int:
        return len(self._source) + self._count

    def __getitem__(self, index: int) -> Any:
        own = index - len(self._source)
        if own < 0:
            return self._source[index]
        return jax.tree.map(lambda leaf: leaf[own], self._canaries)


def _losses(
    loss: Callable[[Any, Any], Array], params: PyTree, examples: Source
) -> np.ndarray:
    of_all = filter_jit(
        lambda params, batch: jax.vmap(lambda example: loss(params, example))(batch),
    )
    starts = range(0, len(examples), _BATCH)
    parts = []
    for start in starts:
        rows = np.arange(start, min(start + _BATCH, len(examples)))
        # One shape for all of them: the last is filled up with its last example.
        filled = np.concatenate([rows, np.repeat(rows[-1:], _BATCH - len(rows))])
        losses = of_all(params, gather(examples, filled))
        parts.append(np.asarray(losses, np.float64)[: len(rows)])
    return np.concatenate(parts)
