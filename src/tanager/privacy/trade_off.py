"""The trade-off curve of a mechanism: how few errors any attack can make.

An attack that tells two neighbouring data sets apart has a false-positive rate and a
false-negative rate. The curve gives, for each of the first, the least of the second.

References:
    Dong, Roth and Su 2022, Gaussian Differential Privacy, definition 2.1 and
    proposition 2.12 (from all (ε, δ) to the curve).
"""

import functools
import math

import numpy as np
from scipy import stats

from tanager.privacy import _pld, accountant
from tanager.privacy.mechanism import Mechanism


_LINES = 400
"""Number of values of ε whose tangents make the curve."""


class TradeOff:
    """The trade-off curve of the Poisson-subsampled Gaussian, composed.

    Exact without subsampling. Otherwise slightly below the exact curve, because of the
    grid, of which `accountant.epsilon` tells, and the finite number of tangents: an
    attack that beats this curve beats the mechanism.
    """

    def __init__(self, mechanism: Mechanism, coarseness: float = 1.0):
        self._mu = None
        if mechanism.noise_multiplier == 0:
            self._mu = math.inf
        elif mechanism.sample_rate == 1:
            signals = mechanism.adjacency.signals
            self._mu = signals * math.sqrt(mechanism.steps) / mechanism.noise_multiplier
        else:
            self._epsilons, self._deltas = _tangents(mechanism, coarseness)

    def false_negatives(self, false_positives: float | np.ndarray) -> np.ndarray:
        """Return the least false-negative rate at each false-positive rate."""
        alpha = np.asarray(false_positives, np.float64)
        if self._mu is not None:
            if math.isinf(self._mu):
                return np.zeros_like(alpha)
            return stats.norm.cdf(stats.norm.isf(alpha) - self._mu)
        rate = alpha[..., None]
        steep = 1 - self._deltas - np.exp(self._epsilons) * rate
        flat = np.exp(-self._epsilons) * (1 - self._deltas - rate)
        return np.maximum(np.maximum(steep, flat).max(-1), 0.0)


@functools.lru_cache(maxsize=64)
def _tangents(mechanism: Mechanism, coarseness: float) -> tuple[np.ndarray, np.ndarray]:
    parts = accountant.parts_of(mechanism)
    try:
        with np.errstate(all="ignore"):
            composed = _pld.compose(parts, mechanism.adjacency, coarseness)
            highest = min(float(composed.get_epsilon_for_delta(1e-9)), 500.0)
            epsilons = np.linspace(0.0, max(highest, 1e-6), _LINES)
            deltas = _pld.deltas(composed, epsilons)
    except (ArithmeticError, ValueError):
        # No grid is wide enough, so use δ ≤ 1.
        return np.zeros(1), np.ones(1)
    lost = _pld.lost_to_rounding(parts)
    deltas = np.where(np.isfinite(deltas), np.clip(deltas + lost, 0.0, 1.0), 1.0)
    return epsilons, deltas
