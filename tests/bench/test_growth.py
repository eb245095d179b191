"""How cost grows: the exponents of what was measured."""

import pytest

from scripts import load


@pytest.fixture(scope="module")
def growth():
    return load("benchmarks/growth.py")


def test_the_exponent_of_a_power_is_found(growth):
    points = [{"value": n, "cost": 7.0 * n**1.5} for n in (1, 2, 4, 8)]
    assert growth.exponent(points, lambda p: p["cost"]) == pytest.approx(1.5)


def test_no_exponent_of_a_single_point_or_of_what_failed(growth):
    points = [{"value": 1, "cost": 3.0}, {"value": 2, "cost": None}]
    assert growth.exponent(points, lambda p: p["cost"]) is None


def test_arithmetic_grows_as_it_must(growth):
    one, two = (
        growth.measure("views K", views, 1, strategies=("sgd",)) for views in (1, 2)
    )
    assert two["flops"] == 2 * one["flops"]
    assert one["rows"]["sgd"]["seconds"] > 0
