"""Membership inference on many models: was the canary in the data?

The privacy budget is given; the attacker chooses everything else. Phase I trains some
models in many settings, with a canary z and without; after each round the better half
of the settings gets more models. Phase II trains many models in the setting in which
the two differ most, all from the same first parameters, and bounds ε by the errors of a
threshold on the loss of z, chosen on other models. Phase I decides only on the setting,
so the bound stays valid.

References:
    De et al. 2022, Unlocking High-Accuracy Differentially Private Image Classification
    through Scale, appendix A.2, Tables 8 and 9.
"""

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

from tanager import _validate as validate
from tanager.audit.bounds import (
    RESERVED,
    Audit,
    AuditResult,
    Errors,
    Estimator,
    SubsampledEstimator,
    audit_scores,
    models_needed,
)
from tanager.audit.canaries import appended, joined, require_like, secret_of
from tanager.audit.many_models import ManyModels, guess_update, with_rates
from tanager.audit.membership_trainer import (
    FEWEST,
    MembershipTrainer,
    Records,
    Setting,
    Tried,
)
from tanager.clipping import Style
from tanager.data import ArraySource, gather
from tanager.data.source import Source
from tanager.privacy import accountant
from tanager.privacy.calibrate import calibrate
from tanager.privacy.mechanism import Mechanism
from tanager.training import charging, fingerprint
from tanager.training.estimate import duration
from tanager.training.problem import DPSGD, Problem
from tanager.training.run_folder import RunFolder


@dataclasses.dataclass(frozen=True, kw_only=True)
class Membership(AuditResult):
    """What membership inference found; scores are −loss of z of models of phase II.

    `epsilon_lower_bound` holds for any mechanism, as in Table 9.

    Attributes:
        mechanism: of the setting.
        setting: that phase I chose.
        tried: all of phase I, the best first.
        audit: errors of the threshold, and the bound that they prove.
        highest_provable: the bound of an attack on as many models without any error.
    """

    mechanism: Mechanism
    setting: Setting
    tried: tuple[Tried, ...]
    audit: Audit
    highest_provable: float

    @property
    def models(self) -> int:
        """How many models phase II trained."""
        return len(self.inside) + len(self.outside)


@dataclasses.dataclass(frozen=True)
class Attack:
    """State a budget, and what an attacker with that budget can choose from (Table 8).

    Attributes:
        epsilon: of the guarantee that is audited.
        delta: of the guarantee and of the bounds.
        batch_size: expected, q·N.
        steps: numbers of steps to choose from.
        learning_rates: to choose from.
        clip_norms: to choose from.
        style: how gradients are brought to C, as in `DPSGD`.
        optimizer: from ``learning_rate`` to an optax transformation.
        augmentation_multiplicity: K views averaged before clipping.
        confidence: of each bound.
    """

    epsilon: float
    delta: float
    batch_size: float = 64
    steps: Sequence[int] = (50, 100)
    learning_rates: Sequence[float] = (0.1, 0.5, 1.0)
    clip_norms: Sequence[float] = (0.1, 1.0, 10.0)
    style: str | Style = "clip"
    optimizer: Callable[..., optax.GradientTransformation] = optax.sgd
    augmentation_multiplicity: int = 0
    confidence: float = 0.999

    def algorithm(self, mechanism: Mechanism, clip_norm: float, size: int) -> DPSGD:
        """Return how models of a mechanism are trained on `size` examples."""
        return DPSGD(
            mechanism,
            with_rates(self.optimizer),
            delta=self.delta,
            clip_norm=clip_norm,
            style=self.style,
            augmentation_multiplicity=self.augmentation_multiplicity,
            ema_decay=0.0,
            declared_examples=size,
        )


