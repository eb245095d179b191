"""What norm groups add to squared norms for rounding that comes after."""

import math

import jax.numpy as jnp
import numpy as np
import pytest
from oracle import read

from tanager.clipping.analysis.rounding import product_steps
from tanager.clipping.rules.base import DIRECT, TapValues
from tanager.clipping.rules.grams import Gram
from tanager.clipping.rules.groups import Joint, Method, Single


DRAW = np.random.default_rng(0).normal


def single(loss, w, x):
    program, (group,) = read(loss, w, x)
    assert isinstance(group, Single)
    return program, group


@pytest.mark.parametrize("times", [1, 2])
def test_sums_that_are_formed_again_may_differ_by_their_terms(times):
    """Of T positions, each formation by T roundings of A at least."""
    positions, terms = 256, 9.0
    w, x = jnp.zeros((3, 2)), jnp.ones((1, positions, 3))
    _, group = single(lambda w, x: jnp.sum(x @ w), w, x)
    for squares in (0.0, 1.0):
        gram = Gram(jnp.full(1, squares), jnp.full(1, terms))
        norm = np.sqrt(np.float64(group.formed_again(gram, times)[0]))
        assert norm - np.sqrt(squares) > times * positions * 2.0**-24 * 3


@pytest.mark.parametrize(("scale", "size"), [(1.7, 1.0), (3e5, 1e-22)])
def test_squares_of_gradients_times_a_number_are_rounded_up(scale, size):
    """Those of small numbers vanish, unless the number comes first."""
    w, x = jnp.ones(1), jnp.ones((1, 1))
    _, group = single(lambda w, x: jnp.sum(x * (scale * w)), w, x)
    chunk = jnp.asarray(size * DRAW(size=(200, 1)), jnp.float32)
    exact = np.square(group.scale * np.float64(chunk[:, 0]))
    assert group.plain and group.scale == pytest.approx(scale)
    found = np.float64(group._norms(group.scale)(chunk))
    assert np.all((found >= exact) | (exact < 1e-37))


def test_terms_are_those_of_the_parameter():
    """A number before it scales what rounding in its gradients is relative to."""
    w = jnp.ones((3, 2))
    x, dy = (jnp.asarray(DRAW(size=(6, 4, n)), jnp.float32) for n in (3, 2))
    found = []
    for scale in (1.0, 3.0):
        program, group = single(lambda w, x, c=scale: jnp.sum(x @ (c * w)), w, x)
        seen = [TapValues([x], [dy], [dy], program.evaluate_prologue([w]))]
        (whole,) = group.by_rule(seen)
        found.append((group.gram(group.grams()[0], whole).terms, group.terms(whole)))
        assert group.sum_steps(Method("gram", DIRECT), 999) > product_steps(999)
    for one, nine in zip(*found, strict=True):
        np.testing.assert_allclose(nine, 9 * one, rtol=1e-5)


def test_norms_of_gradients_that_are_dropped_allow_for_two_formations():
    w, positions = jnp.ones((3, 2)), 64
    x, dy = (jnp.asarray(DRAW(size=(6, positions, n)), jnp.float32) for n in (3, 2))
    program, group = single(lambda w, x: jnp.sum(x @ w), w, x)
    seen = [TapValues([x], [dy], [dy], program.evaluate_prologue([w]))]
    least = 2 * positions * 2.0**-24 * np.sqrt(group.terms(*group.by_rule(seen)))
    for method in group.gradients():
        kept, dropped = (
            np.sqrt(np.float64(group.squares(method, seen, retain=retain)[0]))
            for retain in (True, False)
        )
        assert np.all(dropped - kept >= 0.9 * least)


def test_no_scale_of_which_squares_would_vanish_is_plain():
    w, x = jnp.ones(1), jnp.ones((1, 1))
    for scale in (1e-9, 1e9):
        _, group = single(lambda w, x, c=scale: jnp.sum(x * (c * w)), w, x)
        assert not group.plain


def test_squares_of_leaves_that_are_clipped_together_are_added_up():
    w = [jnp.ones(1)] * 40  # alike, so that every addition rounds the same way
    x = jnp.asarray(DRAW(size=(200, 1)), jnp.float32)
    program, (group,) = read(lambda w, x: jnp.sum(x * math.prod(w)), w, x)
    assert isinstance(group, Joint)
    seen = [TapValues([x], [x], [jnp.ones_like(x)], program.evaluate_prologue(w))]
    found, held = group.squares("vmap", seen, retain=True)
    assert held.gradients is not None
    each = [np.float64(leaf.chunks[0][:, 0]) for leaf in held.gradients]
    assert len(each) == 40
    assert np.all(np.float64(found) >= sum(np.square(each)))
