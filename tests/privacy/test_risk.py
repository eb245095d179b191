"""Risks beside closed forms, an independent convolution and planted bugs."""

import dataclasses
import json
import math

import numpy as np
import pytest
from scipy import special

import tanager
from tanager.privacy import _pld, accountant, trade_off
from tanager.privacy.mechanism import Adjacency, Mechanism
from tanager.privacy.risk import risk
from tanager.privacy.trade_off import TradeOff


LEAST, ROUNDING = 1e-10, 1e-15
QUIET = Mechanism(0.01, 0.6, 500)
ORDINARY = Mechanism(0.328, 9.4, 2000)


def one_step(mechanism):
    """Rates of the best attack on one step, by closed forms: a threshold on the sum."""
    q, sigma = mechanism.sample_rate, mechanism.noise_multiplier
    place = np.linspace(-9, 9, 20_001) * sigma + 0.5
    moved = q * special.ndtr((1 - place) / sigma)
    still = special.ndtr(-place / sigma)
    if mechanism.adjacency is Adjacency.REPLACE_ONE:
        wrong = (1 - q) * still + q * special.ndtr((-1 - place) / sigma)
    else:
        wrong = still
    return wrong, (1 - q) * still + moved


def gaussian(mu, rates):
    return special.ndtr(mu + special.ndtri(rates))


STEPS = [
    Mechanism(0.1, 1.0, 1),
    Mechanism(0.6, 0.4, 1),
    Mechanism(0.3, 2.0, 1, Adjacency.REPLACE_ONE),
]


@pytest.mark.parametrize("step", STEPS, ids=str)
def test_one_step_is_bounded_closely(step):
    wrong, right = one_step(step)
    found = risk(step)
    rates = wrong[wrong > LEAST]
    limit = TradeOff(step).true_positives(rates)
    assert (limit >= right[wrong > LEAST] - ROUNDING).all()
    assert found.advantage >= (right - wrong).max()
    assert found.advantage == pytest.approx((right - wrong).max(), rel=1e-3)
    for rate, name in ((0.001, "tpr_at_0_1_percent"), (0.01, "tpr_at_1_percent")):
        exact = np.interp(rate, wrong[::-1], right[::-1])
        assert exact * (1 - 1e-6) <= getattr(found, name) <= exact * (1 + 1e-3)
    counts = (wrong > LEAST) & (right < 1 - LEAST)
    needed = (special.ndtri(right[counts]) - special.ndtri(wrong[counts])).max()
    assert needed <= found.mu <= needed * (1 + 1e-3)


def bounds(step, mu):
    """Whether no attack on one step beats μ-Gaussian DP."""
    wrong, right = one_step(step)
    counts = (wrong >= LEAST) & (right <= 1 - LEAST)
    return bool((right[counts] <= gaussian(mu, wrong[counts]) + ROUNDING).all())


@pytest.mark.parametrize("step", STEPS, ids=str)
def test_planted_mu_rounded_down_bounds_no_more(step):
    mu = risk(step).mu
    assert bounds(step, mu)
    assert not bounds(step, 0.998 * mu)
    assert not bounds(step, math.floor(100 * mu) / 100)


def test_planted_one_direction_alone_is_beaten(monkeypatch):
    """The example that is added loses less than the one that is removed."""
    step = STEPS[0]
    monkeypatch.setattr(trade_off, "_tangents", trade_off._tangents.__wrapped__)
    wrong, right = one_step(step)
    assert (TradeOff(step).true_positives(wrong) >= right - ROUNDING).all()
    both = _pld.deltas

    def added(composed, epsilons):
        _, *composed = composed
        return both(composed, epsilons)

    monkeypatch.setattr(_pld, "deltas", added)
    assert (TradeOff(step).true_positives(wrong) < 0.99 * right).any()


@pytest.mark.parametrize("adjacency", list(Adjacency))
def test_without_sampling_there_are_closed_forms(adjacency):
    found = risk(Mechanism(1.0, 8.0, 16, adjacency))
    mu = 0.5 * adjacency.signals
    assert found.mu == pytest.approx(mu, rel=1e-12)
    assert found.regret == 0
    assert found.advantage == pytest.approx(2 * special.ndtr(mu / 2) - 1, rel=1e-12)
    assert found.tpr_at_1_percent == pytest.approx(gaussian(mu, 0.01), rel=1e-12)
    assert found.tpr_at_0_1_percent == pytest.approx(gaussian(mu, 0.001), rel=1e-12)


def test_mu_and_regret_are_those_of_the_paper():
    """Gomez et al. 2025: 1.5686 and 0.0010 by their program, on a grid of 1e-4."""
    found = risk(ORDINARY)
    assert found.mu == pytest.approx(1.5685, abs=2e-4)
    assert found.regret == pytest.approx(0.00102, abs=2e-5)


def test_the_regret_is_the_shift_that_the_paper_defines():
    """The smallest Δ with f(x + Δ) − Δ ≤ f_μ(x) for all x, by bisection."""
    found, curve = risk(QUIET), TradeOff(QUIET)
    rates = np.concatenate([np.geomspace(1e-9, 0.01, 2000), np.linspace(0.01, 1, 4000)])
    low, high = 0.0, 1.0
    while high - low > 1e-7:
        shift = (low + high) / 2
        shifted = curve.false_negatives(np.minimum(rates + shift, 1.0)) - shift
        below = (shifted <= 1 - gaussian(found.mu, rates)).all()
        low, high = (low, shift) if below else (shift, high)
    assert found.regret == pytest.approx(high, abs=2e-5)
    assert found.regret > 0.1  # μ alone says too little of such a run


