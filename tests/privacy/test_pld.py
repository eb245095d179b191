"""Privacy loss distributions: one step, its composition, groups, and the grid."""

import math

import dp_accounting
import mpmath
import numpy as np
import pytest
from closed_forms import gaussian_epsilon
from dp_accounting.pld import privacy_loss_distribution
from dp_accounting.pld.pld_pmf import DensePLDPmf
from scipy import fft, stats

from tanager.privacy import _pld, accountant
from tanager.privacy.mechanism import Adjacency, Mechanism


ADD, REPLACE = Adjacency.ZERO_OUT, Adjacency.REPLACE_ONE


@pytest.mark.parametrize("count", [100, 1_000_000])
def test_composition_never_loses_to_rounding(count):
    # Sampled with q = 1 - 1e-12 it is composed by Fourier transform, and known exactly.
    mechanism = Mechanism(1 - 1e-12, 2 * math.sqrt(count), count)
    for delta in (1e-5, 1e-8, 1e-9):
        exact = gaussian_epsilon(0.5, delta)
        assert exact <= accountant.epsilon(mechanism, delta) <= exact * 1.01


@pytest.mark.parametrize("adjacency", [ADD, REPLACE])
@pytest.mark.parametrize(
    ("q", "sigma", "interval"),
    [
        (0.25, 0.6, 1e-3),
        (1e-5, 0.5, 1e-3),
        (1e-3, 50.0, 1e-5),
        (1 - 1e-12, 20.0, 1e-3),
        (1.0, 0.8, 1e-3),
        (1.0, 300.0, 1e-6),
    ],
)
def test_a_step_is_that_of_dp_accounting(q, sigma, interval, adjacency, monkeypatch):
    """The same δ at every loss above 0, of each direction; theirs reaches further."""
    make = "from_gaussian_mechanism"
    theirs = getattr(privacy_loss_distribution, make)(
        sigma,
        value_discretization_interval=interval,
        sampling_prob=q,
        neighboring_relation=_pld.relation(adjacency),
    )
    monkeypatch.delattr(privacy_loss_distribution, make)
    ours = _pld._step(_pld.Part(q, sigma, 1), interval, adjacency)
    assert _pld._symmetric([ours]) == (adjacency is REPLACE or q == 1)
    for side in ("_pmf_remove", "_pmf_add"):
        found, wanted = (getattr(one, side).to_dense_pmf() for one in (ours, theirs))
        assert found._discretization == wanted._discretization == interval
        assert found._infinity_mass == pytest.approx(wanted._infinity_mass, abs=1e-20)
        epsilons = interval * np.arange(0, found._lower_loss + found.size, 7)
        one, other = (
            np.array(pmf.get_delta_for_epsilon(epsilons)) for pmf in (found, wanted)
        )
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize("q", [1e-9, 0.2, 1.0])
@pytest.mark.parametrize("sigma", [0.1, 0.6, 50.0])
def test_a_step_of_replace_one_has_at_least_its_exact_delta(q, sigma):
    """By 40 digits, between the points of the grid too; sums of doubles lose 1e-13."""
    part = _pld.Part(q, sigma, 1)
    interval = _pld.value_discretisation_interval([part], REPLACE)
    pmf = _pld._step(part, interval, REPLACE)._pmf_remove.to_dense_pmf()
    top = interval * (pmf._lower_loss + pmf.size)
    epsilons = np.concatenate([np.linspace(0, top, 9), np.geomspace(1e-9, top, 9)])
    for epsilon, found in zip(epsilons, _pld.deltas([pmf], epsilons), strict=True):
        assert found >= replaced_delta(q, sigma, epsilon) - 1e-13


def replaced_delta(q, sigma, epsilon):
    """The δ of one step between (1 − q)N(0, σ²) + qN(±1, σ²), inverted by bisection."""
    with mpmath.workdps(40):
        q, sigma, epsilon = map(mpmath.mpf, (q, sigma, epsilon))

        def above(x, side):
            return (1 - q) * mpmath.ncdf(-x / sigma) + q * mpmath.ncdf(
                (side - x) / sigma
            )

        def loss(x):
            moved = [(side * x - 0.5) / sigma**2 for side in (1, -1)]
            up, down = (1 - q + q * mpmath.exp(each) for each in moved)
            return mpmath.log(up) - mpmath.log(down)

        low, high = mpmath.mpf(0), mpmath.mpf(1)
        while loss(high) < epsilon:
            high *= 2
        for _ in range(80):
            middle = (low + high) / 2
            low, high = (middle, high) if loss(middle) < epsilon else (low, middle)
        return above(low, 1) - mpmath.exp(epsilon) * above(low, -1)


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


