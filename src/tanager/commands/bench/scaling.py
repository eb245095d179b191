"""`tanager bench scaling`: what more devices bring, measured and predicted."""

import dataclasses
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from rich.table import Table

from tanager import _validate as validate
from tanager.commands.bench.measured import Measured, Outcome, exit_code
from tanager.commands.tables import (
    digits,
    error_lines,
    milliseconds,
    new_table,
    number,
)


if TYPE_CHECKING:
    from tanager.bench.cluster import Cluster
    from tanager.bench.scaling import ScalingBench


_OF_SIMULATION = ", fitted to the simulation,"


@dataclasses.dataclass(frozen=True)
class Scaling(Measured):
    """Time logical steps on 1, 2, 4, … devices; predict more hosts.

    A logical step is some physical batches and one update. By default scaling is weak:
    each device adds --chunks physical batches. With --logical-batch it is strong: all
    devices divide the same number of examples, and Amdahl's law is fitted.

    Give --simulate hosts=, devices= (per host), bandwidth= (GB/s of each host's link),
    such as hosts=20,devices=4,bandwidth=12.5, and also local_bandwidth= (GB/s of each
    device's link), latency= (seconds), sample_rate= (each device draws its own
    examples) and overlap= (seconds of sgd's backward pass that gradients are sent in).
    """

    physical_batch: int = 32
    """Rows of each physical batch on each device."""

    chunks: int | None = None
    """Physical batches of each device in a logical step. Default: 4."""

    logical_batch: int | None = None
    """Examples of a logical step, the same on any number of devices."""

    devices: tuple[int, ...] = ()
    """Numbers of devices. Default: 1, 2, 4, … and all."""

    strategies: tuple[str, ...] = ("sgd", "auto")
    """Clipping strategies; sgd is training without privacy."""

    repeats: int = 5
    """Rounds of timing."""

    simulate: Annotated[str | None, tyro.conf.arg(metavar="hosts=…,bandwidth=…")] = None
    """Predict 1, 2, 4, … hosts; see above."""

    step_seconds: tuple[float, ...] = ()
    """Seconds of a logical step on one device, one for each of --strategies."""

    parameter_bytes: int | None = None
    """Bytes in one all-reduce of the gradient. Default: those of tanager's sums."""

    plot: pathlib.Path | None = None
    """Draw throughput against devices as a PNG or SVG file."""

    def measure(self, report: Callable[[str], None]) -> Outcome:
        from tanager.bench import programs, scaling
        from tanager.bench.cluster import amdahl
        from tanager.report import figures, scaling_figures

        cluster = self._cluster()
        if self.plot is not None:
            figures.check_ending(self.plot)
        workload = self.workload()
        sums = {
            name: self.parameter_bytes or scaling.sum_bytes(workload, name)
            for name in programs.known(self.strategies)
        }
        found = scaling.ScalingBench([], {}, stopped=False)
        one_device = dict(zip(self.strategies, self.step_seconds, strict=False))
        if not self.step_seconds:
            found = scaling.bench_scaling(
                workload,
                self.strategies,
                physical_batch=self.physical_batch,
                chunks=self._chunks,
                logical_batch=self.logical_batch,
                devices=self.devices,
                repeats=self.repeats,
                report=report,
            )
            one = (row for row in found.rows if row["devices"] == 1)
            one_device = {row["strategy"]: row["seconds"] for row in one}
        most = max((row["devices"] for row in found.rows), default=1)
        warning = scaling.crowding(most)
        predicted = [] if cluster is None else self._predict(cluster, one_device, sums)
        expected = {} if self.logical_batch is None else amdahl(predicted)
        lines = self._measured(found, sums) if found.rows else []
        if cluster is not None and predicted:
            lines += [*([""] if lines else []), f"Simulated: {self._links(cluster)}."]
            lines += [_predicted_table(predicted), *_laws(expected, _OF_SIMULATION)]
        if warning:
            lines += ["", f"Warning: {warning}."]
        measured = {name: p for name, p in found.parallel.items() if p is not None}
        if self.plot is not None and scaling_figures.plot(
            found.rows,
            expected | measured,
            predicted,
            self.plot,
            title=f"{self.model}: {self._examples()}",
        ):
            lines += ["", f"Drawn to {self.plot}"]
        simulation = cluster and {
            "cluster": dataclasses.asdict(cluster),
            "rows": predicted,
            "parallel_fraction": expected,
        }
        record = {
            "rows": found.rows,
            "parallel_fraction": found.parallel,
            "sum_bytes": sums,
            "simulation": simulation,
            "workload": dataclasses.asdict(workload),
            "physical_batch": self.physical_batch,
            "chunks": self._chunks if self.logical_batch is None else None,
            "logical_batch": self.logical_batch,
            "repeats": self.repeats,
            "warnings": [warning] if warning else [],
        }
        return Outcome(record, lines, exit_code(found.rows, found.stopped))

    @property
    def _chunks(self) -> int:
        return 4 if self.chunks is None else self.chunks

    def _predict(
        self, cluster: "Cluster", one_device: dict[str, Any], sums: dict[str, int]
    ) -> list[Mapping[str, Any]]:
        """Return rows of what the cluster does, from the seconds on one device."""
        from tanager.bench.cluster import predict
        from tanager.bench.workload import SGD

        logical_batch = self.logical_batch or self.physical_batch * self._chunks
        return [
            {"strategy": name} | row
            for name, seconds in one_device.items()
            if seconds is not None
            for row in predict(
                cluster,
                seconds,
                logical_batch,
                sums[name],
                strong=self.logical_batch is not None,
                private=name != SGD,
            )
        ]

    def _measured(self, found: "ScalingBench", sums: dict[str, int]) -> list[Any]:
        sizes = ", ".join(f"{size:,} ({name})" for name, size in sums.items())
        return [
            _measured_table(found.rows),
            *error_lines(found.rows, "{strategy} on {devices}"),
            "",
            f"Bytes of a sum of gradients: {sizes}. Devices exchange bytes/step in "
            "each logical step; bytes/batch of them in each physical batch.",
            *_laws(found.parallel),
        ]

    def _cluster(self) -> "Cluster | None":
        """Read --simulate, and refuse options that do not fit together."""
        from tanager.bench.cluster import Cluster

        if self.logical_batch is not None:
            if self.chunks is not None:
                rule = "does not go with logical_batch"
                validate.refuse("chunks", self.chunks, rule, "leave one of them away")
            validate.whole(logical_batch=self.logical_batch, at_least=1)
        if self.simulate is None:
            remedy = "give --simulate hosts=…,devices=…,bandwidth=…, too"
            for name in ("step_seconds", "parameter_bytes"):
                if (given := getattr(self, name)) not in (None, ()):
                    validate.refuse(name, given, "is for a simulation", remedy)
            return None
        cluster = Cluster.parse(self.simulate)
        validate.whole(physical_batch=self.physical_batch, at_least=1)
        for name in ("chunks", "parameter_bytes"):
            if (given := getattr(self, name)) is not None:
                validate.whole(at_least=1, **{name: given})
        for seconds in self.step_seconds:
            validate.positive(step_seconds=seconds)
        if self.step_seconds and len(self.step_seconds) != len(self.strategies):
            rule = f"must be {len(self.strategies)} numbers"
            remedy = f"one for each of {', '.join(self.strategies)}"
            validate.refuse("step_seconds", self.step_seconds, rule, remedy)
        if self.devices and 1 not in self.devices and not self.step_seconds:
            rule = "must hold 1: a simulation begins with one device"
            remedy = "add it, or give --step-seconds"
            validate.refuse("devices", self.devices, rule, remedy)
        return cluster

    def _examples(self) -> str:
        if self.logical_batch is not None:
            return f"logical batches of {self.logical_batch:,} on all devices"
        each = f"{self._chunks} × {self.physical_batch}"
        return f"logical batches of {each} per device"

    def _links(self, cluster: "Cluster") -> str:
        within = "no time within a host"
        if cluster.local_bandwidth is not None:
            within = f"{cluster.local_bandwidth:g} GB/s within a host"
        drawn = ""
        if cluster.sample_rate is not None:
            drawn = f", drawn by each device at {cluster.sample_rate:g}"
        return (
            f"{cluster.devices} devices a host, {cluster.bandwidth:g} GB/s between "
            f"hosts, {within}, latency {cluster.latency:g} s, overlap "
            f"{cluster.overlap:g} s; {self._examples()}{drawn}"
        )


