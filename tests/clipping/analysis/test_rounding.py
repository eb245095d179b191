"""Float arithmetic attacked: searches for rounding that goes one way.

Random numbers round both ways and hide what a bound must hold for. Here all entries are
equal, so that every addition rounds alike, positions cancel, and a hill climb looks for
the sizes where what is left is largest against the norm.
"""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from oracle import ALL, alone, cast, lengths, read

from cases import in_full, tuples_in_full
from tanager.clipping import clipped_grad
from tanager.clipping.analysis import rounding
from tanager.clipping.analysis.standardise import standardise
from tanager.clipping.rules.base import Bilinear, TapValues
from tanager.clipping.rules.groups import Method


C = 1e-3
LIMIT = 1.001 * C
CANDIDATES, ROUNDS = 12, 3
strategies = pytest.mark.parametrize("strategy", ALL)


@pytest.mark.parametrize(
    "shape", [(2**22,), (2**22 + 1,), (3, 1000, 700), (1, 9, 64, 128), (5,), (1, 1)]
)
@pytest.mark.parametrize("value", [1.1, 0.7, 1.9999999])
def test_squares_of_equal_numbers(shape, value):
    found = jax.jit(rounding.squares)(jnp.full((2, *shape), value, jnp.float32))
    exact = np.float64(np.float32(value)) ** 2 * np.prod(shape, dtype=np.float64)
    found = np.asarray(found, np.float64)
    assert np.all(found >= exact)
    assert np.all(found <= exact * (1 + 1e-3))


@pytest.mark.parametrize(
    ("shape", "steps"), [((5,), 4), ((4096,), 4095), ((16, 16, 64), 63 + 255)]
)
def test_squares_are_raised_by_what_their_sums_can_lose(shape, steps):
    found = float(rounding.squares(jnp.ones((1, *shape)))[0])
    assert found >= math.prod(shape) * (1 + rounding.gamma(steps, jnp.float32))


def test_what_both_of_two_sums_lose_is_allowed_for():
    """With one row masked or not; and by numbers that vanish, next to a small C."""
    u, tiny = 2.0**-24, 2.0**-126
    few = rounding.float_error(20.0, 64, 1.0, 10, jnp.float32)
    assert few.sum >= (2 * 20 * 64 + 16) * u and few.target == 1
    many = rounding.float_error(200.0, 4096, 1.0, 10, jnp.float32)
    assert many.target * (1 + many.sum) == pytest.approx(1 + rounding.ALLOWANCE)
    small = rounding.float_error(1.0, 1, 1e-12, 10**9, jnp.float32)
    assert small.sum >= 1e9 * tiny / 1e-12**2
    assert rounding.gamma(2.0**25, jnp.float32) == math.inf
    assert [rounding.run_steps(size) for size in (8, 64, 65)] == [3, 7 + 3, 7]


def test_reductions_that_follow_each_other_stay_apart():
    compiled = jax.jit(rounding.squares).lower(jnp.ones((2, 64, 64, 64))).compile()
    assert (compiled.as_text() or "").count(" reduce(") >= 2


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 13, 100])
def test_sums_by_halves_and_by_a_tree(count):
    values = np.arange(3 * count, dtype=np.float32).reshape(count, 3)
    expected = np.sum(values, axis=0)
    both = jax.jit(lambda v: (rounding.pairwise(v, 0), rounding.tree(list(v))))
    for found in both(values):
        np.testing.assert_array_equal(found, expected)
    assert 2 ** rounding.levels(count) >= count > 2 ** (rounding.levels(count) - 1)


@pytest.mark.parametrize("rows", [1, 2, 16, 17, 33, 64, 128, 200])
def test_steps_bound_the_partial_sums(rows):
    """Against the sizes that partial sums of unit vectors have, counted one by one."""

    def in_order(sizes):
        return sum(np.cumsum(sizes)[1:])

    blocks = [min(16, rows - start) for start in range(0, rows, 16)]
    total = sum(in_order([1] * size) for size in blocks)
    while len(blocks) > 1:
        merged = [sum(blocks[n : n + 2]) for n in range(0, len(blocks), 2)]
        total += sum(m for n, m in enumerate(merged) if 2 * n + 1 < len(blocks))
        blocks = merged
    assert rows + total <= rounding.row_steps(rows) * rows


def product(w, e):
    return jnp.vdot(e["x"] @ w, e["dy"])


def narrow(w, e):
    y = e["x"].astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)
    return jnp.vdot(y.astype(jnp.float32), e["dy"])


def convolution(w, e):
    y = lax.conv_general_dilated(
        e["x"][None],
        w,
        (1,),
        "VALID",
        dimension_numbers=("NWC", "WIO", "NWC"),
    )[0]
    return jnp.vdot(y, e["dy"])


def standardised(params, e):
    return convolution(standardise(params["w"], params.get("gain")), e)


def table(w, e):
    return jnp.vdot(w[e["rows"]], e["dy"])


def scaled(w, e):
    return jnp.vdot(e["x"] * w[None], e["dy"])


