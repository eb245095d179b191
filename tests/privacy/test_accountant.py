"""Accountants against closed forms, quadrature, published rows and each other."""

import dataclasses
import logging
import math
import re
from typing import Any

import mpmath
import numpy as np
import pytest
from closed_forms import gaussian_epsilon, root
from scipy import integrate, special, stats

from tanager.privacy import _pld, _rdp, accountant
from tanager.privacy.accountant import Accountant
from tanager.privacy.mechanism import Adjacency, Mechanism


ADD, REPLACE = Adjacency.ZERO_OUT, Adjacency.REPLACE_ONE
CIFAR = Mechanism(4096 / 50_000, 3.0, 2500)
SMALL = Mechanism(0.01, 1.2, 200)


def step_delta(mechanism, epsilon):
    """δ of ONE step by quadrature of the hockey-stick divergence, both directions."""
    q, sigma = mechanism.sample_rate, mechanism.noise_multiplier
    x, spacing = np.linspace(-12 * sigma - 1, 12 * sigma + 1, 200_001, retstep=True)

    def density(mean):
        return np.exp(-0.5 * ((x - mean) / sigma) ** 2) / (
            sigma * math.sqrt(2 * math.pi)
        )

    def excess(p, r):
        return np.maximum(p - math.exp(epsilon) * r, 0).sum() * spacing

    without = density(0)
    with_one = (1 - q) * without + q * density(1)
    if mechanism.adjacency is REPLACE:
        return excess(with_one, (1 - q) * without + q * density(-1))
    return max(excess(with_one, without), excess(without, with_one))


### What every accountant must do


@pytest.fixture(params=list(Accountant))
def name(request):
    return request.param


def test_less_privacy_costs_more(name):
    spent = accountant.epsilon(SMALL, 1e-5, name)
    assert 0 < spent < math.inf
    worse: tuple[dict[str, Any], ...] = (
        {"sample_rate": 0.02},
        {"noise_multiplier": 1.0},
        {"steps": 300},
    )
    for change in worse:
        changed = dataclasses.replace(SMALL, **change)
        assert accountant.epsilon(changed, 1e-5, name) > 1.02 * spent
    assert accountant.epsilon(SMALL, 1e-6, name) > 1.02 * spent


def test_no_step_is_free_and_no_noise_is_priceless(name):
    assert accountant.epsilon(SMALL, 1e-5, name, steps=0) == 0
    half = dataclasses.replace(SMALL, steps=100)
    spent = accountant.epsilon(SMALL, 1e-5, name, steps=100)
    assert spent == accountant.epsilon(half, 1e-5, name)
    silent = dataclasses.replace(SMALL, noise_multiplier=0.0)
    assert accountant.epsilon(silent, 1e-5, name) == math.inf
    assert accountant.epsilon(silent, 1e-5, name, steps=0) == 0


