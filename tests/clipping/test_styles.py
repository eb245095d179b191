"""Styles of clipping, norms by part of the gradient, and transformed gradients."""

import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import gradients
from test_sensitivity import LAST, POISON, ROWS, SLACK, last_row, network, problem

from cases import in_full, tuples_in_full
from tanager.clipping import STYLES, Style, clipped_grad
from tanager.clipping.analysis.rounding import ALLOWANCE
from tanager.clipping.rules import factors
from tanager.clipping.rules.factors import Limit
from trees import distance


NORMS = {
    "kernel": 0.3,  # shares a standardised weight with its gain
    "gain": 0.05,
    "bias": 0.1,
    "mix": 0.5,
    "place": 0.2,
    "table": 0.1,
    "head": 0.4,
}
LIMITS = {
    "one norm": (0.5, "clip"),
    "parts": (NORMS, "clip"),
    "unit": (0.5, "unit"),
    "parts to unit norm": (NORMS, "unit"),
    "automatic": (0.5, "automatic"),
    "automatic parts": (NORMS, Style("automatic", gamma=0.3)),
}
strategies = pytest.mark.parametrize("strategy", ["per_example", "bk"])
# Strategies share the factors: one case is enough of per_example. And test_sensitivity
# has the same network with one norm.
PAIRS = [(name, "bk") for name in [*LIMITS][1:]] + [("parts", "per_example")]
MORE = [(name, "per_example") for name in LIMITS if name != "parts"]
MORE += [("one norm", "bk")]
limits = pytest.mark.parametrize(
    ("name", "strategy"), tuples_in_full(PAIRS + MORE, *MORE)
)


def doubled(gradient):
    """Leave one leaf out, and count another twice."""
    return {"head": 2 * gradient["head"], "rest": (gradient["mix"], gradient["gain"])}


@functools.cache
def made(name, strategy="bk", memory="default"):
    clip_norm, style = LIMITS[name]
    options = {"strategy": strategy, "memory": memory, "style": style}
    return clipped_grad(network, clip_norm=clip_norm, **options)


@functools.cache
def compiled(name, strategy):
    return jax.jit(made(name, strategy))


@functools.cache
def exact_gradients():
    params, batch = problem()
    with jax.enable_x64(True):
        return gradients(network, params, batch)[0]


def by_definition(found, clip_norm, style, mask):
    """Return sum and norms in float64, part by part."""
    style = Style(style) if isinstance(style, str) else style
    if isinstance(clip_norm, float):
        clip_norm, found = {"": clip_norm}, {"": found}
    sums, norms = {}, {}
    for name, most in clip_norm.items():
        leaves = jax.tree.leaves(found[name])
        norm = np.sqrt(sum(np.sum(g.reshape(ROWS, -1) ** 2, 1) for g in leaves))
        factor = {
            "clip": np.minimum(1, most / norm),
            "unit": np.minimum(1, most / norm) / most,
            "automatic": most / (norm + style.gamma),
        }[style.name]
        sums[name] = [np.tensordot(factor * mask, leaf, 1) for leaf in leaves]
        norms[name] = norm * mask
    return sums, norms


@limits
def test_each_agrees_with_its_definition(name, strategy):
    params, batch = problem()
    mask = np.arange(ROWS) != 1
    clip_norm, style = LIMITS[name]
    total, norms = by_definition(exact_gradients(), clip_norm, style, mask)
    out = compiled(name, strategy)(params, batch, mask)
    assert distance(out.sum, total) < 2e-5 * math.sqrt(ROWS)
    pairs = zip(jax.tree.leaves(out.norms), jax.tree.leaves(norms), strict=True)
    for got, right in pairs:
        np.testing.assert_allclose(got, right, rtol=1e-4)


def test_halves_of_a_batch():
    params, batch = problem()
    whole = compiled("automatic parts", "bk")(params, batch, np.ones(ROWS, bool))
    out = jax.jit(made("automatic parts", "bk", "low"))(params, batch)
    assert distance(out, whole) < 1e-5


@limits
def test_no_example_moves_the_sum_by_more_than_the_sensitivity(name, strategy):
    params, batch = problem()
    grad_fn, most = compiled(name, strategy), made(name, strategy).sensitivity
    everyone = jnp.ones(ROWS, bool)
    others = everyone.at[LAST].set(False)
    without = grad_fn(params, batch, others)
    for values in POISON.values():
        out = grad_fn(params, last_row(batch, **values), everyone)
        added = distance(out.sum, without.sum)
        assert added <= most, (values, added)
        if not np.all(np.isfinite([n[LAST] for n in jax.tree.leaves(out.norms)])):
            assert added == 0  # not even the parts that are finite
        masked = grad_fn(params, last_row(batch, **values), others)
        assert distance(masked, without) == 0


