"""From a loss taken apart to a plan: which method clips each of its norm groups.

| strategy | norms | sums |
|---|---|---|
| ghost, bk | Gram wherever there is one | formed again from (x, dy) |
| mixed_ghost, bk_mixed | Gram where 2T² ≤ K·N, else gradients | formed again |
| bk_mixopt | Gram where 2T² ≤ K·N, else gradients | gradients, or formed again |
| auto | what is fastest within the memory | what is fastest within the memory |

Published ghost clipping runs a second backward pass for the sum. XLA may round
differently in it, and the norms of the first would then bound another gradient. It
saved no memory where it was measured, so the ghost strategies are book-keeping too.

`auto` takes no Gram matrix whose rounding would raise ordinary norms by more than 1 %.

Elementwise taps and shared parameters always form gradients and retain them.
T positions, K inputs at each, N outputs (Bu et al. 2022, arXiv:2205.10683, section 4;
Rodriguez Beltran et al., section 2.2, for the names).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from tanager.clipping.analysis import links
from tanager.clipping.analysis.dtypes import accumulation_dtype
from tanager.clipping.analysis.rounding import FloatError, float_error
from tanager.clipping.analysis.taps import Program
from tanager.clipping.planning import cost
from tanager.clipping.planning.autotune import Timings
from tanager.clipping.rules.factors import SMALLEST, Limit
from tanager.clipping.rules.groups import (
    RETAINED,
    Joint,
    Method,
    NormGroup,
    Single,
    joined,
)
from tanager.clipping.rules.masked import Masked
from tanager.clipping.rules.retained import retained_steps
from tanager.clipping.rules.standardised import Standardised


STRATEGIES = {
    "auto": "per tap, the fastest method known for this device within the memory",
    "per_example": "vmap of grad: every gradient is formed whole",
    "ghost": "norms by Gram matrices; gradients are formed again for the sum",
    "mixed_ghost": "norms by Gram matrices or gradients, which are formed again",
    "bk": "the same as ghost: one backward pass",
    "bk_mixed": "the same as mixed_ghost: one backward pass",
    "bk_mixopt": "the same, but gradients once formed are retained for the sum",
}
"""The clipping strategies; all compute the same sum."""

Estimate = Callable[[NormGroup, Method], cost.Cost]


@dataclass(frozen=True, eq=False)
class Plan:
    """How a loss is clipped at one physical batch size: a method for each group.

    `program` is None if the loss is clipped by `vmap` of its gradient.
    """

    program: Program | None
    strategy: str
    rows: int
    timings: Timings
    groups: Sequence[NormGroup] = ()
    methods: Sequence[Method] = ()

    @property
    def sum_steps(self) -> float:
        """D of the parameter whose sum rounds most (`rounding.row_steps`)."""
        if self.program is None:
            return retained_steps(self.rows, self.rows)
        pairs = zip(self.groups, self.methods, strict=True)
        return max((group.sum_steps(m, self.rows) for group, m in pairs), default=0.0)


def plan_clipping(
    program: Program | None, rows: int, strategy: str, parts: Sequence[int] = ()
) -> Plan:
    """Choose a method for each norm group; without a program, clip by definition.

    `parts` are those of `factors.Limit`.
    """
    timings = Timings()
    if program is None:
        return Plan(None, "per_example", rows, timings)
    groups = norm_groups(program, parts)
    # In a measured WRN-16-4, 1.4 times the temporary memory of plain SGD.
    most_bytes = cost.most_held(rows * program.activations)

    def estimate(group: NormGroup, method: Method) -> cost.Cost:
        return timings.estimate(group, method, rows)

    methods = choose(strategy, groups, rows, most_bytes, estimate)
    return Plan(program, strategy, rows, timings, groups, methods)


def error_of(
    plans: Mapping[int, Plan], like: PyTree, rows: int, limit: Limit
) -> FloatError:
    """Return what rounding does to the sum of a physical batch.

    `plans` are those of its pieces by size, `like` are the shapes of what is clipped.
    """
    leaves = jax.tree.leaves(like)
    dtypes = [accumulation_dtype(leaf.dtype) for leaf in leaves]
    coarsest = max(dtypes, key=lambda dtype: float(jnp.finfo(dtype).eps))
    steps = max(plan.sum_steps for plan in plans.values())
    joined = -(-rows // max(plans)) - 1
    numbers = sum(leaf.size for leaf in leaves)
    known = [norm for norm in limit.norms if isinstance(norm, float)]
    least = min(known) if len(known) == len(limit.norms) else SMALLEST
    return float_error(steps + joined, rows, least, numbers, coarsest)


def norm_groups(program: Program, parts: Sequence[int] = ()) -> list[NormGroup]:
    """Return the parts of a program's gradient whose squared norms add up.

    None has leaves of two `parts` (`factors.Limit`).
    """
    groups: list[NormGroup] = []
    for unit in program.units:
        own = [parts[leaf] for leaf in unit.leaves] if parts else [0]
        if len(set(own)) > 1:
            for part in sorted(set(own)):
                leaves = [leaf for leaf in unit.leaves if parts[leaf] == part]
                groups.append(Joint(program, unit, leaves))
            continue
        # Parts of a standardised weight are not apart: they share its mean and size.
        rules = joined(program, unit.uses)
        if unit.kind == "standardised" and len(rules) == 1:
            groups.append(Standardised(program, unit, *unit.uses))
        elif unit.kind == "leaf" and all(
            links.disjoint(one.use.links, other.use.links)
            for number, one in enumerate(rules)
            for other in rules[:number]
        ):
            for rule in rules:
                kind = Masked if links.masks(rule.use.links) else Single
                groups.append(kind(program, unit, *rule.uses))
        else:
            groups.append(Joint(program, unit, unit.leaves))
    return groups


def choose(
    strategy: str,
    groups: Sequence[NormGroup],
    rows: int,
    most_bytes: float,
    estimate: Estimate,
) -> list[Method]:
    """Return a method for each group; `auto` holds `most_bytes` for the sums."""
    if strategy == "auto":
        return _within(groups, most_bytes, estimate)
    return [_by_rule(strategy, group, rows, estimate) for group in groups]


def _by_rule(strategy: str, group: NormGroup, rows: int, estimate: Estimate) -> Method:
    def cheapest(methods: Sequence[Method]) -> Method:
        return min(methods, key=lambda method: estimate(group, method).seconds)

    options = cost.candidates(group)
    grams = [m for m in options if m.norm in group.grams()]
    formed = [m for m in options if m.norm not in group.grams()]
    if grams and (strategy in ("ghost", "bk") or group.rule.work(rows).gram_pays):
        return cheapest(grams)
    again = [m for m in formed if m.total != RETAINED]
    retained = [m for m in formed if m.total == RETAINED]
    return cheapest(retained if strategy == "bk_mixopt" or not again else again)


def _within(
    groups: Sequence[NormGroup], most_bytes: float, estimate: Estimate
) -> list[Method]:
    """Take the fastest everywhere, then give up as little time as the memory needs."""
    costs = [
        {method: estimate(group, method) for method in cost.precise(group)}
        for group in groups
    ]
    chosen = [min(options, key=lambda m, o=options: o[m].seconds) for options in costs]
    while True:
        held = sum(o[m].bytes for o, m in zip(costs, chosen, strict=True))
        swaps = []
        for number, (options, mine) in enumerate(zip(costs, chosen, strict=True)):
            for other, its in options.items():
                if (saved := options[mine].bytes - its.bytes) > 0:
                    lost = its.seconds - options[mine].seconds
                    swaps.append((lost / saved, number, other))
        if held <= most_bytes or not swaps:
            return chosen
        _, number, other = min(swaps)
        chosen[number] = other
