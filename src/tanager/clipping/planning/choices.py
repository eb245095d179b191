"""Which method clips each group, under each strategy.

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

from collections.abc import Callable, Sequence

from tanager.clipping.planning import cost
from tanager.clipping.rules.groups import RETAINED, Method, NormGroup


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

_ONE_PASS = {"ghost": "bk", "mixed_ghost": "bk_mixed"}

_MOST_EXCESS = 0.01
"""How much too large a norm `auto` accepts from a Gram matrix."""

Estimate = Callable[[NormGroup, Method], cost.Cost]


def choose(
    strategy: str,
    groups: Sequence[NormGroup],
    rows: int,
    *,
    most_bytes: float,
    estimate: Estimate,
) -> list[Method]:
    """Return one method for each group.

    Args:
        strategy: one of `STRATEGIES` but `per_example`.
        groups: of a program.
        rows: B, the physical batch size.
        most_bytes: what `auto` may hold between norms and sums.
        estimate: what a method is expected (or known) to cost.
    """
    strategy = _ONE_PASS.get(strategy, strategy)
    if strategy == "auto":
        return _within(groups, rows, most_bytes, estimate)
    return [_by_rule(strategy, group, rows, estimate) for group in groups]


def _by_rule(strategy: str, group: NormGroup, rows: int, estimate: Estimate) -> Method:
    def cheapest(methods: Sequence[Method]) -> Method:
        return min(methods, key=lambda method: estimate(group, method).seconds)

    options = cost.candidates(group)
    grams = [m for m in options if m.norm in group.grams()]
    formed = [m for m in options if m.norm not in group.grams()]
    again = [m for m in formed if m.total != RETAINED]
    retained = [m for m in formed if m.total == RETAINED]
    if grams and (strategy == "bk" or group.rule.work(rows).gram_pays):
        return cheapest(grams)
    return cheapest(retained if strategy == "bk_mixopt" or not again else again)


def precise(group: NormGroup) -> list[Method]:
    """Return the methods whose norms are not much too large for ordinary examples.

    Where the T terms of a gradient are as good as independent, A² = T·‖g‖².
    """
    options = cost.candidates(group)
    positions = group.rule.work(1).positions
    return [
        method
        for method in options
        if method.norm not in group.grams()
        or group.excess(method) * positions <= 2 * _MOST_EXCESS
    ] or options


def _within(
    groups: Sequence[NormGroup], rows: int, most_bytes: float, estimate: Estimate
) -> list[Method]:
    """Take the fastest everywhere, then give up as little time as the memory needs."""
    costs = [
        {method: estimate(group, method) for method in precise(group)}
        for group in groups
    ]
    chosen = [min(options, key=lambda m, o=options: o[m].seconds) for options in costs]
    while True:
        held = sum(o[m].bytes for o, m in zip(costs, chosen, strict=True))
        swaps = [
            (
                (options[other].seconds - options[mine].seconds)
                / (options[mine].bytes - options[other].bytes),
                number,
                other,
            )
            for number, (options, mine) in enumerate(zip(costs, chosen, strict=True))
            for other in options
            if options[other].bytes < options[mine].bytes
        ]
        if held <= most_bytes or not swaps:
            return chosen
        _, number, other = min(swaps)
        chosen[number] = other
