"""Lower bounds on ε from the errors of an attack.

An attack scores canaries: a high score says that the canary was in the data. Its errors
are counted on other scores than those its threshold was chosen on, and bound ε from
below with a stated confidence. Useless or reversed scores prove an ε of 0.

References:
    Tramèr et al. 2022, Debugging Differential Privacy, section 3 (`Estimator`).
    Nasr et al. 2023, Tight Auditing of Differentially Private Machine Learning,
    sections 4 and 5 (`GaussianEstimator`, `SubsampledEstimator`).
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from scipy import special, stats

from tanager import _validate as validate
from tanager.privacy import accountant
from tanager.privacy.mechanism import Adjacency, Mechanism
from tanager.privacy.trade_off import TradeOff


RESERVED = 0.1
"""Share of the scores that the threshold is chosen on."""
_LEAST_NOISE, _MOST_NOISE = 1e-2, 1e6
_MARGIN = 1.0001
"""More noise, for a lower bound: PLD's ε is rounded up by less than that changes it."""
_LARGEST_EXPONENT = 700
_WORST = 1e30


class Errors(NamedTuple):
    """What an attack got wrong, of canaries outside of the data and inside."""

    false_positives: int
    outside: int
    false_negatives: int
    inside: int


def _check_delta(delta: float) -> None:
    validate.not_negative(delta=delta)
    if delta >= 1:
        validate.refuse("delta", delta, "must be below 1", "nothing is claimed at 1")


@dataclasses.dataclass(frozen=True)
class Estimator:
    """Turns errors into a lower bound on ε of any mechanism.

    ln((1 − FNR − δ)/FPR), or with the two rates changed round, from upper bounds of
    both that hold together (Clopper and Pearson's).

    Attributes:
        delta: δ of the bound, in [0, 1).
        confidence: that the bound is below the true ε, in (0, 1).

    Raises:
        ValueError: a field is out of range, or counts of errors are.
    """

    delta: float
    confidence: float

    def __post_init__(self):
        _check_delta(self.delta)
        validate.probability(confidence=self.confidence)

    def bound(self, errors: Errors) -> float:
        """Return the lower bound on ε, at least 0."""
        return max(float(self.promise(*self.highest_rates(errors))), 0.0)

    def highest_rates(self, errors: Errors) -> tuple[np.ndarray, np.ndarray]:
        """Return upper bounds of both rates that hold at once."""
        positives, outside, negatives, inside = errors
        validate.whole(outside=outside, inside=inside, at_least=1)
        for name, wrong, total in (
            ("false_positives", positives, outside),
            ("false_negatives", negatives, inside),
        ):
            if not 0 <= wrong <= total:
                validate.refuse(name, wrong, f"must be from 0 to {total}")
        return self.highest(positives, outside), self.highest(negatives, inside)

    def highest(self, wrong: int | np.ndarray, total: int) -> np.ndarray:
        """Return Clopper and Pearson's upper bound of a rate, for one rate of two."""
        above, below = np.add(wrong, 1.0), np.subtract(total, wrong)
        rate = special.betaincinv(above, below, (1 + self.confidence) / 2)
        return np.where(np.equal(wrong, total), 1.0, rate)

    def promise(self, positive: np.ndarray, negative: np.ndarray) -> np.ndarray:
        """Return what grows with the bound, for upper bounds of the two rates."""
        with np.errstate(all="ignore"):
            return np.maximum(
                np.log(np.maximum(1 - negative - self.delta, 0) / positive),
                np.log(np.maximum(1 - positive - self.delta, 0) / negative),
            )


@dataclasses.dataclass(frozen=True)
class GaussianEstimator(Estimator):
    """Turns errors into a lower bound on ε, if the mechanism is Gaussian.

    It is that of whole batches, or of one step whose canaries are known to have been
    sampled. With q < 1 it is not: see `SubsampledEstimator`. δ must be positive.
    """

    def __post_init__(self):
        super().__post_init__()
        validate.probability(delta=self.delta)

    def bound(self, errors: Errors) -> float:
        """Return the ε of `mu`, rounded down."""
        return accountant.epsilon_gaussian(self.mu(errors), self.delta, up=False)

    def mu(self, errors: Errors) -> float:
        """Return the lower bound as a μ of Gaussian DP; 0 at the least."""
        return super().bound(errors)

    def noise_multiplier(self, errors: Errors) -> float:
        """Return the largest noise multiplier that is not refuted, or ∞."""
        mu = self.mu(errors)
        return 1 / mu if mu else math.inf

    def promise(self, positive: np.ndarray, negative: np.ndarray) -> np.ndarray:
        """Return μ."""
        return -special.ndtri(positive) - special.ndtri(negative)


