"""The trade-off curve beside the exact Gaussian's and beside attacks on it."""

import math

import numpy as np
import pytest
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from scipy import stats

from tanager.privacy import _pld, accountant, trade_off
from tanager.privacy.mechanism import Adjacency, Mechanism
from tanager.privacy.trade_off import TradeOff


RATES = np.array([0.0, 1e-4, 0.01, 0.1, 0.5, 0.9, 1.0])


@pytest.mark.parametrize("adjacency", [Adjacency.ZERO_OUT, Adjacency.REPLACE_ONE])
def test_without_sampling_it_is_the_gaussian_curve(adjacency):
    curve = TradeOff(Mechanism(1.0, 4.0, 4, adjacency))
    mu = 1.0 if adjacency is Adjacency.REPLACE_ONE else 0.5
    expected = stats.norm.cdf(stats.norm.isf(RATES) - mu)
    np.testing.assert_allclose(curve.false_negatives(RATES), expected, atol=1e-12)


def test_without_noise_nothing_is_hidden():
    found = TradeOff(Mechanism(0.5, 0.0, 1)).false_negatives(RATES)
    np.testing.assert_array_equal(found, 0.0)


def test_it_is_just_below_the_exact_curve():
    """A sample rate just below 1 goes through the grid, and loses little by it."""
    exact = TradeOff(Mechanism(1.0, 2.0, 9)).false_negatives(RATES)
    found = TradeOff(Mechanism(1 - 1e-9, 2.0, 9)).false_negatives(RATES)
    assert np.all(found <= exact + 1e-9)
    np.testing.assert_allclose(found, exact, atol=2e-3)


def test_its_tangents_are_the_deltas():
    mechanism = Mechanism(0.1, 1.0, 50)
    curve = TradeOff(mechanism)
    for epsilon in (0.5, 2.0):
        delta = accountant.delta(mechanism, epsilon)
        # δ(ε) = max over α of 1 − f(α) − e^ε α.
        rates = np.geomspace(1e-8, 1, 4000)
        gap = 1 - curve.false_negatives(rates) - np.exp(epsilon) * rates
        assert gap.max() == pytest.approx(delta, rel=0.02)


@pytest.mark.parametrize("adjacency", [Adjacency.ZERO_OUT, Adjacency.REPLACE_ONE])
@pytest.mark.parametrize(("q", "sigma", "steps"), [(0.1, 0.8, 100), (1.0, 1.0, 5)])
def test_many_deltas_at_once_are_those_of_dp_accounting(q, sigma, steps, adjacency):
    parts = accountant.parts_of(Mechanism(q, sigma, steps, adjacency))
    composed = _pld.compose(parts, adjacency, coarseness=4.0)
    epsilons = np.linspace(0.0, 40.0, 50)
    library = PrivacyLossDistribution(*composed)
    theirs = np.array([library.get_delta_for_epsilon(float(e)) for e in epsilons])
    found = _pld.deltas(composed, epsilons)
    np.testing.assert_allclose(found, theirs, rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize("adjacency", [Adjacency.ZERO_OUT, Adjacency.REPLACE_ONE])
@pytest.mark.parametrize(
    ("q", "sigma", "steps"),
    [(0.1, 0.8, 100), (1.0, 0.02, 5), (0.01, 20.0, 3), (1.0, 0.01, 5)],
)
def test_epsilon_is_that_of_dp_accounting(q, sigma, steps, adjacency):
    """From 0 to hundreds, and where exp(-ε) is 0 as a double."""
    parts = accountant.parts_of(Mechanism(q, sigma, steps, adjacency))
    composed = _pld.compose(parts, adjacency, coarseness=4.0)
    deltas = [0.0, 1e-13, 1e-9, 1e-6, 1e-3, 0.4]
    library = PrivacyLossDistribution(*composed)
    theirs = [library.get_epsilon_for_delta(delta) for delta in deltas]
    found = [_pld.epsilon(composed, delta) for delta in deltas]
    np.testing.assert_allclose(found, theirs, rtol=1e-9)


def test_the_best_attack_is_on_the_curve_and_none_below():
    """200 000 runs of each kind; every rate within 6 standard deviations."""
    mechanism = Mechanism(0.2, 1.0, 10)
    q, sigma, count = 0.2, 1.0, 200_000
    rng = np.random.default_rng(0)

    def scores(inside):
        seen = rng.normal(0, sigma, (count, 10)).astype(np.float32)
        if inside:
            seen += rng.random(seen.shape) < q
        return np.log1p(q * np.expm1((2 * seen - 1) / (2 * sigma**2))).sum(1)

    inside, outside = scores(True), scores(False)
    curve = TradeOff(mechanism)
    for rate in (0.02, 0.1, 0.3):
        cut = np.quantile(outside, 1 - rate)
        missed = np.mean(inside < cut)
        least, more = curve.false_negatives(np.array([rate, rate + 1e-3]))
        # Both rates vary, the first as much as the curve is steep.
        slope = (least - more) / 1e-3
        variance = missed * (1 - missed) + slope**2 * rate * (1 - rate)
        slack = 6 * np.sqrt(variance / count)
        # The curve may lie below the best attack by what the grid costs.
        assert least - slack < missed < least + slack + 2e-3, rate


def test_a_loss_too_wide_for_a_grid_promises_nothing():
    curve = TradeOff(Mechanism(0.5, 1e-4, 10_000))
    assert np.all(curve.false_negatives(RATES) >= 0)
    assert float(curve.false_negatives(0.01)) < 0.01


@pytest.fixture
def computed_anew():
    trade_off._tangents.cache_clear()
    yield
    trade_off._tangents.cache_clear()


def test_what_is_not_a_number_hides_nothing(monkeypatch, computed_anew):
    monkeypatch.setattr(_pld, "deltas", lambda composed, epsilons: epsilons * math.nan)
    assert np.all(TradeOff(Mechanism(0.1, 1.3, 7)).deltas == 1)


def test_what_rounding_hides_is_in_the_curve(monkeypatch, computed_anew):
    mechanism = Mechanism(0.1, 1.3, 7)
    assert TradeOff(mechanism).advantage >= accountant.delta(mechanism, 0.0)
    exact = TradeOff(mechanism).deltas
    monkeypatch.setattr(_pld, "lost_to_rounding", lambda parts: 1e-6)
    monkeypatch.setattr(trade_off, "_SUMMED", 1e-3)
    trade_off._tangents.cache_clear()
    found = TradeOff(mechanism).deltas
    np.testing.assert_allclose(found, exact * (1 + 1e-3) + 1e-6, atol=1e-12)


def test_noise_without_sampling_is_added_up():
    several = TradeOff(Mechanism(1.0, 1.0, 4), Mechanism(1.0, 0.5, 1))
    assert several.gaussian == pytest.approx(math.sqrt(8))
