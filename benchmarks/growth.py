"""Say how the cost of private training grows, and with which power.

    python benchmarks/growth.py [--axes width depth] [--rounds 7] [--out FILE]
        [--plot PICTURE] [--write PAGE]

One thing at a time grows, from a small wide ResNet (depth 10, width 2, 32 × 32 images,
physical batch 16, one view): width, depth, side of the images, physical batch,
augmentation multiplicity K, and devices with a physical batch each. Seconds and
temporary memory of plain SGD and of private training are measured in turns, as `tanager
bench step` does. An exponent is the slope of a straight line through the logarithms;
beside it is that of the arithmetic (multiplications and additions of a forward pass),
which time cannot but follow. On a CPU devices are shares of the same cores: there the
work grows and the cores do not. Several devices of one CPU want settings of their own
(JAX's thread for programs), so they are measured by a process of their own.
"""

import argparse
import dataclasses
import datetime
import json
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from tanager._heap import keep_freed_memory, run_in_place
from tanager.bench import machine
from tanager.bench.scaling import bench_scaling
from tanager.bench.timing import bench_step
from tanager.bench.workload import Workload
from tanager.models.counts import count_flops
from tanager.models.wide_resnet import WideResNet
from tanager.report.figures import number_axis, save


AXES: dict[str, tuple[int, ...]] = {
    "width": (1, 2, 4),
    "depth": (10, 16, 28),
    "image side": (16, 32, 64),
    "physical batch": (8, 32, 128),
    "views K": (1, 4, 16),
    "devices": (1, 2),
}
BASE = {"width": 2, "depth": 10, "image side": 32, "physical batch": 16, "views K": 1}
_MEASURED = ("seconds", "temp_bytes")
STRATEGIES = ("sgd", "auto", "auto:low", "per_example")


@dataclasses.dataclass(frozen=True)
class Wide(Workload):
    """A wide ResNet of any depth and width, not only those that have a name."""

    depth: int = 10
    width: int = 2

    def params(self) -> Any:
        """Return initial parameters; the same on every call."""
        return WideResNet(self.depth, self.width, self.classes, key=jax.random.key(0))


def measure(
    axis: str, value: int, rounds: int, strategies: Sequence[str] = STRATEGIES
) -> dict[str, Any]:
    """Time plain SGD and private training where one thing differs from `BASE`."""
    setting = BASE | {axis: value}
    shape = (setting["image side"],) * 2 + (3,)
    workload = Wide(
        "wrn-16-4",
        shape,
        views=setting["views K"],
        depth=setting["depth"],
        width=setting["width"],
    )
    batch = setting["physical batch"]
    images = batch * setting["views K"] * setting.get("devices", 1)
    flops = images * count_flops(workload.param_shapes, shape)
    if axis == "devices":
        found = bench_scaling(
            workload,
            strategies[:2],
            devices=[value],
            physical_batch=batch,
            chunks=1,
            repeats=rounds,
        ).rows
    else:
        found = bench_step(
            workload, strategies, physical_batch=batch, repeats=rounds
        ).rows
    kept = ("seconds", "temp_bytes", "compile_seconds", "error")
    rows = {row["strategy"]: {key: row.get(key) for key in kept} for row in found}
    return {"value": value, "flops": flops, "rows": rows}


