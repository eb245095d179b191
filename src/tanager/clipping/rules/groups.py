"""Norm groups: the parts of a gradient whose squared norms add up.

A norm group is one use of a parameter where nothing else touches the same entries
(`Single`, `standardised.Standardised`, `masked.Masked`), or all uses of parameters that
are tied, reused or made of one another (`Joint`): their gradients are added, and
carried back through what makes them, before a norm is taken.

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
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jaxtyping import Array, Float

from tanager.clipping.analysis import links, rounding
from tanager.clipping.analysis.jaxprs import aval
from tanager.clipping.analysis.rounding import gamma, product_steps, root, row_steps
from tanager.clipping.analysis.taps import Program, Unit, Use
from tanager.clipping.rules.base import DIRECT, Bilinear, Formation, Rule, TapValues
from tanager.clipping.rules.convolutions import Convolution
from tanager.clipping.rules.dots import Dot
from tanager.clipping.rules.factors import ClipFactors
from tanager.clipping.rules.gathers import Gather, takes_rows
from tanager.clipping.rules.grams import Gram
from tanager.clipping.rules.retained import (
    RetainedGradients,
    form,
    formed_sum,
    retained_steps,
    weighted_sum,
)


RETAINED = "retained"
"""Name of the sum of the gradients that the norm was taken from."""

_LARGEST_SCALE = 2.0**20
"""Links outside 1/this to this would make squares vanish, of gradients or of the scale.
"""


class Method(NamedTuple):
    """How a norm group is clipped.

    Norms come from a Gram or gradient method of the rule. The total is `RETAINED`,
    `DIRECT`, or the gradient method by which the sum's gradients are formed again.
    """

    norm: str
    total: str


class Held(NamedTuple):
    """What is held between norms and sums.

    Per-example gradients at the anchors or leaves, or None if they were dropped; and
    those of a standardised weight's gain.
    """

    gradients: list[RetainedGradients] | None = None
    gain: RetainedGradients | None = None


class NormGroup(abc.ABC):
    """Parameters, and a rule for each use: what strategies choose a method for."""

    def __init__(self, program: Program, unit: Unit, uses: Sequence[Use]):
        self.program = program
        self.unit = unit
        self.rules = joined(program, uses)
        self.uses = tuple(use for rule in self.rules for use in rule.uses)

    @property
    def leaves(self) -> tuple[int, ...]:
        """Numbers of the leaves whose gradients it clips, all in one part."""
        return self.unit.leaves

    @property
    def rule(self) -> Rule:
        """The rule of the first use."""
        return self.rules[0]

    def grams(self) -> tuple[str, ...]:
        """Return the names of the norm methods that form no gradient."""
        return ()

    @abc.abstractmethod
    def gradients(self) -> tuple[str, ...]:
        """Return the names of the norm methods that form per-example gradients."""

    def totals(self) -> tuple[str, ...]:
        """Return the names of the methods for sums other than `RETAINED`."""
        return ()

    @abc.abstractmethod
    def squares(
        self, method: str, seen: Sequence[TapValues], *, retain: bool
    ) -> tuple[Float[Array, " b"], Held]:
        """Return squared norms, and what is held for the sum: gradients to `retain`."""

    @abc.abstractmethod
    def total(
        self, method: str, seen: Sequence[TapValues], held: Held, factors: ClipFactors
    ) -> dict[int, Array]:
        """Return Σ c_i·g_i by number of the leaf, by `RETAINED` or one of `totals`.

        Rows that do not count contribute exact zeros.
        """

    @abc.abstractmethod
    def sum_steps(self, method: Method, rows: int) -> float:
        """Return the steps of the sum (`rounding.row_steps`)."""

    def excess(self, method: Method) -> float:
        """Return η: the squared norm is raised by η·A², beside its own rounding."""
        return 0.0

    def by_rule(self, seen: Sequence[TapValues]) -> list[TapValues]:
        """Return what was seen at the uses, together for each rule."""
        taken = iter(seen)
        return [rule.gather([next(taken) for _ in rule.uses]) for rule in self.rules]


def joined(program: Program, uses: Sequence[Use]) -> list[Rule]:
    """Return rules for uses: one for all that reach the anchor by the same links.

    An encoder that is called twice has twice the positions of one.
    """
    rules: list[Rule] = []
    for use in uses:
        rule = rule_for(program, use)
        if not any(other.join(rule) for other in rules):
            rules.append(rule)
    return rules


def rule_for(program: Program, use: Use) -> Rule:
    """Return the rule for one use of a parameter."""
    tap = program.taps[use.tap]
    equation = tap.equation
    name = equation.primitive.name
    avals = [aval(atom) for atom in (*equation.invars, *equation.outvars)]
    if any(one.size == 0 for one in avals) or jnp.issubdtype(
        avals[-1].dtype, jnp.complexfloating
    ):
        return Rule(tap, use)
    if name == "dot_general":
        return Dot(tap, use)
    grouped = equation.params.get("batch_group_count", 1) > 1
    if name == "conv_general_dilated" and use.position == 1 and not grouped:
        return Convolution(tap, use)
    taken = name in ("gather", "dynamic_slice") and use.position == 0
    if taken and takes_rows(tap):
        return Gather(tap, use)
    return Rule(tap, use)


class Single(NormGroup):
    """Uses of a parameter by one rule, whose entries are used nowhere else."""

    def __init__(self, program: Program, unit: Unit, *uses: Use):
        super().__init__(program, unit, uses)
        self.scale = links.scale(uses[0].links)

    @property
    def plain(self) -> bool:
        """Whether norms can be taken where the parameter is used."""
        return 1 / _LARGEST_SCALE <= self.scale <= _LARGEST_SCALE  # nor NaN

    def grams(self) -> tuple[str, ...]:
        return tuple(self.rule.grams()) if self.totals() else ()

    def gradients(self) -> tuple[str, ...]:
        return tuple(self.rule.gradients())

    def totals(self) -> tuple[str, ...]:
        return self.rule.totals() if self.plain else ()

    def sum_steps(self, method: Method, rows: int) -> float:
        carried = len(self.uses[0].links) + 1
        if method.total == RETAINED:
            chunk = self.rule.chunk(method.norm, rows)
            return retained_steps(rows, chunk) + carried
        if method.total == DIRECT:
            return product_steps(rows) + carried
        return row_steps(rows) + carried

    def excess(self, method: Method) -> float:
        gram = method.norm in self.grams()
        return self.bilinear.excess(method.norm) if gram else 0.0

    def squares(
        self, method: str, seen: Sequence[TapValues], *, retain: bool
    ) -> tuple[Float[Array, " b"], Held]:
        (whole,) = self.by_rule(seen)
        if method in self.grams():
            return self.formed_again(self.gram(method, whole), 1), Held()
        formation, chunk = self.formation(method), self.rule.chunk(method, whole.rows)
        norms = self._norms(formation.scale)
        found, retained = form(formation, whole, chunk, norms, retain=retain)
        squares = jnp.concatenate(found)
        if retained is None:
            again = Gram(squares, self.terms(whole))
            return self.formed_again(again, 2), Held()
        return squares, Held([retained])

    def gram(self, method: str, seen: TapValues) -> Gram:
        """Return squared norms by a Gram method, and their terms."""
        found = self.rule.grams()[method](seen)
        return Gram(*(each * self.scale**2 for each in found))

    def terms(self, seen: TapValues) -> Float[Array, " b"]:
        """Return `Gram.terms` at the anchor."""
        return self.bilinear.terms(seen) * self.scale**2

    @property
    def bilinear(self) -> Bilinear:
        """The rule, where sums can be formed again."""
        assert isinstance(self.rule, Bilinear)
        return self.rule

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
        """Return a formation whose gradients have the norms that are wanted."""
        formation = self.rule.gradients()[method]
        return formation if self.plain else formation.at_anchor()

    def formed_again(self, gram: Gram, times: int) -> Float[Array, " b"]:
        """Return squared norms that allow for `times` further roundings."""
        each = gamma(self.bilinear.forming, gram.squares.dtype, product=True)
        more = times * each * root(gram.terms.astype(gram.squares.dtype))
        return jnp.square(root(gram.squares) + more)

    def total(
        self, method: str, seen: Sequence[TapValues], held: Held, factors: ClipFactors
    ) -> dict[int, Array]:
        (leaf,) = self.unit.leaves
        (whole,) = self.by_rule(seen)
        return {leaf: self.total_at_anchor(method, whole, held, factors)}

    def total_at_anchor(
        self, method: str, seen: TapValues, held: Held, factors: ClipFactors
    ) -> Array:
        """Return Σ c_i·g_i at the anchor of the one use."""
        if method == RETAINED:
            assert held.gradients is not None
            return weighted_sum(held.gradients[0], factors)
        if method == DIRECT:
            assert isinstance(self.rule, Dot | Gather)
            return _direct(self.rule, seen.exactly(), factors)
        formation = self.rule.gradients()[method]
        chunk = self.rule.chunk(method, seen.rows)
        return formed_sum(formation, seen.exactly(), factors, chunk)


def _direct(rule: Dot | Gather, seen: TapValues, factors: ClipFactors) -> Array:
    def plain() -> Array:
        return rule.direct(seen.scaled(factors.values))

    def clean() -> Array:
        return rule.direct(seen.scaled(factors.values).cleaned(factors.counted))

    # 0·NaN is NaN; but most batches are full, and a product can be spared the copy of
    # x. A scatter first adds up within an example, which must not change with others.
    if not isinstance(rule, Dot):
        return clean()
    return jax.lax.cond(jnp.all(factors.counted), plain, clean)


class Joint(NormGroup):
    """All uses of parameters that share entries: cross terms are included.

    `leaves` are those of the unit that are clipped together: of a gain and the weight
    it multiplies, one may be in another part of the gradient (`factors.Limit`).
    """

    def __init__(self, program: Program, unit: Unit, leaves: Sequence[int]):
        super().__init__(program, unit, unit.uses)
        self._leaves = tuple(leaves)

    @property
    def leaves(self) -> tuple[int, ...]:
        return self._leaves

    def gradients(self) -> tuple[str, ...]:
        every = (name for rule in self.rules for name in rule.gradients())
        return tuple(dict.fromkeys(every))

    def sum_steps(self, method: Method, rows: int) -> float:
        return retained_steps(rows, rows)

    def squares(
        self, method: str, seen: Sequence[TapValues], *, retain: bool
    ) -> tuple[Float[Array, " b"], Held]:
        anchors: dict[jex.Var, Array] = {}
        for rule, at in zip(self.rules, self.by_rule(seen), strict=True):
            gradient = _formed(rule, method, at)
            anchor = rule.use.anchor
            before = anchors.get(anchor)
            anchors[anchor] = gradient if before is None else before + gradient
        ordered = [anchors[anchor] for anchor in self.unit.anchors]
        if self.unit.kind != "leaf":
            constants, program = seen[0].constants, self.program
            leaves = [constants[leaf] for leaf in program.parameters]
            back = functools.partial(program.pull_back, self.unit, leaves)
            ordered = jax.vmap(back)(ordered)
        pairs = zip(self.unit.leaves, ordered, strict=True)
        ordered = [gradient for leaf, gradient in pairs if leaf in self.leaves]
        squares = [rounding.squares(gradient) for gradient in ordered]
        total = sum(squares[1:], squares[0])
        total = total * (1 + rounding.gamma(len(squares), total.dtype))
        retained = [RetainedGradients([each], links.same) for each in ordered]
        return total, Held(retained if retain else None)

    def total(
        self, method: str, seen: Sequence[TapValues], held: Held, factors: ClipFactors
    ) -> dict[int, Array]:
        assert held.gradients is not None
        totals = [weighted_sum(each, factors) for each in held.gradients]
        return dict(zip(self.leaves, totals, strict=True))


def _formed(rule: Rule, method: str, seen: TapValues) -> Array:
    """Return gradients at the anchor by a method, or by `vmap` if it is another's."""
    methods = rule.gradients()
    name = method if method in methods else "vmap"
    formation, chunk = methods[name].at_anchor(), rule.chunk(name, seen.rows)
    starts = range(0, seen.rows, chunk)
    return jnp.concatenate([formation.form(seen.part(n, chunk)) for n in starts])
