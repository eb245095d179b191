"""Cells: the parts of a gradient whose squared norms add up, and how each is clipped.

A cell is one use of a parameter where nothing else touches the same entries (`Single`,
`Standardised`), or all uses of parameters that are tied, reused or made of one another
(`Joint`), where the gradients of all uses must be added before a norm can be taken.
"""

from collections.abc import Sequence

import jax
import jax.extend.core as jex
from jaxtyping import Array, Float

from tanager.clipping import links, rounding
from tanager.clipping.factors import Weights
from tanager.clipping.kept import Kept, kept_steps, weighted_sum
from tanager.clipping.rules import Seen
from tanager.clipping.single import (
    KEPT as KEPT,
)
from tanager.clipping.single import (
    Cell as Cell,
)
from tanager.clipping.single import (
    Method as Method,
)
from tanager.clipping.single import (
    Remembered as Remembered,
)
from tanager.clipping.single import (
    Single as Single,
)
from tanager.clipping.single import (
    rule_for,
)
from tanager.clipping.standardised import Standardised
from tanager.clipping.taps import Program, Unit, Use


def cells_of(program: Program) -> list[Cell]:
    """Split a program's units into cells."""
    cells: list[Cell] = []
    for unit in program.units:
        # Parts of a standardised weight are not apart: they share its mean and size.
        if unit.kind == "standardised" and len(unit.uses) == 1:
            cells.append(Standardised(program, unit, unit.uses[0]))
        elif unit.kind == "leaf" and _separable(unit.uses):
            cells.extend(Single(program, unit, use) for use in unit.uses)
        else:
            cells.append(Joint(program, unit))
    return cells


def _separable(uses: Sequence[Use]) -> bool:
    return all(
        links.disjoint(one.links, other.links)
        for number, one in enumerate(uses)
        for other in uses[:number]
    )


class Joint(Cell):
    """All uses of parameters that share entries: cross terms are included."""

    def __init__(self, program: Program, unit: Unit):
        self.unit = unit
        self.uses = unit.uses
        self.rules = [rule_for(program, use) for use in unit.uses]
        self.program = program

    def grams(self) -> tuple[str, ...]:
        """None: norms of sums need the sums."""
        return ()

    def gradients(self) -> tuple[str, ...]:
        """See `Cell`."""
        return ("vmap",)

    def sum_steps(self, method: Method, rows: int) -> float:
        """See `Cell`."""
        del method
        return kept_steps(rows, rows)

    def squares(
        self, method: str, seen: Sequence[Seen], leaves: Sequence[Array], *, keep: bool
    ) -> tuple[Float[Array, " b"], Remembered]:
        """See `Cell`."""
        anchors: dict[jex.Var, Array] = {}
        for rule, at in zip(self.rules, seen, strict=True):
            gradient = rule.gradients()[method].at_anchor().form(at)
            anchor = rule.use.anchor
            held = anchors.get(anchor)
            anchors[anchor] = gradient if held is None else held + gradient
        ordered = [anchors[anchor] for anchor in self.unit.anchors]
        if self.unit.kind != "leaf":

            def back(gradients):
                return self.program.pull_back(self.unit, leaves, gradients)

            ordered = jax.vmap(back)(ordered)
        squares = [rounding.squares(gradient) for gradient in ordered]
        total = sum(squares[1:], squares[0])
        total = total * (1 + rounding.gamma(len(squares), total.dtype))
        kept = [Kept([gradient], links.same) for gradient in ordered]
        return total, Remembered(kept if keep else None)

    def total(
        self, method: str, seen: Sequence[Seen], held: Remembered, weights: Weights
    ) -> dict[int, Array]:
        """See `Cell`."""
        del method, seen
        assert held.gradients is not None
        totals = [weighted_sum(gradients, weights) for gradients in held.gradients]
        return dict(zip(self.unit.leaves, totals, strict=True))
