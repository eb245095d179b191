"""JAX-Privacy's tests of clipping, with `clipped_grad`.

Names of tests are theirs (tests/clipping_test.py and gradient_clipping_test.py at
version 2). They have 132 cases. 38 of them have no counterpart by design: C = 0 and
C = ∞ (refused here) and narrow sums (sums are float32 or wider). The other 94 have; two
that differ in `dtype=None` alone are one here.
"""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.core import Tracer

import tanager
from cases import in_full, tuples_in_full
from tanager.clipping import clipped_grad
from tanager.grid import Grid, Whole
from trees import distance


TREES = [
    np.zeros((5, 5), np.float32),
    {
        "a": np.zeros(10, jnp.float16),
        "b": np.zeros((5, 5), np.float32),
        "c": np.zeros((), jnp.bfloat16),
    },
]
STYLES = ["unit", "clip"]
each = pytest.mark.parametrize
two_trees = each("tree", TREES, ids=["array", "dictionary"])


def drawn(tree):
    leaves, structure = jax.tree.flatten(tree)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    pairs = zip(leaves, keys, strict=True)
    return structure.unflatten(
        [jax.random.normal(k, x.shape, x.dtype) for x, k in pairs]
    )


def linear(params, example):
    """A loss whose gradient is the example: what they clip as a tree."""
    products = jax.tree.map(lambda w, g: jnp.sum(w * g), params, example)
    return sum(each.astype(jnp.float32) for each in jax.tree.leaves(products))


def clip_pytree(tree, clip_norm, style="clip"):
    """Return a tree clipped, and its norm."""
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(tree)):
        one = jax.tree.map(lambda leaf: leaf[None], tree)
        zeros = jax.tree.map(jnp.zeros_like, tree)
    else:
        one = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)[None]), tree)
        zeros = jax.tree.map(lambda leaf: jnp.asarray(np.zeros_like(leaf)), tree)
    out = clipped_grad(linear, clip_norm=clip_norm, style=style)(zeros, one)
    return out.sum, jax.tree.map(lambda norm: norm[0], out.norms)


jitted = jax.jit(clip_pytree, static_argnums=2)


@two_trees
@each("clip_norm", in_full([1.0, 2.0], 1.0))
@each("style", STYLES)
def test_clip_pytree_output_shape_matches_input(tree, clip_norm, style):
    tree = drawn(tree)
    plain, _ = clip_pytree(tree, clip_norm, style)
    traced, _ = jitted(tree, clip_norm, style)
    for leaf, one, other in zip(
        *map(jax.tree.leaves, (tree, plain, traced)), strict=True
    ):
        assert leaf.shape == one.shape == other.shape
        assert one.dtype == other.dtype == jnp.float32
    assert distance(plain, traced) < 1e-6


@two_trees
@each("clip_norm", in_full([1.0, 2.0], 1.0))
@each("style", STYLES)
def test_clip_pytree_has_bounded_norm(tree, clip_norm, style):
    clipped, _ = clip_pytree(drawn(tree), clip_norm, style)
    most = clip_norm if style == "clip" else 1.0
    assert optax.tree.norm(clipped) <= most * (1 + 2**-11)


@two_trees
def test_clip_pytree_with_large_clip_norm(tree):
    tree = drawn(tree)
    clipped, _ = clip_pytree(
        tree, 1.5 * distance(tree, jax.tree.map(jnp.zeros_like, tree))
    )
    assert distance(clipped, tree) < 1e-5


@two_trees
def test_clip_pytree_zero_norm_pytree(tree):
    for style in STYLES:
        clipped, norm = clip_pytree(tree, 1.0, style)
        assert norm == 0 and not any(np.any(leaf) for leaf in jax.tree.leaves(clipped))


@each("bad", in_full([np.nan, np.inf, -np.inf], np.inf))
def test_clip_pytree_non_finite_input_returns_non_finite_norm(bad):
    clipped, norm = clip_pytree(jnp.array([3.0, 0.0, bad, 2.0]), 1.0)
    assert not np.isfinite(norm) and not np.any(clipped)


PAIR = {"a": np.array([3, 4], np.float32), "b": np.array([0, 10], np.float32)}
DEEP = {
    "layer1": {"w": np.array([0, 3], np.float32), "b": np.array([4], np.float32)},
    "layer2": {"w": np.array([0, 8], np.float32), "b": np.array([6], np.float32)},
}
PARTS = {
    "full": (PAIR, {"a": np.array(1.0), "b": np.array(15.0)}, {"a": 5.0, "b": 10.0}),
    "zero": (
        {"layer1": {"w": np.zeros(2, np.float32), "b": np.zeros(1, np.float32)}},
        {"layer1": np.array(2.0)},
        {"layer1": 0.0},
    ),
    "tuple": (
        {"layer1": (PAIR["a"], PAIR["b"])},
        {"layer1": (np.array(1.0), np.array(15.0))},
        {"layer1": (5.0, 10.0)},
    ),
    "prefix": (
        DEEP,
        {"layer1": np.array(2.0), "layer2": np.array(5.0)},
        {"layer1": 5.0, "layer2": 10.0},
    ),
}


