"""JAX keys of a run's seed."""

import jax
import numpy as np
import pytest

import tanager


@pytest.mark.parametrize(
    ("indices", "rule"),
    [
        ([1.0, 1.5], "be whole numbers"),
        (np.array([True, False]), "be whole numbers"),
        (3, "have one axis, a number for each example"),
        ([[1, 2]], "have one axis, a number for each example"),
        (np.array([1, 2**32 + 1]), "be at least 0 and below 2³¹"),
        ([-1], "be at least 0 and below 2³¹"),
    ],
)
def test_indices_that_are_no_numbers_of_examples_are_refused(indices, rule):
    with pytest.raises(ValueError, match=rf"indices \(=.*must {rule}"):
        tanager.example_keys(tanager.Seed.from_os(), 0, indices)


def test_keys_are_made_where_transfers_are_refused():
    with jax.transfer_guard("disallow"):
        tanager.example_keys(tanager.Seed.from_os(), 0, np.arange(3))
