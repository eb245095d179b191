"""One run's bounds: the theorems written anew, and ideal canaries."""

import bisect
import functools
import math

import numpy as np
import pytest
from scipy import stats

from tanager.audit.one_run import (
    Guesses,
    guess,
    one_run,
    one_run_trade_off,
    p_value,
)
from tanager.privacy import accountant
from tanager.privacy.mechanism import Mechanism


DELTA = 1e-6


def gaussian(guesses, *, delta, confidence):
    """The bound for one step of whole batches, whose trade-off curve is Gaussian."""
    claimed = Mechanism(1.0, 1.0, 1)
    return one_run_trade_off(guesses, claimed, delta=delta, confidence=confidence)


def theorem(guesses, epsilon, delta):
    """Steinke et al., theorem 5.2, as it is printed."""
    m, r, v = guesses
    s = math.exp(epsilon) / (1 + math.exp(epsilon))

    def of(k):
        return math.comb(r, k) * s**k * (1 - s) ** (r - k)

    beta = sum(of(k) for k in range(v, r + 1))
    alpha = max(
        (sum(of(k) for k in range(v - i, v)) / i for i in range(1, v + 1)), default=0.0
    )
    return min(beta + 2 * m * delta * alpha, 1.0)


@pytest.mark.parametrize("numbers", [(40, 20, 18), (40, 40, 25), (30, 10, 10)])
@pytest.mark.parametrize("epsilon", [0.0, 0.7, 3.0])
@pytest.mark.parametrize("delta", [0.0, 1e-3])
def test_the_p_value_is_the_theorems(numbers, epsilon, delta):
    guesses = Guesses(*numbers)
    expected = theorem(guesses, epsilon, delta)
    assert p_value(guesses, epsilon, delta) == pytest.approx(expected)


def paper_refutes(guesses, significance, mu):
    """Mahloujifar et al.: the tails of the number of right guesses, from above."""
    m, made, right = guesses
    r, h = [0.0] * (right + 1), [0.0] * (right + 1)
    r[right], h[right] = significance * right / m, significance * (made - right) / m
    for i in range(right - 1, -1, -1):
        least = stats.norm.cdf(stats.norm.ppf(r[i + 1]) - mu)
        h[i] = max(h[i + 1], least)
        r[i] = r[i + 1] + i / (made - i) * (h[i] - h[i + 1])
    return r[0] + h[0] > made / m


@pytest.mark.parametrize("numbers", [(200, 60, 52), (500, 40, 40)])
def test_the_gaussian_bound_is_where_the_recursion_stops_refuting(numbers):
    guesses = Guesses(*numbers)
    found = gaussian(guesses, delta=DELTA, confidence=0.95)
    assert found > 0

    def epsilon(mu):
        return accountant.epsilon(Mechanism(1.0, 1 / mu, 1), DELTA)

    grid = np.linspace(0.05, 4, 80)
    refuted = [mu for mu in grid if paper_refutes(guesses, 0.05, mu)]
    assert refuted, "the grid is too coarse"
    after = grid[len(refuted)]
    assert epsilon(refuted[-1]) <= found * 1.005
    assert found <= epsilon(after)


def scores_of(rng, canaries, mu):
    included = rng.random(canaries) < 0.5
    return rng.normal(0, 1, canaries) + mu * included, included


BOUNDS = [one_run, gaussian]


@pytest.mark.slow
@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("mu", [0.2, 1.0, 2.5])
def test_bounds_of_ideal_canaries_are_valid(bound, mu):
    """Above the true ε in at most 5 of 100 runs; of 3000, false alarm 1e-6."""
    rng = np.random.default_rng(0)
    true = accountant.epsilon(Mechanism(1.0, 1 / mu, 1), DELTA)

    def above(right):
        return bound(Guesses(200, 60, right), delta=DELTA, confidence=0.95) > true

    # The bound grows with the number of right guesses.
    least = bisect.bisect_left(range(61), True, key=above)
    rights = [guess(*scores_of(rng, 200, mu), 60).right for _ in range(3000)]
    over = sum(right >= least for right in rights)
    assert over <= stats.binom.isf(1e-6, 3000, 0.05)


@pytest.mark.parametrize("bound", BOUNDS)
def test_null_and_reversed_scores_prove_exactly_nothing(bound):
    rng = np.random.default_rng(1)
    scores, included = scores_of(rng, 1000, 3.0)
    backwards = guess(-scores, included, 200)
    for useless in (backwards, Guesses(1000, 200, 100)):
        assert bound(useless, delta=DELTA, confidence=0.95) == 0.0


