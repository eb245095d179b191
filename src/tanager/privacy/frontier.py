"""What ε costs in compute: a plan with smaller and larger batches at the same η.

Batch size and noise multiplier change by one factor, so that every update keeps its
signal and noise and the run trains much alike (TAN Without a Burn, sections 3.3, 3.4).
Where σ is below about 2, less compute is dear in ε; where it is above about 4, less ε
is dear in compute.
"""

from typing import NamedTuple

from tanager import _validate as validate
from tanager.privacy import accountant, tan
from tanager.privacy.plan import Plan
from tanager.privacy.shown import format_epsilon


_LEAST_SIGMA, _MOST_SIGMA = 0.4, 20.0
_WITHIN = 1.1
"""How far ε of the cheapest may lie above that of the largest batch."""


class Point(NamedTuple):
    """A batch size at the plan's η and steps.

    Attributes:
        batch_size: B.
        noise_multiplier: σ.
        epsilon: ε by the plan's accountant at its δ.
        compute: examples used, in proportion to those of the plan.
        cheapest: whether it is the smallest batch whose ε is within 10 % of that of the
            largest.
    """

    batch_size: int
    noise_multiplier: float
    epsilon: float
    compute: float
    cheapest: bool = False


def frontier(plan: Plan) -> list[Point]:
    """Return the plan at batch sizes that are its own times powers of two, rising.

    From σ = 0.4 to 20, and at most all examples; the plan itself is always there.

    Raises:
        ValueError: the plan has no noise.
    """
    validate.positive(
        noise_multiplier=plan.noise_multiplier,
        remedy="without noise no batch has a finite ε",
    )
    points = []
    sizes = {round(plan.batch_size * 2.0**power) for power in range(-20, 21)}
    for batch_size in sorted(sizes):
        factor = batch_size / plan.batch_size
        sigma = plan.noise_multiplier * factor
        possible = 1 <= batch_size <= plan.examples
        if factor != 1 and not (possible and _LEAST_SIGMA <= sigma <= _MOST_SIGMA):
            continue
        moved = tan.at_batch_size(plan.mechanism, factor=factor)
        epsilon = accountant.epsilon(moved, plan.delta, plan.accountant)
        points.append(Point(batch_size, sigma, epsilon, factor))
    least = min(point.epsilon for point in points)
    first = next(n for n, p in enumerate(points) if p.epsilon <= _WITHIN * least)
    points[first] = points[first]._replace(cheapest=True)
    return points


def advice(points: list[Point]) -> list[str]:
    """Return what the cheapest batch costs, and what a step either way would."""
    place = next(n for n, point in enumerate(points) if point.cheapest)
    best = points[place]
    said = [
        f"cheapest: batch size {best.batch_size} with noise multiplier "
        f"{format_epsilon(best.noise_multiplier)}, ε = {format_epsilon(best.epsilon)}, "
        + (
            "which is this plan"
            if best.compute == 1
            else f"for {best.compute:.3g} times the compute of this plan"
        )
    ]
    for step, name in ((-1, "half"), (1, "twice")):
        if not 0 <= place + step < len(points):
            continue
        other = points[place + step]
        change = other.epsilon / best.epsilon - 1
        percent = float(f"{100 * abs(change):.2g}")
        said.append(
            f"{name} that batch: ε = {format_epsilon(other.epsilon)}, "
            f"{percent:g} % {'more' if change > 0 else 'less'}, for {name} the compute"
        )
    return said
