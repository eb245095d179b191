"""`tanager bench step`, `memory` and `explain`: one physical batch of one model."""

import dataclasses
from collections.abc import Callable
from typing import Any

from rich.table import Table

from tanager import _validate as validate
from tanager.commands.bench.measured import Measured, Outcome, exit_code
from tanager.commands.tables import error_lines, milliseconds, new_table, number


@dataclasses.dataclass(frozen=True)
class Step(Measured):
    """Time plain SGD and private training, strategies in turns.

    A row is one physical batch. For sgd it is the gradient and the update. For a
    strategy it is the clipped gradients added to an accumulator. The noisy update comes
    once per logical batch and has its own line.
    """

    physical_batch: int = 32
    """Rows of the physical batch."""

    examples: int | None = None
    """How many rows are examples; the others are padding. Default: all."""

    strategies: tuple[str, ...] = ()
    """sgd and clipping strategies. Default: all."""

    repeats: int = 10
    """Rounds of timing."""

    breakdown: bool = False
    """Also time forward, backward, clipping and the optimizer step."""

    def measure(self, report: Callable[[str], None]) -> Outcome:
        from tanager.bench import programs, timing

        workload = self.workload()
        found = timing.bench_step(
            workload,
            self.strategies or programs.NAMES,
            physical_batch=self.physical_batch,
            examples=self.examples,
            repeats=self.repeats,
            breakdown=self.breakdown,
            report=report,
        )
        record: dict[str, Any] = {
            "rows": found.rows,
            "update": found.update,
            "workload": dataclasses.asdict(workload),
            "physical_batch": self.physical_batch,
            "examples": self.examples or self.physical_batch,
            "repeats": self.repeats,
        }
        lines: list[Any] = [_step_table(found.rows), *error_lines(found.rows)]
        if found.update["seconds"] is not None:
            lines.append(
                "noisy update, once for each logical batch: "
                f"{milliseconds(found.update)} ms"
            )
        if self.breakdown:
            record["notes"] = _notes(found.rows)
            lines += ["", _breakdown_table(found.rows), *record["notes"]]
        return Outcome(record, lines, exit_code(found.rows, found.stopped))


def _step_table(rows: list[dict[str, Any]]) -> Table:
    table = new_table(
        "strategy", "ms ± IQR", "examples/s", "× SGD", "temp MiB", "compile s", "traces"
    )
    for row in rows:
        if row["seconds"] is None:
            continue
        mebibytes = None if row["temp_bytes"] is None else row["temp_bytes"] / 2**20
        table.add_row(
            row["strategy"],
            milliseconds(row),
            f"{row['examples_per_second']:.4g}",
            number(row["ratio_to_sgd"], "{:.2f}"),
            number(mebibytes, "{:.1f}"),
            number(row["compile_seconds"], "{:.1f}"),
            number(row["traces"], "{}"),
        )
    return table


def _notes(rows: list[dict[str, Any]]) -> list[str]:
    """Return what the sections are differences of, and why one can be below 0."""
    sections = [s for row in rows for s in (row["breakdown"] or {}).values()]
    notes = [
        "backward: the plain gradient minus forward; clip and accumulate: the clipped "
        "sum minus the plain gradient",
        "optimizer step of a strategy: the noisy update, counted whole for this one "
        "physical batch; a logical batch of n has 1/n of it for each",
        "gradients of single examples count as clip and accumulate; a profiler counts "
        "them as backward (Rodriguez Beltran et al. 2024, Table 2)",
    ]
    if any(section["seconds"] < 0 for section in sections):
        notes.append("below 0: less than the noise of these timings; give more repeats")
    return notes


def _breakdown_table(rows: list[dict[str, Any]]) -> Table:
    headings = ("forward", "backward", "clip and accumulate", "optimizer step")
    table = new_table("ms (share)", *headings)
    for row in rows:
        if row["breakdown"] is not None:
            table.add_row(
                row["strategy"],
                *(
                    f"{1e3 * section['seconds']:.4g} ({100 * section['share']:.0f} %)"
                    for section in row["breakdown"].values()
                ),
            )
    return table


@dataclasses.dataclass(frozen=True)
class Memory(Measured):
    """Find the largest physical batch that fits: compiled on a CPU, run elsewhere.

    Parameters, one physical batch and its gradients count. The optimizer's state of
    private training does not.
    """

    strategies: tuple[str, ...] = ()
    """sgd and clipping strategies. Default: all."""

    limit_gib: float | None = None
    """Memory limit in GiB; needed on a CPU. Default: the device's memory."""

    def measure(self, report: Callable[[str], None]) -> Outcome:
        from tanager.bench import memory, programs

        if self.limit_gib is not None:
            validate.positive(limit_gib=self.limit_gib)
        limit = None if self.limit_gib is None else int(self.limit_gib * 2**30)
        workload = self.workload()
        rows, stopped = memory.bench_memory(
            workload,
            self.strategies or programs.NAMES,
            limit_bytes=limit,
            report=report,
        )
        workload = dataclasses.asdict(workload)
        record = {"rows": rows, "workload": workload, "limit_bytes": limit}
        table = new_table("strategy", "largest physical batch", "× SGD")
        for row in rows:
            if row["error"] is None:
                more = "at least " if row["at_ceiling"] else ""
                ratio = number(row["ratio_to_sgd"], "{:.2f}")
                table.add_row(row["strategy"], f"{more}{row['physical_batch']}", ratio)
        none = [row["strategy"] for row in rows if row["physical_batch"] == 0]
        lines = [f"{name}: one example needs more memory than that" for name in none]
        lines = [table, *error_lines(rows), *lines]
        return Outcome(record, lines, exit_code(rows, stopped))


@dataclasses.dataclass(frozen=True)
class Explain(Measured):
    """Print where parameters meet data, and how each such tap is clipped."""

    physical_batch: int = 32
    """Rows of the physical batch."""

    strategy: str = "auto"
    """Clipping strategy."""

    def measure(self, report: Callable[[str], None]) -> Outcome:
        from tanager.bench import programs

        validate.one_of(programs.NAMES[1:], strategy=self.strategy)
        validate.whole(physical_batch=self.physical_batch, at_least=1)
        workload = self.workload()
        with workload.computing():
            explanation = workload.step(self.strategy).grad_fn.explain(
                workload.params(), workload.batch(self.physical_batch)
            )
        record = {
            "explain": explanation.as_json(),
            "workload": dataclasses.asdict(workload),
            "physical_batch": self.physical_batch,
            "strategy": self.strategy,
        }
        return Outcome(record, [str(explanation)], 0)
