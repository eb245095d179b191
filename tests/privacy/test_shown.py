import math
import re
from fractions import Fraction

import pytest

from tanager.privacy.shown import (
    format_bound,
    format_delta,
    format_epsilon,
    format_share,
)
from tanager.report import guarantee


EPSILONS = [0.0, 1e-7, 0.19849, 0.99996, 2.0, 3.0000001, 7.400165, 12.4432, 9999.5, 2e6]


@pytest.mark.parametrize("epsilon", EPSILONS)
def test_what_is_claimed_is_rounded_up_and_what_is_proven_down(epsilon):
    claimed, proven = Fraction(format_epsilon(epsilon)), Fraction(format_bound(epsilon))
    exact = Fraction(str(epsilon))
    assert proven <= exact <= claimed
    assert claimed - proven <= exact / 1000


def test_four_digits():
    assert [format_epsilon(7.400165), format_bound(7.400165)] == ["7.401", "7.4"]
    assert [format_epsilon(12.4432), format_bound(12.4432)] == ["12.45", "12.44"]
    assert format_epsilon(3.0) == format_bound(3.0) == "3"
    assert [format_epsilon(123456.7), format_epsilon(1.23456e160)] == [
        "123500",
        "1.235e+160",
    ]


def test_a_delta_is_rounded_up_where_a_run_claims_it():
    """One over 70,000 is 1.428571…e-05, and 1.42857e-05 would be a smaller δ."""
    shown = [format_delta(each) for each in (1 / 70_000, 1.00000004e-5, 1e-5, 0.5)]
    assert shown == ["1.42858e-05", "1.00001e-05", "1e-05", "0.5"]
    result = {"epsilon": 3.0, "delta": 1 / 70_000, "adjacency": "zero-out"}
    for sentence in (guarantee.claim(result), guarantee.meaning(result)):
        assert re.search(r"δ = 1\.42858e-05[ )]", sentence)


def test_a_risk_is_rounded_up_and_at_most_certain():
    shares = (0.0, 1e-6, 0.0010001, 0.0230001, 0.17757, 0.999901, 1.0, 1.0 + 1e-15)
    shown = ["0 %", "0.0001 %", "0.101 %", "2.31 %", "17.8 %", "100 %", "100 %"]
    assert [format_share(each) for each in shares] == [*shown, "100 %"]


@pytest.mark.parametrize("epsilon", [None, math.inf])
def test_no_guarantee_is_infinite(epsilon):
    assert format_epsilon(epsilon) == format_bound(epsilon) == "∞"
