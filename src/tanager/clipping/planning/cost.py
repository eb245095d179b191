"""What a method is expected to cost: seconds and bytes, from shapes alone.

The figures are rough and only their order matters. Those of a CPU were fitted to
measurements on two cores with AVX-512 (docs/performance.md); those of an accelerator
are guesses. Where it counts, `planning.autotune` measures.

On a GPU, measuring a method can take a minute of compiling. So there `auto` takes
patches, by what an H200 took: `vmap` takes 1.8 to 9 times as long, and crossed copies
0.8 to 1.05 times.

For a TPU, programs were compiled but not run (``benchmarks/tpu_compiled.py``):

- By `vmap`, the kernel gradients of B examples are one convolution of about B times the
  operations; patches and crossed copies take no more than they must.
- XLA keeps a smaller part of the activations there, so `auto` may hold fewer gradients.

What XLA does on a CPU, as ``python benchmarks/costs.py`` measures it beside what is
expected:

- By `vmap` it forms the kernel gradients of a convolution from patches that it gathers
  number by number. That takes longer than the product where outputs are few.
- It does so for B examples in G groups as if each of the B·G groups met all others, and
  slowly where a group has several channels.
- The gradient of a table by `vmap` is B tables of zeros, written, and B copies of them.
  The Gram matrix of row numbers takes comparisons alone.
- Pages above 32 MiB are mapped and cleared at every call, unless the process keeps its
  memory (`_heap`). To write a number there takes several times as long.
"""

from typing import NamedTuple

import jax

from tanager import _heap
from tanager.clipping.analysis.jaxprs import aval
from tanager.clipping.analysis.rounding import PRODUCT_ROWS
from tanager.clipping.rules.base import DIRECT, Rule, Work
from tanager.clipping.rules.convolutions import Convolution
from tanager.clipping.rules.dots import Dot
from tanager.clipping.rules.gathers import Gather
from tanager.clipping.rules.groups import RETAINED, Method, NormGroup


class Cost(NamedTuple):
    """Seconds for one physical batch, and bytes held between its norms and its sum."""

    seconds: float
    bytes: float


class _Device(NamedTuple):
    flops: float  # of a convolution or product at its best, per second
    bandwidth: float  # bytes per second
    launch: float  # seconds per kernel
    gradients: dict[str, float]  # time of a gradient method, relative to `flops`
    gathered: float  # seconds for a number of a patch that XLA gathers by itself
    gram: float
    held: float = 1.0  # what `auto` holds for the sums, over the activations


_CPU = _Device(
    flops=2e11,
    bandwidth=1e10,
    launch=2e-6,
    gradients={"vmap": 2.4, "crossed": 1.3, "patches": 1.7, "gathered": 1.7},
    gathered=5e-9,
    gram=2.0,
)
_ACCELERATOR = _Device(
    flops=1e14,
    bandwidth=2e12,
    launch=5e-6,
    gradients={"vmap": 3.0, "crossed": 1.5, "patches": 1.5, "gathered": 1.5},
    gathered=0.0,
    gram=3.0,
)
_TPU = _ACCELERATOR._replace(held=0.4)
_DOT = {"vmap": 1.2, "batched": 1.5}
_GROUPED = {"depthwise": 5e10, "grouped": 1e9}
"""Operations a second of `vmap` on a CPU, were each group to meet all others."""

_MAPPED = 2.0**25
"""Bytes of a block that glibc maps at every call."""

_FRESH = 2e9
"""Bytes a second of memory that the system clears when it is first written."""

_MOST_EXCESS = 0.01
"""How much too large a norm `auto` accepts from a Gram matrix."""


_SMALL = 16 * 2**20  # bytes that no training misses


def _device() -> _Device:
    return {"cpu": _CPU, "tpu": _TPU}.get(jax.default_backend(), _ACCELERATOR)


def most_held(activations: float) -> float:
    """Return how many bytes `auto` holds for the sums, from those of activations."""
    return max(_device().held * activations, _SMALL)


def candidates(group: NormGroup) -> list[Method]:
    """Return every way to clip a group that is worth considering."""
    totals = group.totals()
    methods = [Method(norm, total) for norm in group.grams() for total in totals]
    for norm in group.gradients():
        again = [total for total in totals if total in (norm, DIRECT)]
        methods += [Method(norm, total) for total in (RETAINED, *again)]
    return methods


def precise(group: NormGroup) -> list[Method]:
    """Return the methods whose norms are not much too large for ordinary examples.

    Where the T terms of a gradient are as good as independent, A² = T·‖g‖². On a GPU,
    where patches are a way, others that form gradients are left out.
    """
    options = candidates(group)
    if jax.default_backend() == "gpu" and "patches" in group.gradients():
        others = {"vmap", "crossed"}
        options = [m for m in options if others.isdisjoint(m)]
    positions = group.rule.work(1).positions
    return [
        method
        for method in options
        if method.norm not in group.grams()
        or group.excess(method) * positions <= 2 * _MOST_EXCESS
    ] or options