def scaled(params, example):
    """Its gradient is the example, whose parts can be as long as one likes."""
    return sum(jnp.vdot(params[name], example[name]) for name in params)


PARAMS = {"a": jnp.zeros(4), "b": jnp.zeros((2, 3))}


def far(size):
    return {"a": jnp.full((1, 4), size), "b": jnp.full((1, 2, 3), size)}


@pytest.mark.parametrize(
    ("clip_norm", "style", "most"),
    [
        (2.0, "clip", 2.0),
        (2.0, "unit", 1.0),
        (2.0, "automatic", 2.0),
        ({"a": 3.0, "b": 4.0}, "clip", 5.0),
        ({"a": 3.0, "b": 4.0}, "unit", math.sqrt(2)),
        ({"a": 3.0, "b": 4.0}, "automatic", 5.0),
    ],
)
@pytest.mark.parametrize("traced", [False, True])
def test_a_sensitivity_is_reached_and_not_exceeded(clip_norm, style, most, traced):
    grad_fn = clipped_grad(scaled, clip_norm=9.0, style=style)
    if not traced:
        grad_fn = clipped_grad(scaled, clip_norm=clip_norm, style=style)
        above = grad_fn.sensitivity / (most * (1 + ALLOWANCE)) - 1
        several = isinstance(clip_norm, dict) and style != "unit"
        margin = 2**-19 if several else 0
        assert above == pytest.approx(margin, abs=1e-11)
    for size in (1e2, 1e6, 1e9):
        norms = jax.tree.map(jnp.float32, clip_norm) if traced else None
        out = grad_fn(PARAMS, far(size), clip_norm=norms)
        length = distance(out.sum, jax.tree.map(jnp.zeros_like, PARAMS))
        assert 0.999 * most < length <= grad_fn.sensitivity_at(clip_norm)


def test_the_reach_of_traced_norms_is_rounded_up():
    for norms in np.random.default_rng(0).uniform(0.1, 9, (100, 3)).astype(np.float32):
        found = Limit([jnp.float32(norm) for norm in norms]).reach()
        assert float(found) >= math.hypot(*norms.tolist())


def test_a_norm_of_many_leaves_is_rounded_up():
    """Every addition to 1 of less than half a unit in its last place is lost."""
    small = [jnp.full(1, 2.0**-25)] * 64
    squares = [*enumerate([jnp.ones(1), *small])]
    (found,) = Limit([1.0]).norms_of(squares, 1)
    assert float(found[0]) ** 2 >= 1 + 64 * 2.0**-25
    with jax.enable_x64(True):
        squares[1] = 1, jnp.full(1, 1e-60)
        (found,) = Limit([1.0]).norms_of(squares[:2], 1)
        assert found.dtype == jnp.float64


@pytest.mark.parametrize("style", STYLES)
def test_gradients_are_brought_to_the_target(style):
    made = Style(style, gamma=1e-9)
    norms, mask = jnp.full(1, 8.0), jnp.ones(1, bool)
    (found,) = factors.clip_factors(norms, mask, 2.0, made, target=0.5).values
    assert 8 * float(found) == pytest.approx(0.5 if style == "unit" else 1.0)


@pytest.mark.parametrize("style", ["unit", Style("automatic", 1e-12)], ids=str)
@strategies
def test_gradients_that_are_zero_or_vanish_when_squared(strategy, style):
    """The norm is 0 in float32, and the factor as large as it can be."""
    grad_fn = clipped_grad(scaled, clip_norm=2.0, style=style, strategy=strategy)
    for size in (0.0, 1e-30, 1e-22, 1e-19, 1e-13, 1e-12):
        out = grad_fn(PARAMS, far(size))
        length = distance(out.sum, jax.tree.map(jnp.zeros_like, PARAMS))
        assert length <= grad_fn.sensitivity
        assert size or length == 0


@pytest.mark.parametrize("style", STYLES)
def test_a_traced_norm_out_of_range_counts_nothing(style):
    @jax.jit
    def total(clip_norm):
        made = clipped_grad(scaled, clip_norm=clip_norm, style=style)
        return made(PARAMS, far(1.0)).sum

    assert all(np.any(leaf) for leaf in jax.tree.leaves(total(1.0)))
    for number in (0.0, -1.0, np.nan, np.inf, 1e-13, 1e13):
        assert not any(np.any(leaf) for leaf in jax.tree.leaves(total(number))), number
        with pytest.raises(ValueError, match="clip_norm"):
            clipped_grad(scaled, clip_norm=number)
        with pytest.raises(ValueError, match="clip_norm"):
            clipped_grad(scaled, clip_norm=1.0)(PARAMS, far(1.0), clip_norm=number)