def test_nothing_is_ever_not_a_number(name):
    for fields in (
        (0.01, 0.01, 10**6),
        (0.5, 1e-200, 10),
        (1e-9, 1e6, 10),
        (1, 1e-3, 10**9),
        (1e-12, 1e8, 1),
    ):
        for adjacency in Adjacency:
            if (name, adjacency) == (Accountant.RDP, REPLACE):
                continue
            spent = accountant.epsilon(Mechanism(*fields, adjacency), 1e-5, name)
            assert spent >= 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0,), "delta (=0) must be strictly between 0 and 1"),
        ((1.5,), "delta (=1.5) must be strictly between 0 and 1"),
        ((1e-5, "pld", -1), "steps (=-1) must be"),
        ((1e-5, "pld", 1.5), "steps (=1.5) must be"),
        ((1e-5, "moments"), "must be one of pld, rdp, gdp_clt, tan"),
    ],
)
def test_arguments_are_checked(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        accountant.epsilon(SMALL, *arguments)


@pytest.mark.parametrize(
    "mechanism",
    [
        Mechanism(0.08192, 3.0, 2500),
        Mechanism(0.00128, 0.047, 2500),
        Mechanism(0.1, 2.0, 300, REPLACE),
    ],
)
def test_a_coarser_grid_is_a_guarantee_and_hardly_more(mechanism):
    best = accountant.epsilon(mechanism, 1e-5)
    coarse = accountant.epsilon(mechanism, 1e-5, coarseness=8.0)
    assert best <= coarse <= 1.0005 * best


def test_who_is_a_guarantee():
    guarantees = {name for name in Accountant if name.is_guarantee}
    assert guarantees == {Accountant.PLD, Accountant.RDP}


### Published rows


@pytest.mark.parametrize(
    ("mechanism", "delta", "published", "within"),
    [
        (Mechanism(16384 / 1271167, 2.5, 71_589), 8e-7, 8.00, 0.01),  # Unlocking, 15
        (Mechanism(16384 / 635584, 2.5, 71_589), 16e-7, 17.98, 0.01),  # TAN, table 6
        (Mechanism(4096 / 45_000, 3.0, 2468), 1e-5, 8.0, 0.05),  # Unlocking, table 13
        (CIFAR, 1e-5, 7.1, 0.05),  # TAN, table 5
    ],
)
def test_rdp_of_published_rows(mechanism, delta, published, within):
    spent = accountant.epsilon(mechanism, delta, "rdp")
    assert spent == pytest.approx(published, abs=within)


### Independent oracles


@pytest.mark.parametrize(("sigma", "steps"), [(0.3, 1), (1.0, 37), (1000.0, 37)])
@pytest.mark.parametrize("adjacency", [ADD, REPLACE])
def test_without_sampling_it_is_the_gaussian_mechanism(sigma, steps, adjacency):
    signals = 1 if adjacency is ADD else 2
    exact = gaussian_epsilon(signals * math.sqrt(steps) / sigma, 1e-5)
    spent = accountant.epsilon(Mechanism(1, sigma, steps, adjacency), 1e-5)
    assert exact * (1 - 1e-9) <= spent <= exact * 1.003


@pytest.mark.parametrize("adjacency", [ADD, REPLACE])
@pytest.mark.parametrize(
    "step", [(0.3, 0.8), (0.01, 0.5), (0.9, 2.0), (0.5, 10.0)], ids=str
)
def test_one_step_is_the_hockey_stick_divergence(step, adjacency):
    q, sigma = step
    mechanism = Mechanism(q, sigma, 1, adjacency)
    spent = accountant.epsilon(mechanism, 1e-3)
    exact = root(lambda epsilon: step_delta(mechanism, epsilon) - 1e-3, 50)
    assert exact * (1 - 1e-5) <= spent <= exact * 1.001
    assert accountant.delta(mechanism, exact) == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize(
    ("mechanism", "delta", "most"),
    [
        (Mechanism(0.01, 770.93, 1000), 1e-6, 0.0058),
        (Mechanism(1e-4, 0.5, 10**9), 1e-6, 397),
        (Mechanism(0.00033, 4.0, 10_000), 1e-12, 0.0512),
    ],
)
def test_small_and_large_epsilons_are_tight(mechanism, delta, most):
    spent = accountant.epsilon(mechanism, delta)
    assert 0 < spent <= min(most, accountant.epsilon(mechanism, delta, "rdp"))
    assert accountant.epsilon(mechanism, delta, "rdp") <= max(2 * spent, most)


@pytest.mark.parametrize(
    "q",
    [1e-5, 0.1, 1.0, *(pytest.param(q, marks=pytest.mark.full) for q in (1e-3, 0.7))],
)
@pytest.mark.parametrize("sigma", [0.3, 1.0, 5.0])
def test_no_order_gives_a_smaller_epsilon_by_rdp(q, sigma):
    orders = accountant.RDP_ORDERS
    step = accountant.rdp_of_event(accountant.dp_event(Mechanism(q, sigma, 1)), orders)
    for steps, delta in ((1, 1e-5), (50, 0.01), (1000, 1e-5)):
        theirs = accountant.epsilon_from_rdp(orders, steps * step, delta)
        ours = accountant.epsilon(Mechanism(q, sigma, steps), delta, "rdp")
        assert ours <= theirs * (1 + 1e-7)


@pytest.mark.parametrize(("q", "sigma"), [(0.01, 30.0), (0.2, 2.0), (1e-4, 0.8)])
def test_large_orders_are_those_of_dp_accounting(q, sigma):
    event = accountant.dp_event(Mechanism(q, sigma, 1))
    orders = [2, 17, 513, 900]
    theirs = accountant.rdp_of_event(event, orders)
    ours = [_rdp.divergence(q, sigma, order) for order in orders]
    np.testing.assert_allclose(ours, theirs, rtol=2e-6)
    with mpmath.workdps(50):
        for order, found in zip(orders, ours, strict=True):
            moment = mpmath.nsum(
                lambda i, order=order: (
                    mpmath.binomial(order, i)
                    * mpmath.mpf(q) ** i
                    * (1 - mpmath.mpf(q)) ** (order - i)
                    * mpmath.exp(i * (i - 1) / (2 * mpmath.mpf(sigma) ** 2))
                ),
                [0, order],
            )
            assert found >= mpmath.log(moment) / (order - 1)


@pytest.mark.parametrize("sigma", [0.3, 0.41, 0.47])
def test_exponents_of_large_orders_are_rounded_up(sigma):
    """Against the largest term of the moment."""
    order = 2**18
    with mpmath.workdps(40):
        exponent = order * (order - 1) / (2 * mpmath.mpf(sigma) ** 2)
        least = (exponent + order * mpmath.log(mpmath.mpf(0.9))) / (order - 1)
        assert _rdp.divergence(0.9, sigma, order) >= least
    assert _rdp.divergence(0.9, sigma, 2 * _rdp.LARGEST_ORDER) == math.inf


def test_a_group_without_sampling_is_one_gaussian():
    mechanism = Mechanism(1.0, 20.0, 50)
    exact = gaussian_epsilon(3 * math.sqrt(50) / 20, 1e-5)
    spent = accountant.epsilon(mechanism, 1e-5, group=3)
    assert exact * (1 - 1e-9) <= spent <= exact * 1.001


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"accountant": "rdp"}, "use 'pld'"),
        ({"adjacency": "replace-one"}, "use 'zero-out'"),
        ({"group": 0}, "group"),
        ({"group": 2.5}, "group"),
        ({"coarseness": 0}, "coarseness"),
    ],
)
def test_groups_that_cannot_be_accounted_for_are_refused(settings, message):
    settings = {"group": 2, "adjacency": "zero-out", "accountant": "pld"} | settings
    adjacency = Adjacency(settings.pop("adjacency"))
    one = Mechanism(0.1, 1.0, 5, adjacency)
    with pytest.raises(ValueError, match=message):
        accountant.epsilon(one, 1e-5, **settings)
    with pytest.raises(ValueError, match=message):
        accountant.composed_epsilon([one], 1e-5, **settings)


