"""The physical batch that fits the memory and makes a run fastest.

Rows of padding take time as others do, so one batch need only hold what an update has.
Sizes are compiled from small to large. XLA's analysis says what a program needs before
it runs; then it is timed on zeros whose rows are all masked, never on an example.
"""

import math
import time
from collections.abc import Callable

import jax
from jaxtyping import PyTree

from tanager import _processor
from tanager import _validate as validate
from tanager._record import read_record
from tanager.compiling import bytes_needed, is_out_of_memory
from tanager.parallel import hosts
from tanager.parallel.layout import Layout
from tanager.sampling import PoissonSampler
from tanager.training.estimate import physical_batches
from tanager.training.problem import Runtime
from tanager.training.run_folder import RunFolder
from tanager.training.step import Step


_FIRST = 16  # rows of a device
_PATIENCE = 2  # larger sizes tried that are no faster
_GAIN = 0.95


def least(runtime: Runtime, layout: Layout) -> int:
    """Return the physical batch size, or with "auto" the smallest there is.

    Raises:
        ValueError: it is "auto" on several hosts.
    """
    if runtime.physical_batch_size != "auto":
        return runtime.physical_batch_size
    if hosts.count() > 1:
        rule = "must be a number on several hosts"
        validate.refuse("physical_batch_size", "auto", rule, "give 64 for each device")
    return layout.count


def enough(sampler: PoissonSampler, size: int, devices: int) -> int:
    """Return the size, or a smaller one that holds nearly every logical batch."""
    each = max(_FIRST, -(-_most(sampler) // devices))
    return min(size, each * devices)


def recorded(folder: RunFolder | None, layout: Layout) -> int | None:
    """Return the size that a run began with; None if its devices cannot share it."""
    if folder is None or not folder.config.exists():
        return None
    size = read_record(folder.config, {"physical_batch_size": int})[
        "physical_batch_size"
    ]
    return size if size % layout.count == 0 else None


def choose(step: Step, one: PyTree, share: float, report: Callable[[str], None]) -> int:
    """Return the size whose updates are expected to be fastest, of those that fit.

    It is a power of two for each device. Of `one`, any example on a leading axis of 1,
    only shapes are used. At most this share of the run's time goes into trying larger
    sizes. `report` is called with what is tried.
    """
    devices, began = step.layout.count, time.monotonic()
    step, room = step.on_rows(), _room(step)
    mean = step.sampler.expected_batch_size
    most = _most(step.sampler) / devices  # then one batch holds nearly all

    def update(each: int) -> float | None:
        report(f"physical batches of {each * devices}")
        seconds = _seconds(step, one, each * devices, room)
        batches = physical_batches(step.sampler, each * devices)
        return None if seconds is None else seconds * batches

    best = first = min(_FIRST, 2 ** max(0, math.ceil(math.log2(mean / devices))))
    fastest = update(first)
    while fastest is None and best > 1:
        best //= 2
        fastest = update(best)
    each, slower = best, 0
    while fastest is not None and best >= first and slower < _PATIENCE:
        worth = share * step.sampler.mechanism.steps * fastest
        if each >= most or time.monotonic() - began > worth:
            break
        each *= 2
        seconds = update(each)
        if seconds is None:
            break
        slower += 1
        if seconds < _GAIN * fastest:
            best, fastest, slower = each, seconds, 0
    return best * devices


def _most(sampler: PoissonSampler) -> int:
    """Return a size that hardly any logical batch exceeds."""
    mean = sampler.expected_batch_size
    spread = math.sqrt(mean * (1 - sampler.mechanism.sample_rate))
    return math.ceil(mean + 5 * spread)


def _seconds(step: Step, one: PyTree, size: int, room: float) -> float | None:
    """Return the seconds of a physical batch; None if it does not fit."""
    padding = step.unit.padding(one, size)
    try:
        program, run = step.compiled(step.layout.rows(padding))
        if (bytes_needed(program) or 0) > room:
            return None
        found = []
        for _ in range(3):  # the first is a warm-up
            began = time.perf_counter()
            jax.block_until_ready(run())
            found.append(time.perf_counter() - began)
    except (jax.errors.JaxRuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return None
    return min(found[1:])


def _room(step: Step) -> float:
    """Return the bytes of a device that physical batches may take: half of what is."""
    device = step.layout.mesh.devices.flat[0]
    stats = device.memory_stats() or {}
    if "bytes_limit" in stats:
        return (stats["bytes_limit"] - stats.get("bytes_in_use", 0)) / 2
    return _processor.memory() / step.layout.count / 2
