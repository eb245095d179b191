"""Compile private training for a TPU or GPU without one: what it costs beside SGD.

    pip install 'jax[tpu]'
    python benchmarks/tpu_compiled.py [--json FILE] [--topology v5e:2x2]
    pip install 'jax[cuda13]'
    python benchmarks/tpu_compiled.py --topology h200 --limit-gib 139 --dtypes tf32

Nothing is run. The sum of one physical batch, as `tanager train` does it, is compiled
for one chip. The compiler's own analysis of the program says the temporary memory,
FLOPs and bytes accessed, shown relative to plain SGD on as many examples. The largest
batch is where a straight line through two physical batches meets `--limit-gib`. With
several `--chips`, each has a physical batch, and bytes are what they exchange in a
logical batch. What the compiler expects of seconds is not shown: it can be negative.

For a GPU, no kernels are compared with each other, which takes most of the time where
there is one, and FLOPs and bytes are not known.

`auto` chooses by the cost model: nothing can be measured. FLOPs and bytes of a loop
would count once; such programs are marked.

Rows are printed and appended to the JSON file one by one. A second call continues
where the first stopped. `--effort` is how much time XLA takes: at 0, its
default, a program takes more than ten minutes on two cores.
"""

import contextlib
import dataclasses
import importlib.metadata
import itertools
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import tyro
from jax.experimental import topologies

from tanager import _validate as validate
from tanager.bench import machine, programs
from tanager.bench.scaling import exchanged
from tanager.bench.timing import describe
from tanager.bench.workload import SGD, Workload
from tanager.compiling import bytes_needed
from tanager.models import zoo
from tanager.parallel.layout import Layout
from tanager.training.precision import PRECISIONS


