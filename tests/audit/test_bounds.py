"""Bounds from errors: by hand, on ideal scores, and where they prove nothing."""

import dataclasses
import functools
import math

import mpmath
import numpy as np
import pytest
from scipy import stats

from tanager.audit.bounds import (
    AuditResult,
    Errors,
    Estimator,
    GaussianEstimator,
    SubsampledEstimator,
    advantage,
    auc,
    audit_scores,
    choose_threshold,
    highest_advantage,
    models_needed,
)
from tanager.privacy import accountant
from tanager.privacy.mechanism import Mechanism


DELTA = 1e-5
CLAIMED = Mechanism(0.1, 0.8, 100)
ESTIMATORS = [
    Estimator(DELTA, 0.95),
    GaussianEstimator(DELTA, 0.95),
    SubsampledEstimator(DELTA, 0.95, CLAIMED),
]


def gaussian(rng, mu, count):
    return rng.normal(mu, 1.0, count), rng.normal(0.0, 1.0, count)


@pytest.fixture(params=ESTIMATORS, ids=["any", "gaussian", "subsampled"])
def estimator(request):
    return request.param


def test_useless_scores_prove_exactly_nothing(estimator):
    inside, outside = gaussian(np.random.default_rng(0), 2.0, 400)
    assert audit_scores(outside, inside, estimator).epsilon == 0.0
    found = audit_scores(np.zeros(100), np.zeros(100), estimator)
    assert (found.epsilon, found.auc, found.advantage) == (0.0, 0.5, 0.0)
    for errors in ((0, 1, 0, 1), (50, 100, 50, 100), (100, 100, 0, 100)):
        assert estimator.bound(Errors(*errors)) == 0.0


def test_fewer_errors_prove_more_and_more_confidence_less(estimator):
    found = [
        estimator.bound(Errors(wrong, 1000, wrong, 1000)) for wrong in (400, 200, 5)
    ]
    assert found == sorted(found)
    assert found[0] < found[2]
    errors = Errors(100, 1000, 300, 1000)
    sure = dataclasses.replace(estimator, confidence=0.999)
    assert 0 < sure.bound(errors) < estimator.bound(errors)


@pytest.mark.parametrize(
    ("errors", "message"),
    [
        ((0, 0, 0, 10), "outside (=0) must be at least 1"),
        ((11, 10, 0, 10), "false_positives (=11) must be from 0 to 10"),
        ((0, 10, -1, 10), "false_negatives (=-1) must be from 0 to 10"),
    ],
)
def test_counts_that_cannot_be_are_refused(estimator, errors, message):
    with pytest.raises(ValueError) as told:
        estimator.bound(Errors(*errors))
    assert message in str(told.value)


def test_the_bound_by_hand():
    """No error among 1000: Clopper and Pearson's bound is 1 − 0.025^(1/1000)."""
    rate = 1 - 0.025 ** (1 / 1000)
    expected = math.log((1 - rate - DELTA) / rate)
    found = ESTIMATORS[0].bound(Errors(0, 1000, 0, 1000))
    assert found == pytest.approx(expected, rel=1e-9)
    # The roles can be changed round.
    one = ESTIMATORS[0].bound(Errors(0, 1000, 500, 1000))
    two = ESTIMATORS[0].bound(Errors(500, 1000, 0, 1000))
    assert one == pytest.approx(two)
    assert one > 4


def test_the_gaussian_bound_by_hand():
    """δ(ε) = Φ(μ/2 − ε/μ) − e^ε Φ(−μ/2 − ε/μ) is the δ asked for (Balle and Wang)."""
    estimator = GaussianEstimator(DELTA, 0.95)
    for wrong in (0, 5, 50, 200):
        errors = Errors(wrong, 1000, wrong, 1000)
        mu, epsilon = estimator.mu(errors), estimator.bound(errors)
        above, below = (
            stats.norm.cdf(sign * mu / 2 - epsilon / mu) for sign in (1, -1)
        )
        assert above - math.exp(epsilon) * below == pytest.approx(DELTA, rel=1e-9)


@pytest.mark.parametrize("wrong", [0, 50, 200])
def test_bounds_about_gaussian_noise_are_rounded_down(wrong):
    """Balle and Wang 2018, theorem 8, in 50 digits."""
    errors = Errors(wrong, 1000, wrong, 1000)
    mu = GaussianEstimator(DELTA, 0.95).mu(errors)
    # The search for the noise begins where it ends.
    claimed = Mechanism(1.0, 1 / mu * (1 + 1e-12), 1)
    with mpmath.workdps(50):
        for estimator in (ESTIMATORS[1], SubsampledEstimator(DELTA, 0.95, claimed)):
            epsilon = mpmath.mpf(estimator.bound(errors))
            above, below = (
                mpmath.ncdf(sign * mpmath.mpf(mu) / 2 - epsilon / mu)
                for sign in (1, -1)
            )
            assert above - mpmath.exp(epsilon) * below >= DELTA
            assert epsilon > 0.998 * accountant.epsilon_gaussian(mu, DELTA)