def _measured_table(rows: Sequence[dict[str, Any]]) -> Table:
    table = new_table(
        *("strategy", "devices", "ms ± IQR", "examples/s", "% of ideal"),
        *("bytes/step", "bytes/batch"),
    )
    for row in rows:
        if row["seconds"] is None:
            continue
        share = row["share_of_ideal"]
        table.add_row(
            row["strategy"],
            str(row["devices"]),
            milliseconds(row),
            digits(row["examples_per_second"]),
            number(share and 100 * share, "{:.1f}"),
            f"{row['bytes_per_step']:,}",
            f"{sum(row['accumulate_bytes'].values()):,}",
        )
    return table


def _predicted_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = new_table(
        *("strategy", "hosts", "devices", "ms computing", "ms waiting"),
        *("ms communicating", "examples/s", "% of ideal"),
    )
    for row in rows:
        table.add_row(
            row["strategy"],
            str(row["hosts"]),
            str(row["devices"]),
            digits(1e3 * row["computing_seconds"]),
            digits(1e3 * row["waiting_seconds"]),
            digits(1e3 * row["communicating_seconds"]),
            digits(row["examples_per_second"]),
            f"{100 * row['share_of_ideal']:.1f}",
        )
    return table


def _laws(parallel: Mapping[str, float | None], fitted: str = "") -> list[str]:
    return [
        f"Amdahl's law{fitted} for {name}: {100 * fraction:.1f} % parallel."
        for name, fraction in parallel.items()
        if fraction is not None
    ]
