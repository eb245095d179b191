"""`tanager bench throughput`: examples a second of whole training."""

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Annotated, Any

import tyro
from rich.table import Table

from tanager import _validate as validate
from tanager.commands.bench.measured import Measured, Outcome, exit_code
from tanager.commands.tables import digits, error_lines, new_table, number


@dataclasses.dataclass(frozen=True)
class Throughput(Measured):
    """Time whole training, as Rodriguez Beltran et al. 2024 do.

    Each of --steps logical batches is a Poisson sample of synthetic examples. Data and
    update are timed too, and real examples counted. The defaults are the paper's, for a
    GPU: on a few cores, give fewer --examples.
    """

    physical_batches: tuple[int, ...] = (16, 32, 64)
    """Rows of the physical batch, each in turn."""

    strategies: tuple[str, ...] = ("sgd", "auto")
    """Clipping strategies; sgd is training without privacy."""

    examples: int = 50_000
    """Examples N of the data set."""

    sample_rate: float = 0.5
    """Sample rate q."""

    steps: int = 4
    """Logical steps to time."""

    plot: pathlib.Path | None = None
    """Draw all this as a PNG or SVG file."""

    beside: Annotated[tuple[pathlib.Path, ...], tyro.conf.arg(metavar="FILE …")] = ()
    """Also draw results of other models or machines: files of --json."""

    def measure(self, report: Callable[[str], None]) -> Outcome:
        from tanager.bench import throughput
        from tanager.report import figures, throughput_figures

        if self.plot is not None:
            figures.check_ending(self.plot)
        elif self.beside:
            validate.refuse("beside", f"{self.beside[0]}", "is drawn: it needs --plot")
        others = [throughput_figures.read(path) for path in self.beside]
        workload = self.workload()
        protocol = throughput.Protocol(self.examples, self.sample_rate, self.steps)
        given = workload, self.strategies, self.physical_batches, protocol, report
        rows, stopped = throughput.bench_throughput(*given)
        record = {
            "rows": rows,
            "workload": dataclasses.asdict(workload),
            "protocol": dataclasses.asdict(protocol),
        }
        errors = error_lines(rows, "{strategy}, {physical_batch} rows")
        enough = self.steps >= throughput.FEWEST
        lines: list[Any] = [_table(rows, enough), *errors]
        name = throughput_figures.named(self.model, self.precision)
        if self.plot is not None and throughput_figures.plot(
            [(name, rows), *others], self.plot
        ):
            lines += ["", f"Drawn to {self.plot}"]
        return Outcome(record, lines, exit_code(rows, stopped))


def _table(rows: list[dict[str, Any]], enough: bool) -> Table:
    between = "95 % interval" if enough else "slowest – fastest"
    table = new_table(
        *("strategy", "physical batch", "examples/s", between, "of SGD"),
        *("first batch s", "compilations"),
    )
    for row in rows:
        if row["examples_per_second"] is not None:
            table.add_row(
                row["strategy"],
                str(row["physical_batch"]),
                digits(row["examples_per_second"]),
                f"{digits(row['low'])} – {digits(row['high'])}",
                number(row["relative_throughput"], "{:.2f}"),
                number(row["first_batch_seconds"], "{:.1f}"),
                number(row["compilations"], "{}"),
            )
    return table
