"""A white-box audit: gradient canaries in a real run of `tanager.train`.

The run uses the sampler, clipping and noise of every run. Half of the canaries, by fair
coins, are in the data. The attacker sees what the optimizer sees: the noisy gradient of
every update. From a canary's coordinate it computes the likelihood ratio of the two
cases, in the data or not. No test is better, and each canary counts like a run.

An attacker who also knows who was sampled needs few steps. All canaries are in the
data, and steps in which one was sampled are compared with steps in which it was not.
That tests clipping and noise; it assumes that sampling is Poisson.

References:
    Nasr et al. 2023, Tight Auditing of Differentially Private Machine Learning,
    sections 4 and 5 (Dirac canaries, white box). Steinke et al. 2023 (canaries that
    join by coin).
"""

import contextlib
import dataclasses
import math
import tempfile
from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from tanager import _validate as validate
from tanager.audit.bounds import (
    Audit,
    AuditResult,
    GaussianEstimator,
    SubsampledEstimator,
    audit_scores,
    require_joining,
)
from tanager.audit.canaries import (
    Canaries,
    augmenting,
    joined,
    listening,
    numbered,
    require_heard,
    secret_of,
    trained_with,
    with_canaries,
)
from tanager.privacy.mechanism import Mechanism
from tanager.sampling import PoissonSampler
from tanager.seed import Seed
from tanager.training import charging
from tanager.training.loop import train
from tanager.training.problem import DPSGD, Problem, Runtime


