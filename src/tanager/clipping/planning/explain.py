"""A table of what is done at each tap, and why."""

import dataclasses
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tanager.clipping.analysis.jaxprs import aval
from tanager.clipping.analysis.rounding import FloatError
from tanager.clipping.planning import cost
from tanager.clipping.planning.choices import Plan
from tanager.clipping.rules.groups import Joint, Method, NormGroup


@dataclass(frozen=True)
class TapRow:
    """One norm group of the table.

    Attributes:
        tap: number of the (first) tap, in the order of the loss.
        equation: primitive and shapes of one example.
        leaves: numbers of the parameter leaves, in the order of `jax.tree.leaves`.
        norm: where the norm comes from.
        total: where the sum comes from.
        why: the reason.
        flops: of a plain weight gradient, for the physical batch.
        bytes: held between norms and sums, for the physical batch.
        seconds: measured, or None.
        expected_seconds: by the cost model.
        excess: η: rounding adds η·A² to an ordinary squared norm, with
            A = Σ_t ‖x_t‖·‖dy_t‖; 0 where the norm is of a gradient that was formed.
    """

    tap: int
    equation: str
    leaves: tuple[int, ...]
    norm: str
    total: str
    why: str
    flops: float
    bytes: float
    seconds: float | None
    expected_seconds: float
    excess: float


@dataclass(frozen=True)
class Explanation:
    """The table that `ClippedGrad.explain` returns: print it.

    Attributes:
        strategy: the clipping strategy.
        rows: the physical batch size.
        taps: a row for each norm group; none under ``per_example``.
        float_error: what rounding has to do with the sensitivity.
        why: why every gradient is formed whole, if another strategy was asked for.
    """

    strategy: str
    rows: int
    taps: Sequence[TapRow]
    float_error: FloatError
    why: str = ""

    @property
    def fingerprint(self) -> str:
        """A name for the methods chosen: with another, sums round differently."""
        chosen = [self.strategy, self.rows, *((r.norm, r.total) for r in self.taps)]
        return hashlib.blake2b(repr(chosen).encode(), digest_size=8).hexdigest()

    def as_json(self) -> dict[str, Any]:
        """Return the table as plain data."""
        return {
            "strategy": self.strategy,
            "physical_batch_size": self.rows,
            "why": self.why,
            "float_error": dataclasses.asdict(self.float_error),
            "taps": [dataclasses.asdict(row) for row in self.taps],
        }

    def __str__(self) -> str:
        head = f"strategy {self.strategy}, physical batch of {self.rows}"
        if not self.taps:
            why = f" because {self.why}" if self.why else ""
            head += f": every gradient is formed whole{why}, there are no taps"
            return f"{head}\n{self.float_error}"
        alike: dict[tuple[str, ...], list[int]] = {}
        for row in self.taps:
            alike.setdefault(_line(row), []).append(row.tap)
        if len(alike) < len(self.taps):
            head += "; figures are of one tap"
        titles = ("taps", "equation", "norm", "η", "sum", "GFLOP", "MiB", "ms", "why")
        lines = [titles, *((_numbers(taps), *line) for line, taps in alike.items())]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        signs = ("<", "<", "<", ">", "<", ">", ">", ">", "<")
        form = "  ".join(f"{{:{s}{w}}}" for s, w in zip(signs, widths, strict=True))
        rows = [form.format(*line).rstrip() for line in lines]
        return "\n".join([head, *rows, str(self.float_error)])


def _line(row: TapRow) -> tuple[str, ...]:
    sign, seconds = "", row.seconds
    if seconds is None:
        sign, seconds = "~", row.expected_seconds
    return (
        row.equation,
        row.norm,
        f"{row.excess:.0e}" if row.excess else "0",
        row.total,
        f"{row.flops / 1e9:.3f}",
        f"{row.bytes / 2**20:.2f}",
        f"{sign}{seconds * 1e3:.2f}",
        row.why,
    )


def _numbers(taps: Sequence[int]) -> str:
    if len(taps) <= 3:
        return ", ".join(map(str, taps))
    return f"{taps[0]}, {taps[1]}, … {taps[-1]} ({len(taps)})"


def explain(plan: Plan, error: FloatError, why: str = "") -> Explanation:
    """Return the table of a plan."""
    pairs = zip(plan.groups, plan.methods, strict=True)
    rows = tuple(_row(plan, group, method) for group, method in pairs)
    return Explanation(plan.strategy, plan.rows, rows, error, why)


def _row(plan: Plan, group: NormGroup, method: Method) -> TapRow:
    expected = cost.estimate(group, method, plan.rows)
    return TapRow(
        tap=group.uses[0].tap,
        equation=group.rule.describe(),
        leaves=group.leaves,
        norm=method.norm + ("" if method.norm in group.grams() else " gradients"),
        total=method.total,
        why=_reason(plan, group, method),
        flops=sum(rule.work(plan.rows).flops for rule in group.rules),
        bytes=expected.bytes,
        seconds=plan.timings.known(group, method, plan.rows),
        expected_seconds=expected.seconds,
        excess=group.excess(method),
    )


def _reason(plan: Plan, group: NormGroup, method: Method) -> str:
    options, work = cost.candidates(group), group.rule.work(plan.rows)
    if isinstance(group, Joint):
        alone = len(group.rules) == 1 and len(group.leaves) == len(group.unit.leaves)
        if alone:
            return "a function of parameters: gradients carried back before the norm"
        return "shared parameters: gradients added before the norm"
    general = group.rule.name == "general"
    if len(options) == 1 or general:
        small = general and aval(group.unit.anchors[0]).size <= 4 * work.results
        return "elementwise: the gradient is small" if small else "no fast rule"
    if plan.strategy != "auto" and not group.grams():
        return "no Gram matrix here: gradients are formed"
    if plan.strategy in ("ghost", "bk"):
        return "Gram wherever there is one"
    if plan.strategy != "auto":
        left, right = 2 * work.positions**2, work.inputs * work.outputs
        return f"2T² = {left} {'≤' if work.gram_pays else '>'} K·N = {right}"
    seconds = {m: plan.timings.estimate(group, m, plan.rows).seconds for m in options}
    best = min(seconds, key=lambda m: seconds[m])
    known = plan.timings.known(group, method, plan.rows) is not None
    how = "measured" if known else "expected"
    if best == method:
        return f"{how} fastest of {len(options)}"
    if best not in cost.precise(group):
        but = "raises norms too much" if best.norm in group.grams() else "compiles long"
        return f"{', '.join(best)} would be faster ({how}), but {but}"
    return f"to hold less memory than {', '.join(best)} ({how})"