T = 8
SLOPE = 1 + 0.1 * np.arange(3 * 256).reshape(3, 256, 1) % 1.7
ALONG = np.linspace(-1, 1, 256)
LOSSES = {
    "product of 768": (product, np.zeros((768, 8)), (T, 768)),
    "product of 4096": (product, np.zeros((4096, 8)), (T, 4096)),
    "many positions": (product, np.zeros((64, 8)), (256, 64)),
    "bfloat16": (narrow, np.zeros((2048, 8)), (T, 2048)),
    "convolution": (convolution, np.zeros((3, 512, 8)), (T + 2, 512)),
    "standardised": (
        standardised,
        {"w": np.repeat(SLOPE, 4, 2)},
        (T + 2, 256),
    ),
    "standardised with a gain": (
        standardised,
        {"w": np.repeat(SLOPE, 4, 2), "gain": np.full(4, 1e-3)},
        (T + 2, 256),
    ),
    "standardised, along the weight": (
        standardised,
        {"w": np.broadcast_to(5 + ALONG[:, None], (3, 256, 4))},
        (T + 2, 256),
    ),
    "table": (table, np.zeros((3, 2048)), (T, 1)),
    "scale": (scaled, np.zeros((4096,)), (T, 4096)),
}


def draw_examples(name, sizes, ratios):
    """Examples whose first positions hold c and the others -c·(1 + ratio)."""
    loss, _, shape = LOSSES[name]
    positions = shape[0]
    half = positions // 2
    other = -(sizes * (1 + ratios))
    first = np.arange(positions) < half
    line = np.where(first[None], sizes[:, None], other[:, None]).astype(np.float32)
    if name == "bfloat16":
        line = np.asarray(jnp.asarray(line, jnp.bfloat16), np.float32)
    x = np.broadcast_to(line[..., None], (len(sizes), *shape))
    outputs = {"table": (positions, 2048), "scale": shape}.get(
        name, (positions - 2 if loss in (convolution, standardised) else positions, 8)
    )
    if loss is standardised:
        outputs = (positions - 2, 4)
    if name == "standardised, along the weight":
        x = np.float32(x * ALONG)
    dy = np.ones((len(sizes), *outputs), np.float32)
    if name in ("table", "scale"):
        dy, x = dy * line[..., None], np.ones_like(x)
    rows = np.ones((len(sizes), positions), np.int32)
    return {"x": jnp.asarray(x), "dy": jnp.asarray(dy), "rows": jnp.asarray(rows)}


@pytest.mark.parametrize("name", in_full(LOSSES, "product of 768"))
def test_no_bias_lets_an_example_contribute_more(name):
    generator = np.random.default_rng(1)
    loss, params, _ = LOSSES[name]
    params = cast(params, "float32")
    sizes = generator.uniform(1, 2, CANDIDATES)
    ratios = 10 ** generator.uniform(-3.5, -1.0, CANDIDATES)
    best = {}
    for _ in range(ROUNDS):
        out = alone(loss, params, draw_examples(name, sizes, ratios), C)
        worst = np.zeros(CANDIDATES)
        for strategy, (own, norms) in out.items():
            best[strategy] = max(best.get(strategy, 0), own.max() / C)
            # The climb is on how much the norm is too small.
            own = own / np.minimum(C, np.where(norms > 0, norms, C))
            worst = np.maximum(worst, own)
        kept = np.argsort(worst)[-4:]
        pick = generator.choice(kept, CANDIDATES)
        sizes = sizes[pick] * (1 + 1e-4 * generator.standard_normal(CANDIDATES))
        ratios = ratios[pick] * (1 + 1e-2 * generator.standard_normal(CANDIDATES))
    print(name, best)
    assert max(best.values()) <= LIMIT / C, best
    assert min(best.values()) > 0.01, best


ADDED = {
    "retained": (lambda w, e: jnp.sum(w * e), "bk"),
    "products": (lambda w, e: jnp.sum(e @ w), "bk"),
    "per_example": (lambda w, e: jnp.sum(w * e), "per_example"),
    "halves": (lambda w, e: jnp.sum(w * e), "bk"),
}


# Sums of 16 rows are within those of 96, which have blocks besides.
@pytest.mark.parametrize(
    ("name", "rows"),
    tuples_in_full(
        list(itertools.product(ADDED, (16, 96))),
        *((name, 16) for name in ADDED if name != "retained"),
    ),
)
def test_masking_a_row_moves_the_sum_within_the_sensitivity(name, rows):
    """The others are alike, so that every addition to the sum rounds the same way."""
    loss, strategy = ADDED[name]
    memory = "low" if name == "halves" else "default"
    w = jnp.zeros((64, 1) if name == "products" else 64)
    grad_fn = clipped_grad(loss, clip_norm=1.0, strategy=strategy, memory=memory)
    clip = jax.jit(lambda batch, mask: grad_fn(w, batch, mask).sum)
    generator = np.random.default_rng(2)
    full = jnp.ones(rows, bool)
    place, most, step = 0.1, 0.0, 0.5
    for _ in range(60):
        trial = np.float32(place * (1 + step * generator.standard_normal()))
        row = int(generator.integers(rows))
        batch = jnp.full((rows, 64), trial).at[row].set(1.0)  # clipped
        one, other = clip(batch, full), clip(batch, full.at[row].set(False))
        moved = np.linalg.norm(np.float64(one) - np.float64(other))
        if moved > most:
            most, place, step = moved, float(trial), 0.8 * step
    print(name, rows, most)
    assert 0.9 <= most <= grad_fn.sensitivity
    error = grad_fn.explain(w, jnp.ones((rows, 64))).float_error
    assert most <= error.target * (1 + error.sum)


