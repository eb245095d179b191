"""Private selection: train a secret random number of times, release only the best.

Such a search costs less than the composition of its runs, if nobody decides after
looking how many runs there are: their number is drawn at the start. The runs differ in
hyper-parameters drawn without looking at the data, and all spend the same mechanism.

The score that picks the winner depends on the examples it was computed on. If these are
private too, a little noise on the score (`score_noise`) hides each of them as well as a
run hides a training example. Training and scored examples are separate, so the
guarantee of the whole search holds for both.

References:
    Papernot and Steinke 2022, Hyperparameter Tuning with Rényi Differential Privacy,
    arXiv:2110.03620, theorems 2 (truncated negative binomial) and 6 (Poisson); Liu and
    Talwar 2019, arXiv:1811.07971 (random stopping).
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Self

import numpy as np

from tanager import _validate as validate
from tanager.privacy import accountant as accountants
from tanager.privacy.calibrate import in_six_digits
from tanager.privacy.mechanism import Mechanism
from tanager.seed import Seed


_MOST = 1e6
"""Of mean and shape, to draw. Beyond, or near a mean of 1, the law loses its digits."""


@dataclasses.dataclass(frozen=True)
class Selection:
    """Distribution of the number of runs of a search.

    Attributes:
        mean: expected number of runs, at least 1. It can be drawn from for a mean of 1,
            or from 1.000001 to a million, and a shape up to a million; any has an ε.
        shape: η of the truncated negative binomial, which gives at least one run: 1 is
            geometric; 0 is logarithmic, whose ε grows least with the mean and whose
            tail is heaviest. Infinity is poisson, which can give 0 runs.

    Raises:
        ValueError: a field is out of range.
    """

    mean: float
    shape: float = 1.0

    def __post_init__(self):
        validate.positive(mean=self.mean)
        if self.mean < 1:
            validate.refuse("mean", self.mean, "must be at least 1")
        if self.shape != math.inf:
            validate.not_negative(shape=self.shape, remedy="infinity is poisson")
        object.__setattr__(self, "mean", float(self.mean))
        object.__setattr__(self, "shape", float(self.shape))

    def check_drawn(self) -> None:
        """Refuse a law that cannot be drawn from.

        Raises:
            ValueError: mean or shape is out of range.
        """
        if self.mean != 1 and not 1 + 1e-6 <= self.mean <= _MOST:
            validate.refuse("mean", self.mean, "must be 1, or from 1.000001 to 1e6")
        if _MOST < self.shape < math.inf:
            rule = "must be at most 1e6, or infinity, which is poisson"
            validate.refuse("shape", self.shape, rule)

    def draw(self, seed: Seed) -> int:
        """Draw the number of runs to make; it is secret, like the seed.

        The guarantee holds only for a search of exactly this number of runs.
        """
        word = int.from_bytes(seed.derive("selection", size=8), "little")
        return self.at_most((word + 0.5) * 2.0**-64)

    def at_most(self, share: float) -> int:
        """Return the quantile of the number of runs at a probability `share`."""
        self.check_drawn()
        below, last = 0.0, 0
        for runs, probability in self._probabilities():
            below, last = below + probability, runs
            if below >= share:
                break
        return last

    def _probabilities(self) -> Iterator[tuple[int, float]]:
        """Yield each number of runs with its probability, down to 1e-18.

        By logarithms: that of no run by poisson underflows from a mean of 746 on.
        """
        if self.shape == math.inf:
            runs, logarithm = 0, -self.mean
        elif self.mean == 1:
            yield 1, 1.0
            return
        else:  # definition 1 of Papernot and Steinke
            log_gamma = math.log(self.gamma)
            runs, logarithm = 1, math.log1p(-self.gamma)
            if self.shape == 0:
                logarithm -= math.log(-log_gamma)
            else:
                logarithm += math.log(self.shape) + self.shape * log_gamma
                logarithm -= math.log(-math.expm1(self.shape * log_gamma))
        most_likely = self.mean if self.shape > 1 else 0.0
        while runs <= most_likely or logarithm > math.log(1e-18):
            yield runs, math.exp(logarithm)
            if self.shape == math.inf:
                logarithm += math.log(self.mean / (runs + 1))
            else:
                more = (runs + self.shape) / (runs + 1)
                logarithm += math.log1p(-self.gamma) + math.log(more)
            runs += 1

    @functools.cached_property
    def gamma(self) -> float:
        """The success probability γ in (0, 1] of the truncated negative binomial."""
        if self.shape == math.inf:
            validate.refuse("shape", self.shape, "has no γ: it is poisson")
        if self.shape == 1 or self.mean == 1:
            return 1 / self.mean

        def beyond(logarithm: float) -> float:
            mean = math.expm1(-logarithm)  # 1/γ − 1
            if self.shape == 0:
                mean /= -logarithm
            else:
                mean = self.shape * mean / -math.expm1(self.shape * logarithm)
            return math.log(mean / self.mean)

        return math.exp(_root(beyond, -500.0, -1e-12, 1e-14))


def _root(
    function: Callable[[float], float], low: float, high: float, tolerance: float
) -> float:
    from scipy.optimize import brentq

    return brentq(function, low, high, xtol=tolerance)


@dataclasses.dataclass(frozen=True)
class PrivateSearch:
    """What a search spends if each of its runs spends the same mechanism.

    Attributes:
        run: the mechanism of each run; its adjacency is that of the whole search.
        selection: distribution of the number of runs.

    Raises:
        ValueError: the adjacency is replace-one, which has no bound here.
    """

    run: Mechanism
    selection: Selection

    def __post_init__(self):
        accountants.rdp(dataclasses.replace(self.run, steps=1), (2.0,))

    def epsilon(self, delta: float) -> float:
        """Return the ε of the whole search, by RDP: a guarantee.

        Raises:
            ValueError: δ is not strictly between 0 and 1.
        """
        validate.probability(delta=delta)
        return accountants.epsilon_from_rdp(accountants.RDP_ORDERS, self.rdp(), delta)

    def rdp(self) -> np.ndarray:
        """Return the Rényi divergence of the search at `accountant.RDP_ORDERS`."""
        from dp_accounting.rdp import rdp_privacy_accountant as theirs

        # For what is public there, the divergence of a run can be lost in rounding.
        orders, selection = accountants.RDP_ORDERS, self.selection
        found = theirs._compute_rdp_repeat_and_select(
            orders,
            accountants.rdp(self.run, orders).tolist(),
            selection.mean,
            selection.shape,
        )
        return np.asarray(found)

    @property
    def score_noise(self) -> float:
        """Standard deviation of the noise on a score, in held-out examples.

        The score is the number of held-out examples that a run classifies correctly,
        which one such example changes by at most 1. With this Gaussian noise its Rényi
        divergence, α / 2σ², is at most that of a run at every order: one or two
        examples in the papers' settings.
        """
        orders = np.asarray(accountants.RDP_ORDERS)
        spent = accountants.rdp(self.run, accountants.RDP_ORDERS)
        return float(np.sqrt(np.max(orders / (2 * spent))))

    @classmethod
    def calibrate(
        cls,
        selection: Selection,
        *,
        epsilon: float,
        delta: float,
        sample_rate: float,
        steps: int,
    ) -> Self:
        """Find the smallest noise multiplier for which the whole search meets ε.

        Its `epsilon(delta)` is at most `epsilon`, the noise multiplier within a
        relative 1e-3 of the smallest, with at most six digits.

        Raises:
            ValueError: an argument is out of range, or no noise multiplier meets ε.
        """
        validate.positive(epsilon=epsilon)
        validate.probability(delta=delta)

        def search(sigma: float) -> Self:
            return cls(Mechanism(sample_rate, sigma, steps), selection)

        def beyond(logarithm: float) -> float:
            spent = search(math.exp(logarithm)).epsilon(delta)
            return min(max(math.log(max(spent, 1e-30) / epsilon), -50.0), 50.0)

        low, high = math.log(1e-2), math.log(1e5)
        if beyond(high) > 0:
            least = search(math.exp(high)).epsilon(delta)
            validate.refuse(
                "epsilon",
                epsilon,
                f"is too small for a search of {selection.mean:g} runs on average: "
                f"with any noise it spends at least {least:.3g} at delta = {delta:g}",
                "raise epsilon, or expect fewer runs",
            )
        root = low if beyond(low) <= 0 else _root(beyond, low, high, 5e-4)
        while beyond(root) > 0:
            root += 2.5e-4
        sigma = math.exp(root)
        return search(
            in_six_digits(sigma, lambda it: search(it).epsilon(delta) > epsilon)
        )