def test_so_are_those_of_noise_beside_other_noise():
    """Of two Gaussians, μ² adds up; the one beside is nearly all of it."""
    claimed, beside = Mechanism(1.0, 100.0, 1), Mechanism(1.0, 0.5, 1)
    estimator = SubsampledEstimator(DELTA, 0.95, claimed, (beside,))
    found = estimator.epsilon_at(1.0001 * 100)
    with mpmath.workdps(50):
        mu = mpmath.sqrt(mpmath.mpf(1) / 100**2 + 4)
        above, below = (mpmath.ncdf(s * mu / 2 - found / mu) for s in (1, -1))
        assert above - mpmath.exp(found) * below >= DELTA
    assert found > 0.999 * accountant.epsilon_gaussian(float(mu), DELTA)
    assert estimator.curve(100.0).gaussian == pytest.approx(float(mu))


def test_the_highest_rates_cover_the_true_ones():
    """Both at once in 95 of 100 audits; of 4000, false alarm 1e-6."""
    rng = np.random.default_rng(1)
    true = 0.1, 0.3
    wrong = [rng.binomial(200, rate, 4000) for rate in true]
    estimator = ESTIMATORS[0]
    missed = 0
    for positives, negatives in zip(*wrong, strict=True):
        high = estimator.highest_rates(Errors(int(positives), 200, int(negatives), 200))
        missed += high[0] < true[0] or high[1] < true[1]
    assert missed <= stats.binom.isf(1e-6, 4000, 0.05)


def mu_of(epsilon):
    from scipy.optimize import brentq

    return brentq(
        lambda mu: accountant.epsilon(Mechanism(1.0, 1 / mu, 1), DELTA) - epsilon,
        0.01,
        20.0,
    )


@pytest.mark.parametrize("estimator", ESTIMATORS[:2], ids=["any", "gaussian"])
@pytest.mark.parametrize("true", [0.0, pytest.param(1.0, marks=pytest.mark.full), 8.0])
def test_bounds_on_ideal_scores_are_valid(estimator, true, monkeypatch):
    """Above the true ε in at most 5 of 100 audits; of 1500, false alarm 1e-6."""
    # Of 150 scores there are few counts of errors, and each has one ε.
    exact = functools.cache(accountant.epsilon_gaussian)
    monkeypatch.setattr(accountant, "epsilon_gaussian", exact)
    rng = np.random.default_rng(2)
    mu = mu_of(true) if true else 0.0
    over = sum(
        audit_scores(*gaussian(rng, mu, 150), estimator).epsilon > true
        for _ in range(1500)
    )
    assert over <= stats.binom.isf(1e-6, 1500, 0.05)


def test_errors_are_counted_on_scores_that_chose_no_threshold():
    errors = audit_scores(np.arange(50.0), np.arange(30.0), ESTIMATORS[0]).errors
    assert (errors.inside, errors.outside) == (45, 27)


@pytest.mark.parametrize("bounds", [(1.0, 1.0), (1.1, 0.0), (0.0, 1.1)])
def test_a_claim_is_violated_if_either_bound_is_above_it(bounds):
    lower, trade_off = bounds
    found = AuditResult(
        claimed_epsilon=1.0,
        delta=DELTA,
        confidence=0.95,
        inside=np.zeros(1),
        outside=np.zeros(1),
        epsilon_lower_bound=lower,
        trade_off_bound=trade_off,
    )
    assert found.violated == (max(bounds) > 1)


@pytest.mark.parametrize(
    ("true", "least"), [(4.0, (1.0, 3.0)), (8.0, (2.4, 6.4))], ids=["4", "8"]
)
def test_what_2500_ideal_scores_of_each_prove(true, least):
    scores = gaussian(np.random.default_rng(3), mu_of(true), 2500)
    for estimator, bound in zip(ESTIMATORS, least, strict=False):
        assert bound < audit_scores(*scores, estimator).epsilon < true


