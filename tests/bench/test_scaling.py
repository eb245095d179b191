import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

from tanager.bench import scaling
from tanager.bench.timing import Measurement
from tanager.bench.workload import Workload
from tanager.parallel.layout import AXIS, Layout
from tanager.training.norms import BINS


WORKLOAD = Workload("linear", (6,), classes=3)
PARAMETERS = 4 * (6 * 3 + 3)
# Seconds of each logical step: medians 2, 4, 6 and 8.
SECONDS = {
    ("sgd", 1): [2.0, 1.0, 2.0, 7.0],
    ("sgd", 2): [4.0, 4.0, 4.0, 4.0],
    ("bk", 1): [6.0, 6.0, 6.0, 6.0],
    ("bk", 2): [8.0, 8.0, 8.0, 8.0],
}


@pytest.fixture
def bench(monkeypatch):
    """Make the rows of what took `SECONDS`, and of what failed."""

    def run(failed=(), stopped=False, **options):
        def planted(pairs, *_):
            done = {
                pair: Measurement(seconds=SECONDS[pair])
                if pair not in failed
                else Measurement(error="RuntimeError: no rule for tap")
                for pair in pairs
            }
            return done, stopped

        monkeypatch.setattr(scaling, "in_turns", planted)
        settings: dict[str, Any] = {"physical_batch": 8, "chunks": 3}
        settings |= {"devices": (2, 1)} | options
        return scaling.bench_scaling(WORKLOAD, ("sgd", "bk"), **settings)

    return run


def column(found, name):
    return [row[name] for row in found.rows]


def test_rows_are_medians_of_whole_logical_steps(bench):
    assert bench(stopped=True).stopped
    found = bench()
    assert not found.stopped
    assert column(found, "strategy") == ["sgd", "sgd", "bk", "bk"]
    assert column(found, "devices") == [1, 2, 1, 2]
    assert column(found, "examples") == [24, 48, 24, 48]
    assert column(found, "seconds") == [2, 4, 6, 8]
    assert column(found, "examples_per_second") == [12, 12, 4, 6]
    assert column(found, "share_of_ideal") == [1, 12 / 24, 1, 6 / 8]
    # Amdahl's law is not that of a problem that grows.
    assert found.parallel == {}


def test_strong_scaling_divides_a_logical_batch_among_devices(bench):
    found = bench(logical_batch=48, chunks=4)
    assert column(found, "examples") == [48, 48, 48, 48]
    assert column(found, "examples_per_second") == [24, 12, 8, 6]
    assert column(found, "share_of_ideal") == [1, 1 / 4, 1, 3 / 8]
    # 1/S = (1 − p) + p/2, with S = 1/2 and 3/4.
    assert found.parallel == pytest.approx({"sgd": -2, "bk": -2 / 3})


def test_without_one_device_there_is_no_ideal(bench):
    strong = {"logical_batch": 48}
    assert bench(**strong, devices=(2,)).parallel == {"sgd": None, "bk": None}
    assert bench(**strong, failed={("bk", 2)}).parallel["bk"] is None
    for found in (bench(devices=(2,)), bench(failed={("sgd", 1), ("bk", 1)})):
        assert set(column(found, "share_of_ideal")) == {None}


def test_what_fails_is_a_row(bench):
    found = bench(failed={("bk", 2)})
    reason = "RuntimeError: no rule for tap"
    assert column(found, "error") == [None, None, None, reason]
    assert found.rows[3]["bytes_per_step"] is None


@pytest.mark.parametrize("strategy", ["sgd", "per_example"])
def test_devices_exchange_the_sum_of_gradients_once_for_each_logical_batch(strategy):
    found = scaling.bench_scaling(
        WORKLOAD, (strategy,), physical_batch=4, chunks=3, repeats=1
    )
    assert not found.stopped
    assert column(found, "error") == [None, None]
    assert column(found, "devices") == [1, 2]  # all there are
    one, two = found.rows
    assert one["bytes_per_step"] == 0
    # Besides the gradients, four counts of examples and a histogram.
    assert two["accumulate_bytes"] == {}
    exchanged = (1 if strategy == "sgd" else 2) * PARAMETERS + 4 * (4 + BINS)
    assert two["update_bytes"] == {"all-reduce": exchanged}
    assert two["bytes_per_step"] == exchanged
    assert column(found, "parameter_bytes") == [PARAMETERS] * 2
    sums = scaling.sum_bytes(WORKLOAD, strategy)
    assert sums == exchanged - 4 * (4 + BINS)
    assert two["bytes_over_parameters"] == exchanged / PARAMETERS
    assert two["examples"] == 24


@pytest.mark.parametrize(
    "strategy", [pytest.param("sgd", marks=pytest.mark.full), "per_example"]
)
def test_a_logical_step_is_training_s_own(strategy):
    """Three physical batches on two devices, and the update on their sum by hand."""
    made = scaling.LogicalStep(WORKLOAD, strategy, 2, physical_batch=4, chunks=3)
    made.prepare()
    made.run()
    step = WORKLOAD.step(strategy)
    params, batch = WORKLOAD.params(), WORKLOAD.batch(4)

    @jax.jit
    def total_of(params, batch, mask):
        total = step.grad_fn(params, batch, mask).sum
        total = jax.tree.map(lambda leaf: 2 * 3 * leaf, total)  # on each device
        if step.noise is None:
            return total
        return step.noise(step.noise.grid.round(total), 0)

    total = total_of(params, batch, np.ones(4, bool))
    expected = params.head.weight - 0.1 * total.head.weight / 500  # q·N = 500, C = 1
    found = np.asarray(made._state.params.head.weight)
    np.testing.assert_allclose(found, expected, atol=1e-7)
    made.run()
    assert not np.array_equal(made._state.params.head.weight, found)


