"""Examples a second of whole training, by strategy and physical batch.

The protocol of the efficiency paper: Poisson batches at a large sample rate, data and
update included, real examples counted. For each physical batch all strategies are
compiled first; then they take turns, one logical step each.

References:
    Rodriguez Beltran et al. 2024, "Towards efficient and scalable
    implementation of differentially private deep learning", section 3 and figures 1,
    2, 4, 6, A.1, A.2.
"""

import contextlib
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from tanager import _validate as validate
from tanager.bench import programs
from tanager.bench.timing import Measurement, in_turns
from tanager.bench.workload import SGD, Workload, logical_step
from tanager.compiling import require_nans
from tanager.data import ArraySource, Source
from tanager.data.loader import an_example
from tanager.data.source import check_index, gather
from tanager.parallel.layout import Layout
from tanager.training.feed import Feed, can_hold, feeding, held
from tanager.training.problem import Problem, Runtime
from tanager.training.step import Step


_POOL_BYTES = 2**30
FEWEST = 6
"""Steps below which no two of them hold the median 95 % of the time."""
_COMPILED = "/jax/core/compile/backend_compile_duration"


@dataclasses.dataclass(frozen=True)
class Protocol:
    """How much is trained on in a measurement.

    Attributes:
        examples: N, the size of the data set.
        sample_rate: q.
        steps: logical steps that are timed.
    """

    examples: int = 50_000
    sample_rate: float = 0.5
    steps: int = 4

    def __post_init__(self):
        validate.whole(examples=self.examples, steps=self.steps, at_least=1)
        validate.fraction(sample_rate=self.sample_rate)
        if self.examples * self.sample_rate < 1:
            rule = f"must be such that one of {self.examples} examples is expected"
            validate.refuse("sample_rate", self.sample_rate, rule)


@dataclasses.dataclass(frozen=True, eq=False)
class Pool:
    """A data set of N examples that repeats M of them: example i is i mod M."""

    some: ArraySource
    examples: int

    def __len__(self) -> int:
        return self.examples

    def __getitem__(self, index: int) -> Any:
        check_index(index, len(self))
        return self.some[index % len(self.some)]

    def gather(self, indices: np.ndarray) -> Any:
        """Return the examples at `indices`, stacked."""
        return gather(self.some, indices % len(self.some))


