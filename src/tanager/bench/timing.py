"""Seconds, memory and compilations of a step of training, strategy by strategy.

All programs are compiled and warmed up first. Then they take turns, so that a slow
minute of the machine slows all of them. Medians and interquartile ranges are of seconds
per physical batch.
"""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from jaxtyping import Array

from tanager import _validate as validate
from tanager.bench import programs
from tanager.bench.programs import Program
from tanager.bench.workload import Workload


Name = TypeVar("Name")


@dataclasses.dataclass
class Measurement:
    """What is known about one program.

    Attributes:
        compile_seconds: to lower and compile it.
        temp_bytes: XLA's temporary memory; None if the compiler does not report it.
        seconds: of each timed call.
        traces: how often JAX traced it, warm-up and timing together.
        error: why there is nothing more, or None.
    """

    compile_seconds: float | None = None
    temp_bytes: int | None = None
    seconds: list[float] = dataclasses.field(default_factory=list)
    traces: int | None = None
    error: str | None = None

    @property
    def median(self) -> float | None:
        """The median of `seconds`; None before the first."""
        return float(np.median(self.seconds)) if self.seconds else None

    @property
    def spread(self) -> float | None:
        """The interquartile range of `seconds`; None before the first."""
        if not self.seconds:
            return None
        lower, upper = np.percentile(self.seconds, [25, 75])
        return float(upper - lower)


@dataclasses.dataclass(frozen=True)
class StepBench:
    """The result of `bench_step`.

    Attributes:
        rows: one record for each strategy, see `bench_step`.
        update: seconds, seconds_spread and compile_seconds of noise, optimizer and
            parameter average: paid once for each logical batch.
        stopped: whether Ctrl-C came first.
    """

    rows: list[dict[str, Any]]
    update: dict[str, Any]
    stopped: bool


def bench_step(
    workload: Workload,
    strategies: Sequence[str],
    *,
    physical_batch: int,
    examples: int | None = None,
    repeats: int = 10,
    breakdown: bool = False,
    report: Callable[[str], None] = lambda text: None,
    clock: Callable[[], float] = time.perf_counter,
) -> StepBench:
    """Time plain SGD and private training on the same physical batch.

    A row has `strategy`, `seconds` (median), `seconds_spread`, `examples_per_second`,
    `ratio_to_sgd` (of medians; None without SGD), `temp_bytes`, `compile_seconds`,
    `traces`, `error` and, if asked for, `breakdown`. SGD's seconds include its update;
    those of a strategy do not, since the noisy update comes once per logical batch: see
    `StepBench.update`.

    The breakdown has the four sections of the efficiency paper's table 2, in seconds
    and as shares of their sum, from the times of other programs that take turns too:

    - forward: the mean loss;
    - backward: the gradient of the mean loss, minus forward;
    - clip_and_accumulate: the clipped sum, minus that plain gradient. The paper counts
      what privacy adds to the backward pass as backward; here it is in this section;
    - optimizer_step: the noisy update, as if each physical batch had one; for SGD,
      the whole step minus the plain gradient.

    A section that costs less than the timing's noise can be below 0.

    Args:
        workload: model and data.
        strategies: ``"sgd"`` and names of clipping strategies, in order of rows.
        physical_batch: rows of the batch.
        examples: how many of them are examples and not padding; only these count.
        repeats: rounds of timing.
        breakdown: see above.
        report: called with what is being done.
        clock: seconds, for tests.

    Raises:
        ValueError: an unknown strategy, or a number out of range. A strategy that
            fails later is a row with an `error`.

    References:
        Rodriguez Beltran et al. 2024, "Towards efficient and scalable training of
        differentially private deep learning", table 2.
    """
    examples = physical_batch if examples is None else examples
    validate.whole(
        physical_batch=physical_batch, examples=examples, repeats=repeats, at_least=1
    )
    if examples > physical_batch:
        validate.refuse(
            "examples", examples, f"must be at most the physical batch {physical_batch}"
        )
    for strategy in strategies:
        validate.one_of(programs.training_names(), strategy=strategy)
    names = list(dict.fromkeys(strategies))
    makers: dict[str, Callable[[], Program]] = {
        name: lambda name=name: programs.training(workload, name) for name in names
    }
    makers["update"] = lambda: programs.update(workload)
    if breakdown:
        makers["forward"] = lambda: programs.forward(workload)
        makers["gradient"] = lambda: programs.gradient(workload)
    with workload.computing():
        measured, stopped = _measure(
            makers,
            workload.params(),
            workload.batch(physical_batch),
            programs.masks(physical_batch, examples),
            repeats,
            report,
            clock,
        )
    rows = [_row(name, measured, examples, breakdown) for name in names]
    return StepBench(rows, _update(measured["update"]), stopped)


