"""Rényi divergences of whole orders, and upper bounds on those of broken ones.

`dp_accounting` adds up the terms of an order in a loop: a fifth of a second for the
usual orders, and seconds for one of a million, which a small ε needs. Where a
divergence is tiny, it is lost in rounding there.

References:
    Mironov et al. 2019, arXiv:1908.10530, section 3.3 (the moment as a sum).
"""

import math
import sys
from collections.abc import Callable, Sequence

import numpy as np
from scipy import special


LARGEST_ORDER = 2**20
"""Its sum takes a tenth of a second."""


def divergence(q: float, sigma: float, order: int) -> float:
    """Return an upper bound on the divergence: relatively 1e-6 above it at most.

    exp((α − 1) D) is Σ P[Bin(α, q) = i] exp(i (i − 1) / 2σ²). One is subtracted from
    each exponential, so that all terms are positive and small sums lose no digits.
    """
    if q == 1:
        return order / (2 * sigma**2)
    if order > LARGEST_ORDER:
        return np.inf
    some = np.arange(2.0, order + 1)
    magnitude = special.gammaln(order + 1) + order * abs(np.log(q) + np.log1p(-q))
    log_weights = (
        special.gammaln(order + 1)
        - special.gammaln(some + 1)
        - special.gammaln(order - some + 1)
        + some * np.log(q)
        + (order - some) * np.log1p(-q)
    )
    # Each rounding counts upwards: those of the exponents here, of the weights below.
    exponents = some * (some - 1) / (2 * sigma**2) * (1 + 1e-15)
    log_gains = exponents + np.log(-np.expm1(-exponents))
    rounding = 32 * sys.float_info.epsilon * magnitude
    total = special.logsumexp(log_weights + log_gains) + rounding
    return float(np.logaddexp(0, total)) / (order - 1)


def raised(found: np.ndarray, q: float, sigma: float, orders: np.ndarray) -> np.ndarray:
    """Return upper bounds on what `dp_accounting` finds at broken orders.

    Its sums stop at terms of exp(−30), 9e-14, and are rounded: 1e-14 was measured. A
    divergence rises with its order, so the next whole order needs no more.
    """
    above = [divergence(q, sigma, max(2, math.ceil(order))) for order in orders]
    return np.minimum(found + 2e-13 / (orders - 1), np.maximum(found, above))


def least(
    at: Callable[[Sequence[float]], tuple[float, float]], orders: Sequence[float]
) -> tuple[float, float]:
    """Return the least value and its order, beyond the last if that is best.

    `at` gives the least value at some orders, and its order. The value is flat around
    the best order, so factors are halved down to 2 %.
    """
    found, order = at(orders)
    factor = 2.0
    while order >= orders[-1] and found > 0 and factor > 1.02:
        beside = max(round(order / factor), orders[-1]), round(order * factor)
        value, nearest = at([min(each, LARGEST_ORDER) for each in beside])
        if value < found:
            found, order = value, nearest
        else:
            factor = math.sqrt(factor)
    return found, order
