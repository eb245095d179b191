"""Rényi divergences of broken orders, which are sums without an end."""

import mpmath
import pytest

from tanager.privacy import accountant
from tanager.privacy.mechanism import Mechanism


@pytest.mark.parametrize(
    ("q", "sigma", "order"), [(1e-3, 9e4, 8.8), (1.6e-6, 0.537, 7.6)]
)
def test_a_broken_order_is_no_lower_than_its_integral(q, sigma, order):
    def excess(z):
        """Return what a moment has above 1, less a term whose mean is 0."""
        gain = q * mpmath.expm1((z - 0.5 / sigma) / sigma)
        return mpmath.npdf(z) * ((1 + gain) ** order - 1 - order * gain)

    with mpmath.workdps(30):
        moment = mpmath.quad(excess, [-12, 0, 5, 10, 15, 30])
        exact = float(mpmath.log1p(moment) / (order - 1))
    (found,) = accountant.rdp(Mechanism(q, sigma, 1), [order])
    assert exact <= found <= exact * (1 + 1e-9) + 2.1e-13 / (order - 1)
