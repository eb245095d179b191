"""Leaves that share entries with others, but are clipped apart from them.

A gain and the weight it multiplies, or two factors of one matrix: all their gradients
are formed together, as `groups.Joint` does, and each share takes its own. XLA forms
them once.
"""

from collections.abc import Sequence

from jaxtyping import Array, Float

from tanager.clipping.analysis import rounding
from tanager.clipping.analysis.taps import Program, Unit
from tanager.clipping.rules.base import TapValues
from tanager.clipping.rules.factors import ClipFactors
from tanager.clipping.rules.groups import Held, Joint
from tanager.clipping.rules.retained import weighted_sum


class Share(Joint):
    """The leaves of a unit that are in one part of the gradient (`factors.Limit`)."""

    def __init__(self, program: Program, unit: Unit, leaves: Sequence[int]):
        super().__init__(program, unit)
        self._leaves = tuple(leaves)

    @property
    def leaves(self) -> tuple[int, ...]:
        return self._leaves

    def grams(self) -> tuple[str, ...]:
        return ()

    def gradients(self) -> tuple[str, ...]:
        return ("vmap",)

    def totals(self) -> tuple[str, ...]:
        return ()

    def squares(
        self, method: str, seen: Sequence[TapValues], *, retain: bool
    ) -> tuple[Float[Array, " b"], Held]:
        _, held = super().squares(method, seen, retain=True)
        assert held.gradients is not None
        pairs = zip(self.unit.leaves, held.gradients, strict=True)
        own = [each for number, each in pairs if number in self._leaves]
        squares = [rounding.squares(each.chunks[0]) for each in own]
        total = sum(squares[1:], squares[0])
        total = total * (1 + rounding.gamma(len(squares), total.dtype))
        return total, Held(own if retain else None)

    def total(
        self, method: str, seen: Sequence[TapValues], held: Held, factors: ClipFactors
    ) -> dict[int, Array]:
        del method, seen
        assert held.gradients is not None
        totals = [weighted_sum(each, factors) for each in held.gradients]
        return dict(zip(self._leaves, totals, strict=True))
