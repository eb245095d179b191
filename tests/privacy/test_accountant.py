"""Accountants against closed forms, quadrature, published rows and each other."""

import dataclasses
import logging
import math
import re

import dp_accounting
import mpmath
import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution
from scipy import fft, integrate, optimize, stats

from tanager.privacy import _pld, _rdp, accountant
from tanager.privacy.accountant import Accountant
from tanager.privacy.mechanism import Adjacency, Mechanism


ADD, REPLACE = Adjacency.ZERO_OUT, Adjacency.REPLACE_ONE
CIFAR = Mechanism(4096 / 50_000, 3.0, 2500)
SMALL = Mechanism(0.01, 1.2, 200)


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
    worse = (
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


@pytest.mark.parametrize("count", [100, 1_000_000])
def test_composition_never_loses_to_rounding(count):
    # Sampled with q = 1 - 1e-12 it is composed by Fourier transform, and known exactly.
    mechanism = Mechanism(1 - 1e-12, 2 * math.sqrt(count), count)
    for delta in (1e-5, 1e-8, 1e-9):
        exact = gaussian_epsilon(0.5, delta)
        assert exact <= accountant.epsilon(mechanism, delta) <= exact * 1.01


@pytest.mark.parametrize(
    ("q", "sigma", "interval"),
    [
        (0.25, 0.6, 1e-3),
        (1e-5, 0.5, 1e-3),
        (1e-3, 50.0, 1e-5),
        (1 - 1e-12, 20.0, 1e-3),
    ],
)
def test_a_step_is_that_of_dp_accounting(q, sigma, interval):
    """The same δ at every loss above 0, of each direction; theirs reaches further."""
    theirs = privacy_loss_distribution.from_gaussian_mechanism(
        sigma, value_discretization_interval=interval, sampling_prob=q
    )
    ours = _pld._step(_pld.Part(q, sigma, 1), interval, ADD)
    for side in ("_pmf_remove", "_pmf_add"):
        found, wanted = (getattr(one, side).to_dense_pmf() for one in (ours, theirs))
        assert found._discretization == wanted._discretization == interval
        assert found._infinity_mass == pytest.approx(wanted._infinity_mass, abs=1e-20)
        epsilons = interval * np.arange(0, found._lower_loss + found.size, 7)
        one, other = (
            np.array(pmf.get_delta_for_epsilon(epsilons)) for pmf in (found, wanted)
        )
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-15)


COMPOSED = [
    (_pld.Part(0.1, 1.5, 1), 100),
    (_pld.Part(0.5, 20.0, 1), 2),
    (_pld.Part(0.01, 1.0, 1, group=3), 1001),
    (_pld.Part(0.001, 0.7, 1, group=2), 1000),
    (_pld.Part(1e-4, 1.0, 1), 10**6),
    (_pld.Part(1 - 1e-12, 2000.0, 1), 10_015),
]


@pytest.mark.parametrize(("part", "count"), COMPOSED)
def test_steps_are_composed_as_by_dp_accounting(part, count):
    """Between the same ends, with the same mass; each δ is the same, up to rounding."""
    every = part._replace(steps=count)
    for ((step, times),) in _pld.sides([every], ADD):
        assert times == count
        ours, theirs = _pld.repeat(step, count), step.self_compose(count)
        assert ours._lower_loss == theirs._lower_loss
        assert ours.size == theirs.size
        assert ours._infinity_mass == pytest.approx(theirs._infinity_mass, rel=1e-12)
        one, other = (np.cumsum(pmf._probs[::-1]) for pmf in (ours, theirs))
        lost = 2 * _pld.lost_to_rounding([every])
        np.testing.assert_allclose(one, other, rtol=0, atol=lost)


@pytest.mark.parametrize(("part", "count"), COMPOSED)
def test_rounding_hides_no_more_of_delta_than_is_said(part, count):
    """Against the same transform of 80-bit numbers, at ε = 0 and above."""
    every = part._replace(steps=count)
    for ((step, _),) in _pld.sides([every], ADD):
        ours = _pld.repeat(step, count)
        points = fft.next_fast_len(max(ours.size, step.size), real=True)
        exact = np.asarray(fft.rfft(step._probs.astype(np.longdouble), points)) ** count
        first = ours._lower_loss - count * step._lower_loss
        exact = np.roll(np.asarray(fft.irfft(exact, points)), -first)[: ours.size]
        losses = _pld.losses_of(ours)
        above = losses >= 0
        for weights in (1.0, np.exp(-np.maximum(losses, 0))):
            errors = ((ours._probs - exact) * weights)[above]
            hidden = np.abs(np.cumsum(errors[::-1])).max()
            assert hidden <= _pld.lost_to_rounding([every])


