"""An audit from scores alone: by hand, against a library, and how often it errs."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
from scipy import stats

from tanager.audit.bounds import Errors, Estimator
from tanager.audit.scores import ScoreAudit


RISK = 0.05


@pytest.fixture(scope="module")
def rounded():
    draw = np.random.default_rng(3)
    inside = np.round(draw.normal(1, 1, 700), 1)
    return ScoreAudit(inside, np.round(draw.normal(0, 1, 500), 1))


def test_rates_are_those_of_jax_privacy(rounded):
    """The figures are of its `CanaryScoreAuditor`, version 2.0.0, on these scores."""
    rates = rounded.tpr_at_fpr([0, 0.01, 0.05, 0.5, 1])
    known = [0.01714286, 0.15561905, 0.32971429, 0.86223752, 1.0]
    np.testing.assert_allclose(rates, known, rtol=1e-6)
    assert rounded.max_accuracy() == pytest.approx(0.7175)
    assert rounded.max_accuracy(confidence=0.95) == pytest.approx(0.7524006818)
    assert rounded.max_accuracy(prevalence=0.2) == pytest.approx(0.8300571429)
    assert rounded.epsilon_raw_counts() == pytest.approx(1.6844290765)
    found = rounded.epsilon_raw_counts(delta=1e-3, min_count=20)
    assert found == pytest.approx(2.0273647324)


def test_few_scores_by_hand():
    """Called in from above: in, out, in, out. The hull leaves out the second."""
    audit = ScoreAudit(np.array([4.0, 2.0]), np.array([3.0, 1.0]))
    assert audit.tpr_at_fpr(0.0) == 0.5
    assert audit.tpr_at_fpr(0.25) == 0.75
    assert audit.auc() == audit.max_accuracy() == 0.75
    assert audit.epsilon_raw_counts(min_count=1) == pytest.approx(math.log(2))
    assert audit.epsilon_raw_counts(min_count=2) == 0.0


def test_useless_and_reversed_scores_prove_nothing():
    draw = np.random.default_rng(0)
    lower, higher = draw.normal(0, 1, 300), draw.normal(2, 1, 300)
    for inside, outside in ((np.zeros(50), np.zeros(50)), (lower, higher)):
        audit = ScoreAudit(inside, outside)
        assert audit.epsilon_lower_bound(delta=1e-5) == 0.0
        assert audit.epsilon_raw_counts(min_count=1) == 0.0
        assert audit.max_accuracy() >= 0.5
    assert ScoreAudit(np.zeros(99), np.zeros(99)).epsilon_raw_counts() == 0.0


def test_every_member_is_found_where_all_are_called_members():
    draw = np.random.default_rng(0)
    audit = ScoreAudit(draw.normal(1, 1, 500), draw.normal(0, 1, 400))
    assert audit.tpr_at_fpr(1.0) == 1.0


@pytest.mark.parametrize(
    ("work", "message"),
    [
        (lambda a: ScoreAudit(np.zeros((2, 2)), np.zeros(3)), "inside"),
        (lambda a: ScoreAudit(np.zeros(3), np.zeros(0)), "outside"),
        (lambda a: ScoreAudit(np.array([math.nan]), np.zeros(1)), "none of them NaN"),
        (lambda a: a.tpr_at_fpr(1.5), "fpr"),
        (lambda a: a.max_accuracy(prevalence=2.0), "prevalence"),
        (lambda a: a.max_accuracy(confidence=1.0), "confidence"),
        (lambda a: a.epsilon_raw_counts(min_count=0), "min_count"),
        (lambda a: a.epsilon_raw_counts(delta=1.0), "delta"),
        (lambda a: a.epsilon_lower_bound(delta=0.0, confidence=2.0), "confidence"),
        (lambda a: a.epsilon_lower_bound(delta=0.0, splits=0), "splits"),
        (lambda a: a.bootstrap(ScoreAudit.auc, samples=1), "samples"),
        (lambda a: a.bootstrap(ScoreAudit.auc, confidence=0.0), "confidence"),
    ],
)
def test_bad_input_is_refused(rounded, work, message):
    with pytest.raises(ValueError, match=message):
        work(rounded)


### Claims that hold with a probability


def laplace(draw, epsilon, count):
    """Scores of the Laplace mechanism: exactly ε at every threshold of the tails."""
    return draw.laplace(epsilon, 1.0, count), draw.laplace(0.0, 1.0, count)


def most(trials, risk):
    """Return the number of errors that chance exceeds once in 10⁶ runs."""
    return stats.binom.isf(1e-6, trials, risk)


def wrong(bound, trials=200, epsilon=1.0):
    draw = np.random.default_rng(1)
    audits = [ScoreAudit(*laplace(draw, epsilon, 150)) for _ in range(trials)]
    return sum(bound(audit) > epsilon for audit in audits)


@pytest.mark.statistical
@pytest.mark.parametrize("splits", [1, 5])
def test_a_bound_is_too_high_as_rarely_as_it_says(splits):
    """The false-alarm rate of the test is 10⁻⁶."""

    def bound(audit):
        return audit.epsilon_lower_bound(delta=0.0, confidence=0.6, splits=splits)

    assert wrong(bound) <= most(200, 0.4)


@pytest.mark.statistical
def test_the_bound_is_the_median_of_random_splits(monkeypatch):
    seen = []

    def found(inside, outside, estimator):
        seen.append((*inside, *outside))
        return SimpleNamespace(epsilon=float(len(seen)))

    monkeypatch.setattr("tanager.audit.bounds.audit_scores", found)
    audit = ScoreAudit(np.arange(20.0), np.arange(20.0))
    assert audit.epsilon_lower_bound(delta=1e-5, splits=5) == 3
    assert len({*seen}) == 5


def test_each_split_has_half_the_risk():
    """Their median errs twice as often as one of them, at the most."""
    audit = ScoreAudit(np.ones(100), np.zeros(100))
    for splits, confidence in ((1, 0.9), (5, 0.95)):
        found = audit.epsilon_lower_bound(delta=1e-5, confidence=0.9, splits=splits)
        assert found == Estimator(1e-5, confidence).bound(Errors(0, 90, 0, 90))


def test_a_threshold_chosen_by_what_it_proves_is_caught():
    """The planted bug: no split, and no correction for the choice."""

    def best(audit):
        estimator = Estimator(0.0, 0.6)
        inside, outside = np.sort(audit.inside), np.sort(audit.outside)
        return max(
            estimator.bound(
                Errors(
                    150 - int(np.searchsorted(outside, place)),
                    150,
                    int(np.searchsorted(inside, place)),
                    150,
                )
            )
            for place in np.concatenate([inside, outside])[::3]
        )

    assert wrong(best) > most(200, 0.4)


@pytest.mark.statistical
def test_no_threshold_is_more_accurate_than_the_bound_says():
    """The best is half-way: right with 1 − e^(−ε/2)/2. False alarms: 10⁻⁶."""
    best = 1 - math.exp(-0.5) / 2
    draw = np.random.default_rng(2)
    audits = [ScoreAudit(*laplace(draw, 1.0, 150)) for _ in range(400)]
    below = sum(audit.max_accuracy(confidence=0.6) < best for audit in audits)
    assert below <= most(400, 0.4)
    assert sum(audit.max_accuracy() < best for audit in audits) < 200


@pytest.mark.statistical
@pytest.mark.parametrize(
    ("statistic", "truth"),
    [
        (ScoreAudit.auc, stats.norm.cdf(1 / math.sqrt(2))),
        (
            lambda audit: float(audit.tpr_at_fpr(0.2)),
            stats.norm.sf(stats.norm.isf(0.2) - 1),
        ),
    ],
    ids=["auc", "tpr"],
)
def test_bootstrap_intervals_hold_about_as_often_as_they_say(statistic, truth):
    """Nine of ten, or eight with few canaries: below 60 of 100 once in 10⁵."""
    draw = np.random.default_rng(4)
    held = 0
    for _ in range(100):
        audit = ScoreAudit(draw.normal(1, 1, 150), draw.normal(0, 1, 150))
        low, high = audit.bootstrap(statistic, confidence=0.9, samples=100)
        assert low < high
        held += low <= truth <= high
    assert held >= 60
    assert held <= 99


def test_an_interval_is_the_same_each_time_and_a_bound_has_one(rounded):
    def bound(audit):
        return audit.epsilon_lower_bound(delta=1e-5, splits=3)

    first = rounded.bootstrap(bound, samples=40)
    assert first == rounded.bootstrap(bound, samples=40)
    assert first != rounded.bootstrap(bound, samples=40, seed=1)
    assert 0 <= first[0] < first[1] < 3
