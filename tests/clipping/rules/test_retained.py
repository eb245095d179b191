"""Retained gradients: added up before the sum is brought to the parameter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import read
from rule_cases import convolution, curve

from tanager.clipping.analysis import links
from tanager.clipping.rules.base import Formation, TapValues
from tanager.clipping.rules.convolutions import Convolution
from tanager.clipping.rules.factors import ClipFactors, clip_factors
from tanager.clipping.rules.groups import RETAINED
from tanager.clipping.rules.retained import (
    RetainedGradients,
    form,
    formed_sum,
    retained_steps,
    weighted_sum,
)


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


@pytest.mark.parametrize("sizes", [(7,), (16, 16, 2), (33, 40, 7)])
def test_rows_that_do_not_count_add_zeros_however_they_are_cut(sizes):
    generator, rows = np.random.default_rng(0), sum(sizes)
    gradients = generator.normal(size=(rows, 3)).astype(np.float32)
    values = generator.uniform(0.1, 1, rows).astype(np.float32)
    counted = np.arange(rows) % 3 != 1
    expected = np.sum((values[:, None] * gradients)[counted], 0, dtype=np.float64)
    gradients[~counted] = np.nan
    chunks = map(jnp.asarray, np.split(gradients, np.cumsum(sizes)[:-1]))
    factors = ClipFactors(jnp.asarray(values), jnp.asarray(counted))
    found = weighted_sum(RetainedGradients([*chunks], links.same), factors)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    again = Formation(lambda seen: seen.gradients[0], links.same, (3,))
    seen = TapValues([], [], [jnp.asarray(gradients)], {})
    np.testing.assert_allclose(formed_sum(again, seen, factors, 4), expected, rtol=1e-5)


def test_gradients_that_will_be_formed_again_are_exact():
    exact = []

    def formed(seen):
        exact.append(seen.exact)
        return seen.gradients[0]

    seen = TapValues([], [], [jnp.ones((5, 3))], {})
    for retain in (False, True):
        form(Formation(formed, links.same, (3,)), seen, 2, lambda g: g, retain=retain)
    assert exact == [True, True, False, False]


@pytest.mark.parametrize(
    ("rows", "chunk"), [(15, 16), (40, 4), (40, 40), (63, 32), (64, 32), (300, 299)]
)
def test_steps_bound_the_partial_sums_of_chunks(rows, chunk):
    """Against the sizes that partial sums of unit vectors have, counted one by one."""

    def by_a_tree(sizes):
        total = 0
        while len(sizes) > 1:
            merged = [sum(sizes[n : n + 2]) for n in range(0, len(sizes), 2)]
            total += sum(m for n, m in enumerate(merged) if 2 * n + 1 < len(sizes))
            sizes = merged
        return total

    loop = rows // chunk * chunk if rows >= 2 * chunk else 0
    chunks = [loop] * bool(loop)
    chunks += [min(chunk, rows - start) for start in range(loop, rows, chunk)]
    total = by_a_tree(chunks)
    for size in chunks:
        blocks, rest = [16] * (size // 16), size % 16
        total += sum(sum(range(2, block + 1)) for block in (*blocks, rest))
        total += by_a_tree(blocks) + size * bool(blocks and rest)
    assert rows + total <= retained_steps(rows, chunk) * rows
