"""Class counts: how far a neighbour moves them, their noise, and what they cost."""

import math

import numpy as np
import optax
import pytest
from scipy import stats

from tanager import DPSGD
from tanager.privacy import accountant, class_counts
from tanager.privacy.calibrate import calibrate, calibrate_beside
from tanager.privacy.class_counts import (
    balancing_weights,
    deviation_of,
    noisy_counts,
    release_of,
)
from tanager.privacy.mechanism import Adjacency, Mechanism
from tanager.seed import Seed


K = 4
EXACT = Mechanism(1.0, 0.0, 1)
FALSE_ALARM = 1e-6


def counts(labels, owners=None):
    seed = Seed.from_int(0)
    return np.array(noisy_counts(EXACT, np.array(labels), K, seed, owners))


def persons(random, number):
    """Labels of the examples of each person, one to six, some of them all alike."""
    sizes = random.integers(1, 7, number)
    return [random.choice(K, size, p=random.dirichlet([0.3] * K)) for size in sizes]


def joined(labels):
    owners = np.repeat(np.arange(len(labels)), [*map(len, labels)])
    return counts(np.concatenate(labels), owners)


def check_sensitivity(count):
    """A person, whatever their examples, moves the counts by 1, or √2 if exchanged."""
    random = np.random.default_rng(0)
    people = persons(random, 12)
    people.append(np.arange(2000) // 1999)  # of whose parts one would be rounded away
    whole = count(people)
    others = [np.zeros(1, int), np.full(6, K - 1)]
    exchanged = []
    for number in range(len(people)):
        rest = people[:number] + people[number + 1 :]
        assert np.linalg.norm(whole - count(rest)) <= 1
        for other in others:
            exchanged.append(np.linalg.norm(whole - count([*rest, other])))
    assert max(exchanged) <= math.sqrt(2)
    assert max(exchanged) > 1


def test_further_bits_are_of_one_count(monkeypatch):
    asked = []

    def numbers(words, scale, more):
        for place in range(len(words)):
            more(place, 1)
        return np.zeros(len(words), np.int64)

    def derive(self, *name, size=32):
        asked.append(name)
        return bytes(size)

    monkeypatch.setattr(class_counts, "rounded_normals", numbers)
    monkeypatch.setattr(Seed, "derive", derive)
    noisy_counts(Mechanism(1.0, 5.0, 1), np.zeros(3, int), K, Seed.from_int(0))
    bits = [name for name in asked if name[0] == "class counts bits"]
    assert len(bits) == len({*bits}) == K


def test_one_example_or_person_moves_the_counts_by_one():
    check_sensitivity(joined)
    labels = [0, 0, 3, 1, 0]
    assert counts(labels).tolist() == [3, 1, 0, 1]
    assert joined([[0, 0], [0, 1, 3, 3]]).tolist() == [1.25, 0.25, 0, 0.5]


def test_planted_each_example_of_a_person_counts():
    with pytest.raises(AssertionError):
        check_sensitivity(lambda people: counts(np.concatenate(people)))


@pytest.mark.parametrize("wrong", [K, -1, 77])
@pytest.mark.parametrize("owners", [None, np.array([0, 0, 1])])
def test_labels_that_would_count_for_others_are_refused(wrong, owners):
    with pytest.raises(ValueError, match=r"^labels must be from 0 to 3, and") as error:
        counts([wrong, 0, 1], owners)
    assert str(wrong) not in str(error.value)


def test_labels_and_owners_in_other_shapes_are_refused():
    with pytest.raises(ValueError, match=r"owners \(=2\) must be one for each of the"):
        counts([0, 0, 1], np.array([0, 1]))
    for labels in ([[0, 1]], [0.5, 1.0]):
        with pytest.raises(ValueError, match="must be one row of whole numbers"):
            counts(labels)


@pytest.mark.parametrize("changes", [{"sample_rate": 1e-4}, {"steps": 3}])
def test_a_release_that_claims_less_than_it_spends_is_refused(changes):
    """All examples are counted, so q is 1; a sample rate of 1e-4 would claim ε = 0."""
    release = Mechanism(
        **{"sample_rate": 1.0, "noise_multiplier": 0.5, "steps": 1} | changes
    )
    with pytest.raises(ValueError, match="must have sample rate 1 and 1 step"):
        noisy_counts(release, np.zeros(3, int), K, Seed.from_int(0))
    with pytest.raises(ValueError, match="must have sample rate 1 and 1 step"):
        DPSGD(EXACT, optax.sgd(1.0), delta=1e-5, class_counts=release)


@pytest.mark.statistical
@pytest.mark.parametrize("adjacency", [Adjacency.ZERO_OUT, Adjacency.REPLACE_ONE])
def test_the_noise_is_gaussian_with_the_deviation_claimed(adjacency):
    """By the chi-squared and Kolmogorov-Smirnov tests, false alarm 1e-6 in all."""
    release = Mechanism(1.0, 7.0, 1, adjacency)
    drawn = np.array(
        [
            noisy_counts(release, np.zeros(0, int), K, Seed.from_int(number))
            for number in range(1000)
        ]
    )
    # What neighbours differ by, over the deviation, is what the accountant composes.
    sensitivity = 1 if adjacency is Adjacency.ZERO_OUT else math.sqrt(2)
    claimed = adjacency.signals / release.noise_multiplier
    assert sensitivity / deviation_of(release) == pytest.approx(claimed)
    normal = drawn.ravel() / deviation_of(release)
    square = stats.chi2.cdf((normal**2).sum(), normal.size)
    assert FALSE_ALARM / 4 < square < 1 - FALSE_ALARM / 4
    assert stats.kstest(normal, "norm").pvalue > FALSE_ALARM / 4
    apart = np.abs(np.corrcoef(drawn.T)[np.triu_indices(K, 1)]).max()
    assert apart < stats.norm.isf(FALSE_ALARM / 4 / 12) / math.sqrt(1000)


@pytest.mark.parametrize(
    ("epsilon", "adjacency"),
    [
        (1.0, "zero-out"),
        (8.0, "replace-one"),
        pytest.param(1.0, "replace-one", marks=pytest.mark.full),
        pytest.param(8.0, "zero-out", marks=pytest.mark.full),
    ],
)
def test_counts_cost_the_steps_two_per_cent_of_noise_at_most(epsilon, adjacency):
    budget = {"epsilon": epsilon, "delta": 1e-5, "adjacency": adjacency}
    settings = {"sample_rate": 1.0, "steps": 60, **budget}
    few = release_of(examples=1000, classes=10, **budget)
    with_counts = calibrate_beside([few], **settings).noise_multiplier
    alone = calibrate(**settings).noise_multiplier
    assert 1.015 < with_counts / alone < 1.024  # of 1.0206, solved to 1e-3
    many = release_of(examples=1_000_000, classes=10, **budget)
    assert deviation_of(many) == pytest.approx(1000)
    beside = calibrate_beside([many], **settings)
    assert beside.noise_multiplier / alone < 1.002


@pytest.mark.parametrize(
    ("by", "adjacency"),
    [("pld", "zero-out"), ("pld", "replace-one"), ("rdp", "zero-out")],
)
def test_steps_beside_counts_spend_what_dp_accounting_says_of_both(by, adjacency):
    """The slow oracle: the events of both, composed without tanager."""
    from dp_accounting import NeighboringRelation, dp_event
    from dp_accounting.pld import PLDAccountant
    from dp_accounting.rdp import RdpAccountant

    counted = release_of(2.0, 1e-4, 1000, 10, adjacency)
    steps = calibrate_beside(
        [counted],
        epsilon=2.0,
        delta=1e-4,
        sample_rate=0.25,
        steps=20,
        accountant=by,
        adjacency=adjacency,
    )
    both = [counted, steps]
    relation = NeighboringRelation.ADD_OR_REMOVE_ONE
    if adjacency == "replace-one":
        relation = NeighboringRelation.REPLACE_ONE
    oracle = PLDAccountant(relation)
    if by == "rdp":
        oracle = RdpAccountant(accountant.RDP_ORDERS, relation)
    for one in both:
        noise = dp_event.GaussianDpEvent(one.noise_multiplier)
        sampled = dp_event.PoissonSampledDpEvent(one.sample_rate, noise)
        oracle.compose(sampled, one.steps)
    found = accountant.composed_epsilon(both, 1e-4, by)
    assert found == pytest.approx(oracle.get_epsilon(1e-4), rel=1e-3)
    assert 1.99 < found <= 2.0
    # Planted: σ solved without the counts spends more than ε.
    alone = calibrate(
        epsilon=2.0,
        delta=1e-4,
        sample_rate=0.25,
        steps=20,
        accountant=by,
        adjacency=adjacency,
    )
    assert accountant.composed_epsilon([counted, alone], 1e-4, by) > 2.01


def test_weights_are_in_inverse_proportion_within_a_range():
    release = Mechanism(1.0, 5.0, 1)
    found = np.array(balancing_weights([100.0, 300.0, 3000.0, 600.0], release, 4000))
    np.testing.assert_allclose(found, 1000 / np.array([100, 300, 3000, 600]))
    # A tenth of N/K, and below that two deviations of the noise, are the least.
    for counted, least in ((-20.0, 100), (99.0, 100)):
        found = balancing_weights([counted, 1000.0], release, 2000)
        assert found[0] / found[1] == 1000 / least
    found = balancing_weights([4.0, 40.0], release, 40)
    assert found[0] / found[1] == 4
    sizes = np.array([50.0, 20.0, 700.0, 30.0])
    found = np.array(balancing_weights([*sizes], release, 800))
    assert (found @ sizes) / sizes.sum() == pytest.approx(1)


def test_without_noise_for_a_run_that_is_not_private():
    assert release_of(math.inf, 1e-5, 100, 2, "zero-out") == EXACT
    assert class_counts.release_in({}) is None