MODELS = ("wrn-16-4", "vit-base-16", "bit-50x1", "nf-resnet-50", "wrn-28-10")
STRATEGIES = (SGD, "auto", programs.AUTO_LOW, "bk_mixopt", "per_example")
ENVIRONMENT = {  # libtpu looks for a cloud's metadata and a chip otherwise
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
UNTIMED = "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false"
"""What XLA must leave where it has no GPU to time kernels on."""

GPUS = {
    # bytes, bytes a second, bytes of the second-level cache
    "h100": (85e9, 3.35e12, 50 * 2**20),
    "h200": (150e9, 4.8e12, 60 * 2**20),
}
HOPPER = """
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth:.0f}
  l2_cache_size: {cache}
  clock_rate_ghz: 1.98
  device_memory_size: {memory:.0f}
  shared_memory_per_block_optin: 232448
  cuda_compute_capability {{ major: 9 }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 12 }}
runtime_version {{ major: 13 }}
device_description_str: "NVIDIA {name}"
"""
EFFORT = "jax_exec_time_optimization_effort"
KEY = ("model", "dtype", "strategy", "rows", "chips", "topology", "effort")
MIB = 2**20


@dataclasses.dataclass(frozen=True)
class Options:
    """What to compile.

    Attributes:
        models: names of the zoo.
        dtypes: of the model's arithmetic.
        strategies: plain SGD, or ways to clip.
        physical_batch: examples on each chip.
        chips: of the topology, to compile for.
        topology: of the TPU, as libtpu names it; or h100 or h200.
        limit_gib: memory of a chip, for the largest batch.
        effort: from -1 for fast compilation to 1 for fast programs. Default: -1 for a
            TPU, if JAX can be told (0.10), and else 0.
        json: file that rows are added to, one on a line.
    """

    models: tuple[str, ...] = MODELS
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    strategies: tuple[str, ...] = STRATEGIES
    physical_batch: tuple[int, ...] = (32,)
    chips: tuple[int, ...] = (1,)
    topology: str = "v5e:2x2"
    limit_gib: float = 16.0
    effort: float | None = None
    json: Path | None = None

    def check(self) -> None:
        """Refuse what cannot be compiled, before anything is."""
        for model in self.models:
            zoo.find(model)
        for dtype in self.dtypes:
            validate.one_of(PRECISIONS, dtypes=dtype)
        programs.known(self.strategies)
        for rows in self.physical_batch:
            validate.whole(physical_batch=rows, at_least=1)
        validate.positive(limit_gib=self.limit_gib)
        if self.taken and not hasattr(jax.config, EFFORT):
            rule = f"must be 0 with JAX {jax.__version__}, which cannot be told"
            validate.refuse("effort", self.effort, rule)

    @property
    def taken(self) -> float:
        """The effort of XLA."""
        if self.effort is not None:
            return self.effort
        return 0.0 if self.topology in GPUS or not hasattr(jax.config, EFFORT) else -1.0

    def jobs(self) -> list[dict[str, Any]]:
        """Return what identifies each row, in the order of compilation."""
        batches = itertools.product(self.chips, self.physical_batch)
        return [
            dict(
                zip(KEY, (*named, rows, chips, self.topology, self.taken), strict=True)
            )
            for (chips, rows), *named in itertools.product(
                list(batches), self.models, self.dtypes, self.strategies
            )
        ]


def devices_of(topology: str) -> list[Any]:
    """Return descriptions of the chips of a machine; refuse an unknown topology."""
    if topology in GPUS:
        return _gpus(topology)
    try:
        importlib.metadata.version("libtpu")
    except importlib.metadata.PackageNotFoundError:
        raise SystemExit(
            "libtpu is not installed, and only it compiles for a TPU: "
            "pip install 'jax[tpu]'"
        ) from None
    os.environ.update(ENVIRONMENT)
    try:
        return list(topologies.get_topology_desc(topology, "tpu").devices)
    except Exception as error:
        validate.refuse(
            "topology",
            topology,
            f"is unknown to libtpu ({str(error).splitlines()[0]})",
            "give one like v5e:2x2, v5e:4x4 or v4:2x2x1, or h100 or h200",
        )


def _gpus(name: str) -> list[Any]:
    try:
        importlib.metadata.version("jax-cuda13-plugin")
    except importlib.metadata.PackageNotFoundError:
        raise SystemExit(
            "jax-cuda13-plugin is not installed, and only it compiles for an NVIDIA "
            "GPU: pip install 'jax[cuda13]'"
        ) from None
    os.environ["XLA_FLAGS"] = f"{UNTIMED} {os.environ.get('XLA_FLAGS', '')}"
    memory, bandwidth, cache = GPUS[name]
    target = HOPPER.format(
        memory=memory, bandwidth=bandwidth, cache=cache, name=name.upper()
    )
    described = topologies.get_topology_desc(
        name, "cuda", topology="1x1x8", target_config=target
    )
    return list(described.devices)


@contextlib.contextmanager
def compiling_for(devices: Sequence[Any], effort: float) -> Iterator[None]:
    """Have tanager believe that these are JAX's devices, and XLA take its time."""
    platform = devices[0].platform.replace("cuda", "gpu")
    with contextlib.ExitStack() as stack:
        if effort:
            stack.callback(jax.config.update, EFFORT, getattr(jax.config, EFFORT))
            jax.config.update(EFFORT, effort)
        patch = mock.patch.object
        stack.enter_context(patch(jax, "devices", lambda *_: list(devices)))
        stack.enter_context(patch(jax, "default_backend", lambda: platform))
        yield


def measure(job: Mapping[str, Any]) -> dict[str, Any]:
    """Compile the programs of one row, and return what is known of them."""
    started = time.perf_counter()
    shape = zoo.find(job["model"]).image_shape
    workload = Workload(job["model"], shape, precision=job["dtype"])
    with workload.computing():
        step = workload.step(job["strategy"], Layout(job["chips"]))
        size = job["rows"] * job["chips"]
        accumulate, update = step.lowered(workload.batch_shapes(size), size)
        compiled = accumulate.compile()
        text, costs = compiled.as_text() or "", compiled.cost_analysis() or {}
        stats = compiled.memory_analysis()
        assert stats is not None
        row: dict[str, Any] = {
            "temp_bytes": stats.temp_size_in_bytes,
            "bytes_needed": bytes_needed(compiled),
            "flops": costs.get("flops"),
            "bytes_accessed": costs.get("bytes accessed"),
            "loops": text.count(" while("),
        }
        if job["chips"] > 1:
            row["accumulate_exchanges"] = exchanged(text)
            row["update_exchanges"] = exchanged(update.compile().as_text() or "")
    return row | {"seconds": time.perf_counter() - started}


def line(
    row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], limit: float
) -> str:
    """Return a row of the Markdown table; `limit` in GiB."""
    named = [str(row[key]) for key in ("model", "dtype", "strategy", "rows", "chips")]
    if "error" in row:
        return "| " + " | ".join([*named, row["error"]]) + " |"
    sgd = other(row, rows, strategy=SGD)
    cells = [f"{row['temp_bytes'] / MIB:.0f}"]
    for key in ("temp_bytes", "flops", "bytes_accessed"):
        known = sgd is not None and sgd.get(key) and row[key] is not None
        cells.append(f"{row[key] / sgd[key]:.2f}" if known and sgd else "–")
    if row["loops"]:
        cells[-1] += " (loops)"
    most = largest(row, rows, limit)
    cells.append("–" if most is None else str(most))
    cells.append(", ".join(shared(row)) or "–")
    return "| " + " | ".join([*named, *cells, f"{row['seconds']:.0f}"]) + " |"


