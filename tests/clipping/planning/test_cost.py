"""What is expected to be fastest, where nothing is measured."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from oracle import check, draw, read

from tanager import _heap
from tanager.clipping.analysis.reading import read_loss
from tanager.clipping.planning import autotune, choices, cost
from tanager.clipping.planning.choices import choose, plan_clipping
from tanager.clipping.planning.cost import DIRECT, RETAINED, Method


def convolution(side, into, out, kernel, groups, stride, rows, spread=1):
    w = jnp.ones((kernel, kernel, into // groups, out))
    x = jnp.ones((rows, side, side, into))
    return read(convolved(kernel, groups, stride, spread), w, x)[1][0]


def convolved(kernel, groups, stride, spread):
    def loss(w, x):
        padding = "SAME" if spread == 1 else [(kernel - 1, kernel - 1)] * 2
        y = lax.conv_general_dilated(
            x[None],
            w,
            (stride, stride),
            padding,
            lhs_dilation=(spread, spread),
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=groups,
        )
        return jnp.sum(y**2)

    return loss


def looked_up(table, ids):
    return jnp.sum(jnp.sin(table[ids]))


def multiplied(w, x):
    return jnp.sum(jnp.sin(x @ w))


def planned(loss, params, batch):
    """The one method of a plan for which nothing was measured."""
    (method,) = plan_clipping(read(loss, params, batch)[0], len(batch), "auto").methods
    return method


# Fastest in `benchmarks/costs.py`, and how many times as long `vmap` takes there.
MEASURED = [
    ((8, 48, 48, 7, 48, 1, 8), "crossed", 84),
    ((16, 96, 96, 3, 96, 1, 8), "crossed", 12),
    ((16, 96, 96, 3, 96, 2, 8), "patches", 33),
    ((8, 32, 64, 3, 32, 1, 4), "crossed", 440),
    ((8, 32, 32, 3, 8, 1, 4), "crossed", 240),
    ((16, 64, 64, 3, 1, 1, 16), "crossed", 4.8),
    # To few channels, and transposed (the last number dilates x).
    ((28, 32, 1, 4, 1, 1, 16), "crossed", 11),
    ((7, 32, 1, 4, 1, 1, 16, 4), "gathered", 170),
    ((7, 32, 16, 4, 1, 1, 16, 4), "gathered", 80),
    ((16, 32, 16, 4, 1, 1, 16, 2), "gathered", 20),
]


@pytest.mark.cpu
@pytest.mark.parametrize(("shape", "fastest", "times"), MEASURED)
def test_the_fastest_way_is_expected_and_vmap_not_tried(shape, fastest, times):
    group, rows = convolution(*shape), shape[6]
    seconds = {
        name: cost.estimate(group, cost.Method(name, cost.RETAINED), rows).seconds
        for name in group.gradients()
    }
    assert min(seconds, key=lambda name: seconds[name]) == fastest
    assert times / 5 < seconds["vmap"] / seconds[fastest] < 5 * times
    assert "retained:vmap" not in autotune._worth_trying(group, rows)


@pytest.mark.parametrize(("side", "channels"), [(32, 64), (16, 128), (8, 256)])
def test_on_a_gpu_no_convolution_is_compiled_to_be_measured(
    side, channels, monkeypatch
):
    """For (8, 256), gradients by convolutions took 24 and 43 s to compile there."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    group = convolution(side, channels, channels, 3, 1, 1, 16)
    seconds = {m: cost.estimate(group, m, 256).seconds for m in cost.precise(group)}
    assert min(seconds, key=lambda method: seconds[method]).norm == "patches"
    parts = autotune._worth_trying(group, 256)
    assert not {"crossed", "vmap"} & {part.split(":")[1] for part in parts}


@pytest.mark.parametrize("strategy", ["auto", "bk_mixopt"])
@pytest.mark.parametrize(("side", "channels"), [(32, 64), (16, 128), (8, 256)])
def test_on_a_tpu_no_gradient_of_a_kernel_is_formed_by_vmap(
    side, channels, strategy, monkeypatch
):
    """XLA compiled them to 27 to 31 times the operations, for 32 examples."""
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    group = convolution(side, channels, channels, 3, 1, 1, 32)
    estimate = functools.partial(cost.estimate, rows=32)
    (chosen,) = choose(strategy, [group], 32, math.inf, estimate)
    assert "vmap" not in chosen