@dataclasses.dataclass(frozen=True)
class SubsampledEstimator(GaussianEstimator):
    """Turns errors of whole runs into a lower bound on ε of DP-SGD.

    Of all noise multipliers, those whose trade-off curve allows no attack with these
    few errors are refuted; ε is that of the largest that is not. The bound is about the
    noise: sample rate, steps and adjacency are taken as `claimed`, and so is all that
    the runs spend `beside` these steps.
    """

    claimed: Mechanism
    beside: tuple[Mechanism, ...] = ()

    def noise_multiplier(self, errors: Errors) -> float:
        """Return the largest noise multiplier that is not refuted, or ∞."""
        positive, negative = map(float, self.highest_rates(errors))
        if positive + negative >= 1:
            return math.inf

        def refuted(noise_multiplier: float) -> bool:
            curve = self.curve(noise_multiplier)
            return negative < float(curve.false_negatives(positive))

        return largest_refuted(refuted, self.claimed.noise_multiplier or 1.0)

    def bound(self, errors: Errors) -> float:
        """Return the ε of that noise multiplier; 0 if none is refuted."""
        return self.epsilon_at(self.noise_multiplier(errors))

    def epsilon_at(self, noise_multiplier: float) -> float:
        """Return the ε of the mechanism with another noise multiplier, or less.

        `beside` counts with a little more noise, as `largest_refuted` does.
        """
        if math.isinf(noise_multiplier):
            return 0.0
        spent = [
            dataclasses.replace(own, noise_multiplier=_MARGIN * own.noise_multiplier)
            for own in self.beside
        ]
        spent.append(self._with(noise_multiplier))
        return accountant.composed_epsilon(spent, self.delta)

    def curve(self, noise_multiplier: float) -> TradeOff:
        """Return the trade-off curve of the mechanism with another noise multiplier."""
        return TradeOff(*self.beside, self._with(noise_multiplier), coarseness=4.0)

    def _with(self, noise_multiplier: float) -> Mechanism:
        return dataclasses.replace(self.claimed, noise_multiplier=noise_multiplier)


def largest_refuted(refuted: Callable[[float], bool], noise_multiplier: float) -> float:
    """Return the largest noise multiplier that stands, to 0.1 % above; 0 if none does.

    It is ∞ if none is refuted. The search begins with `noise_multiplier`.
    """
    low = high = noise_multiplier
    while refuted(low):
        high, low = low, low / 2
        if low < _LEAST_NOISE:
            return 0.0
    while not refuted(high):
        low, high = high, 2 * high
        if high > _MOST_NOISE:
            return math.inf
    while high > 1.0008 * low:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if refuted(middle) else (middle, high)
    return _MARGIN * high


def models_needed(epsilon: float, *, delta: float, confidence: float) -> int:
    """Return how many runs of each kind could prove an ε, if an attack never erred.

    By `Estimator`; those that the threshold is chosen on come on top.

    Raises:
        ValueError: an argument is out of range.
    """
    Estimator(delta, confidence)
    validate.not_negative(epsilon=epsilon)
    # (1 − u − δ)/u = e^ε at the bound u = 1 − ((1 − confidence)/2)^(1/n) of no error.
    if epsilon > _LARGEST_EXPONENT:
        rule = f"must be at most {_LARGEST_EXPONENT}"
        validate.refuse("epsilon", epsilon, rule, "claim less")
    rate = (1 - delta) / (1 + math.exp(epsilon))
    return math.ceil(math.log((1 - confidence) / 2) / math.log1p(-rate))


def require_noise(mechanism: Mechanism) -> None:
    """Refuse a mechanism that adds no noise, and so claims nothing."""
    if mechanism.noise_multiplier == 0:
        rule = "claims nothing that could be audited"
        validate.refuse("noise_multiplier", 0, rule, "add noise")


def require_joining(mechanism: Mechanism) -> None:
    """Refuse a mechanism that canaries joining the data cannot test."""
    if mechanism.adjacency is Adjacency.REPLACE_ONE:
        rule = "cannot be tested by canaries that join the data"
        remedy = f"audit under {Adjacency.ZERO_OUT}"
        validate.refuse("adjacency", str(mechanism.adjacency), rule, remedy)
    require_noise(mechanism)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AuditResult:
    """What an audit found.

    Attributes:
        claimed_epsilon: of the mechanism, by PLD.
        delta: of that ε and of the bounds.
        confidence: that a bound is below the true ε.
        inside: float64[n] scores of canaries (or models) with the canary in the data.
        outside: float64[m] scores of the others.
        epsilon_lower_bound: that the attack proves.
        trade_off_bound: by the trade-off curve of the mechanism, about its noise alone.
    """

    claimed_epsilon: float
    delta: float
    confidence: float
    inside: np.ndarray
    outside: np.ndarray
    epsilon_lower_bound: float
    trade_off_bound: float

    @property
    def violated(self) -> bool:
        """Whether a bound is above what is claimed."""
        highest = max(self.epsilon_lower_bound, self.trade_off_bound)
        return highest > self.claimed_epsilon


