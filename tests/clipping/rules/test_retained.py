"""Retained gradients: added up before the sum is brought to the parameter."""

import jax
import jax.numpy as jnp
import pytest
from oracle import read
from rule_cases import convolution, curve

from tanager.clipping.rules.base import TapValues
from tanager.clipping.rules.convolutions import Convolution
from tanager.clipping.rules.factors import clip_factors
from tanager.clipping.rules.groups import RETAINED


@pytest.mark.parametrize("method", ["patches", "crossed"])
def test_retained_gradients_are_added_up_before_they_are_brought_to_the_kernel(
    method, monkeypatch
):
    brought = []
    once = Convolution._at_anchor

    def counting(self, gradient):
        brought.append(gradient.size)
        return once(self, gradient)

    monkeypatch.setattr(Convolution, "_at_anchor", counting)
    monkeypatch.setattr(Convolution, "chunk", lambda self, method, rows: 2)
    apply, w, x = convolution("same", rows=5)
    w, x = jnp.asarray(w, jnp.float32), jnp.asarray(x, jnp.float32)
    program, (group,) = read(lambda w, x: curve(apply(w, x)), w, x)
    dy = jax.vmap(apply, (None, 0))(w, x)
    seen = [TapValues([x], [dy], [dy], program.evaluate_prologue([w]))]
    squares, held = group.squares(method, seen, retain=True)
    assert held.gradients is not None
    assert len(held.gradients[0].chunks) == 2  # a loop, and the rest
    factors = clip_factors(jnp.sqrt(squares), jnp.ones(5, bool), 1.0)
    assert not brought
    group.total(RETAINED, seen, held, factors)
    assert brought == [w.size]
