"""What ε costs in compute, at a constant η."""

import pytest

from tanager.privacy import accountant, tan
from tanager.privacy.frontier import advice, frontier
from tanager.privacy.mechanism import Mechanism
from tanager.privacy.plan import Plan


def solved(batch_size, sigma, **options):
    return Plan.solve(
        50_000, batch_size, 2000, sigma, delta=1e-5, accountant="rdp", **options
    )


PLAN = solved(16_384, 9.4)


def test_all_points_have_the_plans_eta_and_their_own_epsilon():
    points = frontier(PLAN)
    assert [point.batch_size for point in points] == [1024 << n for n in range(6)]
    for point in points:
        rate = point.batch_size / 50_000
        mechanism = Mechanism(rate, point.noise_multiplier, 2000)
        assert tan.eta(mechanism) == pytest.approx(tan.eta(PLAN.mechanism))
        assert point.epsilon == accountant.epsilon(mechanism, 1e-5, "rdp")
        assert point.compute == point.batch_size / PLAN.batch_size


@pytest.mark.parametrize("sigma", [0.5, 1.0, 9.4, 25.0])
def test_the_cheapest_is_the_smallest_batch_before_the_wall(sigma):
    """About the TAN paper's σ from 2 to 4, wherever the plan is."""
    points = frontier(solved(round(16_384 * sigma / 9.4), sigma))
    assert sum(point.compute == 1 for point in points) == 1
    (best,) = [point for point in points if point.cheapest]
    least = min(point.epsilon for point in points)
    assert 1.5 < best.noise_multiplier < 4
    assert best.epsilon <= 1.1 * least
    for smaller in points[: points.index(best)]:
        assert smaller.epsilon > 1.1 * least


def test_the_advice_goes_both_ways():
    points = frontier(PLAN)
    epsilon = {point.batch_size: point.epsilon for point in points}
    best, half, twice = advice(points)
    assert best.startswith("cheapest: batch size 4096 with noise multiplier 2.35, ε = ")
    assert best.endswith(", for 0.25 times the compute of this plan")
    here, *_ = advice(frontier(solved(4096, 2.35)))
    assert here.endswith(", which is this plan")
    more = 100 * (epsilon[2048] / epsilon[4096] - 1)
    assert f", {more:.2g} % more, for half the compute" in half
    less = 100 * (1 - epsilon[8192] / epsilon[4096])
    assert f", {less:.2g} % less, for twice the compute" in twice


def test_advice_has_no_exponent():
    plan = Plan.solve(50_001, 777, 1001, 2.2, delta=1e-6, adjacency="replace-one")
    _, half, _ = advice(frontier(plan))
    assert ", 200 % more, for half" in half


def test_of_few_examples_there_may_be_one_batch():
    points = frontier(Plan.solve(5, 5, 5, 10.0, delta=1e-2))
    assert [point.batch_size for point in points] == [1, 2, 5]
    (point,) = frontier(Plan.solve(1, 1, 5, 10.0, delta=1e-2))
    assert point.cheapest
    assert len(advice([point])) == 1
