"""JAX keys of a run's seed."""

import numpy as np
import pytest

import tanager


@pytest.mark.parametrize("indices", [[1.0, 1.5], np.array([True, False])])
def test_indices_that_are_not_whole_numbers_are_refused(indices):
    with pytest.raises(ValueError, match=r"indices \(=.*must be whole numbers"):
        tanager.example_keys(tanager.Seed.from_os(), 0, indices)