def data(workload: Workload, examples: int) -> Source:
    """Return N synthetic examples; large ones repeat a part that fits the memory."""
    shapes = workload.batch_shapes(1)
    one = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in shapes.values())
    rows = min(examples, max(1, _POOL_BYTES // one))
    some = ArraySource(jax.tree.map(np.asarray, workload.batch(rows)))
    return some if rows == examples else Pool(some, examples)


class _Training:
    """A run that goes on from one logical step to the next, with its data.

    Its examples are given in its own turns, so that nothing is read ahead during those
    of others.
    """

    def __init__(self, examples: "_Examples", strategy: str, size: int):
        self.step, params = examples.step(strategy), examples.workload.params()
        self.step.grad_fn.tune(params, examples.workload.batch(size), seconds=math.inf)
        self._feeding = functools.partial(examples.feed, self.step, size)
        steps = range(examples.protocol.steps)
        self.drawn = [len(self.step.sampler.indices(number)) for number in steps]
        self.compilations = 0
        self._state = self.step.start(params)

    def first_batch(self) -> float:
        """Return the seconds of the first physical batch, which is compiled for it."""
        with self._feeding(0) as feed:
            batch = feed.empty()
        total = jax.block_until_ready(self.step.zero())
        key = self.step.augmentation_key(0)  # by a program of its own
        with self._counting():
            started = time.perf_counter()
            total = self.step.accumulate(self._state.params, total, batch, key)
            jax.block_until_ready(total)
            seconds = time.perf_counter() - started
        # Twice: the second step is given what the first returned.
        for _ in range(2):
            self._state = logical_step(self.step, self._state, [batch], 0)
        return seconds

    def run(self, number: int) -> None:
        """Make one logical step and wait for it."""
        with self._counting(), self._feeding(number) as feed:
            batches = (batch for batch, _ in feed.batches(number))
            self._state = logical_step(self.step, self._state, batches, number)

    @contextlib.contextmanager
    def _counting(self) -> Iterator[None]:
        """Count what is compiled during the block."""

        def count(event: str, duration_secs: float, **details: str | int) -> None:
            self.compilations += event == _COMPILED

        jax.monitoring.register_event_duration_secs_listener(count)
        try:
            yield
        finally:
            jax.monitoring.unregister_event_duration_listener(count)


def bench_throughput(
    workload: Workload,
    strategies: Sequence[str],
    physical_batches: Sequence[int],
    protocol: Protocol | None = None,
    report: Callable[[str], None] = lambda text: None,
) -> tuple[list[dict[str, Any]], bool]:
    """Train by each strategy with each physical batch.

    A row has the median of real examples a second over the logical steps, `low` and
    `high` of its 95 % interval (with fewer than `FEWEST` steps the slowest and the
    fastest, which hold less often), `relative_throughput` (that median over
    the one of SGD with the same physical batch), the seconds of the first physical
    batch, with its compilation but not what `auto` measures before, and how often the
    program was compiled while batches changed. What fails is a row with an `error`.

    Data that are too large for the device are read ahead by a thread, in the turn of
    its strategy alone.

    Returns:
        The rows, and whether Ctrl-C came before all was measured.
    """
    protocol, names = protocol or Protocol(), programs.known(strategies)
    if not physical_batches:
        validate.refuse("physical_batches", (), "must name at least one size")
    for size in physical_batches:
        validate.whole(physical_batches=size, at_least=1)
    require_nans()  # clipping does, once, and its program would count as a compilation
    examples = _Examples(workload, protocol)
    rows: list[dict[str, Any]] = []
    for size in dict.fromkeys(physical_batches):
        with workload.computing():
            made, measured, stopped = _measured(examples, names, size, report)
        rates = {
            name: np.array(made[name].drawn[: len(found.seconds)]) / found.seconds
            for name, found in measured.items()
            if found.seconds
        }
        for name, found in measured.items():
            untimed = None if found.seconds else "stopped before it was timed"
            row: dict[str, Any] = {"strategy": name, "physical_batch": size}
            own, sgd = rates.get(name), rates.get(SGD)
            row |= _estimated(own) | {"relative_throughput": None}
            if own is not None and sgd is not None:
                row["relative_throughput"] = float(np.median(own) / np.median(sgd))
            row["first_batch_seconds"] = found.compile_seconds
            training = made.get(name)
            row["compilations"] = training and training.compilations
            rows.append(row | {"error": found.error or untimed})
        if stopped:
            return rows, True
    return rows, False


class _Examples:
    """The data of all trainings: on the device once if it has room for them."""

    def __init__(self, workload: Workload, protocol: Protocol):
        self.workload, self.protocol = workload, protocol
        self.layout = Layout(1)
        self._source = data(workload, protocol.examples)
        self._placed = None
        if can_hold(self._source, self.layout):
            assert isinstance(self._source, ArraySource)
            self._placed = self.layout.everywhere(self._source.tree)

    def step(self, strategy: str) -> Step:
        """Return a step that takes these examples."""
        return self.workload.step(
            strategy,
            self.layout,
            sample_rate=self.protocol.sample_rate,
            examples=self.protocol.examples,
            in_memory=self._placed is not None,
        )

    def feed(
        self, step: Step, size: int, begun: int
    ) -> contextlib.AbstractContextManager[Feed]:
        """Give physical batches of these examples to a step, from number `begun` on."""
        if self._placed is not None:
            return contextlib.nullcontext(held(step, self._placed, size))
        problem = Problem(self.workload.loss, step.params, self._source)
        runtime, one = Runtime(physical_batch_size=size), an_example(self._source)
        return feeding(problem, runtime, self._source, one, step, begun)


def _measured(
    examples: _Examples, names: list[str], size: int, report: Callable[[str], None]
) -> tuple[dict[str, _Training], dict[str, Measurement], bool]:
    """Return what `in_turns` does of one physical batch, and the trainings."""
    made = {}

    def prepare(name: str, found: Measurement) -> Callable[[int], None]:
        made[name] = _Training(examples, name, size)
        found.compile_seconds = made[name].first_batch()
        return made[name].run

    steps = examples.protocol.steps
    found = in_turns(names, prepare, steps, lambda text: report(f"{size} rows: {text}"))
    return made, *found


def _estimated(rates: np.ndarray | None) -> dict[str, float | None]:
    """Return the median of some rates and its interval by ranks (binomial)."""
    if rates is None:
        return dict.fromkeys(("examples_per_second", "low", "high"))
    from scipy import stats

    ordered, rank = np.sort(rates), max(int(stats.binom.ppf(0.025, len(rates), 0.5)), 1)
    low, high = ordered[rank - 1], ordered[-rank]
    return {
        "examples_per_second": float(np.median(rates)),
        "low": float(low),
        "high": float(high),
    }