@pytest.mark.parametrize(("backend", "share"), [("cpu", 1), ("gpu", 1), ("tpu", 0.4)])
def test_on_a_tpu_a_smaller_part_of_the_activations_may_be_held(
    backend, share, monkeypatch
):
    """16 MiB are always free."""
    program = read_loss(lambda w, x: jnp.sum(x @ w), jnp.ones((3, 4)), jnp.ones(3))
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    most = []
    monkeypatch.setattr(choices, "choose", lambda *given: most.append(given[3]) or [])
    plan_clipping(program, 2**24, "auto")
    plan_clipping(program, 16, "auto")
    assert most == [pytest.approx(share * 2**24 * program.activations), 2**24]


# Rows, width, positions and B; the last two have few rows and many positions.
TABLES = [
    ((5000, 64, 1, 16), Method("gram", DIRECT)),
    ((5000, 64, 128, 16), Method("gram", DIRECT)),
    ((30000, 16, 128, 16), Method("gram", DIRECT)),
    ((200, 512, 197, 8), Method("vmap", RETAINED)),
    ((50, 256, 64, 32), Method("vmap", RETAINED)),
]


@pytest.mark.parametrize(("shape", "fastest"), TABLES)
@pytest.mark.parametrize("kept", [False, True])
def test_a_table_is_formed_for_each_example_only_if_it_is_small(
    shape, fastest, kept, monkeypatch
):
    monkeypatch.setattr(_heap, "_active", kept)
    size, width, positions, rows = shape
    table, ids = jnp.ones((size, width)), jnp.zeros((rows, positions), int)
    (group,) = read(looked_up, table, ids)[1]
    seconds = {m: cost.estimate(group, m, rows).seconds for m in cost.candidates(group)}
    assert min(seconds, key=lambda method: seconds[method]) == fastest
    if fastest.norm == "gram":
        assert planned(looked_up, table, ids) == fastest


@pytest.mark.cpu
def test_new_pages_count_where_the_process_gives_its_memory_back(monkeypatch):
    def seconds(shape, rows, kept):
        monkeypatch.setattr(_heap, "_active", kept)
        (group,) = read(multiplied, jnp.ones(shape), jnp.ones((rows, 8, shape[0])))[1]
        return cost.estimate(group, Method("vmap", RETAINED), rows).seconds

    small, large = ((64, 64), 8), ((1024, 1024), 16)
    assert seconds(*small, kept=False) == seconds(*small, kept=True)
    more = seconds(*large, kept=False) - seconds(*large, kept=True)
    written = 16 * (4 * 1024**2 - 4 * 8 * 2 * 1024)
    assert more == pytest.approx(written / cost._FRESH)


@pytest.mark.cpu
def test_pages_that_a_measurement_of_few_rows_misses_are_added(monkeypatch):
    rows = 64
    (group,) = read(multiplied, jnp.ones((512, 512)), jnp.ones((rows, 64, 512)))[1]
    few, method = autotune.measured_rows(group, rows), Method("vmap", RETAINED)
    assert few < rows
    timings = autotune.Timings()
    timings._seconds = {f"{autotune._signature(group, few)}:retained:vmap": 1e-3}
    monkeypatch.setattr(_heap, "_active", True)
    assert timings.known(group, method, rows) == 1e-3 * rows / few
    monkeypatch.setattr(_heap, "_active", False)
    new = cost.clearing(group, method, rows)
    new -= cost.clearing(group, method, few) * rows / few
    assert new > 0
    assert timings.known(group, method, rows) == 1e-3 * rows / few + new


def test_sums_are_those_of_the_gradients():
    w, x = draw(0, (4, 4, 8, 1), (4, 7, 7, 8))
    loss = convolved(4, 1, 1, 4)
    assert planned(loss, jnp.asarray(w), jnp.asarray(x)).norm == "gathered"
    check(loss, w, x, strategies=("auto",), dtypes=("float32",))
    (table,) = draw(1, (3000, 16))
    ids = np.random.default_rng(2).integers(0, 40, (4, 12))
    assert planned(looked_up, jnp.asarray(table), jnp.asarray(ids)).norm == "gram"
    check(looked_up, table, ids, strategies=("auto",), dtypes=("float32",))