def per_layer(tree, clip_norm, sizes=(1.0,)):
    """Return the sum of multiples of a tree, clipped by definition."""

    def part(most, own):
        norm = np.sqrt(sum(np.sum(leaf**2) for leaf in jax.tree.leaves(own)))
        scale = sum(min(size, most / norm) if norm else 1.0 for size in sizes)
        return jax.tree.map(lambda leaf: leaf * scale, own)

    return jax.tree.map(part, clip_norm, tree)


@each("name", PARTS)
def test_clip_pytree_per_layer_clip_norm_tree(name):
    tree, clip_norm, norms = PARTS[name]
    clipped, found = clip_pytree(tree, clip_norm)
    assert distance(clipped, per_layer(tree, clip_norm)) < 1e-5
    assert jax.tree.structure(found) == jax.tree.structure(norms)
    assert distance(found, norms) < 1e-5


@each("name", ["full", "prefix"])
def test_clip_per_layer_clipped_fun_norm_tree(name):
    tree, clip_norm, norms = PARTS[name]

    def loss(params, size):
        return size * linear(params, jax.tree.map(jnp.asarray, tree))

    zeros = jax.tree.map(jnp.zeros_like, tree)
    out = clipped_grad(loss, clip_norm=clip_norm)(zeros, jnp.array([1.0, 2.0, 3.0]))
    assert distance(out.sum, per_layer(tree, clip_norm, (1, 2, 3))) < 1e-4
    for found, norm in zip(*map(jax.tree.leaves, (out.norms, norms)), strict=True):
        np.testing.assert_allclose(found, norm * np.array([1, 2, 3]), rtol=1e-6)


def test_normalize_by_scales_sensitivity():
    """A sum is divided by its user, and its sensitivity with it."""
    assert clipped_grad(linear, clip_norm=2.0).sensitivity / 4 == pytest.approx(
        0.5, rel=1e-3
    )


def test_rescale_to_unit_norm_ignores_clip_magnitude():
    for clip_norm in (0.25, 100.0):
        grad_fn = clipped_grad(linear, clip_norm=clip_norm, style="unit")
        assert grad_fn.sensitivity == 1 + 2**-11


def test_per_layer_rescale_uses_sqrt_num_leaves():
    norms = {"a": 1.0, "b": 2.0, "c": 3.0}
    found = clipped_grad(linear, clip_norm=norms, style="unit").sensitivity
    assert found == pytest.approx(3**0.5, rel=1e-3)


def test_per_layer_without_rescale_uses_leaf_norm():
    found = clipped_grad(linear, clip_norm={"a": 3.0, "b": 4.0}).sensitivity
    assert found == pytest.approx(5.0, rel=1e-3)


# Grids: sums on the grid of the noise, whose spacing follows from the sensitivity.
GRIDS = tuples_in_full([(1.0, 100), (5.0, 1000), (0.5, 50)], (1.0, 100))


@functools.cache
def long_rows(clip_norm, size):
    """Sums of one example: uniform at the clipping norm, and random ones beyond."""
    rng = np.random.default_rng(42)
    rows = [np.full(size, clip_norm / np.sqrt(size))]
    for _ in range(5):
        raw = rng.standard_normal(size)
        rows.append(raw / np.linalg.norm(raw) * 2 * clip_norm)
    grad_fn = clipped_grad(linear, clip_norm=clip_norm)
    one = jax.jit(lambda row: grad_fn(jnp.zeros(size), row[None]).sum)
    return [one(jnp.asarray(row, jnp.float32)) for row in rows], grad_fn.sensitivity


def values_of(grid, total):
    high, low = np.asarray(total.high, np.int64), np.asarray(total.low, np.int64)
    return (high * 2**16 + low) * grid.spacing


@each(("clip_norm", "size"), GRIDS)
def test_clipping_bound_obeyed_after_rounding(clip_norm, size):
    sums, sensitivity = long_rows(clip_norm, size)
    grid = Grid.of(sensitivity, jnp.zeros(size))
    for total in sums:
        moved = np.linalg.norm(values_of(grid, grid.round(total)))
        assert moved <= sensitivity + grid.rounding <= sensitivity * (1 + 2**-12)


