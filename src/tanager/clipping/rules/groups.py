"""Cells: the parts of a gradient whose squared norms add up, and how each is clipped.

A cell is one use of a parameter where nothing else touches the same entries (`Single`,
`standardised.Standardised`), or all uses of parameters that are tied, reused or made of
one another (`Joint`), where the gradients of all uses must be added before a norm is
taken.

Every squared norm is an upper bound of what the example adds to the sum, rounding
included (`analysis.rounding`):

| norm | sum | added to the norm |
|---|---|---|
| of gradients | of the same gradients | the relative rounding of the norm itself |
| of gradients | formed again | 2γ(T)·A: the two formations differ by no more |
| Gram | formed again | η·A² to its square, γ(T)·A to the norm |

with A = Σ_t ‖x_t‖·‖dy_t‖ over the example's T positions.
"""

import abc
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jaxtyping import Array, Float

from tanager.clipping.analysis import links, rounding
from tanager.clipping.analysis.jaxprs import aval
from tanager.clipping.analysis.rounding import gamma, product_steps, row_steps
from tanager.clipping.analysis.taps import Program, Unit, Use
from tanager.clipping.rules.base import DIRECT, Bilinear, Formation, Rule, Seen, in_turn
from tanager.clipping.rules.convolutions import Convolution
from tanager.clipping.rules.dots import Dot
from tanager.clipping.rules.factors import Weights
from tanager.clipping.rules.gathers import Gather, takes_rows
from tanager.clipping.rules.grams import Gram
from tanager.clipping.rules.retained import Kept, formed_sum, kept_steps, weighted_sum


KEPT = "kept"
"""Name of the total made of the gradients the norm was taken from."""

_LARGEST_SCALE = 2.0**20
"""Squares of gradients that a link scales by more could vanish before they are scaled;
and where it scales by less than one part in so many, the square of the scale could.
"""


class Method(NamedTuple):
    """How a cell is clipped.

    Attributes:
        norm: the rule's gram or gradient method that norms come from.
        total: ``"kept"``, the gradient method by which the sum's gradients are formed
            again, or `DIRECT`.
    """

    norm: str
    total: str

    def __str__(self) -> str:
        return f"{self.norm}, {self.total}"


class Remembered(NamedTuple):
    """What is held between norms and sums.

    Attributes:
        gradients: per-example gradients at the anchors or leaves; None if dropped.
        gain: those of a standardised weight's gain.
    """

    gradients: list[Kept] | None = None
    gain: Kept | None = None


class Cell(abc.ABC):
    """What strategies choose methods for.

    Attributes:
        program: the loss.
        unit: the parameters.
        uses: where they meet data.
        rules: one for each use.
    """

    program: Program
    unit: Unit
    uses: tuple[Use, ...]
    rules: Sequence[Rule]

    @property
    def rule(self) -> Rule:
        """The rule of the first use."""
        return self.rules[0]

    @abc.abstractmethod
    def grams(self) -> tuple[str, ...]:
        """Names of the norm methods that form no gradient."""

    @abc.abstractmethod
    def gradients(self) -> tuple[str, ...]:
        """Names of the norm methods that form per-example gradients."""

    def totals(self) -> tuple[str, ...]:
        """Names of the methods for sums other than of kept gradients."""
        return ()

    @abc.abstractmethod
    def squares(
        self, method: str, seen: Sequence[Seen], leaves: Sequence[Array], *, keep: bool
    ) -> tuple[Float[Array, " b"], Remembered]:
        """Return squared norms, and what is held for the sum.

        Args:
            method: one of `grams` or `gradients`.
            seen: of each use.
            leaves: of the parameters.
            keep: whether gradients are kept.
        """

    @abc.abstractmethod
    def total(
        self, method: str, seen: Sequence[Seen], held: Remembered, weights: Weights
    ) -> dict[int, Array]:
        """Return Σ c_i·g_i by number of the leaf, by ``"kept"`` or one of `totals`.

        Rows that do not count contribute exact zeros.
        """

    @abc.abstractmethod
    def sum_steps(self, method: Method, rows: int) -> float:
        """Return the steps of the sum (`rounding.row_steps`)."""

    def excess(self, method: Method) -> float:
        """Return η: the squared norm is raised by η·A², beside its own rounding."""
        del method
        return 0.0


def rule_for(program: Program, use: Use) -> Rule:
    """Return the rule for one use of a parameter."""
    tap = program.taps[use.tap]
    name = tap.equation.primitive.name
    kind: type[Rule] = Rule
    avals = [aval(atom) for atom in (*tap.equation.invars, *tap.equation.outvars)]
    if any(one.size == 0 for one in avals) or jnp.issubdtype(
        avals[-1].dtype, jnp.complexfloating
    ):
        return kind(tap, use)
    if name == "dot_general":
        kind = Dot
    elif name == "conv_general_dilated" and use.position == 1:
        kind = Convolution
    elif name == "gather" and use.position == 0 and takes_rows(tap.equation):
        kind = Gather
    return kind(tap, use)


