"""From a loss taken apart to the plan of its clipping."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from tanager.clipping.analysis import links
from tanager.clipping.analysis.jaxprs import aval
from tanager.clipping.analysis.taps import Program, Use
from tanager.clipping.planning import choices
from tanager.clipping.planning.autotune import Timings
from tanager.clipping.rules.groups import Joint, Method, NormGroup, Single
from tanager.clipping.rules.standardised import Standardised


MEMORY = {"default": 1, "low": 2}
"""In how many pieces, one after the other, a physical batch is clipped."""

_HELD = 1.0
"""What `auto` may hold between norms and sums, as a part of the taps' inputs and
outputs. In a measured WRN-16-4, 1.4 times the temporary memory of plain SGD."""


@dataclass(frozen=True, eq=False)
class Plan:
    """How a loss is clipped at one physical batch size.

    Attributes:
        program: the loss taken apart.
        groups: of the program.
        methods: one for each group.
        strategy: the name.
        rows: B.
        timings: what is known of this device.
    """

    program: Program
    groups: Sequence[NormGroup]
    methods: Sequence[Method]
    strategy: str
    rows: int
    timings: Timings

    @property
    def sum_steps(self) -> float:
        """D of the parameter whose sum rounds most (`rounding.row_steps`)."""
        pairs = zip(self.groups, self.methods, strict=True)
        return max((group.sum_steps(m, self.rows) for group, m in pairs), default=0.0)


def plan_clipping(program: Program, rows: int, strategy: str) -> Plan:
    """Choose a method for each group.

    Args:
        program: the loss taken apart.
        rows: B.
        strategy: one of `choices.STRATEGIES` but `per_example`.
    """
    groups, timings = norm_groups(program), Timings()
    methods = choices.choose(
        strategy,
        groups,
        rows,
        most_bytes=_HELD * rows * _activations(program),
        estimate=lambda group, method: timings.estimate(group, method, rows),
    )
    return Plan(program, groups, methods, strategy, rows, timings)


def norm_groups(program: Program) -> list[NormGroup]:
    """Split a program's units into groups."""
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


def example_of(batch: PyTree) -> PyTree:
    """Return the shapes and dtypes of one row of a batch."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(np.shape(leaf)[1:], jnp.result_type(leaf)),
        batch,
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
