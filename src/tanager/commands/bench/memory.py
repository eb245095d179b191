"""`tanager bench memory`: the largest physical batch, strategy by strategy."""

import dataclasses
from collections.abc import Callable

from tanager import _validate as validate
from tanager.commands.bench.measured import STOPPED, Measured, Outcome
from tanager.commands.tables import error_lines, exit_code, new_table, number


_GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Memory(Measured):
    """Find the largest physical batch that fits: compiled on a CPU, run elsewhere."""

    strategies: tuple[str, ...] = ()
    """sgd and clipping strategies. Default: all."""

    limit_gib: float | None = None
    """Memory limit in GiB; needed on a CPU. Default: the device's memory."""

    def measure(self, report: Callable[[str], None]) -> Outcome:
        """Measure; `report` receives what is being done."""
        from tanager.bench import memory, programs

        if self.limit_gib is not None:
            validate.positive(limit_gib=self.limit_gib)
        limit = None if self.limit_gib is None else int(self.limit_gib * _GIB)
        workload = self.workload()
        rows, stopped = memory.bench_memory(
            workload,
            self.strategies or programs.NAMES,
            limit_bytes=limit,
            report=report,
        )
        record = {
            "rows": rows,
            "workload": dataclasses.asdict(workload),
            "limit_bytes": limit,
        }
        table = new_table("strategy", "largest physical batch", "× SGD")
        for row in rows:
            if row["error"] is None:
                more = "at least " if row["at_ceiling"] else ""
                size = f"{more}{row['physical_batch']}"
                table.add_row(
                    row["strategy"], size, number(row["ratio_to_sgd"], "{:.2f}")
                )
        code = STOPPED if stopped else exit_code(rows)
        return Outcome(record, [table, *error_lines(rows)], code)
