import math
from fractions import Fraction

import pytest

from tanager.privacy.shown import lower, upper


EPSILONS = [0.0, 1e-7, 0.19849, 0.99996, 2.0, 3.0000001, 7.400165, 12.4432, 9999.5, 2e6]


@pytest.mark.parametrize("epsilon", EPSILONS)
def test_what_is_claimed_is_rounded_up_and_what_is_proven_down(epsilon):
    claimed, proven = Fraction(upper(epsilon)), Fraction(lower(epsilon))
    exact = Fraction(str(epsilon))
    assert proven <= exact <= claimed
    assert claimed - proven <= exact / 1000


def test_four_digits():
    assert [upper(7.400165), lower(7.400165)] == ["7.401", "7.4"]
    assert [upper(12.4432), lower(12.4432)] == ["12.45", "12.44"]
    assert upper(3.0) == lower(3.0) == "3"


@pytest.mark.parametrize("epsilon", [None, math.inf])
def test_no_guarantee_is_infinite(epsilon):
    assert upper(epsilon) == lower(epsilon) == "∞"