def _measure(
    makers: dict[str, Callable[[], Program]],
    params: Any,
    batch: Any,
    masks: tuple[list[Array], list[Array]],
    repeats: int,
    report: Callable[[str], None],
    clock: Callable[[], float],
) -> tuple[dict[str, Measurement], bool]:
    """Compile and warm up every program, then time them in turns."""
    measured = {name: Measurement() for name in makers}
    ready: dict[str, Program] = {}
    warm_up, timed = masks
    try:
        for name, make in makers.items():
            report(f"compiling {name}")
            found = measured[name]
            try:
                program = make()
                program.prepare(params, batch)
                compiled = program.compile(warm_up[0], clock)
                found.compile_seconds, found.temp_bytes = compiled
                for mask in warm_up:
                    program.run(mask)
                ready[name] = program
            except Exception as error:
                found.error = describe(error)
        runs = {
            name: lambda number, program=program: program.run(
                timed[number % len(timed)]
            )
            for name, program in ready.items()
        }
        in_turns(runs, measured, repeats, report, clock)
        stopped = False
    except KeyboardInterrupt:
        stopped = True
    for name, program in ready.items():
        measured[name].traces = program.traces
    for found in measured.values():
        if not found.seconds and found.error is None:
            found.error = "stopped before it was timed"
    return measured, stopped


def in_turns(
    runs: Mapping[Name, Callable[[int], None]],
    measured: Mapping[Name, Measurement],
    repeats: int,
    report: Callable[[str], None],
    clock: Callable[[], float],
) -> None:
    """Time rounds in which everything runs once, one after the other.

    Args:
        runs: what to time, given the number of the round.
        measured: where to put the seconds; or the error of what fails, which is then
            left out.
        repeats: how many rounds.
        report: called with the number of the round.
        clock: seconds.
    """
    going = dict(runs)
    for number in range(repeats):
        report(f"timing round {number + 1} of {repeats}")
        for name, run in list(going.items()):
            try:
                started = clock()
                run(number)
                measured[name].seconds.append(clock() - started)
            except Exception as error:
                measured[name].error = describe(error)
                del going[name]


def describe(error: Exception) -> str:
    """Return an error as it stands in a row: its kind and its message."""
    return f"{type(error).__name__}: {error}"


def _row(
    name: str, measured: dict[str, Measurement], examples: int, breakdown: bool
) -> dict[str, Any]:
    found = measured[name]
    seconds = found.median
    sgd = measured[programs.SGD].median if programs.SGD in measured else None
    row = {
        "strategy": name,
        "seconds": seconds,
        "seconds_spread": found.spread,
        "examples_per_second": examples / seconds if seconds else None,
        "ratio_to_sgd": seconds / sgd if seconds and sgd else None,
        "temp_bytes": found.temp_bytes,
        "compile_seconds": found.compile_seconds,
        "traces": found.traces,
        "error": found.error,
    }
    if breakdown:
        row["breakdown"] = _breakdown(name, measured)
    return row


def _breakdown(
    name: str, measured: dict[str, Measurement]
) -> dict[str, dict[str, float]] | None:
    forward, gradient, whole = (
        measured[key].median for key in ("forward", "gradient", name)
    )
    if forward is None or gradient is None or whole is None:
        return None
    after = whole - gradient
    sections = {"forward": forward, "backward": gradient - forward}
    if name == programs.SGD:
        sections |= {"clip_and_accumulate": 0.0, "optimizer_step": after}
    else:
        update = measured["update"].median
        if update is None:
            return None
        sections |= {"clip_and_accumulate": after, "optimizer_step": update}
    total = sum(sections.values())
    return {
        section: {"seconds": seconds, "share": seconds / total}
        for section, seconds in sections.items()
    }


def _update(found: Measurement) -> dict[str, Any]:
    return {
        "seconds": found.median,
        "seconds_spread": found.spread,
        "compile_seconds": found.compile_seconds,
        "error": found.error,
    }