def test_epsilon_is_no_lower_where_rounding_hides_a_part_of_delta():
    """Against the ε of a finer grid, tilted and composed in 80-bit numbers."""
    spent = accountant.epsilon(Mechanism(0.001, 0.7, 1000), 1e-10, group=2)
    assert 5.145594 <= spent <= 5.145594 * 1.001


def test_a_narrow_loss_loses_no_step():
    mechanism = Mechanism(1 - 1e-12, 20 * math.sqrt(10_015), 10_015)
    exact = gaussian_epsilon(0.05, 1e-5)
    assert exact <= accountant.epsilon(mechanism, 1e-5) <= exact * 1.001


def test_a_tiny_delta_is_not_read_off_rounding_errors():
    """At T = 10⁶ the transform's errors are near 1e-11; tilted it answers."""
    mechanism = Mechanism(1 - 1e-12, 2000.0, 10**6)
    exact = gaussian_epsilon(0.5, 1e-12)
    spent = accountant.epsilon(mechanism, 1e-12)
    assert exact <= spent <= exact * 1.01
    assert 1e-12 <= accountant.delta(mechanism, exact) <= 1.2e-12


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


@pytest.mark.parametrize("q", [0.01, 0.3])
@pytest.mark.parametrize("group", [1, 2, 10])
def test_a_group_is_a_mixture_of_gaussians(q, group):
    """Its δ by the densities, integrated in float64."""
    one = Mechanism(q, 1.5, 1)
    spent = accountant.epsilon(one, 1e-4, group=group)
    x = np.linspace(-15, 15 + group, 200_001)
    law = stats.binom.pmf(np.arange(group + 1), group, q)
    with_group = sum(
        share * stats.norm.pdf(x, shift, 1.5) for shift, share in enumerate(law)
    )
    without = stats.norm.pdf(x, 0, 1.5)
    for epsilon, least in ((spent, 0.99e-4), (0.99 * spent, 1e-4)):
        found = max(
            np.trapezoid(np.maximum(one - np.exp(epsilon) * other, 0), x)
            for one, other in ((with_group, without), (without, with_group))
        )
        assert found >= least
        assert found <= 1.0001e-4 or epsilon < spent


@pytest.mark.parametrize("group", [100, 1000, 100_000])
def test_a_large_group_that_is_seldom_sampled_is_as_a_law_of_few(group):
    """Binomial(k, 0.1 / k) is nearly Poisson(0.1): ε hardly depends on k."""
    spent = [
        accountant.epsilon(Mechanism(0.1 / k, 2.0, 1000), 1e-6, group=k)
        for k in (50, group)
    ]
    assert spent[0] == pytest.approx(9.39, abs=0.01)
    assert spent[1] == pytest.approx(spent[0], rel=1e-3)


def test_numbers_of_a_group_that_are_left_out_count_as_no_privacy():
    """The δ of a step, in 50 digits, is not above the one that is stated."""
    one, group, epsilon = Mechanism(0.001, 0.5, 1), 60, 6.0
    part = _pld.Part(one.sample_rate, one.noise_multiplier, 1, group)
    assert len(part.shifts()[0]) < group
    (removed, _) = _pld.compose((part,), one.adjacency)
    with mpmath.workdps(50):
        law = [
            mpmath.binomial(group, k)
            * mpmath.mpf(one.sample_rate) ** k
            * (1 - mpmath.mpf(one.sample_rate)) ** (group - k)
            for k in range(group + 1)
        ]

        def loss(x):
            return mpmath.log(
                sum(w * mpmath.exp(4 * k * (x - k / 2)) for k, w in enumerate(law))
            )

        x = mpmath.findroot(lambda x: loss(x) - epsilon, (0, 5), solver="anderson")
        with_group = sum(w * mpmath.ncdf(2 * (k - x)) for k, w in enumerate(law))
        exact = with_group - mpmath.exp(epsilon) * mpmath.ncdf(-2 * x)
    stated = removed.get_delta_for_epsilon(epsilon)
    assert exact <= stated <= 1.001 * exact


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


@pytest.mark.parametrize("mu", [1e-6, 3e-3, 0.06, 0.7, 30.0, 1e4])
def test_epsilon_of_a_gaussian_is_rounded_up_at_any_delta(mu):
    """Balle and Wang 2018, theorem 8, in 400 digits."""

    def exact_delta(epsilon):
        place, half = mpmath.mpf(epsilon) / mu, mpmath.mpf(mu) / 2
        second = mpmath.exp(epsilon) * mpmath.ncdf(-place - half)
        return mpmath.ncdf(half - place) - second

    with mpmath.workdps(400):
        for delta in (1e-300, 1e-100, 1e-18, 1e-5, 8e-3, 0.5):
            spent = accountant.epsilon_gaussian(mu, delta)
            less = mpmath.mpf(spent) * (1 - 2e-14) - 4e-12
            assert exact_delta(spent) <= delta
            assert less < 0 or exact_delta(less) > delta
            lower = accountant.epsilon_gaussian(mu, delta, up=False)
            assert spent * (1 - 4e-14) - 8e-12 < lower <= spent
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