@pytest.mark.parametrize(("sigma", "order"), [(0.8, 2), (2.0, 5)])
def test_rdp_is_the_divergence_of_its_definition(sigma, order):
    q = 0.05

    def integrand(x):
        base = stats.norm.pdf(x, 0, sigma)
        ratio = 1 - q + q * math.exp((2 * x - 1) / (2 * sigma**2))
        return base * ratio**order

    moment, _ = integrate.quad(integrand, -15 * sigma, 15 * sigma + order + 1)
    expected = math.log(moment) / (order - 1)
    (divergence,) = accountant.rdp(Mechanism(q, sigma, 1), [order])
    assert divergence == pytest.approx(expected, rel=1e-6)


def test_rdp_of_a_gaussian_is_linear_in_the_order():
    orders = [1.5, 2, 3, 100]
    divergences = accountant.rdp(Mechanism(1, 4.0, 8), orders)
    np.testing.assert_allclose(divergences, np.array(orders) * 8 / (2 * 16))


@pytest.mark.parametrize(
    "mu", [2.532706595712985e-12, 1e-6, 3e-3, 0.06, 0.7, 30.0, 1e4]
)
def test_epsilon_of_a_gaussian_is_rounded_up_at_any_delta(mu):
    """Balle and Wang 2018, theorem 8, in 400 digits."""

    def exact_delta(epsilon):
        place, half = mpmath.mpf(epsilon) / mu, mpmath.mpf(mu) / 2
        second = mpmath.exp(epsilon) * mpmath.ncdf(-place - half)
        return mpmath.ncdf(half - place) - second

    with mpmath.workdps(400):
        for delta in (1e-300, 3.9587570367725357e-289, 1e-100, 1e-18, 1e-5, 8e-3, 0.5):
            spent = accountant.epsilon_gaussian(mu, delta)
            less = mpmath.mpf(spent) * (1 - 2e-14) - 1e-10
            assert exact_delta(spent) <= delta
            assert less < 0 or exact_delta(less) > delta
            lower = accountant.epsilon_gaussian(mu, delta, up=False)
            assert spent * (1 - 4e-14) - 2e-10 < lower <= spent
            assert lower == 0 or exact_delta(lower) >= delta


