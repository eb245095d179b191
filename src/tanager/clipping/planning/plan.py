"""From a loss taken apart to the plan of its clipping."""

from collections.abc import Sequence
from dataclasses import dataclass

from tanager.clipping.analysis import links
from tanager.clipping.analysis.jaxprs import aval
from tanager.clipping.analysis.taps import Program, Use
from tanager.clipping.planning import choices
from tanager.clipping.planning.autotune import Timings
from tanager.clipping.rules.groups import Joint, Method, NormGroup, Single
from tanager.clipping.rules.retained import retained_steps
from tanager.clipping.rules.standardised import Standardised


_HELD = 1.0
"""What `auto` may hold between norms and sums, as a part of the taps' inputs and
outputs. In a measured WRN-16-4, 1.4 times the temporary memory of plain SGD."""


@dataclass(frozen=True, eq=False)
class Plan:
    """How a loss is clipped at one physical batch size.

    Attributes:
        program: the loss taken apart; None where it is clipped by its definition.
        strategy: the name.
        rows: B.
        timings: what is known of this device.
        groups: of the program.
        methods: one for each group.
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


def plan_clipping(program: Program | None, rows: int, strategy: str) -> Plan:
    """Choose a method for each norm group.

    Args:
        program: the loss taken apart; None to clip it by its definition.
        rows: B.
        strategy: one of `choices.STRATEGIES`.
    """
    timings = Timings()
    if program is None:
        return Plan(None, "per_example", rows, timings)
    groups = norm_groups(program)
    methods = choices.choose(
        strategy,
        groups,
        rows,
        most_bytes=_HELD * rows * _activations(program),
        estimate=lambda group, method: timings.estimate(group, method, rows),
    )
    return Plan(program, strategy, rows, timings, groups, methods)


def norm_groups(program: Program) -> list[NormGroup]:
    """Return the parts of a program's gradient whose squared norms add up."""
    groups: list[NormGroup] = []
    for unit in program.units:
        # Parts of a standardised weight are not apart: they share its mean and size.
        if unit.kind == "standardised" and len(unit.uses) == 1:
            groups.append(Standardised(program, unit, unit.uses[0]))
        elif unit.kind == "leaf" and _separable(unit.uses):
            groups.extend(Single(program, unit, use) for use in unit.uses)
        else:
            groups.append(Joint(program, unit))
    return groups


def _separable(uses: Sequence[Use]) -> bool:
    return all(
        links.disjoint(one.links, other.links)
        for number, one in enumerate(uses)
        for other in uses[:number]
    )


def _activations(program: Program) -> float:
    """Bytes of the values of one example that plain SGD keeps, roughly."""
    held = {}
    for tap in program.taps:
        for number in tap.data:
            atom = tap.equation.invars[number]
            held[atom] = aval(atom).size * aval(atom).dtype.itemsize
        for variable in tap.equation.outvars:
            held[variable] = aval(variable).size * aval(variable).dtype.itemsize
    return float(sum(held.values()))
