"""What a method is expected to cost: seconds and bytes, from shapes alone.

The figures are rough and only their order matters. Those of a CPU were fitted to
measurements on two cores with AVX-512 (docs/performance.md); those of an accelerator
are guesses, never measured. Where it counts, `planning.autotune` measures.

XLA on a CPU forms the kernel gradients of B examples of a convolution in G groups by
`vmap` as if each of the B·G groups met all others, and slowly where a group has several
channels. ``python benchmarks/costs.py`` measures a table of convolutions beside what is
expected of them.
"""

from typing import NamedTuple

import jax

from tanager.clipping.analysis.jaxprs import aval
from tanager.clipping.rules.base import DIRECT, Rule, Work
from tanager.clipping.rules.convolutions import Convolution
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
    gram: float


_CPU = _Device(
    flops=2e11,
    bandwidth=1e10,
    launch=2e-6,
    gradients={"vmap": 20.0, "crossed": 1.3, "patches": 1.7},
    gram=2.0,
)
_ACCELERATOR = _Device(
    flops=1e14,
    bandwidth=2e12,
    launch=5e-6,
    gradients={"vmap": 3.0, "crossed": 1.5, "patches": 1.5},
    gram=3.0,
)
_DOT = {"vmap": 1.2, "batched": 1.5}
_GROUPED = {"depthwise": 5e10, "grouped": 1e9}
"""Operations a second of `vmap` on a CPU, were each group to meet all others."""


_MOST_EXCESS = 0.01
"""How much too large a norm `auto` accepts from a Gram matrix."""


def _device() -> _Device:
    return _CPU if jax.default_backend() == "cpu" else _ACCELERATOR


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

    Where the T terms of a gradient are as good as independent, A² = T·‖g‖².
    """
    options = candidates(group)
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
    seconds, held = 0.0, 0.0
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


def _norm_seconds(rule: Rule, method: str, rows: int, device: _Device) -> float:
    work = rule.work(rows)
    if method not in (*rule.grams(), *rule.gradients()):
        method = "vmap"
    if method in rule.grams():
        return _gram_seconds(work, method, device)
    if rule.name in ("general", "gather"):
        # Elementwise: one pass over dy, one over the gradients.
        return 4.0 * rows * (work.results + work.weights) / device.bandwidth
    grouped = isinstance(rule, Convolution) and work.groups > 1
    if grouped and method == "vmap" and device is _CPU:
        depthwise = work.inputs == work.offsets and work.outputs == 1
        rate = _GROUPED["depthwise" if depthwise else "grouped"]
        return work.flops * work.groups * rows / rate
    factor = (device.gradients if work.pixels else _DOT)[method]
    moved = 4.0 * rows * work.weights
    if isinstance(rule, Convolution):
        each = 24.0 if grouped and method == "patches" else 8.0
        moved += each * rows * rule.copied(method)
    chunks = -(-rows // rule.chunk(method, rows))
    return (
        work.flops * factor / device.flops
        + moved / device.bandwidth
        + chunks * work.offsets * device.launch
    )


def _gram_seconds(work: Work, method: str, device: _Device) -> float:
    if work.positions == 1:
        return 4.0 * work.rows * (work.data + work.results) / device.bandwidth
    square = float(work.positions) ** 2 * work.groups
    flops, moved = 2.0 * square * work.outputs, 12.0 * square
    if method == "shifted gram":
        pixels = float(work.pixels) ** 2 * work.groups
        flops += 2.0 * pixels * work.inputs / work.offsets
        moved += 4.0 * pixels + 4.0 * work.offsets * square
    else:
        flops += 2.0 * square * work.inputs
        if method == "patch gram":
            moved += 8.0 * work.positions * work.groups * work.inputs
    seconds = flops * device.gram / device.flops + moved / device.bandwidth
    return work.rows * seconds


def _total_seconds(rule: Rule, method: str, rows: int, device: _Device) -> float:
    work = rule.work(rows)
    if rule.name in ("general", "gather"):
        return 4.0 * rows * work.results / device.bandwidth
    if method == DIRECT:
        return work.flops * _DOT[method] / device.flops
    added = 4.0 * rows * work.weights / device.bandwidth
    return _norm_seconds(rule, method, rows, device) + added