def estimate(group: NormGroup, method: Method, rows: int) -> Cost:
    """Return the expected cost of clipping a group by a method."""
    device = _device()
    seconds, held = clearing(group, method, rows), 0.0
    for rule in group.rules:
        seconds += _norm_seconds(rule, method.norm, rows, device)
    if method.total == RETAINED:
        weights = 4.0 * rows * sum(aval(anchor).size for anchor in group.unit.anchors)
        return Cost(seconds + weights / device.bandwidth, weights)
    for rule in group.rules:
        seconds += _total_seconds(rule, method.total, rows, device)
    for use in group.uses:
        tap = group.program.taps[use.tap]
        invars, outvars = tap.equation.invars, tap.equation.outvars
        kept = map(aval, [*(invars[n] for n in tap.data), *outvars])  # x and dy
        held += float(rows * sum(each.size * each.dtype.itemsize for each in kept))
    return Cost(seconds, held)


def clearing(group: NormGroup, method: Method, rows: int) -> float:
    """Return the seconds that the system takes to clear what a method first writes.

    None for as much as is free again after the forward pass.
    """
    if _device() is not _CPU or _heap.keeps_freed():
        return 0.0
    before = rows * group.program.activations
    numbers = sum(_formed_at_once(rule, method, rows) for rule in group.rules)
    if 4.0 * numbers + before <= _MAPPED:
        return 0.0
    return max(4.0 * numbers - before, 0.0) / _FRESH


def _formed_at_once(rule: Rule, method: Method, rows: int) -> float:
    """Return how many numbers of Gram matrices or gradients exist at one time."""
    work, formed = rule.work(rows), 0.0
    for name in (method.norm, method.total):
        if name in rule.grams():
            left = work.pixels if name == "shifted gram" else work.positions
            squares = float(left) ** 2 + float(work.positions) ** 2
            formed = max(formed, rows * work.groups * squares)
        elif name not in (DIRECT, RETAINED):
            dropped = method.total != RETAINED
            most = rule.chunk(name, rows) if dropped else rows
            copies = 2.0 if name == "vmap" and not isinstance(rule, Dot) else 1.0
            formed = max(formed, copies * most * work.weights)
    return formed


def _norm_seconds(rule: Rule, method: str, rows: int, device: _Device) -> float:
    work = rule.work(rows)
    if method not in (*rule.grams(), *rule.gradients()):
        method = "vmap"
    if method in rule.grams():
        return _gram_seconds(rule, work, method, device)
    if isinstance(rule, Gather):
        return rows * (4.0 * work.results + 8.0 * work.weights) / device.bandwidth
    if rule.name == "general":
        # Elementwise: one pass over dy, one over the gradients.
        return 4.0 * rows * (work.results + work.weights) / device.bandwidth
    grouped = isinstance(rule, Convolution) and work.groups > 1
    if grouped and method == "vmap" and device is _CPU:
        depthwise = work.inputs == work.offsets and work.outputs == 1
        rate = _GROUPED["depthwise" if depthwise else "grouped"]
        return work.flops * work.groups * rows / rate
    factor = (device.gradients if work.pixels else _DOT)[method]
    moved, gathered = 4.0 * rows * work.weights, 0.0
    if isinstance(rule, Convolution):
        each = 24.0 if grouped and method == "patches" else 8.0
        moved += each * rows * rule.copied(method)
        factor *= rule.share(method)
        if method == "vmap":
            moved *= 4  # the axes of each gradient change places
            gathered = device.gathered * rows * work.positions * work.inputs
            factor *= rows if device is _TPU else 1
    chunks = -(-rows // rule.chunk(method, rows))
    return (
        work.flops * factor / device.flops
        + gathered
        + moved / device.bandwidth
        + chunks * work.offsets * device.launch
    )


def _gram_seconds(rule: Rule, work: Work, method: str, device: _Device) -> float:
    if work.positions == 1:
        return 4.0 * work.rows * (work.data + work.results) / device.bandwidth
    square = float(work.positions) ** 2 * work.groups
    flops, moved = 2.0 * square * work.outputs, 12.0 * square
    if method == "shifted gram":
        pixels = float(work.pixels) ** 2 * work.groups
        flops += 2.0 * pixels * work.inputs / work.offsets
        moved += 4.0 * pixels + 4.0 * work.offsets * square
    elif not isinstance(rule, Gather):  # which compares the numbers of rows
        flops += 2.0 * square * work.inputs
        if method == "patch gram":
            moved += 8.0 * work.positions * work.groups * work.inputs
    seconds = flops * device.gram / device.flops + moved / device.bandwidth
    return work.rows * seconds


def _total_seconds(rule: Rule, method: str, rows: int, device: _Device) -> float:
    work = rule.work(rows)
    if isinstance(rule, Gather):
        # A product adds up what one example has for a row, before the table is written.
        product = _gram_seconds(rule, work, method, device)
        tables = work.weights * -(-rows // PRODUCT_ROWS)
        return product + (8.0 * rows * work.results + 4.0 * tables) / device.bandwidth
    if rule.name == "general":
        return 4.0 * rows * work.results / device.bandwidth
    if method == DIRECT:
        return work.flops * _DOT[method] / device.flops
    added = 4.0 * rows * work.weights / device.bandwidth
    return _norm_seconds(rule, method, rows, device) + added