def likelihood_scores(rng, mechanism, count):
    """The best attack on a subsampled Gaussian: the likelihood ratio of all steps."""
    q, sigma = mechanism.sample_rate, mechanism.noise_multiplier
    for inside in (True, False):
        seen = rng.normal(0, sigma, (count, mechanism.steps))
        if inside:
            seen += rng.random(seen.shape) < q
        yield np.log1p(q * np.expm1((2 * seen - 1) / (2 * sigma**2))).sum(1)


@pytest.mark.slow
def test_the_subsampled_bound_is_near_the_truth_and_not_above():
    rng = np.random.default_rng(4)
    true = accountant.epsilon(CLAIMED, DELTA)
    inside, outside = likelihood_scores(rng, CLAIMED, 4000)
    found = audit_scores(inside, outside, ESTIMATORS[2]).epsilon
    assert 0.85 * true < found < true
    assert audit_scores(inside, outside, ESTIMATORS[0]).epsilon < found
    # Half of the noise that is claimed is found out.
    half = Mechanism(CLAIMED.sample_rate, 0.4, CLAIMED.steps)
    inside, outside = likelihood_scores(rng, half, 2000)
    assert audit_scores(inside, outside, ESTIMATORS[2]).epsilon > 2 * true


def test_so_many_models_can_prove_it_and_one_fewer_cannot():
    for epsilon, confidence in ((1.0, 0.95), (8.0, 0.999)):
        needed = models_needed(epsilon, delta=DELTA, confidence=confidence)
        estimator = Estimator(DELTA, confidence)
        assert estimator.bound(Errors(0, needed, 0, needed)) >= epsilon
        fewer = Errors(0, needed - 1, 0, needed - 1)
        assert estimator.bound(fewer) < epsilon


def test_the_threshold_is_chosen_on_reserved_scores_alone():
    rng = np.random.default_rng(6)
    inside, outside = gaussian(rng, 2.0, 1000)
    one = audit_scores(inside, outside, ESTIMATORS[0])
    # The others in another order: nothing changes.
    inside, outside = (
        np.concatenate([scores[:100], scores[:99:-1]]) for scores in (inside, outside)
    )
    assert audit_scores(inside, outside, ESTIMATORS[0]) == one
    other = choose_threshold(inside[:100], outside[:100], ESTIMATORS[0], (900, 900))
    assert other == one.threshold


def test_area_and_advantage_of_a_shift():
    rng = np.random.default_rng(7)
    inside, outside = gaussian(rng, 0.32, 100_000)
    # Φ(μ/√2) and 2 Φ(μ/2) − 1, as in Table 9's row of ε = 1.
    assert auc(inside, outside) == pytest.approx(0.59, abs=0.005)
    assert advantage(inside, outside) == pytest.approx(0.127, abs=0.01)
    assert auc(np.array([1.0, 1.0]), np.array([1.0, 0.0])) == 0.75


@pytest.mark.parametrize(
    ("epsilon", "delta", "published"),
    [
        *((1, 0.01, 0.47), (2, 0.01, 0.76), (8, 0.01, 1.0)),
        *((1, 1 / 60_000, 0.46), (4, 1 / 60_000, 0.96)),
    ],
)
def test_the_highest_advantage_is_table_9s(epsilon, delta, published):
    assert highest_advantage(epsilon, delta) == pytest.approx(published, abs=0.006)
    assert highest_advantage(1e4, delta) == 1.0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Estimator(1.0, 0.95), "delta (=1.0) must be below 1"),
        (
            lambda: models_needed(800.0, delta=DELTA, confidence=0.95),
            "epsilon (=800.0) must be at most 700",
        ),
        (
            lambda: models_needed(1.0, delta=DELTA, confidence=1.0),
            "confidence (=1.0)",
        ),
        (lambda: highest_advantage(-1.0, 0.1), "epsilon (=-1.0)"),
        (lambda: highest_advantage(1.0, 1.5), "delta (=1.5) must be below 1"),
        (lambda: Estimator(-0.1, 0.95), "delta (=-0.1)"),
        (lambda: Estimator(0.1, 1.0), "confidence (=1.0)"),
        (lambda: GaussianEstimator(0.0, 0.95), "delta (=0.0)"),
        (
            lambda: audit_scores(np.array([1.0]), np.zeros(9), ESTIMATORS[0]),
            "inside (=1) scores are too few",
        ),
        (
            lambda: audit_scores(np.zeros(9), np.full(9, np.nan), ESTIMATORS[0]),
            "outside (=(9,)) must be one score for each",
        ),
    ],
)
def test_bad_input_is_one_message(make, message):
    with pytest.raises(ValueError) as told:
        make()
    assert message in str(told.value)