### From scores


class Audit(NamedTuple):
    """What the scores of an attack prove.

    Attributes:
        epsilon: lower bound.
        threshold: scores from here on were called in.
        errors: at that threshold, on scores that it was not chosen on.
        auc: area under the receiver operating curve of the same scores.
        advantage: 1 − FPR − FNR, the largest of any threshold; not a proven bound.
    """

    epsilon: float
    threshold: float
    errors: Errors
    auc: float
    advantage: float


def audit_scores(
    inside: np.ndarray, outside: np.ndarray, estimator: Estimator
) -> Audit:
    """Return what scores prove: the first of them choose a threshold, the rest count.

    Args:
        inside: [n] scores where the canary was in the data, in random order.
        outside: [m] scores where it was not.
        estimator: of ε.

    Raises:
        ValueError: a score is not a number, or there are too few of them.
    """
    parts = []
    for name, scores in (("inside", inside), ("outside", outside)):
        scores = np.asarray(scores, np.float64)
        if scores.ndim != 1 or np.isnan(scores).any():
            validate.refuse(name, scores.shape, "must be one score for each, not nan")
        first = math.ceil(RESERVED * len(scores))
        if not 1 <= first < len(scores):
            validate.refuse(name, len(scores), "scores are too few to reserve a part")
        parts.append((scores[:first], scores[first:]))
    (chosen_in, rest_in), (chosen_out, rest_out) = parts
    counted = len(rest_in), len(rest_out)
    threshold = choose_threshold(chosen_in, chosen_out, estimator, counted)
    errors = Errors(
        int(np.sum(rest_out >= threshold)),
        len(rest_out),
        int(np.sum(rest_in < threshold)),
        len(rest_in),
    )
    return Audit(
        estimator.bound(errors),
        threshold,
        errors,
        auc(rest_in, rest_out),
        advantage(rest_in, rest_out),
    )


def choose_threshold(
    inside: np.ndarray,
    outside: np.ndarray,
    estimator: Estimator,
    counted: tuple[int, int],
) -> float:
    """Return the threshold that promises the best bound on other scores.

    `counted` says how many there are of these, inside and outside.
    """
    places = np.unique(np.concatenate([inside, outside]))
    positives = len(outside) - np.searchsorted(np.sort(outside), places)
    negatives = np.searchsorted(np.sort(inside), places)
    # Laplace's rule: no error among few is a hope of few among many, not of none.
    rates = (positives + 1) / (len(outside) + 2), (negatives + 1) / (len(inside) + 2)
    high = [
        estimator.highest(np.floor(rate * total), total)
        for rate, total in zip(rates, reversed(counted), strict=True)
    ]
    promised = estimator.promise(*high)
    promised = np.where(np.isnan(promised) | (sum(high) >= 1), -np.inf, promised)
    if not promised.max() > 0:
        return float(places[np.argmin(rates[0] + rates[1])])
    return float(places[np.argmax(promised)])


def finite(scores: np.ndarray) -> np.ndarray:
    """Return scores without infinities; those that are not a number are lowest."""
    return np.clip(np.nan_to_num(scores, nan=-_WORST), -_WORST, _WORST)


def auc(inside: np.ndarray, outside: np.ndarray) -> float:
    """Return how often a score inside is above one outside; half for equal ones."""
    ranks = stats.rankdata(np.concatenate([inside, outside]))
    above = ranks[: len(inside)].sum() - len(inside) * (len(inside) + 1) / 2
    return float(above / (len(inside) * len(outside)))


def advantage(inside: np.ndarray, outside: np.ndarray) -> float:
    """Return the largest 1 − FPR − FNR of any threshold."""
    test: Any = stats.ks_2samp(outside, inside, alternative="greater", method="asymp")
    return float(test.statistic)


def highest_advantage(epsilon: float, delta: float) -> float:
    """Return the most that (ε, δ) allows: (e^ε − 1 + 2δ)/(e^ε + 1).

    Humphries et al. 2020; the last column of Table 9 of Unlocking.

    Raises:
        ValueError: an argument is out of range.
    """
    validate.not_negative(epsilon=epsilon)
    _check_delta(delta)
    if epsilon > _LARGEST_EXPONENT:
        return 1.0
    return (math.expm1(epsilon) + 2 * delta) / (math.exp(epsilon) + 1)