def audit_membership(
    problem: Problem,
    attack: Attack,
    canaries: Mapping[str, Any],
    *,
    models: int = 1000,
    sweep_models: int | None = None,
    strategy: str = "auto",
    models_at_once: int = 16,
    out: str | Path | None = None,
    seed: int | None = None,
    on_models: Callable[[str, float, int, str], None] = lambda *seen: None,
) -> Membership:
    """Train models with a canary and without, and bound ε by how they differ.

    Args:
        problem: see `tanager.train`. Its data are D, the N examples that all models
            have; few, so that one more counts.
        attack: the budget, and what to choose from.
        canaries: by name, the examples z to choose from, each like one of D.
        models: trained by phase II, half of them with z (the paper: a million).
        sweep_models: trained by phase I; None for half as many. With one setting there
            is no phase I.
        strategy: see `tanager.clipped_grad`.
        models_at_once: in one program.
        out: folder; the same call resumes the audit.
        seed: None draws it from the operating system; a number repeats the audit.
        on_models: called first with a guess of how long it takes, then after each
            update of a program of models, with the phase, how many models are trained
            (a fraction of those in it), how many both phases train, and what is being
            done or known so far.

    Raises:
        ValueError: an argument is out of range, the models are too few to prove
            anything, the canaries are not like the data, or `out` holds another audit.
    """
    if problem.labels is not None:
        rule = "must be left out: no class counts are released in this audit"
        validate.refuse("labels", "given", rule, "audit without class weights")
    source, size = problem.source(), problem.size()
    epsilon, delta = attack.epsilon, attack.delta
    validate.whole(models=models, at_least=20)
    validate.whole(models_at_once=models_at_once, at_least=2)
    validate.positive(batch_size=attack.batch_size)
    if attack.batch_size > size:
        rule = f"must be at most the {size} examples"
        validate.refuse("batch_size", attack.batch_size, rule)
    models += models % 2
    settings = _settings(attack, canaries)
    estimator = Estimator(delta, attack.confidence)
    highest = _highest_provable(estimator, models, epsilon)
    if sweep_models is None:
        sweep_models = models // 2
    rounds = _rounds(len(settings), sweep_models)
    rate, in_all = attack.batch_size / size, models
    for (_, before), (left, by_then) in itertools.pairwise([(0, 0), *rounds]):
        in_all += left * (by_then - before)
    recorded = None if out is None else Path(out) / "scores.jsonl"
    trained = 0.0
    if recorded is not None and recorded.exists():
        trained = min(recorded.read_bytes().count(b"\n"), in_all)

    def report(phase: str, reached: float, known: str) -> None:
        nonlocal trained
        trained = min(reached, in_all)
        on_models(phase, trained, in_all, known)

    mechanisms = {
        count: calibrate(epsilon=epsilon, delta=delta, sample_rate=rate, steps=count)
        for count in dict.fromkeys(attack.steps)
    }
    account = charging.account_of(problem, "audit")
    # What all models spend together, at most: phase I chooses among the mechanisms.
    spent = [
        dataclasses.replace(one, steps=one.steps * in_all)
        for one in mechanisms.values()
    ]
    charging.require_room(account, spent, delta, out, seed)
    if trained < in_all and (guess := _guess(problem, attack, rate)) is not None:
        left = guess * float(np.mean(attack.steps)) * (in_all - trained)
        known = (
            f"about {duration(left)} left (first guess: {guess:.2g} s an update of one "
            "model, as long as drawing a batch and two plain gradients)"
        )
        report("getting ready", trained, known)
    both = _with_canaries(source, canaries)
    data = joined(problem, both, len(canaries))
    with_both = dataclasses.replace(problem, data=data)
    made: dict[tuple[float, int], ManyModels] = {}

    def program(clip_norm: float, steps: int) -> ManyModels:
        if (clip_norm, steps) not in made:
            made.clear()  # first, so that the memory of only one is held
            made[clip_norm, steps] = ManyModels(
                with_both,
                attack.algorithm(mechanisms[steps], clip_norm, size),
                strategy,
                lambda what: report("measuring how to clip", trained, what),
            )
        return made[clip_norm, steps]

    secret = secret_of(out, seed)
    if out is not None:
        folder = RunFolder(out)
        config = {
            "epsilon": epsilon,
            "delta": delta,
            "batch_size": attack.batch_size,
            "settings": [list(setting) for setting in settings],
            "rounds": [list(each) for each in rounds],
            "augmentation_multiplicity": attack.augmentation_multiplicity,
            "style": str(attack.style),
        }
        prints = fingerprint.fingerprints(
            secret,
            program(settings[0].clip_norm, settings[0].steps).step,
            both,
            jax.tree.map(lambda leaf: leaf[:1], both.tree),
        )
        surroundings = {"versions": fingerprint.versions()}
        fingerprint.check_fingerprint(folder, secret, config, prints, surroundings)
    own = charging.charge_of(account, spent, delta, out, secret)
    charging.charge(account, own)
    trainer = MembershipTrainer(
        program,
        settings,
        list(canaries),
        secret,
        Records(recorded),
        models_at_once,
        report,
    )

    # Phase I, then phase II: other models, by other secrets.
    tried = trainer.choose(rounds)
    best = settings.index(tried[0].setting) if tried else 0
    mechanism = mechanisms[settings[best].steps]

    def so_far(scores: Sequence[np.ndarray]) -> str:
        if min(map(len, scores)) < 20:
            return ""
        found = audit_scores(scores[0], scores[1], estimator)
        return f"ε ≥ {found.epsilon:.3f}, AUC {found.auc:.3f}"

    inside, outside = trainer.scores(1, {best: models}, "phase II", so_far)[best]
    whole = SubsampledEstimator(delta, attack.confidence, mechanism)
    audit = audit_scores(inside, outside, estimator)
    return Membership(
        claimed_epsilon=accountant.epsilon(mechanism, delta),
        delta=delta,
        confidence=attack.confidence,
        inside=inside,
        outside=outside,
        epsilon_lower_bound=audit.epsilon,
        trade_off_bound=audit_scores(inside, outside, whole).epsilon,
        mechanism=mechanism,
        setting=settings[best],
        tried=tuple(tried),
        audit=audit,
        highest_provable=highest,
    )


