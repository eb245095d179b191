"""Throughput of whole logical steps on 1…n devices: what adding devices brings.

A logical step is what `tanager train` does between two updates, by the compiled
functions of training: an accumulator of zeros, some physical batches added to it, and
one update (with noise, if private). The batches are on the devices beforehand.

Scaling is weak: each device has the same number of rows of each physical batch. Ideal
is the throughput of one device times their number. Programs take turns as in
`tanager.bench.timing`; all are in memory at once.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from tanager import _validate as validate
from tanager.bench import cluster, programs
from tanager.bench.collectives import exchanged
from tanager.bench.machine import machine
from tanager.bench.timing import Measurement, describe, in_turns
from tanager.bench.workload import Workload
from tanager.clipping.analysis.dtypes import accumulation_dtype
from tanager.parallel.layout import Layout
from tanager.sampling import PhysicalBatch


class LogicalStep:
    """Whole logical steps on some devices, each going on from the one before.

    Args:
        workload: model and data.
        strategy: ``"sgd"`` or a clipping strategy.
        devices: how many.
        physical_batch: rows of a physical batch on each device.
        chunks: physical batches of a logical one.

    Raises:
        ValueError: there is no such strategy, or there are too few devices.
    """

    def __init__(
        self,
        workload: Workload,
        strategy: str,
        devices: int,
        physical_batch: int,
        chunks: int,
    ):
        name, _, memory = strategy.partition(":")
        self._workload = workload
        self._layout = Layout(devices)
        self._step = workload.step(name, memory or "default", self._layout)
        self._size = devices * physical_batch
        self._chunks = chunks
        self._done = 0
        self._state: Any = None
        self._batch: Any = None

    def prepare(
        self, report: Callable[[str], None] = lambda text: None
    ) -> tuple[dict[str, int], dict[str, int]]:
        """Place what is computed on, compile, and read what devices exchange.

        Given ``"auto"``, measures what it does not know of this device yet.

        Args:
            report: called with what is being measured.

        Returns:
            Bytes by kind of collective operation, see `exchanged`: of adding one
            physical batch, and of the update.
        """
        params, step = self._workload.params(), self._step
        examples = jax.tree.map(np.asarray, self._workload.batch(self._size))
        step.explain(params, examples, self._size, report)
        indices = np.arange(self._size, dtype=np.int32)
        everyone = np.ones(self._size, bool)
        batch = PhysicalBatch(examples, everyone, indices)
        self._batch = self._layout.rows(batch)
        self._state = step.start(params)
        accumulate, update = step.lowered(self._state, self._batch)
        return _exchanged(accumulate), _exchanged(update)

    def run(self) -> None:
        """Make one logical step and wait for it."""
        step, state, number = self._step, self._state, self._done
        total, key = step.zero(), step.augmentation_key(number)
        for _ in range(self._chunks):
            total = step.accumulate(state.params, total, self._batch, key)
        drawn = step.draw(number)
        self._state, counts, _ = step.apply(state, total, drawn, np.int32(number))
        jax.block_until_ready((self._state, counts))
        self._done += 1


@dataclasses.dataclass(frozen=True)
class ScalingBench:
    """The result of `bench_scaling`.

    Attributes:
        rows: one record for each strategy and number of devices, see `bench_scaling`.
        parallel: Amdahl's p of each strategy, see `cluster.amdahl_fit`; None without
            one device and several.
        stopped: whether Ctrl-C came first.
    """

    rows: list[dict[str, Any]]
    parallel: dict[str, float | None]
    stopped: bool

    def one_device_seconds(self, strategy: str) -> float | None:
        """Return the median seconds of a logical step on one device, if measured."""
        for row in self.rows:
            if (row["strategy"], row["devices"]) == (strategy, 1):
                return row["seconds"]
        return None


def bench_scaling(
    workload: Workload,
    strategies: Sequence[str],
    *,
    physical_batch: int,
    chunks: int = 4,
    devices: Sequence[int] = (),
    repeats: int = 5,
    report: Callable[[str], None] = lambda text: None,
    clock: Callable[[], float] = time.perf_counter,
) -> ScalingBench:
    """Time whole logical steps on different numbers of devices.

    A row has `strategy`, `devices`, `examples` (of a logical step, on all devices),
    `seconds` (median, of a logical step), `seconds_spread` (interquartile range),
    `examples_per_second`, `share_of_ideal` (throughput over devices × that of one
    device; None without that), and `error`. And what devices exchange, as XLA compiled
    it: `accumulate_bytes` of each physical batch and `update_bytes` of the update, by
    kind of operation; `bytes_per_step` in all; and `bytes_over_parameters`, that over
    `parameter_bytes`.

    Args:
        workload: model and data.
        strategies: ``"sgd"``, which is not private, and names of clipping strategies.
        physical_batch: rows of each physical batch on each device.
        chunks: physical batches of a logical batch.
        devices: how many; by default 1, 2, 4, … and all there are.
        repeats: rounds of timing.
        report: called with what is being done.
        clock: seconds, for tests.

    Raises:
        ValueError: an unknown strategy, or a number out of range. A strategy that
            fails later is a row with an `error`.

    References:
        Rodriguez Beltran et al. 2024, "Towards efficient and scalable training of
        differentially private deep learning", figures 7, A.4 and A.5.
    """
    validate.whole(
        physical_batch=physical_batch, chunks=chunks, repeats=repeats, at_least=1
    )
    for strategy in strategies:
        validate.one_of(programs.training_names(), strategy=strategy)
    counts = dict.fromkeys(devices or cluster.doubling(jax.device_count()))
    for count in counts:
        Layout(count)
    pairs = [
        (strategy, count)
        for strategy in dict.fromkeys(strategies)
        for count in sorted(counts)
    ]
    measured = {pair: Measurement() for pair in pairs}
    exchanges: dict[tuple[str, int], tuple[dict[str, int], dict[str, int]]] = {}
    runs: dict[tuple[str, int], Callable[[int], None]] = {}
    stopped = False
    try:
        with workload.computing():
            for pair in pairs:
                strategy, count = pair
                report(f"compiling {strategy} on {count}")
                try:
                    made = LogicalStep(workload, *pair, physical_batch, chunks)
                    exchanges[pair] = made.prepare(report)
                    # Twice: the second step is given what the first returned.
                    made.run()
                    made.run()
                    runs[pair] = lambda number, made=made: made.run()
                except Exception as error:
                    measured[pair].error = describe(error)
            in_turns(runs, measured, repeats, report, clock)
    except KeyboardInterrupt:
        stopped = True
    size = parameter_bytes(workload)
    rows = [
        _row(pair, measured, exchanges.get(pair), physical_batch, chunks, size)
        for pair in pairs
    ]
    return ScalingBench(rows, _parallel(rows), stopped)


def parameter_bytes(workload: Workload) -> int:
    """Return the bytes of a sum of gradients: parameters in float32, or wider."""
    return sum(
        leaf.size * np.dtype(accumulation_dtype(leaf.dtype)).itemsize
        for leaf in jax.tree.leaves(workload.param_shapes)
    )


def crowding(devices: int) -> str | None:
    """Return a warning if virtual devices share the cores of a CPU.

    Args:
        devices: the largest number of them that is used at once.
    """
    found = machine()
    if found["backend"] != "cpu" or not found["cores"] or devices <= found["cores"]:
        return None
    return (
        f"{devices} virtual devices share {found['cores']} cores of a CPU: they cannot "
        "be faster than the cores, so the share of ideal does not apply to real devices"
    )


def _exchanged(lowered: jax.stages.Lowered) -> dict[str, int]:
    text = lowered.compile().as_text()
    if text is None:
        raise RuntimeError("this device's compiler does not show its programs")
    return exchanged(text)


def _row(
    pair: tuple[str, int],
    measured: dict[tuple[str, int], Measurement],
    exchange: tuple[dict[str, int], dict[str, int]] | None,
    physical_batch: int,
    chunks: int,
    size: int,
) -> dict[str, Any]:
    strategy, devices = pair
    found = measured[pair]
    one = measured.get((strategy, 1), Measurement()).median
    seconds = found.median
    if seconds is None and found.error is None:
        found.error = "stopped before it was timed"
    examples = devices * physical_batch * chunks
    row = {
        "strategy": strategy,
        "devices": devices,
        "examples": examples,
        "seconds": seconds,
        "seconds_spread": found.spread,
        "examples_per_second": examples / seconds if seconds else None,
        # Each device has the same number of examples: that of seconds is enough.
        "share_of_ideal": one / seconds if one and seconds else None,
        "accumulate_bytes": None,
        "update_bytes": None,
        "bytes_per_step": None,
        "bytes_over_parameters": None,
        "parameter_bytes": size,
        "error": found.error,
    }
    if exchange is not None:
        accumulate, update = exchange
        total = chunks * sum(accumulate.values()) + sum(update.values())
        row |= {
            "accumulate_bytes": accumulate,
            "update_bytes": update,
            "bytes_per_step": total,
            "bytes_over_parameters": total / size,
        }
    return row


def _parallel(rows: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    speedups: dict[str, dict[int, float]] = {}
    for row in rows:
        mine = speedups.setdefault(row["strategy"], {})
        if row["share_of_ideal"] is not None:
            mine[row["devices"]] = row["devices"] * row["share_of_ideal"]
    return {name: cluster.amdahl_fit(mine) for name, mine in speedups.items()}