@each(("clip_norm", "size"), [(1.0, 100), (2.0, 10_000)])
def test_adjusted_clip_norm(clip_norm, size):
    """There C shrinks by what rounding takes; here the noise grows by it."""
    grid = Grid.of(clip_norm, jnp.zeros(size))
    assert 0 < grid.rounding < clip_norm


def test_a_sum_that_does_not_fit_into_the_grid_is_refused():
    with pytest.raises(ValueError, match="batch_size"):
        Grid.of(1.0, jnp.zeros(10_000)).require_room(1e12, 1.0)


def test_clip_and_round_to_grid_shapes_and_types():
    """Whole numbers in two int32: no 64-bit mode is needed, so none is asked for."""
    gradient = {"w": jnp.array([0.1, -0.3, 0.5]), "b": jnp.array(0.05)}
    total = Grid.of(1.0, gradient).round(gradient)
    for limb in (total.high, total.low):
        assert {k: (v.shape, v.dtype) for k, v in limb.items()} == {
            "w": ((3,), jnp.int32),
            "b": ((), jnp.int32),
        }


@each("x64", [False, True])
def test_sums_on_the_grid_with_and_without_64_bits(x64):
    with jax.enable_x64(x64):
        total = Grid.of(1.0, jnp.zeros(3)).round(jnp.array([0.1, -0.3, 0.5]))
        assert total.high.dtype == jnp.int32


@each("options", [{"style": "unit"}, {"clip_norm": {"a": 1.0, "b": 0.5}}], ids=str)
def test_clipped_fun_grid_scale_goes_with_every_style(options):
    """They refuse these together; here a grid is of the sensitivity alone."""
    params = {"a": jnp.zeros(4), "b": jnp.zeros(3)}
    grad_fn = clipped_grad(linear, **{"clip_norm": 2.0} | options)
    grid = Grid.of(grad_fn.sensitivity, params)
    batch = jax.tree.map(lambda leaf: jnp.full((1, *leaf.shape), 9.0), params)
    total = grid.round(grad_fn(params, batch).sum)
    parts = [Whole(total.high[name], total.low[name]) for name in params]
    moved = sum(np.sum(values_of(grid, part) ** 2) for part in parts)
    assert np.sqrt(moved) <= grad_fn.sensitivity + grid.rounding


@each("normalize_by", [1.0, 100.0])
def test_normalising_happens_after_the_noise(normalize_by):
    grid = Grid.of(1.0, jnp.zeros(4))
    value = jnp.array([0.25, -0.5, 0.0, 0.125])
    found = grid.floats(grid.round(value), value) / normalize_by
    np.testing.assert_allclose(found, value / normalize_by, atol=grid.spacing)


def test_clipped_grad_grid_scale():
    def loss(params, data):
        return jnp.mean((data - params) ** 2)

    mechanism = tanager.Mechanism(sample_rate=0.5, noise_multiplier=0.0, steps=1)
    grad_fn = clipped_grad(loss, clip_norm=1.0)
    params, data = jnp.zeros(4), jax.random.normal(jax.random.key(0), (10, 4))
    seed = tanager.Seed.from_int(0)
    noise = tanager.GaussianNoise(mechanism, grad_fn.sensitivity, seed, params)
    found = noise(noise.grid.round(grad_fn(params, data).sum), 0)
    assert distance(found, grad_fn(params, data).sum) <= noise.grid.rounding


# Functions of one example, and of a batch of one.
def one_example(params, x):
    assert x.ndim == 1
    return linear(params, x + 2)


def of_a_batch(params, x):
    return linear(params, x[None].mean(axis=0))


DATA = jax.random.normal(jax.random.key(0), (15, 4))
ZEROS = jnp.zeros(4)
functions = each("fun", [one_example, of_a_batch])


@functions
def test_clip_sum_sensitivity(fun):
    grad_fn = clipped_grad(fun, clip_norm=1.0)
    whole = grad_fn(ZEROS, DATA).sum
    replaced = grad_fn(ZEROS, DATA.at[3].set(jnp.array([-10.0, 10, 20, 20]))).sum
    assert jnp.linalg.norm(whole - replaced) <= 2 * grad_fn.sensitivity
    masked = grad_fn(ZEROS, DATA, np.arange(15) != 3).sum
    assert jnp.linalg.norm(whole - masked) <= grad_fn.sensitivity
    assert jnp.linalg.norm(whole - grad_fn(ZEROS, DATA[1:]).sum) <= grad_fn.sensitivity


