"""Exact Gaussian noise: the law on whole numbers, to the last bit."""

import math
from typing import Any

import mpmath
import numpy as np
import pytest
from scipy import special, stats

from tanager import gaussian
from tanager.gaussian import rounded_normals
from tanager.seed import Seed


FALSE_ALARM = 1e-6


def words(count, step=0):
    return Seed.from_int(7).words(count, "test", step)


def refuse(place, taken):
    raise AssertionError(f"{taken} words decide every draw here")


def few(place, taken):
    return 2**60


def many(place, taken):
    return 2**63


def whole_of(number) -> int:
    floor: Any = mpmath.floor(number)
    return int(floor)


def exact_tail(bound):
    with mpmath.workprec(400):
        return mpmath.erfc(mpmath.mpf(bound) / mpmath.sqrt(2)) / 2


def of_definition(word, scale):
    """round(s·N) in 400 bits, from the middle of the interval that the word leaves."""
    with mpmath.workprec(400):
        tail = (mpmath.mpf(int(word) >> 1) + mpmath.mpf("0.5")) / mpmath.mpf(2) ** 64
        size = mpmath.findroot(
            lambda x: mpmath.erfc(x / mpmath.sqrt(2)) / 2 - tail,
            -special.ndtri(float(tail)),
        )
        return (1 - 2 * (int(word) & 1)) * whole_of(
            size * mpmath.mpf(scale) + mpmath.mpf("0.5")
        )


@pytest.mark.parametrize("scale", [0.3, 7.0, 2.0**20, 2.0**33])
def test_draws_are_the_definition_in_400_bits(scale):
    drawn = words(300)
    found = rounded_normals(drawn, scale, lambda place, taken: 2**63)
    assert found.tolist() == [of_definition(word, scale) for word in drawn]


@pytest.mark.statistical
@pytest.mark.parametrize("scale", [0.4, 1.0, 5.0])
def test_the_law_on_whole_numbers(scale):
    """Chi-squared test of all whole numbers; false alarm 1e-6."""
    count = 400_000
    found = rounded_normals(words(count, 1), scale, refuse)
    most = math.ceil(4 * scale)
    edges = np.arange(-most, most) + 0.5
    chances = np.diff(stats.norm.cdf(edges / scale), prepend=0, append=1)
    seen = np.bincount(np.searchsorted(edges, found), minlength=2 * most + 1)
    keep = chances * count > 10
    statistic = np.sum((seen - chances * count)[keep] ** 2 / (chances * count)[keep])
    assert stats.chi2.sf(statistic, keep.sum() - 1) > FALSE_ALARM


@pytest.mark.statistical
def test_deviation_tails_and_sign():
    """Chi-squared, Kolmogorov and Smirnov, and a sign test; false alarm 1e-6 each."""
    scale, count = 2.0**24, 1_000_000
    drawn = words(count, 2)
    found = rounded_normals(drawn, scale, lambda place, taken: 2**63) / scale
    low, high = stats.chi2.ppf([FALSE_ALARM / 2, 1 - FALSE_ALARM / 2], count)
    assert low < np.sum(found**2) < high
    assert stats.kstest(found, "norm").pvalue > FALSE_ALARM
    assert stats.binomtest(int((found > 0).sum()), count).pvalue > FALSE_ALARM


def test_the_largest_and_the_smallest_words():
    """Beyond what a float32 normal reaches: 9 deviations, and there is no zero."""
    extreme = np.array([0, 1, 2**64 - 1, 2**64 - 2], np.uint64)
    found = rounded_normals(extreme, 2.0**20, lambda place, taken: 2**63) / 2.0**20
    assert 8.9 < found[0] < 9.2
    assert found[1] == -found[0]
    assert abs(found[2]) < 1e-6 and abs(found[3]) < 1e-6
    # There, U's next bits decide more than the last one of those drawn.
    low, high = (rounded_normals(extreme[:1], 8.0, more) for more in (few, many))
    assert low == 75 and high == 73


def test_ndtri_is_as_precise_as_is_said():
    """Against mpmath, over all of (0, 1/2): a quarter of what is allowed at most."""
    draw = np.random.default_rng(0)
    tails = np.concatenate(
        [
            draw.random(300) / 2,
            2 ** -draw.uniform(1, 64, 300),
            0.5 - 2**-53 * 3 ** np.arange(30),
        ]
    )
    worst = 0.0
    for tail in tails:
        found = special.ndtri(tail)
        with mpmath.workprec(200):
            z, phi = mpmath.mpf(float(found)), mpmath.npdf(float(found))
            step = (
                mpmath.erfc(-z / mpmath.sqrt(2)) / 2 - mpmath.mpf(float(tail))
            ) / phi
            worst = max(worst, abs(float(step / z)))
    assert worst < gaussian._RELATIVE_ERROR / 4


def boundary(scale, whole):
    """The 63 bits of the word whose tail probability is just beyond whole + 1/2."""
    with mpmath.workprec(400):
        bound = exact_tail((whole + mpmath.mpf("0.5")) / mpmath.mpf(scale))
        return whole_of(mpmath.ldexp(bound, 64))


@pytest.mark.parametrize("scale", [0.7, 3.0, 2.0**22])
@pytest.mark.parametrize("whole", [0, 1, 2])
def test_bits_that_are_not_drawn_yet_decide_at_a_boundary(scale, whole):
    """With U's next bits 0 it is beyond the boundary, with 1 before it."""
    whole = int(whole * max(scale, 1))
    tail = boundary(scale, whole)
    word = np.array([tail << 1], np.uint64)
    with mpmath.workprec(400):
        place = (
            mpmath.ldexp(
                exact_tail((whole + mpmath.mpf("0.5")) / mpmath.mpf(scale)), 64
            )
            - tail
        )
        next_bits = whole_of(mpmath.ldexp(place, 64))
    for offset, expected in ((-1, whole + 1), (1, whole)):
        asked = []

        def more(place, taken, offset=offset, asked=asked):
            asked.append((place, taken))
            return next_bits + offset

        assert rounded_normals(word, scale, more)[0] == expected
        assert asked == [(0, 1)]


def test_bits_are_asked_for_until_they_decide():
    scale, whole = 3.0, 4
    tail = boundary(scale, whole)
    with mpmath.workprec(500):
        place = mpmath.ldexp(
            exact_tail((whole + mpmath.mpf("0.5")) / mpmath.mpf(scale)), 192
        ) - (tail << 128)
        bits = whole_of(place)
    given, asked = [bits >> 64, (bits & (2**64 - 1)) + 1], []

    def more(place, taken):
        asked.append((place, taken))
        return given[taken - 1]

    word = np.array([*words(2), tail << 1], np.uint64)
    assert rounded_normals(word, scale, more)[2] == whole
    assert asked == [(2, 1), (2, 2)]


def test_planted_a_draw_that_trusts_float64_is_another(monkeypatch):
    """What the exact path is for: a boundary that float64 puts on the wrong side."""
    scale = 2.0**40
    exact, wrong = (
        rounded_normals(words(4000, 3), scale, lambda place, taken: 2**63),
        None,
    )
    monkeypatch.setattr(gaussian, "_nearest", lambda tail, scale, guess: guess)
    wrong = rounded_normals(words(4000, 3), scale, lambda place, taken: 2**63)
    assert np.any(exact != wrong)
