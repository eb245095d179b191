"""Bounds that Gram matrices give, where squares vanish or overflow in float32."""

import jax.numpy as jnp
import numpy as np
import pytest

from tanager.clipping.rules.grams import gram_of, guarded, terms_of


TINY = float(jnp.finfo(jnp.float32).tiny)


def test_squares_that_vanish_count_in_the_terms():
    left, right = jnp.zeros((1, 2, 3)), jnp.ones((1, 2, 3))
    found = float(terms_of(left, right, (64, 5))[0])
    assert found >= 2 * 9 * 64 * TINY


@pytest.mark.parametrize("side", [0, 1])
def test_products_that_vanish_are_added_to_a_norm(side):
    lengths = [jnp.zeros((1, 2, 3)), jnp.zeros((1, 2, 3))]
    lengths[side] = lengths[side].at[0, 1].set(2.0**60)
    summands = (7, 1) if side else (1, 7)
    found = float(guarded(jnp.zeros(1), lengths[0], lengths[1], summands)[0])
    # All 3 positions meet the one, in each of its 7 summands.
    assert found >= 2 * 7 * 3 * 3 * 2.0**60 * TINY


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("value", [2.0**66, np.inf, np.nan])
def test_a_norm_of_terms_that_are_too_large_is_infinite(side, value):
    grams = [jnp.ones((2, 1, 3, 3)), jnp.ones((2, 1, 3, 3))]
    grams[side] = grams[side].at[1, 0, 2, 2].set(value)
    found = gram_of(grams[0], grams[1], (1, 1), 0.0).squares
    assert np.isposinf(found).tolist() == [False, True]


def test_a_square_that_cancels_below_zero_is_none():
    left = jnp.array([[[[1.0, -2.0], [-2.0, 1.0]]]])
    found = gram_of(left, jnp.ones_like(left), (1, 1), 0.5)
    assert found.squares[0] >= 0.5 * found.terms[0] > 0