@pytest.mark.parametrize("rows", [2, 64, 128, 1024])
@strategies
def test_what_is_stated_keeps_within_the_sensitivity(strategy, rows):
    def loss(w, e):
        return jnp.sum(jnp.tanh(e @ w["a"] + w["b"][None]))

    w = {"a": jnp.ones((4, 3)), "b": jnp.ones(3)}
    grad_fn = clipped_grad(loss, clip_norm=0.5, strategy=strategy)
    error = grad_fn.explain(w, jnp.ones((rows, 5, 4))).float_error
    assert error.rows == rows
    assert error.target <= 1
    assert error.target * (1 + error.sum) <= 1 + rounding.ALLOWANCE + 1e-12
    assert error.allowance == grad_fn.sensitivity / 0.5 - 1
    assert (error.target < 1) == (error.sum > error.allowance)


SHAPES = {
    "product": (lambda w, x: x @ w, (64, 5), (7, 64)),
    "one position": (lambda w, x: x @ w, (64, 5), (64,)),
    "batched": (lambda w, x: jnp.einsum("gti,gio->gto", x, w), (3, 64, 5), (3, 7, 64)),
}


@pytest.mark.parametrize("name", SHAPES)
def test_norms_are_between_the_exact_one_and_what_is_stated(name):
    apply, weight, data = SHAPES[name]
    generator = np.random.default_rng(3)
    w = jnp.zeros(weight)
    x = generator.standard_normal((6, *data), np.float32)
    x[3:] += 100  # and with a mean, so that terms add up instead of cancelling
    shape = jax.eval_shape(jax.vmap(apply, (None, 0)), w, x).shape
    dy = np.float32(generator.standard_normal(shape))
    _, (group,) = read(lambda w, x: jnp.sum(apply(w, x)), w, x)
    with jax.enable_x64(True):
        one = jax.grad(lambda w, x, dy: jnp.sum(apply(w, x) * dy))
        wide = (np.float64(side) for side in (x, dy))
        every = jax.jit(jax.vmap(one, (None, 0, 0)))
        exact = every(np.zeros(weight), *wide)
        exact = lengths(exact, 6) ** 2
    rule = group.rule
    assert isinstance(rule, Bilinear)

    @jax.jit
    def found(x, dy):
        seen = [TapValues([x], [dy], [dy], {})]
        methods = (*group.grams(), *group.gradients())
        squares = {it: group.squares(it, seen, retain=False)[0] for it in methods}
        return squares, rule.terms(seen[0])

    every, terms = found(jnp.asarray(x), jnp.asarray(dy))
    terms = np.float64(terms)
    for method, squares in every.items():
        squares = np.float64(squares)
        assert np.all(squares >= exact), method
        assert np.all(terms >= exact), method
        excess = group.excess(Method(method, group.totals()[0])) + 2e-5
        assert np.all(squares <= exact * (1 + 2e-5) + excess * terms), method


def rounded_up(count):
    """Return factors whose products bfloat16 rounds up by almost a part in 2⁸."""
    first = np.arange(128, 256) / 128
    exact = np.multiply.outer(first, first)
    rounded = np.float64(jnp.asarray(exact, jnp.bfloat16))
    worst = np.argsort(-rounded / exact, axis=None)[:count]
    return [first[n] for n in np.unravel_index(worst, exact.shape)]


@pytest.mark.parametrize("shape", [(32,), (4, 8)])
@pytest.mark.parametrize("strategy", ["bk", "bk_mixopt", "per_example"])
def test_products_that_xla_rounds_for_some_readers_only(strategy, shape):
    def loss(w, example):
        y = (example["a"] * example["b"]).reshape(shape) @ w
        return jnp.sum(y.ravel() * example["c"] * example["d"])

    factors = dict(zip("abcd", (*rounded_up(32), *rounded_up(16)), strict=True))
    batch = {k: jnp.asarray(np.tile(x, (4, 1)), "bfloat16") for k, x in factors.items()}
    w = jnp.zeros((shape[-1], shape[-1] // 2), jnp.bfloat16)
    grad_fn = clipped_grad(loss, clip_norm=C, strategy=strategy)
    out = grad_fn(w, batch, jnp.arange(4) == 1)
    assert 0.99 * C < np.linalg.norm(np.float64(out.sum)) <= LIMIT
