import dataclasses
import math
import re

import numpy as np
import pytest

from tanager.privacy.mechanism import Adjacency, Mechanism


def test_the_adjacency_is_explicit_and_zeroes_out_by_default():
    mechanism = Mechanism(0.1, 1.0, 10)
    assert mechanism.adjacency is Adjacency.ZERO_OUT
    replaced = Mechanism(0.1, 1.0, 10, "replace-one")  # pyrefly: ignore[bad-argument-type]
    assert replaced.adjacency is Adjacency.REPLACE_ONE
    assert str(replaced.adjacency) == "replace-one"


@pytest.mark.parametrize(
    "fields", [(1, 0, 1), (1e-9, 1e9, 10**9), (np.float64(0.5), np.float32(1), 3)]
)
def test_the_ends_of_the_ranges_are_allowed(fields):
    Mechanism(*fields)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sample_rate": 0.0}, "sample_rate (=0.0) must be above 0 and at most 1: it"),
        ({"sample_rate": 1.01}, "sample_rate (=1.01) must be above 0 and at most 1"),
        ({"sample_rate": math.nan}, "sample_rate (=nan) must be a number"),
        ({"noise_multiplier": -1.0}, "noise_multiplier (=-1.0) must be finite and not"),
        ({"noise_multiplier": math.inf}, "noise_multiplier (=inf) must be finite and"),
        ({"steps": 0}, "steps (=0) must be at least 1"),
        ({"steps": 2.0}, "steps (=2.0) must be a whole number"),
        (
            {"adjacency": "replace"},
            "adjacency (='replace') is unknown: did you mean replace-one? It must be "
            "one of zero-out, add-or-remove-one, replace-one",
        ),
    ],
)
def test_fields_out_of_range_are_refused(change, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        dataclasses.replace(Mechanism(0.1, 1.0, 10), **change)


@pytest.mark.parametrize("adjacency", list(Adjacency))
def test_only_a_public_size_may_be_divided_by(adjacency):
    mechanism = Mechanism(0.1, 1.0, 10, adjacency)
    assert adjacency.signals == (2 if adjacency is Adjacency.REPLACE_ONE else 1)
    if adjacency is not Adjacency.ADD_OR_REMOVE_ONE:
        mechanism.require_public_size()
        return
    with pytest.raises(ValueError, match="protects the number of examples"):
        mechanism.require_public_size()
