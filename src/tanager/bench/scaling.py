"""Throughput of whole logical steps on 1…n devices: what adding devices brings.

A logical step is what `tanager train` does between two updates, by the compiled
functions of training: an accumulator of zeros, some physical batches added to it, and
one update (with noise, if private). The batches are on the devices beforehand.

Each device has the same number of rows of each physical batch. Weak scaling: it has the
same number of physical batches too, so the logical batch grows with the devices. Strong
scaling: all devices divide the physical batches of one logical batch. Ideal is the
throughput of one device times their number. Programs take turns as in
`tanager.bench.timing`; all are in memory at once.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from tanager import _validate as validate
from tanager.bench import cluster, programs
from tanager.bench.machine import machine
from tanager.bench.timing import Measurement, in_turns
from tanager.bench.workload import Workload, logical_step
from tanager.clipping.analysis.dtypes import accumulation_dtype
from tanager.parallel.layout import Layout
from tanager.sampling import PhysicalBatch
from tanager.training import tuning


_KINDS = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
_CALL = re.compile(rf"= (.*?) ({_KINDS})(?:-start)?\(")
_ARRAY = re.compile(r"\b(pred|[a-z]+(\d+)\w*)\[([\d,]*)\]")


class _Pair(NamedTuple):
    strategy: str
    devices: int

    def __str__(self) -> str:
        return f"{self.strategy} on {self.devices}"


@dataclasses.dataclass(eq=False)
class LogicalStep:
    """Whole logical steps on some devices, each going on from the one before.

    `physical_batch` is of each device, which has the same examples; a logical batch has
    `chunks` of them.
    """

    workload: Workload
    strategy: str
    devices: int
    physical_batch: int
    chunks: int

    def __post_init__(self):
        self._layout = Layout(self.devices)
        self._step = self.workload.step(self.strategy, self._layout)
        self._done = 0

    def prepare(
        self, report: Callable[[str], None] = lambda text: None
    ) -> tuple[dict[str, int], dict[str, int]]:
        """Place what is computed on, compile, and return the bytes that are exchanged.

        They are by kind, see `exchanged`: of one physical batch, and of the update.
        """
        params, step = self.workload.params(), self._step
        size = self.devices * self.physical_batch
        examples = jax.tree.map(
            lambda leaf: np.concatenate([leaf] * self.devices),
            self.workload.batch(self.physical_batch),
        )
        tuning.explain(step, params, examples, size, report)
        indices = np.arange(size, dtype=np.int32)
        everyone = np.ones(size, bool)
        batch = PhysicalBatch(examples, everyone, indices)
        self._batch = self._layout.rows(batch)
        self._state = step.start(params)
        accumulate, update = (each.compile() for each in step.lowered(examples, size))
        return exchanged(accumulate.as_text()), exchanged(update.as_text())

    def run(self) -> None:
        """Make one logical step and wait for it."""
        batches = [self._batch] * self.chunks
        self._state = logical_step(self._step, self._state, batches, self._done)
        self._done += 1


@dataclasses.dataclass(frozen=True)
class ScalingBench:
    """Rows of `bench_scaling`, Amdahl's p of strategies, and whether it was stopped.

    Amdahl's law is that of a fixed problem: `parallel` is empty of weak scaling.
    """

    rows: list[dict[str, Any]]
    parallel: dict[str, float | None]
    stopped: bool


def bench_scaling(
    workload: Workload,
    strategies: Sequence[str],
    *,
    physical_batch: int,
    chunks: int = 4,
    logical_batch: int | None = None,
    devices: Sequence[int] = (),
    repeats: int = 5,
    report: Callable[[str], None] = lambda text: None,
) -> ScalingBench:
    """Time whole logical steps on 1, 2, 4, … devices and all there are, or as given.

    Scaling is strong if `logical_batch` is given: `chunks` then follows from it.
    `share_of_ideal` is throughput over devices × that of one device. What devices
    exchange is as XLA compiled it, by kind of operation: `accumulate_bytes` of each
    physical batch and `update_bytes` of the update; `bytes_over_parameters` is that of
    a step over `parameter_bytes`. A strategy that fails is a row with an `error`.

    References:
        Rodriguez Beltran et al. 2024, "Towards efficient and scalable
        implementation of differentially private deep learning", figures 7, A.4 and A.5.
    """
    validate.whole(
        physical_batch=physical_batch, chunks=chunks, repeats=repeats, at_least=1
    )
    names = programs.known(strategies)
    counts = sorted({*(devices or cluster.doubling(jax.device_count()))})
    for count in counts:
        Layout(count)
    if logical_batch is not None:
        _divisible(logical_batch, physical_batch, counts)
    parts = {
        count: logical_batch // (count * physical_batch) if logical_batch else chunks
        for count in counts
    }
    exchanges: dict[_Pair, tuple[dict[str, int], dict[str, int]]] = {}

    def prepare(pair: _Pair, found: Measurement) -> Callable[[int], None]:
        made = LogicalStep(workload, *pair, physical_batch, parts[pair.devices])
        exchanges[pair] = made.prepare(report)
        # Twice: the second step is given what the first returned.
        made.run()
        made.run()
        return lambda number: made.run()

    pairs = [_Pair(*pair) for pair in itertools.product(names, counts)]
    with workload.computing():
        measured, stopped = in_turns(pairs, prepare, repeats, report)
    size = parameter_bytes(workload)
    rows = []
    for pair, found in measured.items():
        mine = parts[pair.devices]
        row: dict[str, Any] = {
            "strategy": pair.strategy,
            "devices": pair.devices,
            "examples": pair.devices * physical_batch * mine,
            "parameter_bytes": size,
            **found.times(),
        }
        one, seconds = measured.get(_Pair(pair.strategy, 1)), row["seconds"]
        alone = None if one is None else one.median
        row["examples_per_second"] = row["examples"] / seconds if seconds else None
        row["share_of_ideal"] = None
        if alone and seconds:
            # Of one device, for as many physical batches as this one has.
            row["share_of_ideal"] = alone * mine / parts[1] / seconds
        rows.append(row | _bytes(exchanges.get(pair), mine, size))
    parallel = {} if logical_batch is None else cluster.amdahl(rows)
    return ScalingBench(rows, parallel, stopped)


def _divisible(logical: int, physical: int, counts: Sequence[int]) -> None:
    validate.whole(logical_batch=logical, at_least=1)
    whole = math.lcm(*counts) * physical
    if logical % whole:
        rule = f"must be a multiple of {whole:,}"
        given = ", ".join(map(str, counts))
        remedy = (
            f"each of {given} devices takes physical batches of {physical} rows; for "
            f"example {whole * math.ceil(logical / whole)}, or give --devices"
        )
        validate.refuse("logical_batch", logical, rule, remedy)


def sum_bytes(workload: Workload, strategy: str) -> int:
    """Return the bytes of what is added up over devices: whole numbers, if private."""
    total = jax.eval_shape(workload.step(strategy).zero).sum
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(total))


def parameter_bytes(workload: Workload) -> int:
    """Return the bytes of a sum of gradients: parameters in float32, or wider."""
    return sum(
        leaf.size * np.dtype(accumulation_dtype(leaf.dtype)).itemsize
        for leaf in jax.tree.leaves(workload.param_shapes)
    )


def crowding(devices: int) -> str | None:
    """Return a warning if this many virtual devices share the cores of a CPU."""
    found = machine()
    if found["backend"] != "cpu" or not found["cores"] or devices <= found["cores"]:
        return None
    return (
        f"{devices} virtual devices share {found['cores']} cores of a CPU: they cannot "
        "be faster than the cores, so the share of ideal does not apply to real devices"
    )


def exchanged(program: str | None) -> dict[str, int]:
    """Return the bytes of the results of each kind of collective in optimised HLO.

    What an all-reduce moves over a link depends on its algorithm: in a ring of n,
    2 (n − 1)/n times these bytes. A collective in a loop counts once.
    """
    if program is None:
        raise RuntimeError("this device's compiler does not show its programs")
    found: dict[str, int] = {}
    for arrays, kind in _CALL.findall(program):
        found.setdefault(kind, 0)
        for _, bits, sizes in _ARRAY.findall(arrays):
            entries = math.prod(int(size) for size in sizes.split(",") if size)
            found[kind] += math.ceil(entries * int(bits or 8) / 8)
    return found


def _bytes(
    exchange: tuple[dict[str, int], dict[str, int]] | None, chunks: int, size: int
) -> dict[str, Any]:
    names = "accumulate_bytes", "update_bytes", "bytes_per_step"
    if exchange is None:
        return dict.fromkeys((*names, "bytes_over_parameters"))
    total = chunks * sum(exchange[0].values()) + sum(exchange[1].values())
    found = dict(zip(names, (*exchange, total), strict=True))
    return found | {"bytes_over_parameters": total / size}