class Single(Cell):
    """One use of a parameter whose entries are used nowhere else."""

    def __init__(self, program: Program, unit: Unit, use: Use):
        self.unit = unit
        self.uses = (use,)
        self.rules = [rule_for(program, use)]
        self.program = program
        self.scale = links.scale(use.links)

    @property
    def plain(self) -> bool:
        """Whether norms can be taken where the parameter is used."""
        return 1 / _LARGEST_SCALE <= self.scale <= _LARGEST_SCALE  # nor NaN

    def grams(self) -> tuple[str, ...]:
        """See `Cell`."""
        return tuple(self.rule.grams()) if self.plain and self.totals() else ()

    def gradients(self) -> tuple[str, ...]:
        """See `Cell`."""
        return tuple(self.rule.gradients())

    def totals(self) -> tuple[str, ...]:
        """See `Cell`."""
        rule = self.rule
        if not self.plain or not isinstance(rule, Bilinear):
            return ()
        return (*([DIRECT] if rule.direct() else []), *rule.totals())

    def sum_steps(self, method: Method, rows: int) -> float:
        """See `Cell`."""
        rule = self.rule
        carried = len(self.uses[0].links) + 1
        if method.total == KEPT:
            group = rule.group(method.norm, rows)
            return kept_steps(rows, group) + carried
        if method.total == DIRECT:
            return product_steps(rows) + carried
        return row_steps(rows) + carried

    def excess(self, method: Method) -> float:
        """See `Cell`."""
        rule = self.rule
        gram = method.norm in self.grams()
        return rule.excess(method.norm) if gram and isinstance(rule, Bilinear) else 0.0

    def squares(
        self, method: str, seen: Sequence[Seen], leaves: Sequence[Array], *, keep: bool
    ) -> tuple[Float[Array, " b"], Remembered]:
        """See `Cell`."""
        gram = self.rule.grams().get(method)
        if gram is not None:
            return self.again(gram(seen[0]), 1) * self.scale**2, Remembered()
        formation, whole = self.formation(method), seen[0]
        norms = self._norms(formation.scale)
        found, kept = form(self.rule, method, formation, whole, norms, keep=keep)
        squares = jnp.concatenate(found)
        if kept is None:
            terms = self._terms(whole) * self.scale**2
            return self.again(Gram(squares, terms), 2), Remembered()
        return squares, Remembered([kept])

    def _norms(self, scale: float) -> Callable[[Array], Float[Array, " b"]]:
        if scale == 1:
            return rounding.squares
        steps = 2 * len(self.uses[0].links) + 2

        def norms(chunk: Array) -> Float[Array, " b"]:
            # Scaled before they are squared: squares of small numbers vanish.
            squares = rounding.squares(chunk * scale)
            return squares * (1 + gamma(steps, squares.dtype))

        return norms

    def formation(self, method: str) -> Formation:
        """Return a formation of which norms can be taken as they are."""
        formation = self.rule.gradients()[method]
        return formation if self.plain else formation.at_anchor()

    def again(self, gram: Gram, times: int) -> Float[Array, " b"]:
        """Return squared norms of gradients that are formed after the norm is known.

        Args:
            gram: the norms as far as known.
            times: how many formations may have rounded.
        """
        rule = self.rule
        assert isinstance(rule, Bilinear)
        each = gamma(rule.forming, gram.squares.dtype, product=True)
        more = times * each * jnp.sqrt(gram.terms.astype(gram.squares.dtype))
        return jnp.square(jnp.sqrt(gram.squares) + more)

    def _terms(self, seen: Seen) -> Float[Array, " b"]:
        assert isinstance(self.rule, Bilinear)
        return self.rule.terms(seen)

    def total(
        self, method: str, seen: Sequence[Seen], held: Remembered, weights: Weights
    ) -> dict[int, Array]:
        """See `Cell`."""
        (leaf,) = self.unit.leaves
        return {leaf: self.total_at_anchor(method, seen[0], held, weights)}

    def total_at_anchor(
        self, method: str, seen: Seen, held: Remembered, weights: Weights
    ) -> Array:
        """Return Σ c_i·g_i at the anchor of the one use."""
        if method == KEPT:
            assert held.gradients is not None
            return weighted_sum(held.gradients[0], weights)
        rule = self.rule
        assert isinstance(rule, Bilinear)
        if method == DIRECT:
            return _direct(rule, seen.exactly(), weights)
        group = rule.group(method, seen.rows)
        return formed_sum(rule.gradients()[method], seen.exactly(), weights, group)


def form(rule, method, formation, whole, norms, *, keep):
    """Form gradients group by group; return what `norms` finds, and them if kept."""
    group = rule.group(method, whole.rows)
    if keep:
        starts = range(0, whole.rows, group)
        chunks = [formation.form(whole.part(start, group)) for start in starts]
        return [norms(chunk) for chunk in chunks], Kept(chunks, formation.home)

    def dropped(at: Seen):
        return norms(formation.form(at))

    return list(in_turn(whole.exactly(), group, dropped)), None


def _direct(rule: Bilinear, seen: Seen, weights: Weights) -> Array:
    total = rule.direct()
    assert total is not None

    def plain() -> Array:
        return total(seen.scaled(weights.factors))

    def clean() -> Array:
        return total(seen.scaled(weights.factors).cleaned(weights.counted))

    # 0·NaN is NaN; but most batches are full, and a product can be spared the copy of
    # x. A scatter first adds up within an example, which must not change with others.
    if not isinstance(rule, Dot):
        return clean()
    return jax.lax.cond(jnp.all(weights.counted), plain, clean)


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
