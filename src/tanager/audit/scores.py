"""What the scores of an attack say, whoever made the attack.

    audit = ScoreAudit(inside, outside)
    audit.epsilon_lower_bound(delta=1e-5)  # holds with confidence 0.95
    audit.tpr_at_fpr(0.01), audit.max_accuracy(), audit.auc()
    audit.bootstrap(lambda each: each.tpr_at_fpr(0.01))

A high score says that the canary was in the data. The bound takes scores as
independent; `tanager.audit.one_run` has those for many canaries in one run.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import numpy as np
from jaxtyping import ArrayLike
from scipy import optimize, special

from tanager import _validate as validate
from tanager.audit import bounds
from tanager.audit.bounds import Estimator


@dataclass(frozen=True, eq=False)
class ScoreAudit:
    """Measure an attack by its scores of canaries inside and outside of the data.

    Rates are those of the best attack that calls scores from a threshold on "in",
    where it may toss a coin between two thresholds: the concave hull of the curve.

    Attributes:
        inside: float64[n] scores of canaries in the data.
        outside: float64[m] scores of canaries held out.

    Raises:
        ValueError: an array is empty, has another shape, or holds a NaN.
    """

    inside: np.ndarray
    outside: np.ndarray

    def __post_init__(self):
        for name in ("inside", "outside"):
            scores = np.asarray(getattr(self, name), np.float64)
            if scores.ndim != 1 or not scores.size or np.isnan(scores).any():
                rule = "must be one score for each canary, none of them NaN"
                validate.refuse(name, scores.shape, rule, "give an array of one axis")
            object.__setattr__(self, name, scores)

    def auc(self) -> float:
        """Return the area under the receiver operating curve."""
        return bounds.auc(self.inside, self.outside)

    def tpr_at_fpr(self, fpr: ArrayLike) -> np.ndarray:
        """Return the highest true positive rate at false positive rates, in [0, 1]."""
        rates = np.asarray(fpr, np.float64)
        if not np.all((rates >= 0) & (rates <= 1)):
            validate.refuse("fpr", fpr, "must be from 0 to 1", "give 0.01 for 1 %")
        positives, found = self._hull()
        return np.interp(rates * len(self.outside), positives, found / len(self.inside))

    def max_accuracy(
        self, *, prevalence: float | None = None, confidence: float | None = None
    ) -> float:
        """Return the accuracy of the best threshold, or an upper bound on it.

        Args:
            prevalence: share of canaries that are inside; None for that of the scores.
            confidence: of an upper bound on the accuracy of every threshold, by Clopper
                and Pearson; None for the accuracy on these scores, which is biased
                upwards.
        """
        inside, outside = len(self.inside), len(self.outside)
        share = inside / (inside + outside) if prevalence is None else prevalence
        validate.share(prevalence=share)
        positives, found = self._counts()
        right, kept = found / inside, 1 - positives / outside
        if confidence is not None:
            highest = Estimator(0.0, confidence).highest
            right, kept = highest(found, inside), highest(outside - positives, outside)
        return float(np.max(share * right + (1 - share) * kept))

    def epsilon_raw_counts(self, *, delta: float = 0.0, min_count: int = 50) -> float:
        """Return ε as the rates estimate it: ln((TPR − δ)/FPR), no proven bound.

        It is the largest of all thresholds with `min_count` errors at least, and of the
        same with the two rates changed round. Fewer errors give more variance.
        """
        Estimator(delta, 0.5)
        validate.whole(min_count=min_count, at_least=1)
        reverse = ScoreAudit(-self.outside, -self.inside)
        return max(each._raw(delta, min_count) for each in (self, reverse))

    def epsilon_lower_bound(
        self, *, delta: float, confidence: float = 0.95, splits: int = 25
    ) -> float:
        """Return a lower bound on ε of any mechanism, with Clopper and Pearson's rates.

        Each of `splits` random splits chooses a threshold on one part and counts errors
        on the other (`bounds.audit_scores`). The bound is the median of theirs, each
        with half the risk (Meinshausen et al. 2009, theorem 3.1), so no threshold or
        split is chosen by what it proves.

        Raises:
            ValueError: an argument is out of range, or there are too few scores.
        """
        validate.probability(confidence=confidence)
        validate.whole(splits=splits, at_least=1)
        sure = confidence if splits == 1 else (1 + confidence) / 2
        estimator, draw = Estimator(delta, sure), np.random.default_rng(0)

        def bound() -> float:
            parts = draw.permutation(self.inside), draw.permutation(self.outside)
            return bounds.audit_scores(*parts, estimator).epsilon

        return float(np.median([bound() for _ in range(splits)]))

    def bootstrap(
        self,
        statistic: Callable[[Self], float],
        *,
        confidence: float = 0.95,
        samples: int = 1000,
        seed: int = 0,
    ) -> tuple[float, float]:
        """Return an interval of a statistic over scores drawn again, bias-corrected.

        It says how far other canaries of the same attack would move the statistic. It
        does not hold for ε itself: a better attack may exist (Efron 1987, section 3).

        Args:
            statistic: function of a `ScoreAudit`, such as ``ScoreAudit.auc``.
            confidence: of the interval, about.
            samples: how often to draw.
            seed: of the drawing.
        """
        validate.probability(confidence=confidence)
        validate.whole(samples=samples, at_least=2)
        draw = np.random.default_rng(seed)

        def again(scores: np.ndarray) -> np.ndarray:
            return draw.choice(scores, len(scores))

        drawn = np.array(
            [
                float(statistic(type(self)(again(self.inside), again(self.outside))))
                for _ in range(samples)
            ]
        )
        whole = float(statistic(self))
        # Half of the ties, so that a statistic of few values has no bias of its own.
        below = np.sum(drawn < whole) + np.sum(drawn == whole) / 2
        bias = special.ndtri((below + 1) / (samples + 2))
        edges = special.ndtri([(1 - confidence) / 2, (1 + confidence) / 2])
        low, high = np.quantile(drawn, special.ndtr(2 * bias + edges))
        return float(low), float(high)

    def _counts(self) -> tuple[np.ndarray, np.ndarray]:
        """Return false and true positives, from the highest threshold to the lowest."""
        places = np.unique(np.concatenate([self.inside, self.outside]))[::-1]
        return tuple(  # pyrefly: ignore[bad-return]
            np.append(0, len(of) - np.searchsorted(np.sort(of), places))
            for of in (self.outside, self.inside)
        )

    def _hull(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the same at the corners of the concave hull.

        Against the number called in, the hull's slopes are the antitonic regression of
        the curve's.
        """
        positives, found = self._counts()
        called = np.diff(positives + found)
        corners = optimize.isotonic_regression(
            np.diff(found) / called, weights=called, increasing=False
        ).blocks
        return positives[corners], found[corners]

    def _raw(self, delta: float, min_count: int) -> float:
        outside = len(self.outside)
        if min_count >= outside:
            return 0.0
        positives, _ = self._hull()
        places = np.append(min_count, positives[positives >= min_count]) / outside
        surplus = np.maximum(self.tpr_at_fpr(np.minimum(places, 1.0)) - delta, 0)
        with np.errstate(divide="ignore"):
            return max(float(np.max(np.log(surplus / places))), 0.0)