@functions
def test_nan_safe_by_default(fun):
    grad_fn = clipped_grad(fun, clip_norm=1.0)
    data = DATA.at[5].set(jnp.nan)
    replaced = data.at[3].set(jnp.array([-10.0, 10, 20, 20]))
    moved = grad_fn(ZEROS, data).sum - grad_fn(ZEROS, replaced).sum
    assert jnp.linalg.norm(moved) <= 2 * grad_fn.sensitivity


@each("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
@each("memory", in_full(["low", "default"], "low"))
def test_correct_dtype(dtype, memory):
    """Of float32 sums; others are float32 here too."""
    grad_fn = clipped_grad(one_example, clip_norm=1.0, memory=memory)
    out = grad_fn(ZEROS.astype(dtype), DATA.astype(dtype))
    assert out.sum.dtype == out.norms.dtype == jnp.float32


def test_aux_shapes():
    def fun(params, x):
        return jnp.sum(x) + linear(params, params), (jnp.sum(x), x[:, 0], x[..., 1], x)

    grad_fn = clipped_grad(fun, clip_norm=1.0, has_aux=True)
    _, aux = grad_fn(ZEROS, jnp.zeros((15, 4, 9, 10)))
    shapes = [(15,), (15, 4, 10), (15, 4, 9), (15, 4, 9, 10)]
    assert [leaf.shape for leaf in aux] == shapes


@each("bad", in_full([np.nan, np.inf, -np.inf], np.inf))
@each("style", STYLES)
def test_nan_safe_norm_check_produces_finite_output(bad, style):
    grad_fn = clipped_grad(one_example, clip_norm=1.0, style=style)
    data = DATA[:8].at[3].set(bad)
    assert np.all(np.isfinite(grad_fn(ZEROS, data).sum))
    assert not np.any(grad_fn(ZEROS, data[3:4]).sum)


# Gradients of a quadratic loss: 1, −2 and −5.
W, X = jnp.array([2.0]), jnp.array([[1.0], [4.0], [7.0]])
pieces = each(
    ("memory", "strategy"),
    tuples_in_full(
        [("default", "auto"), ("low", "bk"), ("low", "per_example")], ("low", "bk")
    ),
    ids=str,
)
"""Where they have microbatches of None, 1 and 3."""


def quadratic(params, x):
    return 0.5 * jnp.mean((jnp.broadcast_to(params, x.shape) - x) ** 2)


def quadratic_with_aux(params, x):
    return quadratic(params, x), {"key": x}


def quadratic_grad(*, clip_norm: Any = 2.5, **options):
    return clipped_grad(quadratic, clip_norm=clip_norm, **options)


def test_validate_args_overlap():
    """Parameters and examples are arguments of their own, and cannot overlap."""
    with pytest.raises(TypeError):
        quadratic_grad()(W)  # pyrefly: ignore[missing-argument]


def test_validate_args_empty_batch():
    with pytest.raises(ValueError, match="share one leading axis"):
        quadratic_grad()(W, ())


def test_validate_args_inconsistent_batch_size():
    with pytest.raises(ValueError, match="share one leading axis"):
        quadratic_grad()(jnp.zeros(3), (jnp.zeros((10, 3)), jnp.zeros(5)))


def test_sum_clipped_grad_basic():
    np.testing.assert_allclose(quadratic_grad()(W, X).sum, [-3.5], rtol=1e-6)


@each("dtype", [jnp.float16, jnp.bfloat16])
def test_sum_clipped_grad_float16(dtype):
    total = jax.jit(quadratic_grad())(W.astype(dtype), X.astype(dtype)).sum
    np.testing.assert_allclose(total, [-3.5], rtol=1e-6)


@pieces
def test_sum_clipped_grad_with_rescale(memory, strategy):
    grad_fn = quadratic_grad(style="unit", memory=memory, strategy=strategy)
    np.testing.assert_allclose(grad_fn(W, X).sum, [-3.5 / 2.5], rtol=1e-6)


@pieces
def test_sum_clipped_grad_with_padding_examples(memory, strategy):
    grad_fn = jax.jit(quadratic_grad(style="unit", memory=memory, strategy=strategy))
    for padding, right in ((0, -1.4), (3, 0.0), (2, 0.4)):
        total = grad_fn(W, X, np.arange(3) < 3 - padding).sum
        np.testing.assert_allclose(total, [right], atol=1e-6)


@pieces
def test_sum_clipped_grad_has_aux(memory, strategy):
    options = {"memory": memory, "strategy": strategy, "has_aux": True}
    out, aux = clipped_grad(quadratic_with_aux, clip_norm=10.0, **options)(W, X)
    np.testing.assert_allclose(out.sum, [-6.0], rtol=1e-6)
    np.testing.assert_array_equal(aux["key"], X)


@pieces
def test_sum_clipped_grad_return_metrics(memory, strategy):
    out = quadratic_grad(clip_norm=10.0, memory=memory, strategy=strategy)(W, X)
    np.testing.assert_allclose(out.sum, [-6.0], rtol=1e-6)
    np.testing.assert_allclose(out.norms, [1, 2, 5], rtol=1e-6)


@pieces
def test_sum_clipped_grad_leaf_scales(memory, strategy):
    def loss(params, x):
        return jnp.sum((params["w"] * x + params["b"] - x) ** 2)

    grad_fn = clipped_grad(
        loss,
        clip_norm=1.0,
        transform=lambda g: {"w": 0.1 * g["w"], "b": g["b"]},
        memory=memory,
        strategy=strategy,
    )
    params = {"w": jnp.array([2.0]), "b": jnp.array([1.0])}
    total = grad_fn(params, jnp.array([[1.0], [2.0]])).sum
    one, other = np.hypot(0.4, 4), np.hypot(1.2, 6)
    np.testing.assert_allclose(total["w"], [0.4 / one + 1.2 / other], rtol=1e-5)
    np.testing.assert_allclose(total["b"], [4 / one + 6 / other], rtol=1e-5)


@pieces
def test_sum_clipped_grad_extra_batch_axis(memory, strategy):
    """Two users with three examples each."""
    users = jnp.array([[[1.0], [2.0], [3.0]], [[3.0], [4.0], [5.0]]])
    options = {"memory": memory, "strategy": strategy, "has_aux": True}
    grad_fn = clipped_grad(quadratic_with_aux, clip_norm=1000.0, **options)
    out, _ = grad_fn(W, users)
    expected = jax.grad(quadratic)(W, users.reshape(6, 1))
    np.testing.assert_allclose(out.sum / 2, expected, rtol=1e-6)


@each("has_aux", [True, False])
def test_values_and_sum_per_example_clipped_grads(has_aux):
    fun = quadratic_with_aux if has_aux else quadratic
    found = clipped_grad(fun, clip_norm=10.0, has_aux=has_aux)(W, X)
    out = found[0] if has_aux else found
    np.testing.assert_allclose(out.losses, [0.5, 2.0, 12.5], rtol=1e-6)
    np.testing.assert_allclose(out.sum, [-6.0], rtol=1e-6)


def test_sum_clipped_grad_pytree_params_and_data():
    """Several batched arguments are one tuple."""

    def logistic(params, inputs, targets):
        logits = inputs @ params["weights"] + params["bias"]
        return -jnp.sum(jax.nn.log_softmax(logits) * targets)

    params = {"weights": jnp.array([[1.0, 0.0], [2.0, 0.0]]), "bias": jnp.zeros(2)}
    data = jnp.array([[1.0, 2.0], [3.0, 4.0]]), jnp.array([[0.0, 1.0], [1.0, 0.0]])
    grad_fn = clipped_grad(lambda params, each: logistic(params, *each), clip_norm=1.0)
    total = jax.jit(grad_fn)(params, data).sum
    assert jax.tree.structure(total) == jax.tree.structure(params)


def test_sum_clipped_grad_prng_key():
    def fun(params, x, key):
        return params["w"] * x + params["b"] * jax.random.normal(key)

    params = {"w": jnp.array(2.5), "b": jnp.array(1.0)}
    keys = jax.random.split(jax.random.key(0), 3)
    grad_fn = clipped_grad(fun, clip_norm=1.0)
    total = grad_fn(params, jnp.array([10.0, 20.0, 30.0]), keys=keys).sum
    assert jax.tree.structure(total) == jax.tree.structure(params)


def test_arguments_that_are_not_batched():
    """In a closure, or among the parameters where they change from call to call."""

    def fun(params, x, temperature):
        return quadratic(params, x) / temperature

    closed = clipped_grad(lambda params, x: fun(params, x, 2.0), clip_norm=9.0)
    given = clipped_grad(
        lambda both, x: fun(both["w"], x, both["temperature"]),
        clip_norm=9.0,
        trainable={"w": True, "temperature": False},
    )
    for temperature in itertools.chain([2.0], [4.0]):
        both = {"w": W, "temperature": jnp.float32(temperature)}
        out = given(both, X)
        assert out.sum["temperature"] is None
        np.testing.assert_allclose(out.sum["w"] * temperature, [-6.0], rtol=1e-6)
    np.testing.assert_allclose(closed(W, X).sum, [-3.0], rtol=1e-6)
