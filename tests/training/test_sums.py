"""How logical batches are added up: plain float32 sums, against Welford's averages."""

import numpy as np
import pytest


def plain(parts):
    total = np.zeros_like(parts[0])
    for part in parts:
        total = total + part
    return total


def welford(parts):
    """Algorithm 1 of the Unlocking paper: the running mean, then times their number."""
    mean = np.zeros_like(parts[0])
    for number, part in enumerate(parts, start=1):
        mean = mean + (part - mean) / np.float32(number)
    return mean * np.float32(len(parts))


def errors(parts):
    exact = np.sum(parts.astype(np.float64), axis=0)
    scale = np.sqrt(np.mean(exact**2))
    return [
        float(np.sqrt(np.mean((method(list(parts)) - exact) ** 2)) / scale)
        for method in (plain, welford)
    ]


@pytest.mark.parametrize("count", [2, 16, 128, 1024])
@pytest.mark.parametrize("drift", [0.0, 0.1])
def test_plain_sums_are_as_accurate_as_welford_s_where_parts_vary(count, drift):
    """As sums of clipped gradients do: by coordinate, their mean is below their spread.

    10 000 coordinates, so that a root mean square is known to a percent.
    """
    ours, theirs = compared(count, drift)
    assert ours <= 1.02 * theirs
    assert ours < 1e-6


@pytest.mark.parametrize("count", [2, 16, 128, 1024])
def test_elsewhere_they_lose_a_fifth_of_a_rounding_error_at_most(count):
    ours, theirs = compared(count, drift=3.0)
    assert ours <= 1.2 * theirs
    assert ours < 1e-6


def compared(count, drift):
    draw = np.random.default_rng(count)
    return errors((draw.normal(size=(count, 10_000)) + drift).astype(np.float32))