Hear = Callable[[Array, Array], Array]
_MOST_KEPT = 64
"""Steps of a canary whose every one counts."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class WhiteBox(AuditResult):
    """What a white-box audit found; its bounds hold if noise is Gaussian.

    `epsilon_lower_bound` and `trade_off_bound` are one: ε of the claimed mechanism with
    the largest noise multiplier that is not refuted. With `knows_sample` no trade-off
    curve is used to find it, but the Gaussian of one step.

    Attributes:
        audit: the errors, and the bound that they prove for the steps that were run.
        noise_multiplier: the largest that is not refuted.
    """

    audit: Audit
    noise_multiplier: float


def audit_white_box(
    problem: Problem,
    algorithm: DPSGD,
    runtime: Runtime | None = None,
    *,
    canaries: int = 1000,
    examples_each: int = 1,
    confidence: float = 0.95,
    knows_sample: bool = False,
    steps: int | None = None,
    out: str | Path | None = None,
    seed: int | None = None,
) -> WhiteBox:
    """Train once with canaries, and bound ε from what the optimizer saw.

    The bound is about the mechanism that is run, with the given sample rate, noise and
    steps. Class counts are not released; what they would spend counts in claim and
    bound. The data can be a part of the real data; fewer examples are quicker.

    Args:
        problem: see `tanager.train`; canaries go through `augment` as well.
        algorithm: see `tanager.train`: what is claimed, under add-or-remove-one.
        runtime: see `tanager.train`; by default without a progress bar.
        canaries: m; about half of them join the data, or all with `knows_sample`.
        examples_each: how many examples each canary has. With `tanager.Grouped` data it
            is a person. Otherwise more than 1 shows what a person with several examples
            risks in a run that protects examples: a bound above the claim is no fault.
        confidence: of the bound.
        knows_sample: the attacker knows who was sampled in each step.
        steps: to run, at most the mechanism's, which are run by default. From fewer,
            what they prove of the noise is put into the whole mechanism.
        out: folder of the audited run; the same call resumes it.
        seed: None draws it from the operating system; a number repeats the audit.

    Raises:
        ValueError: an argument is out of range.
        RuntimeError: no canary could be heard.
    """
    mechanism, delta = algorithm.mechanism, algorithm.delta
    clip_norm, style = algorithm.require_clip_norm(), algorithm.clipping_style
    if style.name == "automatic":  # which counts gradients not far above γ for less
        clip_norm = max(clip_norm, 64 * style.gamma)
    validate.whole(canaries=canaries, at_least=20)
    validate.whole(examples_each=examples_each, at_least=1)
    for each in algorithm.mechanisms():
        require_joining(each)
    beside = tuple(algorithm.mechanisms()[:-1])  # as claimed: it is not attacked
    steps = mechanism.steps if steps is None else steps
    run = dataclasses.replace(mechanism, steps=steps)
    if steps > mechanism.steps:
        rule = f"must be at most the mechanism's {mechanism.steps}"
        validate.refuse("steps", steps, rule)
    account = charging.account_of(problem, "audit")
    charging.require_room(account, [run], delta, out, seed)
    with contextlib.ExitStack() as held:
        if knows_sample and out is None and seed is None:
            # Only a folder's secret can be known before the run.
            out = held.enter_context(tempfile.TemporaryDirectory())
        secret = secret_of(out, seed)
        if knows_sample:
            each = examples_each if problem.groups is None else 1
            attack = _KnownSample(run, delta, confidence, canaries, each)
        else:
            attack = _HiddenSample(run, delta, confidence, canaries, secret)
        joining = attack.joining
        source = numbered(problem.source(), np.repeat(joining, examples_each))
        data = joined(problem, source, len(joining), examples_each)
        units = len(source if problem.groups is None else data.groups)
        sampler = PoissonSampler(run, units, secret, units)
        hear = attack.prepare(sampler)
        joint = with_canaries(problem.loss, clip_norm)
        scores = jnp.zeros((attack.rows, canaries), jnp.float32)
        both = Canaries(problem.params, scores)
        trained = trained_with(problem.trainable, problem.params)
        require_heard(joint, both, trained, source[0], clip_norm)
        augment = problem.augment
        audited = Problem(
            joint,
            both,
            data,
            augment=None if augment is None else augmenting(augment),
            trainable=trained,
            unreadable=problem.unreadable,
            account=account,
        )
        listener = dataclasses.replace(
            algorithm,
            mechanism=run,
            class_counts=None,
            optimizer=listening(algorithm.optimizer, sampler.expected_batch_size, hear),
            declared_examples=units,
            delta=min(delta, 0.5 / units),  # shown only in its own report
        )
        runtime = runtime or Runtime(progress=False)
        result = train(audited, listener, runtime, out=out, seed=seed)
    inside, outside = attack.scores(np.asarray(result.params.scores, np.float64))
    audit = audit_scores(inside, outside, attack.estimator)
    noise_multiplier = attack.estimator.noise_multiplier(audit.errors)
    whole = SubsampledEstimator(delta, confidence, mechanism, beside)
    bound = whole.epsilon_at(noise_multiplier)
    return WhiteBox(
        claimed_epsilon=algorithm.claimed_epsilon(),
        delta=delta,
        confidence=confidence,
        inside=inside,
        outside=outside,
        epsilon_lower_bound=bound,
        trade_off_bound=bound,
        audit=audit,
        noise_multiplier=noise_multiplier,
    )


class _HiddenSample:
    """Was the canary in the data? From the likelihood ratio of all steps."""

    rows = 1

    def __init__(
        self,
        run: Mechanism,
        delta: float,
        confidence: float,
        canaries: int,
        secret: Seed,
    ):
        self.estimator = SubsampledEstimator(delta, confidence, run)
        self._coins = secret.generator("canaries").random(canaries) < 0.5
        self.joining = np.flatnonzero(self._coins)

    def prepare(self, sampler: PoissonSampler) -> Hear:
        rate = sampler.mechanism.sample_rate
        sigma = self.estimator.claimed.noise_multiplier

        def hear(step: Array, heard: Array) -> Array:
            ratio = (2 * heard - 1) / (2 * sigma**2)
            if rate == 1:
                return ratio
            return jnp.logaddexp(np.log1p(-rate), np.log(rate) + ratio)

        return hear

    def scores(self, kept: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return kept[0, self._coins], kept[0, ~self._coins]


class _KnownSample:
    """Was the canary sampled in this step? Each step is a test of its own.

    Of each canary, equal numbers of sampled and other steps count.
    """

    def __init__(
        self,
        run: Mechanism,
        delta: float,
        confidence: float,
        canaries: int,
        units: int,
    ):
        self._units = units  # of privacy, that are one canary
        rate, steps = run.sample_rate, run.steps
        if steps * min(rate, 1 - rate) < 1:
            rule = f"are too few for canaries to be sampled, and not, at rate {rate:g}"
            remedy = "leave out knows_sample" + ", or audit more steps" * (rate < 1)
            validate.refuse("steps", steps, rule, remedy)
        likely = steps * rate + 4 * math.sqrt(steps * rate * (1 - rate))
        self._kept = math.ceil(min(likely, _MOST_KEPT))
        self.rows = 2 * self._kept
        self.estimator = GaussianEstimator(delta, confidence)
        self.joining = np.arange(canaries)

    def prepare(self, sampler: PoissonSampler) -> Hear:
        canaries = len(self.joining)
        first = sampler.examples - canaries * self._units
        sampled = np.zeros((sampler.mechanism.steps, canaries), bool)
        for step in range(len(sampled)):
            indices = sampler.indices(step)
            own = indices[indices >= first] - first
            sampled[step, own // self._units] = True
        # Where each step goes: its row among those sampled, or those not; past the
        # last row it goes nowhere.
        own = np.where(sampled, np.cumsum(sampled, 0), np.cumsum(~sampled, 0)) - 1
        rows = np.where(own < self._kept, own + self._kept * ~sampled, self.rows)
        ends = np.minimum([sampled.sum(0), (~sampled).sum(0)], self._kept)
        self._ends = ends.min(0)
        places = jnp.asarray(rows, jnp.int32)

        def hear(step: Array, heard: Array) -> Array:
            here = jnp.arange(self.rows)[:, None] == places[step][None]
            return jnp.where(here, heard[:1], 0.0)

        return hear

    def scores(self, kept: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        full = np.arange(self._kept)[:, None] < self._ends
        return kept[: self._kept][full], kept[self._kept :][full]
