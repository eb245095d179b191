"""Embeddings, by every method, against explicit gradients in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from oracle import check, distinct, draw
from rule_cases import BOTH, ROWS, curve, only_group

from cases import in_full, tuples_in_full
from tanager.clipping import clipped_grad


TABLE = (5, 3)


LOOKUPS = {
    "one row": (lambda t, i: t[i[0]], TABLE),
    "rows": (lambda t, i: t[i], TABLE),
    "rows of rank 2": (lambda t, i: t[i.reshape(2, 3)], TABLE),
    "rows of a rank 3 table": (lambda t, i: t[i], (5, 2, 3)),
    "numbers of a vector": (lambda t, i: t[i], (5,)),
    "take": (lambda t, i: jnp.take(t, i, axis=0, mode="clip"), TABLE),
    "take columns": (lambda t, i: jnp.take(t, i, axis=1, mode="clip"), (3, 5)),
    "promise": (lambda t, i: t.at[i].get(mode="promise_in_bounds"), TABLE),
    "one row by slicing": (lambda t, i: lax.dynamic_slice_in_dim(t, i[0], 2), TABLE),
    "one row of a stack": (lambda t, i: jax.vmap(lambda j: t[j])(i), (5, 2, 3)),
    "one column": (lambda t, i: t[:, i[0]], (3, 5)),
    "mapped": (lambda t, i: jax.vmap(lambda j: t[j])(i), TABLE),
    "mapped columns": (lambda t, i: jax.vmap(lambda j: t[:, j], 0, 1)(i), (3, 5)),
    "pairs": (lambda t, i: t[i, i[::-1] % 3], TABLE),
}


MORE = "rows of rank 2", "numbers of a vector", "take columns", "promise", "mapped"


@pytest.mark.parametrize("name", in_full(LOOKUPS, *MORE))
def test_embeddings(name):
    look_up, shape = LOOKUPS[name]
    (table,) = draw(6, shape)
    indices = np.random.default_rng(6).integers(0, 5, (ROWS, 6))
    indices[0, 1:4] = indices[0, 0]  # repeated

    def loss(table, indices):
        return curve(look_up(table, indices))

    fast = name not in ("one row by slicing", "pairs")
    assert (only_group(loss, table, indices).rule.name == "gather") == fast
    dtypes = BOTH if name in ("rows", "pairs") else ("float64",)
    check(loss, table, indices, methods=True, dtypes=dtypes)


def test_a_sum_of_embeddings_is_one_program_whoever_is_masked():
    """In another, XLA may round otherwise what an example adds up for itself."""
    table, indices = jnp.ones(TABLE), jnp.zeros((ROWS, 6), jnp.int32)
    grad_fn = clipped_grad(lambda t, i: curve(t[i]), clip_norm=1.0, strategy="bk")
    program = str(jax.make_jaxpr(grad_fn)(table, indices, jnp.ones(ROWS, bool)))
    assert "scatter-add" in program and "cond[" not in program


@pytest.mark.parametrize("mode", ["fill", "clip"])
def test_embeddings_of_indices_out_of_bounds(mode):
    (table,) = draw(7, TABLE)
    indices = np.array([[0, 5, 7, 2], [1, 1, 1, 1], [-1, -9, 4, 4]])

    def loss(table, indices):
        return curve(table.at[indices].get(mode=mode, fill_value=0.5))

    check(loss, table, indices, methods=True)


@pytest.mark.parametrize("mode", ["fill", "clip"])
def test_starts_out_of_bounds_along_an_axis_that_is_taken_whole(mode):
    (table,) = draw(7, TABLE)
    starts = np.array([[[0, 0], [4, 1]], [[1, 0], [1, 0]], [[-1, 0], [3, 0]]])
    numbers = lax.GatherDimensionNumbers((1,), (0,), (0, 1))

    def loss(table, starts):
        operands = table, starts, numbers
        return curve(lax.gather(*operands, (1, 3), mode=mode, fill_value=0.5))

    assert only_group(loss, table, starts).rule.name == "gather"
    check(loss, table, starts, methods=True)


def test_embeddings_of_narrow_indices():
    (table,) = draw(7, (100, 3))
    batch = {
        "u": np.array([[0, 99], [1, 1], [255, 7]], np.uint8),
        "i": np.array([[0, -1], [1, 1], [99, -100]], np.int8),
    }

    def loss(table, example):
        return curve(table[example["u"]]) + curve(table[example["i"]] ** 2)

    check(loss, table, batch, methods=True)


@pytest.mark.parametrize(
    ("dtype", "mode"),
    tuples_in_full(
        [
            *((np.uint8, "fill"), (np.uint8, "clip"), (np.int8, "fill")),
            *((np.int8, "clip"), (np.uint16, "promise_in_bounds")),
        ],
        *((np.uint8, "clip"), (np.int8, "fill")),
    ),
)
def test_rows_by_numbers_that_count_fewer_than_the_table_has(dtype, mode):
    dimensions = lax.GatherDimensionNumbers(
        offset_dims=(1,), collapsed_slice_dims=(0,), start_index_map=(0,)
    )
    rows = np.random.default_rng(0).integers(0, 100, (4, 5)).astype(dtype)

    def loss(w, rows):
        taken = lax.gather(w, rows[:, None], dimensions, (1, 3), mode=mode)
        return jnp.sum(jnp.tanh(taken))

    (w,) = draw(0, (300, 3))
    w = jnp.float32(w)
    # JAX itself takes other gradients of rows by narrow numbers.
    expected = clipped_grad(loss, clip_norm=0.5)(w, rows.astype(np.int32))
    for strategy in distinct(loss, w, rows, ("bk", "bk_mixopt")):
        found = clipped_grad(loss, clip_norm=0.5, strategy=strategy)(w, rows)
        np.testing.assert_allclose(found.norms, expected.norms, rtol=1e-5)
        np.testing.assert_allclose(found.sum, expected.sum, rtol=1e-5, atol=1e-6)
