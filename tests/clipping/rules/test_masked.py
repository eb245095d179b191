"""Norms of a masked parameter are no smaller than exact ones, at any scale."""

import jax.numpy as jnp
import numpy as np
import pytest
from oracle import read

from tanager.clipping.rules.base import TapValues
from tanager.clipping.rules.masked import Masked


def normal(*shape):
    return np.random.default_rng(0).normal(size=shape)


CASES = {
    "rounding": (normal(9, 5), normal(64, 9), normal(64, 5)),
    "data that vanish": (np.ones((3, 2)), np.full((1, 3), 1e-22), 1e9),
    "gradients that vanish": (np.ones((3, 2)), np.full((1, 3), 1e9), 1e-22),
    "a mask that vanishes": ([[1.0], [1e-25]], np.array([[0.0, 1e9]]), 1e9),
}


@pytest.mark.parametrize("name", CASES)
def test_squares_are_rounded_up(name):
    mask, x, dy = CASES[name]
    mask, x = jnp.asarray(mask, jnp.float32), jnp.asarray(x, jnp.float32)
    dy = jnp.broadcast_to(jnp.asarray(dy, jnp.float32), (len(x), mask.shape[1]))
    found = squares(mask, x, dy)
    sides = [np.square(np.float64(each)) for each in (x, mask, dy)]
    exact = np.einsum("bk,kn,bn->b", *sides)
    assert np.all(found >= exact) and np.isfinite(found).all()


@pytest.mark.parametrize("value", [1e12, np.nan, np.inf])
def test_what_is_too_large_has_an_infinite_norm(value):
    x = jnp.array([[1.0, 2.0], [1.0, value]])
    found = squares(jnp.ones((2, 3)), x, jnp.ones((2, 3)))
    assert np.isposinf(found).tolist() == [False, True]


def squares(mask, x, dy):
    w = jnp.ones(mask.shape)
    program, (group,) = read(lambda w, x: jnp.sum(x @ (w * mask)), w, x)
    assert isinstance(group, Masked)
    seen = [TapValues([x], [dy], [dy], program.evaluate_prologue([w]))]
    (whole,) = group.by_rule(seen)
    return np.float64(group.gram("gram", whole).squares)
