"""What accountants are compared with: the exact δ and ε of a Gaussian."""

import math

from scipy import optimize, stats


def gaussian_delta(mu, epsilon):
    """Balle and Wang 2018, theorem 8."""
    second = stats.norm.logcdf(-epsilon / mu - mu / 2)
    return stats.norm.cdf(-epsilon / mu + mu / 2) - math.exp(epsilon + second)


def root(function, largest) -> float:
    found = optimize.brentq(function, 0, largest, xtol=1e-9)
    assert isinstance(found, float)
    return found


def gaussian_epsilon(mu, delta):
    return root(lambda x: gaussian_delta(mu, x) - delta, 20 * mu * (mu + 1))
