"""A black-box audit from one run: examples as canaries, and a look at the final model.

Each canary, an example such as a mislabelled image, joins the data of a real run by a
fair coin. The attacker sees only the trained model, and guesses the coins of the
canaries whose loss fell most or least. It proves what a stranger with the model could
prove: far less than an attacker who sees the updates.

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
from tanager.audit.bounds import AuditResult, advantage, auc, finite, require_joining
from tanager.audit.canaries import Rows, appended, joined, require_like, secret_of
from tanager.audit.one_run import (
    Guesses,
    guess,
    one_run,
    one_run_trade_off,
    p_value,
)
from tanager.compiling import filter_jit
from tanager.data import as_source, gather
from tanager.data.source import ArraySource, Source
from tanager.sampling import pack
from tanager.training import charging
from tanager.training.loop import train
from tanager.training.problem import DPSGD, Problem, Runtime


GUESSED = 0.1
"""Share of the canaries that are guessed about: chosen before there is a score."""
_BATCH = 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class OneRun(AuditResult):
    """What one run with many canaries gave away; scores are the fall of the loss.

    `epsilon_lower_bound` holds for any mechanism (Steinke et al.); `trade_off_bound` is
    that of Mahloujifar et al.

    Attributes:
        guesses: made and right.
        auc: of the scores.
        advantage: of the best threshold; not a proven bound.
    """

    guesses: Guesses
    auc: float
    advantage: float


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
        problem: see `tanager.train`.
        algorithm: see `tanager.train`: what is claimed, under add-or-remove-one.
        canaries: m examples like those of the data, stacked or a source.
        runtime: see `tanager.train`; by default without a progress bar.
        confidence: of each bound.
        guessed: share of the canaries that are guessed about, half of them in.
        out: folder of the audited run; the same call resumes it.
        seed: None draws it from the operating system; a number repeats the audit.

    Raises:
        ValueError: an argument is out of range, or nothing could be proven.
    """
    spent, delta = algorithm.mechanisms(), algorithm.delta
    candidates, size = as_source(canaries), problem.size()
    validate.whole(canaries=len(candidates), at_least=20)
    validate.fraction(guessed=guessed)
    for mechanism in spent:
        require_joining(mechanism)
    validate.probability(confidence=confidence)
    made = _made(len(candidates), guessed)
    proven = {"delta": delta, "confidence": confidence}
    _require_provable(len(candidates), guessed, **proven)
    account = charging.account_of(problem, "audit")
    charging.require_room(account, spent, delta, out, seed)
    secret = secret_of(out, seed)
    included = secret.generator("canaries").random(len(candidates)) < 0.5
    source = _joined(problem.source(), candidates, np.flatnonzero(included))
    data = joined(problem, source, int(included.sum()))
    audited = dataclasses.replace(
        algorithm,
        declared_examples=size + len(candidates) // 2,
        delta=min(delta, 0.5 / (size + len(candidates))),
    )
    # Unfinished: what is handed over may be no longer what the loss takes.
    unfinished: dict[str, Any] = {"finish": lambda params: params}
    if problem.labels is not None:
        own = gather(candidates, np.flatnonzero(included))
        of_data = problem.labels
        unfinished["labels"] = lambda: np.append(of_data(), own["label"])
    of_both = dataclasses.replace(problem, data=data, account=account, **unfinished)
    runtime = runtime or Runtime(progress=False)
    result = train(of_both, audited, runtime, out=out, seed=seed)
    before = _losses(problem.loss, problem.params, candidates)
    scores = finite(before - _losses(problem.loss, result.params, candidates))
    guesses = guess(scores, included, made)
    inside, outside = scores[included], scores[~included]
    return OneRun(
        claimed_epsilon=algorithm.claimed_epsilon(),
        **proven,
        inside=inside,
        outside=outside,
        epsilon_lower_bound=one_run(guesses, **proven),
        trade_off_bound=one_run_trade_off(guesses, *spent, **proven),
        guesses=guesses,
        auc=auc(inside, outside),
        advantage=advantage(inside, outside),
    )


def _made(canaries: int, guessed: float) -> int:
    return max(2, math.floor(guessed * canaries))


def _require_provable(
    canaries: int, guessed: float, delta: float, confidence: float
) -> None:
    """Refuse canaries about which even right guesses prove nothing; say how many do."""

    def proves(canaries: int) -> bool:
        made = _made(canaries, guessed)
        return p_value(Guesses(canaries, made, made), 0.0, delta) <= 1 - confidence

    if proves(canaries):
        return
    rule = (
        f"prove nothing at δ = {delta:g} with confidence {confidence:g}, even if all "
        f"{_made(canaries, guessed)} guesses about them were right"
    )
    more = (math.ceil(made / guessed) for made in range(2, 1000))
    enough = next((n for n in more if n > canaries and proves(n)), None)
    remedy = "use a smaller δ, a larger share guessed, or less confidence"
    if enough is not None:
        remedy = f"at least {enough} could; or " + remedy
    validate.refuse("canaries", canaries, rule, remedy)


def _joined(source: Source, canaries: Source, chosen: np.ndarray) -> Source:
    if not len(chosen):
        return source
    own = gather(canaries, chosen)
    require_like("canaries", jax.tree.map(lambda leaf: leaf[0], own), source[0])
    if isinstance(source, ArraySource):
        return appended(source.tree, own)

    def read(index: int) -> Any:
        row = index - len(source)
        return source[index] if row < 0 else jax.tree.map(lambda leaf: leaf[row], own)

    return Rows(read, len(source) + len(chosen))


def _losses(
    loss: Callable[[Any, Any], Array], params: PyTree, examples: Source
) -> np.ndarray:
    of_all = filter_jit(jax.vmap(loss, (None, 0)))
    parts = []
    for _, mask, indices in pack(np.arange(len(examples)), _BATCH):
        losses = of_all(params, gather(examples, indices))
        parts.append(np.asarray(losses, np.float64)[mask])
    return np.concatenate(parts)