@pytest.mark.parametrize("adjacency", [ADD, REPLACE])
def test_gdp_clt_is_the_variance_of_the_loss(adjacency):
    # In the limit μ² is T times the variance of the privacy loss under "no signal".
    q, sigma, steps = 1e-3, 0.9, 1000
    x = np.linspace(-12 * sigma, 12 * sigma, 200_001)
    up = np.exp((2 * x - 1) / (2 * sigma**2))
    down = np.exp((-2 * x - 1) / (2 * sigma**2)) if adjacency is REPLACE else 1.0
    square = np.sum(stats.norm.pdf(x, 0, sigma) * (up - down) ** 2) * (x[1] - x[0])
    mu = accountant.gdp_clt_mu(Mechanism(q, sigma, steps, adjacency))
    assert mu == pytest.approx(q * math.sqrt(steps * square), rel=1e-6)
    spent = accountant.epsilon(Mechanism(q, sigma, steps, adjacency), 1e-9, "gdp_clt")
    assert spent == pytest.approx(gaussian_epsilon(mu, 1e-9), rel=1e-6)


### The accountants among themselves


@pytest.mark.parametrize(
    "fields", [(1e-3, 0.5, 300), (0.3, 6.0, 300), (0.3, 0.5, 1), (1, 6.0, 1)], ids=str
)
def test_pld_is_tighter_than_rdp(fields):
    mechanism = Mechanism(*fields)
    tight = accountant.epsilon(mechanism, 1e-5)
    assert tight <= accountant.epsilon(mechanism, 1e-5, "rdp")


def test_gdp_clt_lies_below_the_guarantee_where_the_papers_are():
    ratio = accountant.epsilon(CIFAR, 1e-5, "gdp_clt") / accountant.epsilon(CIFAR, 1e-5)
    assert 0.988 < ratio < 0.999


def test_tan_is_near_above_the_wall_and_far_below_it():
    for sigma, low, high in ((2.0, 0.8, 1.05), (0.5, 3, 10)):
        mechanism = Mechanism(0.02 * sigma / 2, sigma, 2500)
        spent = accountant.epsilon(mechanism, 1e-5)
        assert low < spent / accountant.epsilon(mechanism, 1e-5, "tan") < high


def test_replace_one_costs_about_twice():
    replaced = dataclasses.replace(CIFAR, adjacency=REPLACE)
    ratio = accountant.epsilon(replaced, 1e-5) / accountant.epsilon(CIFAR, 1e-5)
    assert 2 < ratio < 2.4


def test_an_example_that_contributes_zero_costs_as_one_that_is_not_there(name):
    spent = {
        accountant.epsilon(dataclasses.replace(SMALL, adjacency=each), 1e-5, name)
        for each in (Adjacency.ZERO_OUT, Adjacency.ADD_OR_REMOVE_ONE)
    }
    assert len(spent) == 1


