"""The privacy loss where δ is so small that a Fourier transform rounds it away.

The transform's errors are about 1e-16 of all mass, at any loss. So each loss l is given
the weight e^{tl} before the steps are composed, and loses it afterwards. Most mass is
then near the ε in question, and an error is small next to Chernoff's bound on δ,
instead of next to 1.

References:
    Dembo and Zeitouni 1998, Large Deviations, section 2.2 (tilted measures).
"""

import functools
import math
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy import optimize, signal, special

from tanager.privacy import _pld
from tanager.privacy.mechanism import Adjacency


if TYPE_CHECKING:
    from dp_accounting.pld.pld_pmf import DensePLDPmf

_MOST_POINTS = 3_000_000  # a second


def epsilon(
    parts: Sequence[_pld.Part], adjacency: Adjacency, delta: float, coarseness: float
) -> float:
    """Return ε at δ, infinite if the grid does not reach it.

    Raises:
        OverflowError: the privacy loss spans too wide a range for any grid.
    """
    worst, logarithm = 0.0, math.log(delta)
    for side in _pld.sides(parts, adjacency, coarseness):
        tilt = _best(lambda t, side=side: (_log_moment(side, t) - logarithm) / t)
        losses, deltas = _tail(side, tilt)
        enough = losses[deltas <= delta]
        worst = max(worst, enough[0] if len(enough) else math.inf)
    return float(worst)


def delta(parts: Sequence[_pld.Part], adjacency: Adjacency, epsilon: float) -> float:
    """Return δ at ε, 1 if the grid does not reach it; raise as `epsilon` does."""
    worst = 0.0
    for side in _pld.sides(parts, adjacency):
        tilt = _best(lambda t, side=side: _log_moment(side, t) - t * epsilon)
        losses, deltas = _tail(side, tilt)
        enough = deltas[losses <= epsilon]
        worst = max(worst, enough[-1] if len(enough) else 1.0)
    return float(worst)


def _best(bound: Callable[[float], float]) -> float:
    """Return the tilt with the least of Chernoff's bounds; any other is valid too."""
    found = optimize.minimize_scalar(
        lambda logarithm: bound(math.exp(logarithm)),
        bounds=(math.log(1e-6), math.log(1e15)),
        options={"xatol": 0.05},
    )
    return math.exp(found.x)


def _log_moment(side: "_pld.Side", tilt: float) -> float:
    """Return the logarithm of E[e^{tl}] of all steps together."""
    return sum(count * _moment(pmf, tilt * _pld.losses_of(pmf)) for pmf, count in side)


def _moment(pmf: "DensePLDPmf", exponents: np.ndarray) -> float:
    sums: Any = special.logsumexp(exponents, b=pmf._probs)
    return float(sums)


def _tail(side: "_pld.Side", tilt: float) -> tuple[np.ndarray, np.ndarray]:
    """Return losses ε ≥ 0, rising, and δ at each of them."""
    from dp_accounting.pld.pld_pmf import DensePLDPmf

    tilted, infinite, lost, log_moment = [], 0.0, 0.0, 0.0
    for pmf, count in side:
        exponents = tilt * _pld.losses_of(pmf)
        moment = _moment(pmf, exponents)
        weights = pmf._probs * np.exp(exponents - moment)
        one = DensePLDPmf(pmf._discretization, pmf._lower_loss, weights, 0.0, True)
        if (
            _pld.reach(_pld.losses_of(pmf), weights, count)
            > _MOST_POINTS * pmf._discretization
        ):
            raise OverflowError("the tilted privacy loss spans too many points")
        tilted.append(_pld.repeat(one, count))
        infinite += count * pmf._infinity_mass
        lost += count * _pld.LOST
        # With what rounding the exponents can have taken from it.
        rounding = sys.float_info.epsilon * (1 + np.abs(exponents).max())
        log_moment += count * (moment + rounding)
    composed = functools.reduce(DensePLDPmf.compose, tilted)
    losses = _pld.losses_of(composed)
    scale = log_moment - tilt * losses
    # A bound above 1 says nothing, and would overflow.
    kept = (losses >= 0) & (scale <= 0)
    losses, scale = losses[kept], np.exp(scale[kept])
    # Σ p(l) and Σ p(l) exp(ε − l) over the losses l ≥ ε, the second without overflow.
    falling = (composed._probs[kept] * scale)[::-1]
    upper = np.cumsum(falling)[::-1]
    lower = signal.lfilter([1.0], [1.0, -math.exp(-composed._discretization)], falling)
    # What the transform and the ends of the tilted distribution can hide.
    hidden = (composed._infinity_mass + lost) * scale
    return losses, upper - np.asarray(lower)[::-1] + infinite + hidden
