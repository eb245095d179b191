"""`tanager bench`: what privacy costs on this machine."""

import dataclasses
import datetime
import json
import shlex
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from rich.console import Console
from rich.table import Table

from tanager import _validate as validate


if TYPE_CHECKING:
    from tanager.bench.workload import Workload


_GIB = 2**30
_STOPPED = 130
_VECTOR_MODELS = ("mlp", "linear")


@dataclasses.dataclass(frozen=True)
class _Measured:
    model: str = "wrn-16-4"
    """Name of a model."""

    classes: int = 10
    """Number of classes."""

    image_size: int | None = None
    """Side of the square images. Default: the model's own, see tanager models."""

    channels: int | None = None
    """Channels of the images. Default: the model's own."""

    features: int | None = None
    """Length of a feature vector in place of images, for mlp and linear."""

    views: int = 1
    """K augmented views of each example, averaged before clipping."""

    precision: Annotated[str, tyro.conf.arg(metavar="{float32,tf32,bfloat16}")] = (
        "float32"
    )
    """Precision of the forward and backward pass."""

    clip_norm: float = 1.0
    """Clipping norm, C."""

    json: bool = False
    """Print one JSON object and nothing else."""

    def workload(self) -> "Workload":
        """Return what these options describe."""
        from tanager.bench.workload import Workload

        return Workload(
            self.model,
            self._image_shape(),
            classes=self.classes,
            views=self.views,
            precision=self.precision,
            clip_norm=self.clip_norm,
        )

    def _image_shape(self) -> tuple[int, ...]:
        if self.features is not None:
            validate.one_of(
                _VECTOR_MODELS,
                model=self.model,
                remedy="other models take images: leave --features away",
            )
            return (self.features,)
        from tanager.models import find

        entry = find(self.model)
        side = entry.image_side if self.image_size is None else self.image_size
        channels = entry.channels if self.channels is None else self.channels
        return (side, side, channels)


@dataclasses.dataclass(frozen=True)
class Step(_Measured):
    """Time plain SGD and private training, strategies in turns.

    A row is one physical batch: for sgd gradient and update; for a strategy the
    clipped gradients added to an accumulator, as the noisy update comes once for each
    logical batch and has a line of its own.
    """

    physical_batch: int = 32
    """Rows of the physical batch."""

    examples: int | None = None
    """How many of them are examples, and not padding. Default: all."""

    strategies: tuple[str, ...] = ()
    """sgd and clipping strategies. Default: all there are."""

    repeats: int = 10
    """Rounds of timing."""

    breakdown: bool = False
    """Add the shares of forward, backward, clipping, and optimizer step."""


@dataclasses.dataclass(frozen=True)
class Memory(_Measured):
    """Find the largest physical batch that fits: compiled on a CPU, tried elsewhere."""

    strategies: tuple[str, ...] = ()
    """sgd and clipping strategies. Default: all there are."""

    limit_gib: float | None = None
    """Memory limit in GiB. Default, on an accelerator: all there is."""


@dataclasses.dataclass(frozen=True)
class Explain(_Measured):
    """Print which parameters meet data where, and how each such tap is clipped."""

    physical_batch: int = 32
    """Rows of the physical batch."""

    strategy: str = "auto"
    """The clipping strategy."""


_Command = (
    Annotated[Step, tyro.conf.subcommand("step")]
    | Annotated[Memory, tyro.conf.subcommand("memory")]
    | Annotated[Explain, tyro.conf.subcommand("explain")]
)


def run(arguments: Sequence[str]) -> int:
    """Run the command; `arguments` are the words after `tanager bench`.

    Returns:
        0; 1 when nothing could be measured; 130 when stopped, after what was measured.

    Raises:
        ValueError: an unknown model or strategy, or a number out of range.
    """
    words = list(arguments)
    options = tyro.cli(
        _Command,  # pyright: ignore[reportArgumentType]
        prog="tanager bench",
        description="Measure what privacy costs on this machine.",
        args=words,
    )
    screen = Console(stderr=True)
    # Redrawn rarely: a spinner takes time from what is being timed.
    with screen.status("starting", refresh_per_second=1) as status:
        if isinstance(options, Step):
            record, lines, code = _step(options, status.update)
        elif isinstance(options, Memory):
            record, lines, code = _memory(options, status.update)
        else:
            record, lines, code = _explain(options)
    if options.json:
        record |= _circumstances(words)
        print(json.dumps(record, allow_nan=False, indent=2, ensure_ascii=False))
    else:
        console = Console(highlight=False)
        for line in lines:
            console.print(line, markup=False, soft_wrap=isinstance(line, str))
    if code == _STOPPED:
        screen.print("tanager: stopped: this is what was measured before")
    return code