def test_delta_where_exp_of_epsilon_overflows():
    """A sum near 1 with noise of 0.03, whose loss is 555 + 33 z."""
    mechanism = Mechanism(0.9, 0.03, 1)
    epsilons = np.array([699.0, 701.0, 720.0, 800.0])
    found = np.array([accountant.delta(mechanism, epsilon) for epsilon in epsilons])
    exact = 0.9 * stats.norm.sf((epsilons - 555) / 33.3)
    assert np.all(found >= 0.5 * exact)
    assert np.all(found <= 2 * exact)


@pytest.mark.parametrize("order", [1, -1])
def test_what_is_not_a_number_is_no_small_delta(order, monkeypatch):
    """In whichever direction it comes out."""
    mechanism = Mechanism(0.1, 1.0, 5)
    with monkeypatch.context() as patch:
        patch.setattr(_pld, "compose", lambda *_: [Loss(math.nan), Loss(1e-9)][::order])
        assert accountant.delta(mechanism, 1.0) > 1e-4  # by RDP
    right = accountant.epsilon(Mechanism(0.1, 1.0, 1), 1e-5)
    accountant._epsilon_pld.cache_clear()
    _pld.compose.cache_clear()

    def spoilt(*given):
        for side in sides(*given):
            side[0][0]._probs[-3] = math.nan
            yield side

    sides = _pld.sides
    monkeypatch.setattr(_pld, "sides", spoilt)
    _pld._step.cache_clear()
    assert accountant.epsilon(Mechanism(0.1, 1.0, 1), 1e-5) >= right
    for cache in (_pld._step, _pld.compose, accountant._epsilon_pld):
        cache.cache_clear()


class Loss:
    def __init__(self, delta):
        self.delta = delta

    def get_delta_for_epsilon(self, epsilon):
        return self.delta


def test_delta_inverts_epsilon():
    for mechanism in (SMALL, dataclasses.replace(SMALL, adjacency=REPLACE)):
        spent = accountant.epsilon(mechanism, 1e-5)
        assert accountant.delta(mechanism, spent) == pytest.approx(1e-5, rel=1e-6)
    assert accountant.delta(Mechanism(0.1, 0.0, 1), 5.0) == 1
    assert accountant.delta(Mechanism(0.1, 1e-100, 9), 5.0) == 1


### The grid


def test_ordinary_settings_have_the_ordinary_grid():
    part = _pld.Part(4096 / 50_000, 3.0, 1000)
    for adjacency in (ADD, REPLACE):
        interval = _pld.value_discretisation_interval([part], adjacency)
        assert interval == pytest.approx(1e-4)


def on_grid(mechanism, interval):
    event = accountant.dp_event(mechanism)
    pld = dp_accounting.pld.PLDAccountant(value_discretization_interval=interval)
    return pld.compose(event).get_epsilon(1e-5)


def test_a_coarser_grid_is_pessimistic_and_costs_little():
    mechanism = Mechanism(128 / 50_000, 0.09375, 50)
    part = _pld.Part(128 / 50_000, 0.09375, 50)
    chosen = _pld.value_discretisation_interval([part], ADD)
    assert chosen > 20e-4
    fine, finer = on_grid(mechanism, 1e-2), on_grid(mechanism, 1e-3)
    spent = accountant.epsilon(mechanism, 1e-5)
    assert finer <= spent <= fine
    assert on_grid(mechanism, 1e-1) > fine
    # 192.74244 on the grid of 1e-4, which takes fifteen seconds.
    assert 192.74243 < spent < 192.7430


@pytest.mark.parametrize("steps", [1, 10**6])
def test_tiny_noise_has_no_more_points_than_ordinary_noise(steps):
    part = _pld.Part(128 / 50_000, 0.09375, steps)
    removed, _ = _pld.compose((part,), ADD)
    assert removed.size < 2 * _pld._COMPOSED_POINTS


def test_a_finer_grid_where_a_step_loses_little():
    mechanism = Mechanism(1e-3, 50.0, 1000)
    spent = accountant.epsilon(mechanism, 1e-5)
    assert on_grid(mechanism, 1e-4) > 2 * spent
    assert on_grid(mechanism, 2e-7) <= spent <= 1.001 * on_grid(mechanism, 2e-7)


def test_absurd_settings_still_have_a_finite_bound():
    # Beyond any grid: without sampling the exact Gaussian, with it at most that.
    exact = gaussian_epsilon(1e5, 1e-5)
    assert accountant.epsilon(Mechanism(1, 0.01, 10**6), 1e-5) >= exact * (1 - 1e-9)
    for adjacency in Adjacency:
        spent = accountant.epsilon(Mechanism(0.5, 1e-3, 10**9, adjacency), 1e-5)
        assert 1e14 < spent < 1e16


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
