"""Lower bounds on ε from one run with many canaries, each in with probability one half.

The number of guesses must be chosen before looking at the scores.

References:
    Steinke, Nasr and Jagielski 2023, Privacy Auditing with One (1) Training Run,
    theorem 5.2 (`one_run`).
    Mahloujifar, Melis and Chaudhuri 2024, Auditing f-Differential Privacy in One Run,
    arXiv:2410.22235 (`one_run_trade_off`).
"""

from typing import NamedTuple, cast

import numpy as np
from scipy import optimize, special, stats

from tanager import _validate as validate
from tanager.audit.bounds import SubsampledEstimator, largest_refuted
from tanager.privacy.mechanism import Mechanism


_PRECISION = 1e-4


class Guesses(NamedTuple):
    """Of how many canaries, how many guesses were made, and how many were right."""

    canaries: int
    made: int
    right: int

    def check(self) -> None:
        """Refuse counts that cannot be."""
        validate.whole(canaries=self.canaries, made=self.made, at_least=1)
        validate.whole(right=self.right, at_least=0)
        for name, part, whole in (
            ("made", self.made, self.canaries),
            ("right", self.right, self.made),
        ):
            if part > whole:
                validate.refuse(name, part, f"must be at most {whole}")


def guess(scores: np.ndarray, included: np.ndarray, made: int) -> Guesses:
    """Call the canaries of the highest scores in, those of the lowest out.

    `made` guesses, half of each kind; `included` says whether each canary was in.

    Raises:
        ValueError: shapes differ, a score is not a number, or `made` is out of range.
    """
    scores, included = np.asarray(scores, np.float64), np.asarray(included, bool)
    if scores.ndim != 1 or scores.shape != included.shape or np.isnan(scores).any():
        validate.refuse("scores", scores.shape, "must be one for each canary, not nan")
    guesses = Guesses(len(scores), made, 0)
    guesses.check()
    # Equal scores in an order that has nothing to do with what was included.
    order = np.argsort(scores, kind="stable")
    low, high = made // 2, made - made // 2
    right = int(np.sum(~included[order[:low]]))
    right += int(np.sum(included[order[len(order) - high :]]))
    return guesses._replace(right=right)


def p_value(guesses: Guesses, epsilon: float, delta: float) -> float:
    """Return the largest probability of this many right guesses under (ε, δ)-DP."""
    m, r, v = guesses
    right = special.expit(epsilon)
    least = float(stats.binom.sf(v - 1, r, right))
    if delta == 0 or v == 0:
        return min(least, 1.0)
    i = np.arange(1, v + 1)
    within = np.cumsum(stats.binom.pmf(v - i, r, right)) / i
    return min(least + 2 * m * delta * float(within.max()), 1.0)


def one_run(guesses: Guesses, *, delta: float, confidence: float) -> float:
    """Return a lower bound on ε of any mechanism.

    Args:
        guesses: how many were made, and right.
        delta: δ, at least 0; a large number of canaries makes it count.
        confidence: that the bound is below the true ε.

    Raises:
        ValueError: an argument is out of range, or nothing could be proven: δ is too
            large for this number of canaries, or the guesses are too few.
    """
    guesses.check()
    validate.not_negative(delta=delta)
    validate.probability(confidence=confidence)
    significance = 1 - confidence
    if p_value(guesses._replace(right=guesses.made), 0.0, delta) > significance:
        validate.refuse(
            "made",
            guesses.made,
            f"guesses about {guesses.canaries} canaries prove nothing at δ = {delta:g} "
            f"with confidence {confidence:g}, even if all of them were right",
            "use a smaller δ, other numbers of both, or less confidence",
        )

    def beyond(epsilon: float) -> float:
        return p_value(guesses, epsilon, delta) - significance

    if beyond(0.0) >= 0:
        return 0.0
    root = cast(float, optimize.brentq(beyond, 0.0, 500.0, xtol=_PRECISION))
    return max(root - 2 * _PRECISION, 0.0)


def one_run_trade_off(
    guesses: Guesses, *claimed: Mechanism, delta: float, confidence: float
) -> float:
    """Return a lower bound on ε of DP-SGD: about its noise, all else is as claimed.

    `claimed` ends with the steps of DP-SGD. What stands before them, such as class
    counts, was released too.

    A noise multiplier is refuted if this many right guesses are less likely under its
    trade-off curve than 1 − confidence. ε is that of the largest one not refuted.

    Raises:
        ValueError: an argument is out of range.
    """
    guesses.check()
    *beside, steps = claimed
    estimator = SubsampledEstimator(delta, confidence, steps, tuple(beside))
    m, made, right = guesses

    def refuted(noise_multiplier: float) -> bool:
        curve = estimator.curve(noise_multiplier)
        above = (1 - confidence) * (made - right) / m
        mass = (1 - confidence) * right / m
        for i in range(right - 1, -1, -1):
            # The least that this mass can have under the other membership.
            least = float(curve.false_negatives(1 - min(mass, 1.0)))
            higher = max(above, least)
            mass += i / (made - i) * (higher - above)
            above = higher
            if mass + above > made / m:
                return True
        return False

    highest = largest_refuted(refuted, steps.noise_multiplier or 1.0)
    return estimator.epsilon_at(highest)