@pytest.mark.parametrize(
    "strategy", [pytest.param("sgd", marks=pytest.mark.full), "per_example"]
)
def test_a_strong_logical_step_takes_the_same_examples_on_any_number_of_devices(
    strategy, monkeypatch
):
    made = []

    def first_step(pairs, prepare, *_):
        for pair in pairs:
            prepare(pair, Measurement())
        return {pair: Measurement(seconds=[1.0]) for pair in pairs}, False

    class Recorded(scaling.LogicalStep):
        def run(self):
            super().run()
            made.append((self.devices, np.asarray(self._state.params.head.weight)))

    monkeypatch.setattr(scaling, "LogicalStep", Recorded)
    monkeypatch.setattr(scaling, "in_turns", first_step)
    found = scaling.bench_scaling(
        WORKLOAD, (strategy,), physical_batch=4, logical_batch=24
    )
    assert column(found, "examples") == [24, 24]
    assert [devices for devices, _ in made] == [1, 1, 2, 2]
    np.testing.assert_allclose(made[0][1], made[2][1], rtol=1e-6)
    np.testing.assert_allclose(made[1][1], made[3][1], rtol=1e-6)


def test_sgd_clips_nothing_and_adds_no_noise():
    step = WORKLOAD.step("sgd", layout=Layout(2))
    assert step.grad_fn.clip_norm == np.inf
    assert step.noise is None
    assert step.layout.count == 2
    noise = WORKLOAD.step("bk").noise
    assert noise is not None
    assert noise.standard_deviation == pytest.approx(1, rel=1e-3)


def test_a_sum_of_gradients_is_float32_whatever_the_precision():
    assert scaling.parameter_bytes(WORKLOAD) == PARAMETERS
    low = Workload("linear", (6,), classes=3, precision="bfloat16")
    assert scaling.parameter_bytes(low) == PARAMETERS


def test_more_devices_than_cores_are_warned_of(monkeypatch):
    found = {"backend": "cpu", "cores": 2}
    monkeypatch.setattr(scaling, "machine", lambda: found)
    assert scaling.crowding(2) is None
    assert "3 virtual devices share 2 cores" in (scaling.crowding(3) or "")
    found["backend"] = "gpu"
    assert scaling.crowding(3) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"strategies": ("sdg",)}, "strategies (='sdg') is unknown: did you mean sgd?"),
        ({"chunks": 0}, "chunks (=0) must be at least 1"),
        (
            {"devices": (1, 3)},
            "devices (=3) must be at most 2, the devices that JAX finds",
        ),
        ({"devices": (0,)}, "devices (=0) must be at least 1"),
        (
            {"logical_batch": 12},
            "logical_batch (=12) must be a multiple of 8: each of 1, 2 devices takes "
            "physical batches of 4 rows; for example 16, or give --devices",
        ),
        ({"logical_batch": 0}, "logical_batch (=0) must be at least 1"),
    ],
)
def test_what_cannot_be_timed_is_refused(change, message):
    options = {"strategies": ("sgd",), "physical_batch": 4} | change
    with pytest.raises(ValueError, match=re.escape(message)):
        scaling.bench_scaling(WORKLOAD, **options)


LINE = '  %{0}.1 = {1} {0}(%p), channel_id=1, metadata={{op_name="a = b/psum(c)"}}\n'


@pytest.mark.parametrize(
    ("shapes", "size"),
    [
        ("f32[16,24]{1,0}", 4 * 16 * 24),
        ("f32[]", 4),
        ("bf16[8]{0:T(256)}", 16),
        ("pred[3]", 3),
        ("f8e4m3fn[5]", 5),
        ("(f32[2,3]{1,0}, s32[], f64[4]{0})", 24 + 4 + 32),
    ],
)
def test_bytes_are_of_the_results(shapes, size):
    assert scaling.exchanged(LINE.format("all-reduce", shapes)) == {"all-reduce": size}


def test_kinds_are_counted_apart_and_started_ones_once():
    program = (
        LINE.format("all-reduce", "f32[10]")
        + LINE.format("all-reduce", "s32[]")
        + LINE.format("reduce-scatter", "f32[4]")
        + "  %all-reduce-start.2 = f32[5]{0} all-reduce-start(%p)\n"
        + "  %done = f32[5]{0} all-reduce-done(%all-reduce-start.2)\n"
        + "  %use = f32[5]{0} fusion(%all-reduce.1), calls=%all-reduce\n"
    )
    assert scaling.exchanged(program) == {"all-reduce": 64, "reduce-scatter": 16}


def test_a_real_program_shows_what_its_devices_exchange():
    layout = Layout(2)

    def compiled(function):
        mapped = jax.shard_map(
            function,
            mesh=layout.mesh,
            in_specs=PartitionSpec(AXIS),
            out_specs=PartitionSpec(AXIS),
            check_vma=False,
        )
        return jax.jit(mapped).lower(jnp.ones((6, 5))).compile().as_text() or ""

    assert scaling.exchanged(compiled(lambda x: 2 * x)) == {}
    assert scaling.exchanged(compiled(lambda x: lax.psum(x, AXIS))) == {
        "all-reduce": 60
    }