def _guess(problem: Problem, attack: Attack, rate: float) -> float | None:
    """Return about how many seconds an update of one model takes."""
    # A loss that fails is refused in plain words later, before training.
    with contextlib.suppress(Exception):
        return guess_update(problem, rate, attack.augmentation_multiplicity)
    return None


def _settings(attack: Attack, canaries: Mapping[str, Any]) -> list[Setting]:
    choices: dict[str, Any] = {
        "learning_rates": attack.learning_rates,
        "clip_norms": attack.clip_norms,
        "steps": attack.steps,
        "canaries": canaries,
    }
    for name, values in choices.items():
        if not values:
            validate.refuse(name, values, "must hold at least one to choose from")
    settings = [Setting(*each) for each in itertools.product(*choices.values())]
    for rate, clip_norm, steps, _ in settings:
        validate.positive(learning_rates=rate, clip_norms=clip_norm)
        validate.whole(steps=steps, at_least=1)
    return settings


def _rounds(settings: int, models: int) -> list[tuple[int, int]]:
    """Return how many settings are left in each round, and their models by then."""
    if settings == 1:
        return []
    lefts = [settings]
    while lefts[-1] > 2:
        lefts.append(math.ceil(lefts[-1] / 2))
    trained, rounds = 0, []
    for left in lefts:
        more = models / len(lefts) / left
        trained += 2 * max(FEWEST, round(more / 2))
        rounds.append((left, trained))
    return rounds


def _highest_provable(estimator: Estimator, models: int, epsilon: float) -> float:
    counted = models // 2 - math.ceil(RESERVED * (models // 2))
    highest = estimator.bound(Errors(0, counted, 0, counted))
    if highest == 0:
        delta, confidence = estimator.delta, estimator.confidence
        needed = models_needed(epsilon, delta=delta, confidence=confidence)
        least = 2 * math.ceil(needed / (1 - RESERVED)) + 2
        validate.refuse(
            "models",
            models,
            f"prove nothing at δ = {delta:g} with confidence {confidence:g}, even if "
            "no guess were wrong",
            f"the ε of {epsilon:g} takes at least {least}",
        )
    return highest


def _with_canaries(source: Source, canaries: Mapping[str, Any]) -> ArraySource:
    own = gather(source, np.arange(len(source)))
    for name, canary in canaries.items():
        require_like(f"canaries[{name!r}]", canary, source[0])
    return appended(own, jax.tree.map(lambda *each: np.stack(each), *canaries.values()))