def measure_devices(rounds: int) -> list[dict[str, Any]]:
    """Return the points of the axis of devices, measured by another process."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "devices.json"
        options = ["--axes", "devices", "--rounds", str(rounds), "--out", str(out)]
        subprocess.run(
            [sys.executable, __file__, *options], check=True, stdout=sys.stderr
        )
        return json.loads(out.read_text())["axes"]["devices"]


def exponent(points: list[dict[str, Any]], read: Any) -> float | None:
    """Return the slope of log(read(point)) against log(value), by least squares."""
    pairs = [(point["value"], read(point)) for point in points]
    pairs = [(value, cost) for value, cost in pairs if cost]
    if len(pairs) < 2:
        return None
    values, costs = np.log(np.array(pairs, float)).T
    return float(np.polyfit(values, costs, 1)[0])


def table(record: dict[str, Any]) -> str:
    """Return the exponents in Markdown: of time, and of temporary memory."""
    heading = ["what grows", "arithmetic", *STRATEGIES]
    lines = [heading, ["---", *["---:"] * (1 + len(STRATEGIES))]]
    for axis, points in record["axes"].items():
        values = ", ".join(str(point["value"]) for point in points)
        cells = [_decimals(exponent(points, lambda point: point["flops"]))]
        for name in STRATEGIES:
            of = [_decimals(exponent(points, _reader(name, key))) for key in _MEASURED]
            cells.append(" / ".join(of) if of[0] != "–" else "–")
        lines.append([f"{axis}: {values}", *cells])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _reader(name: str, key: str) -> Callable[[dict[str, Any]], Any]:
    return lambda point: point["rows"].get(name, {}).get(key)


def _decimals(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def filled(page: str, record: dict[str, Any]) -> str:
    """Return the page with the table between its markers."""
    text = f"<!-- growth -->\n{table(record)}\n<!-- end -->"
    return re.sub(r"<!-- growth -->\n.*?<!-- end -->", text, page, flags=re.S)


def draw(record: dict[str, Any], path: Path) -> None:
    """Draw milliseconds against what grows, a panel for each."""
    from matplotlib import pyplot
    from matplotlib.ticker import NullLocator

    colours = dict(
        zip(STRATEGIES, ("0.45", "#c0392b", "#e08e79", "#2c6fb0"), strict=True)
    )
    figure, panels = pyplot.subplots(2, 3, figsize=(9.5, 5.6), sharey=True)
    for axes, (axis, points) in zip(panels.flat, record["axes"].items(), strict=False):
        for name in STRATEGIES:
            pairs = [
                (point["value"], 1e3 * point["rows"][name]["seconds"])
                for point in points
                if point["rows"].get(name, {}).get("seconds")
            ]
            if pairs:
                axes.plot(
                    *np.array(pairs).T, "o-", color=colours[name], ms=3, label=name
                )
        axes.set_xscale("log")
        axes.set_yscale("log")
        for one in (axes.xaxis, axes.yaxis):
            number_axis(one)
        axes.set_xticks([point["value"] for point in points])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlabel(axis)
        axes.grid(alpha=0.3, which="both", linewidth=0.5)
    for axes in panels[:, 0]:
        axes.set_ylabel("ms for a physical batch")
    panels[0, 0].legend(fontsize=7)
    figure.tight_layout()
    save(figure, path)


def main() -> None:
    """Measure, print the exponents, write the record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--axes", nargs="+", default=list(AXES), choices=list(AXES))
    parser.add_argument("--out", type=Path, default=Path("runs/growth.json"))
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--write", type=Path, metavar="PAGE")
    options = parser.parse_args()
    if options.axes == ["devices"]:
        jax.config.update("jax_num_cpu_devices", max(AXES["devices"]))
    keep_freed_memory()
    run_in_place()
    now = datetime.datetime.now(datetime.UTC)
    record: dict[str, Any] = {
        "base": BASE,
        "axes": {},
        "machine": machine.machine(),
        "versions": machine.versions(),
        "command": shlex.join(["python", *sys.argv]),
        "date": now.isoformat(timespec="seconds"),
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)

    def keep() -> None:
        text = json.dumps(record, indent=1, ensure_ascii=False)
        options.out.write_text(text + "\n")

    for axis in options.axes:
        points = record["axes"][axis] = []
        if axis == "devices" and len(options.axes) > 1:
            points += measure_devices(options.rounds)
            keep()
            continue
        for value in AXES[axis]:
            print(f"{axis} {value}", file=sys.stderr, flush=True)
            points.append(measure(axis, value, options.rounds))
            keep()
    print(table(record))
    if options.plot:
        draw(record, options.plot)
    if options.write:
        options.write.write_text(filled(options.write.read_text(), record))


if __name__ == "__main__":
    main()