def test_a_schedule_of_norms_compiles_once():
    traces = []

    @jax.jit
    def step(clip_norm):
        traces.append(clip_norm)
        made = clipped_grad(scaled, clip_norm=clip_norm, style="clip")
        return made(PARAMS, far(1e3)).sum, made.sensitivity

    for number in (0.5, jnp.asarray(1.5), np.float64(2.5)):
        total, most = step(number)
        length = distance(total, jax.tree.map(jnp.zeros_like, PARAMS))
        assert number * 0.999 < length <= most <= 1.001 * number
    assert len(traces) <= 2  # weak and strong


@strategies
def test_what_is_transformed_is_what_is_clipped(strategy):
    params, batch = problem()
    options = {"clip_norm": 0.7, "strategy": strategy, "transform": doubled}
    grad_fn = clipped_grad(network, **options)
    out = grad_fn(params, batch)
    found = jax.vmap(doubled)(exact_gradients())
    total, norms = by_definition(found, 0.7, "clip", np.ones(ROWS, bool))
    assert jax.tree.structure(out.sum) == jax.tree.structure(found)
    assert distance(out.sum, total) < 1e-5
    np.testing.assert_allclose(out.norms, norms[""], rtol=1e-5)
    assert "because transform takes whole gradients" in str(
        grad_fn.explain(params, batch)
    )


def test_parts_of_a_transformed_gradient_and_adversarial_rows():
    params, batch = problem()
    norms = {"head": 0.3, "rest": 0.4}
    grad_fn = jax.jit(clipped_grad(network, clip_norm=norms, transform=doubled))
    everyone = jnp.ones(ROWS, bool)
    without = grad_fn(params, batch, everyone.at[LAST].set(False))
    for values in POISON.values():
        out = grad_fn(params, last_row(batch, **values), everyone)
        assert distance(out.sum, without.sum) <= SLACK * 0.5


BAD = {
    "unknown": ({"style": "automatc"}, "did you mean automatic"),
    "structure": ({"clip_norm": {"a": 1.0}}, "clip_norm must be a number, or a pytree"),
    "function": (
        {"clip_norm": lambda path, leaf: 1.0},
        "clip_norm (='<lambda>') must be a number, or a pytree of numbers like params: "
        "jax.tree_util.tree_map_with_path(function, params) makes one",
    ),
    "shape": ({"clip_norm": jnp.ones(1)}, "array of shape (1,)"),
    "empty": ({"clip_norm": {}}, "clip_norm (={}) must be a number"),
    "part": ({"clip_norm": {"a": 1.0, "b": 0.0}}, "clip_norm (=0.0) must be positive"),
    "integers": ({"transform": lambda g: g["a"] > 0}, "must return a pytree of float"),
    "text": ({"transform": lambda g: "a"}, "must return a pytree of float"),
    "nothing": ({"transform": lambda g: ()}, "must return a pytree of float"),
    "mixing": (
        {"transform": lambda g: jax.lax.psum(g, "batch")},
        "must not mix examples",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_refused_in_one_message(name):
    options, message = BAD[name]
    given: dict[str, Any] = {"clip_norm": 1.0} | options
    with pytest.raises(ValueError, match=re.escape(message)):
        clipped_grad(scaled, **given)(PARAMS, far(1.0))
    with pytest.raises(ValueError, match="gamma"):
        Style("automatic", gamma=0.0)


BUGS = {
    "norms of all parts together": lambda limit: limit._replace(parts=()),
    "every part the largest norm": lambda limit: limit._replace(
        norms=[max(limit.norms)] * len(limit.norms)
    ),
    "gamma is taken away": lambda limit: limit._replace(
        style=limit.style if limit.style.name != "automatic" else Style("unit")
    ),
}


@pytest.mark.parametrize(
    "bug",
    in_full(["a part that is finite counts", *BUGS], "every part the largest norm"),
)
def test_planted_bugs_are_found(bug, monkeypatch):
    """Each makes one of the tests above fail."""
    factors_of = Limit.factors

    def wrong(limit, norms, mask):
        if bug in BUGS:
            changed = BUGS[bug](limit)
            norms = norms[:1] * len(norms) if not changed.parts else norms
            return factors_of(changed, norms, mask)
        each = zip(norms, limit.norms, strict=True)
        return [factors.clip_factors(n, mask, c, limit.style) for n, c in each]

    monkeypatch.setattr(Limit, "factors", wrong)
    made.cache_clear()
    compiled.cache_clear()
    try:
        with pytest.raises(AssertionError):
            name = "automatic parts" if "gamma" in bug else "parts"
            test_each_agrees_with_its_definition(name, "bk")
            test_no_example_moves_the_sum_by_more_than_the_sensitivity(name, "bk")
    finally:
        made.cache_clear()
        compiled.cache_clear()