TITLE = """\
| model | dtype | strategy | batch | chips | temp MiB | × SGD | FLOPs × SGD \
| bytes × SGD | largest batch | exchanged MiB | compile s |
|---|---|---|---|---|---|---|---|---|---|---|---|"""


def other(
    row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], /, **different: Any
) -> Mapping[str, Any] | None:
    """Return the row that differs in these fields alone, if it was compiled."""
    wanted = {key: row[key] for key in KEY} | different
    for each in rows:
        if "error" not in each and all(each[key] == wanted[key] for key in KEY):
            return each
    return None


def largest(
    row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], limit: float
) -> int | None:
    """Return the batch at which a line through two batches meets `limit` GiB."""
    sizes = {each["rows"] for each in rows} - {row["rows"]}
    for size in sorted(sizes):
        if (second := other(row, rows, rows=size)) is not None:
            each = (row["bytes_needed"] - second["bytes_needed"]) / (row["rows"] - size)
            left = limit * 2**30 - row["bytes_needed"]
            return max(int(row["rows"] + left / each), 0) if each > 0 else None
    return None


def shared(row: Mapping[str, Any]) -> list[str]:
    """Return what chips exchange: MiB by kind, of a physical batch and the update."""
    texts = []
    for key, place in (("accumulate", "batch"), ("update", "update")):
        found = row.get(f"{key}_exchanges")
        if found is not None:
            each = [f"{name} {count / MIB:.1f}" for name, count in found.items()]
            texts.append(f"{place}: {', '.join(each) or 'nothing'}")
    return texts


def read(file: Path | None) -> list[dict[str, Any]]:
    """Return the rows of a file, if there is one."""
    lines = file.read_text().splitlines() if file and file.exists() else ()
    return [json.loads(text) for text in lines]


def compile_all(options: Options, devices: Sequence[Any]) -> list[dict[str, Any]]:
    """Compile what the file does not have; print the table."""
    for chips in options.chips:
        if not 1 <= chips <= len(devices):
            rule = f"must be from 1 to {len(devices)}, those of {options.topology}"
            validate.refuse("chips", chips, rule)
    versions = machine.versions() | {"libtpu": _libtpu()}
    rows = [row for row in read(options.json) if row.get("versions") == versions]
    jobs = options.jobs()
    waiting = [
        job
        for job in jobs
        if not any(job.items() <= row.items() and "error" not in row for row in rows)
    ]
    print(TITLE, flush=True)
    for job in jobs:
        if job not in waiting and (known := other(job, rows)):
            print(line(known, rows, options.limit_gib), flush=True)
    started = time.perf_counter()
    for done, job in enumerate(waiting):
        each = (time.perf_counter() - started) / done if done else None
        left = (
            ""
            if each is None
            else f", {each * (len(waiting) - done) / 60:.0f} min left"
        )
        named = " ".join(str(job[key]) for key in KEY[:5])
        print(
            f"{done + 1} of {len(waiting)}{left}: {named}", file=sys.stderr, flush=True
        )
        with compiling_for(devices, job["effort"]):
            try:
                found = measure(job)
            except Exception as error:
                found = {"error": describe(error).splitlines()[0]}
        rows.append({**job, **found, "versions": versions})
        if options.json:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            with options.json.open("a") as file:
                file.write(json.dumps(rows[-1], ensure_ascii=False) + "\n")
        print(line(rows[-1], rows, options.limit_gib), flush=True)
        jax.clear_caches()
    return rows


def _libtpu() -> str | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version("libtpu")
    return None


def main(words: Sequence[str] | None = None) -> None:
    """Compile, and print the table."""
    jax.config.update("jax_platforms", "cpu")  # or JAX leaves the plugin of a GPU out
    try:
        options = tyro.cli(Options, args=words, description=__doc__)
        options.check()
        compile_all(options, devices_of(options.topology))
    except ValueError as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
