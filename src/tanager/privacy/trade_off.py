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
from scipy import special

from tanager.privacy import _pld, accountant
from tanager.privacy.mechanism import Adjacency, Mechanism, common_adjacency


_LINES = 1000
"""Number of values of ε whose tangents make the curve."""
_LEAST_DELTA = 1e-12
_SUMMED = 1e-12
"""What sums over a grid can lose, relative: 5e-14 was measured."""
_NONE = np.zeros(0)


class TradeOff:
    """The trade-off curve of Poisson-subsampled Gaussians, composed.

    Exact without subsampling. Otherwise slightly below the exact curve, because of the
    grid, of which `accountant.epsilon` tells, and the finite number of tangents: an
    attack that beats this curve beats the mechanisms.

    Args:
        mechanisms: any number of them, on the same data.
        coarseness: of the grid, as in `accountant.epsilon`.

    Raises:
        ValueError: the adjacencies differ.

    Attributes:
        gaussian: μ of the Gaussian mechanism without subsampling, which is never below
            (the hockey-stick divergence is jointly convex); infinite without noise.
        epsilons: float64[n] values of ε at rising size, none without subsampling.
        deltas: float64[n] δ at each ε.
    """

    def __init__(self, *mechanisms: Mechanism, coarseness: float = 1.0):
        adjacency = common_adjacency(mechanisms)
        parts = accountant.parts_of(*mechanisms)
        signals = (
            math.sqrt(part.steps) / part.noise_multiplier
            if part.noise_multiplier
            else math.inf
            for part in parts
        )
        self.gaussian = adjacency.signals * math.hypot(*signals)
        self.epsilons = self.deltas = _NONE
        if math.isfinite(self.gaussian) and any(part.sample_rate < 1 for part in parts):
            self.epsilons, self.deltas = _tangents(parts, adjacency, coarseness)

    def false_negatives(self, false_positives: float | np.ndarray) -> np.ndarray:
        """Return the least false-negative rate at each false-positive rate."""
        return 1 - self.true_positives(false_positives)

    def true_positives(self, false_positives: float | np.ndarray) -> np.ndarray:
        """Return the largest true-positive rate at each false-positive rate."""
        alpha = np.asarray(false_positives, np.float64)
        most = np.ones_like(alpha)
        if math.isfinite(self.gaussian):
            most = special.ndtr(self.gaussian + special.ndtri(alpha))
        rate, slope = alpha[..., None], np.exp(self.epsilons)
        steep = self.deltas + slope * rate
        flat = 1 - (1 - self.deltas - rate) / slope
        lines = np.minimum(steep, flat).min(-1, initial=1.0)
        return np.maximum(np.minimum(most, lines), alpha)

    @property
    def advantage(self) -> float:
        """The most by which a true-positive rate exceeds its false-positive rate."""
        most = special.erf(self.gaussian / math.sqrt(8))
        return float(self.deltas[:1].min(initial=most))  # δ at ε = 0

    def corners(self) -> tuple[np.ndarray, np.ndarray]:
        """Return false- and true-positive rates where neighbouring tangents meet.

        Only of the half with more false negatives than false positives. The other half
        mirrors it.
        """
        slope = np.exp(self.epsilons)
        alpha = np.diff(self.deltas) / -np.diff(slope)
        return alpha, self.deltas[:-1] + slope[:-1] * alpha


@functools.lru_cache(maxsize=64)
def _tangents(
    parts: tuple[_pld.Part, ...], adjacency: Adjacency, coarseness: float
) -> tuple[np.ndarray, np.ndarray]:
    try:
        with np.errstate(all="ignore"):
            composed = _pld.compose(parts, adjacency, coarseness)
            highest = min(_pld.epsilon(composed, _LEAST_DELTA), 500.0)
            epsilons = np.linspace(0.0, max(highest, 1e-6), _LINES)
            deltas = _pld.deltas(composed, epsilons)
    except (ArithmeticError, ValueError):
        return _NONE, _NONE  # no grid is wide enough
    deltas = deltas * (1 + _SUMMED) + _pld.lost_to_rounding(parts)
    deltas = np.where(np.isfinite(deltas), np.clip(deltas, 0.0, 1.0), 1.0)
    return epsilons, deltas
