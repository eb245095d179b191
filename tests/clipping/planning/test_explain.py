"""The table of taps, as text and as JSON."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from oracle import curve, draw

from tanager.clipping import clipped_grad
from tanager.clipping.analysis.standardise import standardise


def loss(params, example):
    y = lax.conv_general_dilated(
        example[None],
        params["kernel"],
        (1, 1),
        "SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )[0]
    hidden = jnp.mean(jnp.tanh(y + params["bias"][None, None]), axis=(0, 1))
    return jnp.sum((hidden @ params["tied"]) @ params["tied"].T @ params["head"])


def problem():
    kernel, bias, tied, head, x = draw(
        0, (3, 3, 2, 5), (5,), (5, 5), (5, 3), (6, 4, 4, 2)
    )
    params = {"bias": bias, "head": head, "kernel": kernel, "tied": tied}
    return jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), (params, x))


@pytest.mark.parametrize("strategy", ["ghost", "bk", "bk_mixopt", "auto"])
def test_the_table_has_a_row_for_each_cell(strategy):
    params, x = problem()
    table = clipped_grad(loss, clip_norm=1.0, strategy=strategy).explain(params, x)
    assert (table.strategy, table.rows) == (strategy, 6)
    assert [row.tap for row in table.taps] == sorted(row.tap for row in table.taps)
    # Leaves in the order of jax.tree.leaves: bias, head, kernel, tied.
    rows = {row.leaves: row for row in table.taps}
    assert set(rows) == {(0,), (1,), (2,), (3,)}
    kernel = rows[2,]
    assert kernel.equation == (
        "conv_general_dilated float32[1,4,4,2] float32[3,3,2,5] → float32[1,4,4,5]"
    )
    # 2 · B · positions · weights, as a plain weight gradient would take.
    assert kernel.flops == 2 * 6 * 16 * (3 * 3 * 2 * 5)
    assert rows[1,].flops == 2 * 6 * 15
    assert rows[3,].flops == 2 * (2 * 6 * 25)
    assert "shared parameters" in rows[3,].why
    assert all(row.expected_seconds > 0 and row.bytes > 0 for row in table.taps)
    assert all(row.seconds is None or row.seconds > 0 for row in table.taps)
    # Elementwise taps and shared parameters keep the gradients their norms came from.
    assert rows[0,].total == rows[3,].total == "retained"
    if strategy == "ghost":
        assert rows[2,].total != "retained" and rows[1,].total == "batched"


def test_gram_and_gradient_norms_are_told_apart():
    params, x = problem()
    ghost = clipped_grad(loss, clip_norm=1.0, strategy="ghost").explain(params, x)
    mixed = clipped_grad(loss, clip_norm=1.0, strategy="mixed_ghost").explain(params, x)

    def norm_of_kernel(table):
        (row,) = [row for row in table.taps if row.leaves == (2,)]
        return row.norm, row.why

    norm, why = norm_of_kernel(ghost)
    assert "gram" in norm
    assert why == "Gram wherever there is one"
    norm, why = norm_of_kernel(mixed)
    assert norm.endswith(" gradients")
    assert why == "2T² = 512 > K·N = 90"


@pytest.mark.parametrize("strategy", ["bk", "bk_mixed", "auto"])
@pytest.mark.parametrize("convolves", [False, True])
def test_a_standardised_weight_that_is_added_to_has_no_gram(convolves, strategy):
    shape = (3, 3, 2, 4) if convolves else (2, 4)
    w, x = (jnp.float32(array) for array in draw(1, shape, (6, 4, 4, 2)))

    def loss(w, x):
        own = standardise(w) + jnp.ones(shape, w.dtype)
        if not convolves:
            return curve(x.reshape(-1, 2) @ own)
        layout = ("NHWC", "HWIO", "NHWC")
        y = lax.conv_general_dilated(
            x[None], own, (1, 1), "SAME", dimension_numbers=layout
        )
        return curve(y)

    grad_fn = clipped_grad(loss, clip_norm=1.0, strategy=strategy)
    (row,) = grad_fn.explain(w, x).taps
    assert row.norm.endswith(" gradients")
    if not convolves:
        assert row.why == "no fast rule"
    elif strategy == "auto":
        assert "fastest of" in row.why
    else:
        assert row.why == "no Gram matrix here: gradients are formed"


@pytest.mark.parametrize("one, other", [("ghost", "bk"), ("mixed_ghost", "bk_mixed")])
def test_ghost_clipping_takes_the_methods_of_book_keeping(one, other):
    params, x = problem()
    first, second = (
        clipped_grad(loss, clip_norm=1.0, strategy=strategy).explain(params, x).taps
        for strategy in (one, other)
    )
    assert first == second


def test_the_text_is_a_table_with_one_line_for_each_row():
    params, x = problem()
    table = clipped_grad(loss, clip_norm=1.0, strategy="bk").explain(params, x)
    head, titles, *lines, last = str(table).splitlines()
    assert last == str(table.float_error)
    assert head == "strategy bk, physical batch of 6"
    assert titles.split() == [
        "taps",
        "equation",
        "norm",
        "η",
        "sum",
        "GFLOP",
        "MiB",
        "ms",
        "why",
    ]
    assert len(lines) == len(table.taps)
    column = titles.index("norm")
    for line, row in zip(lines, table.taps, strict=True):
        assert row.equation in line
        assert line[column:].startswith(row.norm)
        assert line.endswith(row.why)


def test_taps_that_are_alike_share_a_line():
    def deep(params, x):
        for weight in params:
            x = jnp.tanh(x @ weight)
        return jnp.sum(x)

    params = [jnp.ones((3, 3), jnp.float32)] * 5
    table = clipped_grad(deep, clip_norm=1.0, strategy="bk").explain(
        params, jnp.ones((4, 3), jnp.float32)
    )
    head, _, *lines, _ = str(table).splitlines()
    assert len(table.taps) == 5
    assert head.endswith("figures are of one tap")
    assert len(lines) == 1
    assert lines[0].startswith("0, 1, … 4 (5)")


def test_the_json_is_plain_and_complete():
    params, x = problem()
    table = clipped_grad(loss, clip_norm=1.0, strategy="bk").explain(params, x)
    held = json.loads(json.dumps(table.as_json(), allow_nan=False))
    assert (held["strategy"], held["physical_batch_size"]) == ("bk", 6)
    assert [row["equation"] for row in held["taps"]] == [r.equation for r in table.taps]
    assert {"norm", "total", "why", "flops", "bytes", "seconds"} <= set(held["taps"][0])


def test_per_example_clipping_has_no_taps():
    params, x = problem()
    table = clipped_grad(loss, clip_norm=1.0, strategy="per_example").explain(params, x)
    assert not table.taps
    assert "there are no taps" in str(table)
    assert table.as_json()["taps"] == []


def test_explaining_computes_nothing_with_the_batch():
    # NaN everywhere: only shapes are looked at.
    params, x = problem()
    one = clipped_grad(loss, clip_norm=1.0, strategy="bk")
    spoilt = jax.tree.map(lambda leaf: jnp.full_like(leaf, np.nan), (params, x))
    assert str(one.explain(*spoilt)) == str(one.explain(params, x))