@pytest.mark.parametrize(("q", "group"), [(0.5, 1000), (0.01, 10**6), (1e-9, 10**9)])
def test_a_group_too_large_to_count_is_taken_as_sampled_whole(q, group):
    sigma = float(group)
    spent = accountant.epsilon(Mechanism(q, sigma, 4), 1e-5, group=group)
    exact = gaussian_epsilon(2.0, 1e-5)
    assert exact <= spent <= exact * 1.001


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


@pytest.mark.parametrize(
    ("group", "q"), [(60, 0.3), (100, 0.01), (1000, 0.05), (1000, 0.1)]
)
def test_numbers_are_left_out_where_all_together_are_seldom_sampled(group, q):
    numbers, _ = _pld.Part(q, 2.0, 1, group).shifts()
    assert numbers[0] == 0 and len(numbers) == numbers[-1] + 1
    assert stats.binom.sf(numbers[-1], group, q) <= _pld._CUT


def test_both_directions_are_composed_where_one_part_is_sampled():
    parts = (_pld.Part(1.0, 1.0, 1), _pld.Part(0.1, 1.0, 1))
    assert len(_pld.compose(parts, ADD)) == 2


def test_numbers_that_are_left_out_are_lost_however_many(monkeypatch):
    monkeypatch.setattr(_pld, "_CUT", 1e-2)
    group, epsilon = 60, 30.0
    part = _pld.Part(0.01, 0.5, 1, group)
    assert len(part.shifts()[0]) < 8
    stated = _pld._connected(part, 1e-3, True).get_delta_for_epsilon(epsilon)
    x = np.linspace(-5, 40, 100_001)
    law = stats.binom.pmf(np.arange(group + 1), group, 0.01)
    with_group = sum(p * stats.norm.pdf(x, k, 0.5) for k, p in enumerate(law))
    without = stats.norm.pdf(x, 0, 0.5)
    exact = np.trapezoid(np.maximum(with_group - np.exp(epsilon) * without, 0), x)
    assert 1e-6 < exact <= stated


@pytest.mark.parametrize("infinite", [0.0, 1e-3])
def test_what_is_infinite_in_a_step_and_beyond_the_ends_is_infinite(infinite):
    pmf = DensePLDPmf(0.5, -1, np.array([0.5, 0.5 - infinite]), infinite, True)
    least = 1 - (1 - infinite) ** 5
    assert _pld.repeat(pmf, 5)._infinity_mass >= least + 0.5 * _pld._CUT_COMPOSED
    quiet = DensePLDPmf(0.5, 0, np.ones(1), 0.0, True)
    for both in ([pmf, quiet], [quiet, pmf]):
        assert _pld.deltas(both, np.array([9.0]))[0] == infinite
        assert (_pld.epsilon(both, 1e-4) == math.inf) == (infinite > 0)


def test_a_loss_that_cannot_be_inverted_is_said():
    said = pytest.raises(ArithmeticError, match="could not be inverted")
    with np.errstate(invalid="ignore"), said:
        _pld._inverse_loss(_pld.Part(0.1, 1.0, 1), np.array([math.nan]))


def test_each_step_of_each_part_loses_to_rounding():
    one, two = (_pld.Part(0.1, 1.0, steps) for steps in (1, 2))
    assert _pld.lost_to_rounding([one, two]) == 3 * _pld.lost_to_rounding([one])


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


@pytest.mark.parametrize("delta", [1e-10, 1e-11])
def test_what_is_hardly_sampled_loses_the_same_when_replaced(delta):
    removed, replaced = (
        accountant.epsilon(Mechanism(1e-9, 0.5, 10**5, adjacency), delta)
        for adjacency in (ADD, REPLACE)
    )
    assert replaced == pytest.approx(removed, rel=0.02)


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