@pytest.mark.parametrize("mechanism", [QUIET, ORDINARY], ids=["quiet", "ordinary"])
def test_the_curve_is_nowhere_below_that_of_mu(mechanism):
    rates = np.concatenate([np.geomspace(LEAST, 1e-3, 500), np.linspace(1e-3, 1, 500)])
    curve, mu = TradeOff(mechanism), risk(mechanism).mu
    assert (curve.true_positives(rates) <= gaussian(mu, rates) + ROUNDING).all()
    assert (curve.true_positives(rates) > gaussian(0.999 * mu, rates)).any()
    # Without a least rate only the Gaussian without sampling would do.
    assert mu < curve.gaussian


def losses_of_a_step(mechanism, grid):
    """Laws of the loss of one step, an example out and in, from distribution functions.

    Each part of the real line goes to the multiple of `grid` below its losses.
    """
    q, sigma = mechanism.sample_rate, mechanism.noise_multiplier
    lowest = math.log1p(-q)
    highest = np.logaddexp(lowest, math.log(q) + (24 * sigma + 1) / (2 * sigma**2))
    first, last = math.floor(lowest / grid), math.ceil(highest / grid)
    edges = np.arange(first, last + 1) * grid
    with np.errstate(divide="ignore"):
        ratio = np.log(np.maximum(np.exp(edges) - (1 - q), 0) / q)
    place = sigma**2 * ratio + 0.5
    out = special.ndtr(place / sigma)
    inside = (1 - q) * out + q * special.ndtr((place - 1) / sigma)
    return first, np.diff(out), np.diff(inside)


def test_mu_is_enough_at_every_corner_of_the_curve():
    """Here a corner asks for more than the least rate does, if only a little."""
    mechanism = Mechanism(0.05, 2.0, 300, Adjacency.REPLACE_ONE)
    alpha, right = TradeOff(mechanism).corners()
    counts = (alpha >= LEAST) & (right <= 1 - LEAST)
    asked = special.ndtri(right[counts]) - special.ndtri(alpha[counts])
    assert asked.max() <= risk(mechanism).mu


def test_rare_false_alarms_are_those_of_an_independent_convolution():
    """Where noise is low, μ of the paper's own program is 1.03 and below the truth.

    An attack on the rounded losses is a real one, so its rates bound from below.
    """
    first, *laws = losses_of_a_step(QUIET, 5e-4)
    size, rates = 2**17, []
    for law in laws:
        composed = np.fft.irfft(np.fft.rfft(law, size) ** QUIET.steps, size)
        # The circle of losses is cut opposite 0.
        composed = np.roll(composed, QUIET.steps * first + size // 2)
        rates.append(np.cumsum(composed[::-1]))
    wrong, right = rates
    for rate, name in ((0.001, "tpr_at_0_1_percent"), (0.01, "tpr_at_1_percent")):
        reached = np.interp(rate, wrong, right)
        assert reached <= getattr(risk(QUIET), name) <= 1.001 * reached
    reached = np.interp(1e-9, wrong, right)
    limit = float(TradeOff(QUIET).true_positives(1e-9))
    assert 0.99 * limit < reached < limit


def test_the_advantage_is_delta_without_epsilon():
    for mechanism in (QUIET, ORDINARY):
        delta = accountant.delta(mechanism, 0.0)
        assert risk(mechanism).advantage == pytest.approx(delta, rel=1e-9)


def test_more_noise_is_less_risk():
    noises = (0.5, 0.7, 1.0, 2.0, 8.0, 100.0)
    found = [risk(Mechanism(0.05, sigma, 50)) for sigma in noises]
    for name in ("tpr_at_0_1_percent", "tpr_at_1_percent", "advantage", "mu"):
        values = [getattr(each, name) for each in found]
        assert values == sorted(values, reverse=True), name


def test_without_noise_nothing_is_hidden():
    found = tanager.risk(Mechanism(0.5, 0.0, 1))
    assert found == tanager.Risk(1.0, 1.0, 1.0, math.inf, 0.0)
    assert json.loads(json.dumps(found.to_json(), allow_nan=False))["mu"] is None
    loud = tanager.risk(Mechanism(0.01, 1.0, 10**6))
    assert loud.tpr_at_0_1_percent == loud.advantage == pytest.approx(1)
    assert 12 < loud.mu <= 1000


def test_several_mechanisms_are_one():
    assert risk() == tanager.Risk(0.001, 0.01, 0.0, 0.0, 0.0)
    half = dataclasses.replace(QUIET, steps=QUIET.steps // 2)
    assert risk(half, half) == risk(QUIET)
    whole = Mechanism(1.0, 6.0, 9)
    assert risk(whole, Mechanism(1.0, 4.0, 4)).mu == pytest.approx(math.hypot(0.5, 0.5))
    mixed = risk(QUIET, whole)
    assert mixed.advantage > max(risk(QUIET).advantage, risk(whole).advantage)
    assert risk(QUIET, Mechanism(0.5, 0.0, 1)).mu == math.inf
    other = dataclasses.replace(QUIET, adjacency=Adjacency.REPLACE_ONE)
    with pytest.raises(ValueError, match="must be the same for all mechanisms"):
        risk(QUIET, other)
