"""Seconds, memory and compilations of a step of training, strategy by strategy.

All programs are compiled and warmed up first. Then they take turns, so that a slow
minute of the machine slows all of them.
"""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np

from tanager import _validate as validate
from tanager.bench import programs
from tanager.bench.programs import Program
from tanager.bench.workload import Workload
from tanager.training.estimate import duration


Name = TypeVar("Name")


@dataclasses.dataclass
class Measurement:
    """What is known about one program; `error` says why there is nothing more."""

    compile_seconds: float | None = None
    temp_bytes: int | None = None
    seconds: list[float] = dataclasses.field(default_factory=list)
    traces: int | None = None
    error: str | None = None

    @property
    def median(self) -> float | None:
        """The median of `seconds`; None before the first."""
        return float(np.median(self.seconds)) if self.seconds else None

    def times(self) -> dict[str, Any]:
        """Return median and interquartile range, or the error that left none.

        One timing has no range: that is None.
        """
        if not self.seconds:
            error = self.error or "stopped before it was timed"
            return {"seconds": None, "seconds_spread": None, "error": error}
        lower, upper = np.percentile(self.seconds, [25, 75])
        return {
            "seconds": self.median,
            "seconds_spread": float(upper - lower) if len(self.seconds) > 1 else None,
            "error": self.error,
        }


@dataclasses.dataclass(frozen=True)
class StepBench:
    """Rows of `bench_step`, and whether Ctrl-C came first.

    `update` is noise, optimizer and parameter average: paid once per logical batch.
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
) -> StepBench:
    """Time plain SGD and private training on the same physical batch.

    SGD's seconds include its update; those of a strategy do not, since the noisy update
    comes once per logical batch: see `StepBench.update`. Only `examples` of the rows of
    a batch count; the others are padding. A strategy that fails is a row with an
    `error`.

    The breakdown has the four sections of table 2 of the efficiency paper, in seconds
    and as shares of their sum, from the times of other programs that take turns too:

    - forward: the mean loss;
    - backward: the gradient of the mean loss, minus forward;
    - clip_and_accumulate: the clipped sum, minus that plain gradient. The paper counts
      what privacy adds to the backward pass as backward; here it is in this section;
    - optimizer_step: the noisy update, as if each physical batch had one; for SGD,
      the whole step minus the plain gradient.

    A section that costs less than the timing's noise can be below 0.
    """
    examples = physical_batch if examples is None else examples
    validate.whole(
        physical_batch=physical_batch, examples=examples, repeats=repeats, at_least=1
    )
    if examples > physical_batch:
        rule = f"must be at most the physical batch {physical_batch}"
        validate.refuse("examples", examples, rule)
    names = programs.known(strategies)
    makers: dict[str, Callable[[Workload], Program]] = {
        name: functools.partial(programs.training, name=name) for name in names
    }
    makers["update"] = programs.update
    if breakdown:
        makers |= {"forward": programs.forward, "gradient": programs.gradient}
    params, batch = workload.params(), workload.batch(physical_batch)
    warm_up, timed = programs.masks(physical_batch, examples)
    ready: dict[str, Program] = {}

    def prepare(name: str, found: Measurement) -> Callable[[int], None]:
        program = makers[name](workload)
        program.prepare(params, batch)
        found.compile_seconds, found.temp_bytes = program.compile(warm_up[0])
        for mask in warm_up:
            program.run(mask)
        ready[name] = program
        return lambda number: program.run(timed[number % len(timed)])

    with workload.computing():
        measured, stopped = in_turns(makers, prepare, repeats, report)
    for name, program in ready.items():
        measured[name].traces = program.traces
    rows = [_row(name, measured, examples, breakdown) for name in names]
    found = measured["update"]
    update = found.times() | {"compile_seconds": found.compile_seconds}
    return StepBench(rows, update, stopped)


def in_turns(
    names: Iterable[Name],
    prepare: Callable[[Name, Measurement], Callable[[int], None]],
    repeats: int,
    report: Callable[[str], None],
) -> tuple[dict[Name, Measurement], bool]:
    """Prepare everything, then time rounds in which each runs once.

    `prepare` compiles, warms up and returns what to run, given the number of the round.
    Return what was measured, with the error of what failed, and whether Ctrl-C came.
    """
    measured = {name: Measurement() for name in names}
    runs: dict[Name, Callable[[int], None]] = {}
    try:
        for name, found in measured.items():
            report(f"compiling {name}")
            with _noting(found):
                runs[name] = prepare(name, found)
        began = time.perf_counter()
        for number in range(repeats):
            taken = time.perf_counter() - began
            left = duration(taken / max(1, number) * (repeats - number))
            ahead = f", about {left} left" if number else ""
            for name, run in runs.items():
                report(f"timing round {number + 1} of {repeats}{ahead}: {name}")
                found = measured[name]
                if found.error is None:
                    with _noting(found):
                        started = time.perf_counter()
                        run(number)
                        found.seconds.append(time.perf_counter() - started)
    except KeyboardInterrupt:
        return measured, True
    return measured, False


@contextlib.contextmanager
def _noting(found: Measurement) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        found.error = describe(error)


def describe(error: Exception) -> str:
    """Return an error as it stands in a row: its kind and its message."""
    return f"{type(error).__name__}: {error}"


def _row(
    name: str, measured: dict[str, Measurement], examples: int, breakdown: bool
) -> dict[str, Any]:
    found = measured[name]
    seconds = found.median
    sgd = measured[programs.SGD].median if programs.SGD in measured else None
    row = {"strategy": name} | found.times()
    row |= {
        "examples_per_second": examples / seconds if seconds else None,
        "ratio_to_sgd": seconds / sgd if seconds and sgd else None,
        "temp_bytes": found.temp_bytes,
        "compile_seconds": found.compile_seconds,
        "traces": found.traces,
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