def _step(
    options: Step, report: Callable[[str], None]
) -> tuple[dict[str, Any], list[Any], int]:
    from tanager.bench import programs, timing

    workload = options.workload()
    found = timing.bench_step(
        workload,
        options.strategies or programs.training_names(),
        physical_batch=options.physical_batch,
        examples=options.examples,
        repeats=options.repeats,
        breakdown=options.breakdown,
        report=report,
    )
    record = {
        "rows": found.rows,
        "update": found.update,
        "workload": dataclasses.asdict(workload),
        "physical_batch": options.physical_batch,
        "examples": options.examples or options.physical_batch,
        "repeats": options.repeats,
    }
    lines: list[Any] = [_step_table(found.rows), *_errors(found.rows)]
    if found.update["seconds"] is not None:
        lines.append(
            "noisy update, once for each logical batch: "
            f"{_milliseconds(found.update)} ms"
        )
    if options.breakdown:
        lines += ["", _breakdown_table(found.rows)]
    return record, lines, _STOPPED if found.stopped else _code(found.rows)


def _memory(
    options: Memory, report: Callable[[str], None]
) -> tuple[dict[str, Any], list[Any], int]:
    from tanager.bench import memory, programs

    if options.limit_gib is not None:
        validate.positive(limit_gib=options.limit_gib)
    limit = None if options.limit_gib is None else int(options.limit_gib * _GIB)
    workload = options.workload()
    rows, stopped = memory.bench_memory(
        workload,
        options.strategies or programs.training_names(),
        limit_bytes=limit,
        report=report,
    )
    record = {
        "rows": rows,
        "workload": dataclasses.asdict(workload),
        "limit_bytes": limit,
    }
    table = _table("strategy", "largest physical batch", "× SGD")
    for row in rows:
        if row["error"] is None:
            more = "at least " if row["at_ceiling"] else ""
            size = f"{more}{row['physical_batch']}"
            table.add_row(row["strategy"], size, _number(row["ratio_to_sgd"], "{:.2f}"))
    return record, [table, *_errors(rows)], _STOPPED if stopped else _code(rows)


def _explain(options: Explain) -> tuple[dict[str, Any], list[Any], int]:
    validate.whole(physical_batch=options.physical_batch, at_least=1)
    workload = options.workload()
    with workload.computing():
        explanation = workload.step(options.strategy).grad_fn.explain(
            workload.params(), workload.batch(options.physical_batch)
        )
    record = {
        "explain": explanation.as_json(),
        "workload": dataclasses.asdict(workload),
        "physical_batch": options.physical_batch,
        "strategy": options.strategy,
    }
    return record, [str(explanation)], 0


def _circumstances(words: list[str]) -> dict[str, Any]:
    from tanager.bench import machine

    now = datetime.datetime.now(datetime.UTC)
    return {
        "machine": machine.machine(),
        "versions": machine.versions(),
        "command": shlex.join(["tanager", "bench", *words]),
        "date": now.isoformat(timespec="seconds"),
    }


def _code(rows: list[dict[str, Any]]) -> int:
    return int(all(row["error"] is not None for row in rows))


def _errors(rows: list[dict[str, Any]]) -> list[str]:
    return [f"{row['strategy']}: {row['error']}" for row in rows if row["error"]]


def _table(*headings: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="right" if number else "left")
    return table


def _step_table(rows: list[dict[str, Any]]) -> Table:
    table = _table(
        "strategy", "ms ± IQR", "examples/s", "× SGD", "temp MiB", "compile s", "traces"
    )
    for row in rows:
        if row["seconds"] is None:
            continue
        mebibytes = None if row["temp_bytes"] is None else row["temp_bytes"] / 2**20
        table.add_row(
            row["strategy"],
            _milliseconds(row),
            f"{row['examples_per_second']:.4g}",
            _number(row["ratio_to_sgd"], "{:.2f}"),
            _number(mebibytes, "{:.1f}"),
            _number(row["compile_seconds"], "{:.1f}"),
            _number(row["traces"], "{}"),
        )
    return table


def _breakdown_table(rows: list[dict[str, Any]]) -> Table:
    headings = ("forward", "backward", "clip and accumulate", "optimizer step")
    table = _table("ms (share)", *headings)
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


def _milliseconds(row: dict[str, Any]) -> str:
    return f"{1e3 * row['seconds']:.4g} ± {1e3 * row['seconds_spread']:.2g}"


def _number(value: float | None, form: str) -> str:
    return "—" if value is None else form.format(value)
