"""Risks: what an attack can reach, in numbers that people understand.

All of them are read off the exact trade-off curve, not off one pair (ε, δ), so they are
smaller than what an ε alone allows. None is below the truth.

References:
    Dong, Roth and Su 2022, Gaussian Differential Privacy; Gomez et al. 2025,
    arXiv:2503.10945 (μ and its regret); Kaissis et al. 2024, arXiv:2406.08918
    (definition of Δ, the regret); Kulynych et al. 2024, arXiv:2407.02191 (advantage and
    true-positive rates from privacy loss distributions).
"""

import dataclasses
from typing import Any

import numpy as np
from scipy import special

from tanager import _validate as validate
from tanager._files import as_json
from tanager.privacy.mechanism import Mechanism
from tanager.privacy.trade_off import TradeOff


_LEAST_RATE = 1e-10
"""Rates below are left out of μ, as in the paper's own program."""


@dataclasses.dataclass(frozen=True)
class Risk:
    """How well any attack can guess whether one example was in the data.

    It knows all other examples and sees every update. Members are the examples that
    were in the data.

    Attributes:
        tpr_at_0_1_percent: true-positive rate, the largest share of members that it can
            recognise, at a false-positive rate of 0.1 %.
        tpr_at_1_percent: the same at a false-positive rate of 1 %.
        advantage: the largest difference of the two rates, which is δ at ε = 0.
        mu: the smallest μ for which μ-Gaussian DP holds at all rates of at least 1e-10;
            infinite without noise. At ever smaller rates subsampling hides ever less,
            so at all rates only √T/σ would do.
        regret: Δ, how far the trade-off curve is above that of μ: the smallest shift
            of both rates that takes it below. Near 0, μ says everything.
    """

    tpr_at_0_1_percent: float
    tpr_at_1_percent: float
    advantage: float
    mu: float
    regret: float

    def to_json(self) -> dict[str, Any]:
        """Return the risks as an object of JSON: an infinite μ becomes None."""
        return as_json(dataclasses.asdict(self))


def risk(*mechanisms: Mechanism) -> Risk:
    """Return the risks of mechanisms on the same data, all together.

    ``tanager.risk(*ledger.mechanisms())`` gives those of everything in a ledger.

    Raises:
        ValueError: the adjacencies differ.
    """
    for one in mechanisms:
        validate.instance(Mechanism, "risk(*mechanisms)", mechanism=one)
    curve = TradeOff(*mechanisms)
    tenth, one = map(float, curve.true_positives(np.array([0.001, 0.01])))
    mu = _mu(curve)
    return Risk(tenth, one, curve.advantage, mu, _regret(curve, mu))


def _mu(curve: TradeOff) -> float:
    if not len(curve.epsilons):
        return curve.gaussian
    # A Gaussian curve that is below every corner is below the lines: it is convex.
    alpha, right = curve.corners()
    counts = (alpha >= _LEAST_RATE) & (right <= 1 - _LEAST_RATE)
    needed = special.ndtri(right[counts]) - special.ndtri(alpha[counts])
    least = curve.true_positives(_LEAST_RATE)
    at_least = special.ndtri(least) - special.ndtri(_LEAST_RATE)
    return min(float(needed.max(initial=at_least)), curve.gaussian)


def _regret(curve: TradeOff, mu: float) -> float:
    """Return Δ, along the lines of constant α − β, where a shift moves both curves."""
    if not (len(curve.epsilons) and np.isfinite(mu)):
        return 0.0
    place = np.linspace(mu / 2, mu / 2 + 8, 400)[:, None]
    alpha, beta = special.ndtr(-place), special.ndtr(place - mu)
    slope = np.exp(curve.epsilons)
    lines = (1 - curve.deltas - slope * (alpha - beta)) / (1 + slope)
    return max(float((lines.max(-1) - beta[:, 0]).max()), 0.0)