@pytest.mark.parametrize(("true", "least"), [(4.0, (1.2, 1.7)), (8.0, (3.0, 4.5))])
def test_what_5000_ideal_canaries_prove(true, least):
    mu, made = {4.0: (0.9249, 152), 8.0: (1.6660, 292)}[true]  # at δ = 1e-5
    rng = np.random.default_rng(2)
    guesses = guess(*scores_of(rng, 5000, mu), made)
    found = [bound(guesses, delta=1e-5, confidence=0.95) for bound in BOUNDS]
    assert least[0] < found[0] < found[1] < true
    assert least[1] < found[1]


@pytest.mark.parametrize("right", [60, 75, 99, 100])
def test_the_bound_is_never_above_where_the_theorem_is(right):
    guesses = Guesses(1000, 100, right)
    found = one_run(guesses, delta=DELTA, confidence=0.95)
    assert found == 0 or p_value(guesses, found, DELTA) < 0.05


def test_what_was_released_beside_the_steps_is_not_theirs():
    """The counts alone give 69 % of right guesses: these refute no noise of steps."""
    counts, steps = Mechanism(1.0, 1.0, 1), Mechanism(1.0, 100.0, 1)
    guesses, both = Guesses(1000, 1000, 650), {"delta": DELTA, "confidence": 0.95}
    assert one_run_trade_off(guesses, steps, **both) > 0
    assert one_run_trade_off(guesses, counts, steps, **both) == 0


def test_guesses_are_the_highest_and_the_lowest():
    scores = np.array([5.0, -5.0, 0.0, 4.0, -4.0, 0.1])
    included = np.array([True, False, True, False, False, False])
    assert guess(scores, included, 4) == Guesses(6, 4, 3)
    assert guess(scores, included, 1) == Guesses(6, 1, 1)


@pytest.mark.parametrize(
    ("numbers", "delta", "message"),
    [
        ((10, 11, 5), 0.0, "made (=11) must be at most 10"),
        ((10, 5, 6), 0.0, "right (=6) must be at most 5"),
        ((10, 0, 0), 0.0, "made (=0) must be at least 1"),
        ((10, 4, 4), 0.0, "made (=4) guesses about 10 canaries prove nothing at δ = 0"),
        ((10_000, 100, 100), 0.01, "canaries prove nothing at δ = 0.01"),
    ],
)
def test_bad_input_is_one_message(numbers, delta, message):
    with pytest.raises(ValueError) as told:
        one_run(Guesses(*numbers), delta=delta, confidence=0.95)
    assert message in str(told.value)


def test_scores_must_be_one_for_each_canary():
    with pytest.raises(ValueError, match=r"scores \(=\(3,\)\) must be one for each"):
        guess(np.zeros(3), np.zeros(4, bool), 2)
    with pytest.raises(ValueError, match=r"scores .* not nan"):
        guess(np.full(4, np.nan), np.zeros(4, bool), 2)


def test_steps_of_whole_batches_are_one_with_less_noise():
    guesses = Guesses(1000, 100, 97)
    claimed = Mechanism(1.0, 2.0, 4)
    expected = gaussian(guesses, delta=1e-5, confidence=0.95)
    found = one_run_trade_off(guesses, claimed, delta=1e-5, confidence=0.95)
    assert found == pytest.approx(expected, rel=5e-3)
    assert found > one_run(guesses, delta=1e-5, confidence=0.95) > 0


def test_the_bound_of_a_subsampled_mechanism_is_below_its_epsilon():
    """Ideal scores of 40 audits at 95 %: more than 8 above the truth once in 10⁴."""
    claimed = Mechanism(0.2, 0.7, 20)
    truth = accountant.epsilon(claimed, 1e-3)
    q, sigma = claimed.sample_rate, claimed.noise_multiplier
    rng = np.random.default_rng(0)

    @functools.cache
    def bound(guesses):
        return one_run_trade_off(guesses, claimed, delta=1e-3, confidence=0.95)

    found = []
    for _ in range(40):
        included = rng.random(300) < 0.5
        seen = rng.normal(0, sigma, (300, claimed.steps))
        seen += (rng.random(seen.shape) < q) & included[:, None]
        scores = np.log1p(q * np.expm1((2 * seen - 1) / (2 * sigma**2))).sum(1)
        found.append(bound(guess(scores, included, 60)))
    assert np.sum(np.array(found) > truth) <= 8
    assert np.median(found) > 0.2 * truth
    # Guesses that are half wrong, or all, prove nothing.
    assert bound(Guesses(300, 60, 30)) == bound(Guesses(300, 60, 0)) == 0