def test_rdp_refuses_replace_one_by_name():
    replaced = dataclasses.replace(CIFAR, adjacency=REPLACE)
    message = (
        "adjacency (='replace-one') has no RDP bound under Poisson sampling: use"
        " accountant 'pld', or adjacency 'zero-out'"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        accountant.epsilon(replaced, 1e-5, "rdp")


def test_delta_of_one_step_is_that_of_the_worse_direction():
    mechanism = Mechanism(0.9, 0.7, 1)
    for epsilon in (0.1, 1.0, 2.0):
        exact = step_delta(mechanism, epsilon)
        assert accountant.delta(mechanism, epsilon) == pytest.approx(exact, rel=1e-3)


@pytest.fixture
def computed_anew():
    accountant._epsilon_pld.cache_clear()
    yield
    accountant._epsilon_pld.cache_clear()


def test_what_is_lost_is_never_nothing():
    """Rounding takes more than there is from the divergences of the first."""
    orders = accountant.RDP_ORDERS
    assert (accountant.rdp(Mechanism(1e-8, 1e4, 1), orders) > 0).all()
    mu = math.sqrt(8) * special.erfinv(1e-5 * (1 + 5e-10))
    assert accountant.epsilon_gaussian(mu, 1e-5) > 0


def test_a_group_too_large_for_the_grid_is_sampled_as_a_whole():
    spent = accountant.epsilon(Mechanism(0.1, 900.0, 4), 1e-5, group=1100)
    whole = accountant.epsilon(Mechanism(1.0, 900 / 1100, 4), 1e-5)
    assert spent == pytest.approx(whole, rel=1e-6)


def test_what_rounding_hides_is_spent(monkeypatch, computed_anew):
    delta, hidden = accountant.delta(SMALL, 0.2), 1e-9
    assert hidden < 0.01 * delta
    sooner = accountant.epsilon(SMALL, delta - hidden)
    monkeypatch.setattr(_pld, "lost_to_rounding", lambda parts: hidden)
    accountant._epsilon_pld.cache_clear()
    assert accountant.delta(SMALL, 0.2) == pytest.approx(delta + hidden, rel=1e-9)
    assert accountant.epsilon(SMALL, delta) == pytest.approx(sooner, rel=1e-9)


def test_either_direction_can_be_the_worse(monkeypatch):
    delta, compose = accountant.delta(SMALL, 0.2), _pld.compose
    monkeypatch.setattr(_pld, "compose", lambda *parts: compose(*parts)[::-1])
    assert accountant.delta(SMALL, 0.2) == delta


def test_what_is_not_a_number_is_no_guarantee(monkeypatch, computed_anew):
    """RDP has one."""

    class Broken:
        def get_delta_for_epsilon(self, epsilon):
            return math.nan

    monkeypatch.setattr(_pld, "compose", lambda *parts: (Broken(),))
    monkeypatch.setattr(_pld, "epsilon", lambda *composed: math.nan)
    spent = accountant.epsilon(SMALL, 1e-5)
    assert spent == accountant.epsilon(SMALL, 1e-5, "rdp")
    assert accountant.delta(SMALL, spent) == pytest.approx(1e-5, rel=1e-3)


def test_delta_inverts_epsilon():
    for mechanism in (SMALL, dataclasses.replace(SMALL, adjacency=REPLACE)):
        spent = accountant.epsilon(mechanism, 1e-5)
        assert accountant.delta(mechanism, spent) == pytest.approx(1e-5, rel=1e-6)
    assert accountant.delta(Mechanism(0.1, 0.0, 1), 5.0) == 1
    assert accountant.delta(Mechanism(0.1, 1e-100, 9), 5.0) == 1


### Several mechanisms


def test_order_and_parts_of_a_composition_do_not_matter():
    other = Mechanism(0.05, 2.0, 7)
    half = dataclasses.replace(SMALL, steps=SMALL.steps // 2)
    rest = dataclasses.replace(SMALL, steps=SMALL.steps - half.steps)
    assert accountant.composed_epsilon([half, rest], 1e-5) == accountant.epsilon(
        SMALL, 1e-5
    )
    whole = accountant.composed_epsilon([SMALL, other], 1e-5)
    assert accountant.composed_epsilon([half, other, rest], 1e-5) == whole
    assert accountant.composed_epsilon([other, SMALL], 1e-5) == pytest.approx(whole)
    assert whole > accountant.epsilon(SMALL, 1e-5)


def test_mixed_steps_compose_exactly():
    # Without sampling, 1/σ² adds up.
    mechanisms = [
        Mechanism(1, 6.0, 9),
        Mechanism(1, 4.0, 4),
        Mechanism(1 - 1e-12, 8.0, 16),
    ]
    exact = gaussian_epsilon(math.sqrt(9 / 36 + 4 / 16 + 16 / 64), 1e-5)
    spent = accountant.composed_epsilon(mechanisms, 1e-5)
    assert exact <= spent <= exact * 1.001


def test_what_has_no_common_epsilon():
    assert accountant.composed_epsilon([], 1e-5) == 0
    silent = Mechanism(0.1, 0.0, 3)
    assert accountant.composed_epsilon([SMALL, silent], 1e-5) == math.inf
    other = dataclasses.replace(SMALL, adjacency=REPLACE)
    with pytest.raises(ValueError, match=r"adjacency .*must be the same for all"):
        accountant.composed_epsilon([SMALL, other], 1e-5)


def test_orders_that_do_not_converge_are_left_out_in_silence(caplog):
    logger = logging.getLogger("absl")
    filters = list(logger.filters)
    with caplog.at_level(logging.WARNING):
        divergences = accountant.rdp(Mechanism(0.5, 1.0, 1), [1.1, 1.5, 2.5, 3])
    assert not caplog.records
    assert logger.filters == filters
    assert np.isinf(divergences).any()
    assert np.isfinite(divergences).any()
    assert (divergences > 0).all()
