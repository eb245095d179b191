"""Cells: the parts of a gradient whose squared norms add up, and how each is clipped.

A cell is one use of a parameter where nothing else touches the same entries (`Single`),
or all uses of parameters that are tied, reused or made of one another (`Joint`), where
the gradients of all uses must be added before a norm can be taken.
"""

import abc
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from tanager.clipping import links, standardise
from tanager.clipping.convolutions import Convolution
from tanager.clipping.dots import Dot
from tanager.clipping.factors import Weights
from tanager.clipping.gathers import Gather, takes_rows
from tanager.clipping.jaxprs import aval
from tanager.clipping.kept import Kept, weighted_sum
from tanager.clipping.precision import accumulation_dtype, widen
from tanager.clipping.rules import (
    Bilinear,
    Formation,
    Rule,
    Seen,
    floor_of,
    in_turn,
    product,
)
from tanager.clipping.taps import Program, Unit, Use


KEPT = "kept"
"""Name of the total made of the gradients the norm was taken from."""

_SMALLEST_GAIN = 2.0**-10
"""Outputs are not divided by a gain that is smaller; it may be 0."""

_LARGEST_SCALE = 2.0**20
"""Squares of gradients that a link scales by more could vanish before they are scaled;
and where it scales by less than one part in so many, the square of the scale could.
"""

_STANDARDISED_FLOOR = 8
"""Norms at standardised weights are a difference of sums over a whole fan-in: that of
4608 inputs was seen to be 11 % too small at `floor_of`."""


class Method(NamedTuple):
    """How a cell is clipped.

    Attributes:
        norm: the rule's gram or gradient method that norms come from.
        total: the rule's total method, or ``"kept"``.
    """

    norm: str
    total: str

    def __str__(self) -> str:
        return f"{self.norm}, {self.total}"


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

    def totals(self) -> dict[str, Callable[[Seen], Array]]:
        """Methods for Σ g_i at the anchor of the one use, dy being scaled and cleaned.

        They form no per-example gradients; see `Rule.totals`.
        """
        return {}

    def total(self, method: str, seen: Seen, weights: Weights) -> Array:
        """Return Σ c_i·g_i at the anchor of the one use, by one of `totals`.

        Rows that do not count contribute exact zeros.
        """
        total = self.totals()[method]

        def scaled() -> Seen:
            return seen.exactly().scaled(weights.factors)

        def plain() -> Array:
            return total(scaled())

        def clean() -> Array:
            return total(scaled().cleaned(weights.counted))

        # 0·NaN is NaN; but most batches are full, and a product can be spared the copy
        # of x. Not a convolution: in a branch XLA's takes 30 times as long on CPU.
        if not isinstance(self.rule, Dot):
            return clean()
        return jax.lax.cond(jnp.all(weights.counted), plain, clean)

    @abc.abstractmethod
    def squares(
        self, method: str, seen: Sequence[Seen], leaves: Sequence[Array], *, keep: bool
    ) -> tuple[Float[Array, " b"], list[Kept] | None]:
        """Return squared norms, and the gradients if asked to keep them."""

    @abc.abstractmethod
    def total_kept(
        self, kept: list[Kept], weights: Weights
    ) -> tuple[dict[jex.Var, Array], dict[int, Array]]:
        """Return Σ c_i·g_i by anchor, or by leaf, from kept gradients."""


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


def cells_of(program: Program) -> list[Cell]:
    """Split a program's units into cells."""
    cells: list[Cell] = []
    for unit in program.units:
        # Parts of a standardised weight are not apart: they share its mean and size.
        alone = len(unit.uses) == 1 and unit.kind == "standardised"
        if alone or (unit.kind == "leaf" and _separable(unit.uses)):
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


def _squares(chunk: Array) -> Float[Array, " b"]:
    flat = widen(chunk).reshape(chunk.shape[0], -1)
    return jnp.sum(jnp.square(flat), axis=1)


class Single(Cell):
    """One use of a parameter whose entries are used nowhere else."""

    def __init__(self, program: Program, unit: Unit, use: Use):
        self.unit = unit
        self.uses = (use,)
        self.rules = [rule_for(program, use)]
        self.program = program
        self._scale = links.scale(use.links)
        self._standardised = unit.kind == "standardised"
        if self._standardised:
            self._equation = next(
                equation
                for equation in program.prologue
                if unit.anchors[0] in equation.outvars
            )
            self._gained = len(unit.leaves) > 1
            shape = aval(unit.anchors[0]).shape
            self._fan_in = aval(unit.anchors[0]).size // shape[-1]

    def grams(self) -> tuple[str, ...]:
        """See `Cell`."""
        return tuple(self.rule.grams()) if self._plain() else ()

    def _plain(self) -> bool:
        """Whether norms can be taken where the parameter is used."""
        if not 1 / _LARGEST_SCALE <= self._scale <= _LARGEST_SCALE:  # nor NaN
            return False
        rule = self.rule
        return not self._standardised or (
            isinstance(rule, Convolution)
            and rule.outputs_last
            and links.entrywise(rule.use.links)
        )

    def gradients(self) -> tuple[str, ...]:
        """See `Cell`."""
        return tuple(self.rule.gradients())

    def totals(self) -> dict[str, Callable[[Seen], Array]]:
        """See `Cell`."""
        return self.rule.totals() if self._plain() else {}

    def squares(
        self, method: str, seen: Sequence[Seen], leaves: Sequence[Array], *, keep: bool
    ) -> tuple[Float[Array, " b"], list[Kept] | None]:
        """See `Cell`."""
        gram = self.rule.grams().get(method)
        if gram is not None:
            if self._standardised:
                return self._standardised_gram(gram, seen[0]), None
            return gram(seen[0]) * self._scale**2, None
        formation, whole = self._formation(method), seen[0]
        squared = self._squared(formation, whole.constants)
        group = self.rule.group(method, whole.rows)
        if keep:
            starts = range(0, whole.rows, group)
            chunks = [formation.form(whole.part(start, group)) for start in starts]
            kept = Kept(chunks, formation.home)
            return jnp.concatenate([squared(chunk) for chunk in chunks]), [kept]

        def dropped(at: Seen) -> Array:
            return squared(formation.form(at))

        squares = list(in_turn(whole.exactly(), group, dropped))
        # The sum will be formed anew from (x, c·dy): its rounding must not exceed C.
        terms = self._terms(whole)
        floor = floor_of(terms.dtype) * terms
        return jnp.maximum(jnp.concatenate(squares), floor), None

    def _terms(self, seen: Seen) -> Float[Array, " b"]:
        rule = self.rule
        assert isinstance(rule, Bilinear)
        if self._standardised:
            assert isinstance(rule, Convolution)
            seen = rule.scaled_outputs(seen, self._parts(seen.constants).factor)
        return rule.terms(seen) * self._scale**2

    def _formation(self, method: str) -> Formation:
        formation = self.rule.gradients()[method]
        return formation if self._plain() else formation.at_anchor()

    def _squared(
        self, formation: Formation, constants: dict
    ) -> Callable[[Array], Float[Array, " b"]]:
        """Return the function from gradients `[b, *own]` to their squared norms."""
        scale = formation.scale
        if not self._standardised:
            # Scaled before they are squared: squares of small numbers vanish.
            return lambda chunk: _squares(chunk if scale == 1 else chunk * scale)
        parts = self._parts(constants)
        own = jax.ShapeDtypeStruct(formation.own, parts.centred.dtype)
        (centred,) = jax.linear_transpose(formation.home, own)(parts.centred)
        # The same, by the largest factor of all output units.
        lift = jnp.maximum(jnp.max(jnp.abs(parts.factor * scale)), 1)
        factor = parts.factor * scale / lift

        def squared(chunk: Array) -> Float[Array, " b"]:
            square, total, projection = standardise.from_gradient(
                chunk, centred, formation.outputs, lift
            )
            scaled = jnp.sum(square * jnp.square(factor)[None], axis=-1)
            whole = jnp.sum(square, axis=-1) * jnp.square(scale / lift)
            return self._weight_norms(parts, scaled, total * scale, projection, whole)

        return squared

    def _parts(self, constants: dict) -> standardise.Statistics:
        values = [
            atom.val if isinstance(atom, jex.Literal) else constants[atom]
            for atom in self._equation.invars
        ]
        parts = standardise.parts_of(values)
        wide = accumulation_dtype(aval(self.rule.tap.equation.outvars[0]).dtype)
        return standardise.Statistics(*(part.astype(wide) for part in parts))

    def _weight_norms(
        self, parts, scaled, total, projection, whole
    ) -> Float[Array, " b"]:
        return standardise.squared_norms(
            self._fan_in,
            parts,
            scaled,
            total,
            projection,
            whole=whole if self._gained else None,
            floor=_STANDARDISED_FLOOR * self._floor(scaled.dtype),
        )

    def _floor(self, dtype: Any) -> float:
        # Statistics are no more precise than the weight, whatever the data is.
        weight = accumulation_dtype(aval(self._equation.invars[0]).dtype)
        return max(floor_of(dtype), floor_of(weight))

    def _standardised_gram(self, gram: Callable, seen: Seen) -> Float[Array, " b"]:
        """The three sums over G from the convolution's own input and output.

        The kernel is the standardised weight times the links' scale, up to its sign,
        which the squares do not see.
        """
        rule = self.rule
        assert isinstance(rule, Convolution)
        parts = self._parts(seen.constants)
        dy = rule.by_position(widen(seen.gradients[0]))
        scaled = gram(rule.scaled_outputs(seen, parts.factor * self._scale))
        total = product("btg,btgf->bgf", *rule.patch_sums(seen)).reshape(
            dy.shape[0], -1
        )
        total = total * self._scale
        projection = self._projection(rule, seen, parts, dy)
        whole = self._whole(rule, seen, parts, scaled) if self._gained else None
        squares = self._weight_norms(parts, scaled, total, projection, whole)
        return jnp.where(jnp.isfinite(scaled), squares, jnp.inf)

    def _whole(
        self,
        rule: Convolution,
        seen: Seen,
        parts: standardise.Statistics,
        scaled: Float[Array, " b"],
    ) -> Float[Array, " b"]:
        """Return ‖G‖² or more, from Σ_o a²‖G‖² where no gain is nearly 0."""

        def known() -> Array:
            return scaled / jnp.min(jnp.square(parts.factor))

        def anew() -> Array:
            return rule.terms(seen).astype(scaled.dtype) * self._scale**2

        return jax.lax.cond(self._large_gains(parts), known, anew)

    def _large_gains(self, parts: standardise.Statistics) -> Bool[Array, ""]:
        return jnp.all(jnp.abs(parts.factor / parts.root) > _SMALLEST_GAIN)

    def _projection(
        self,
        rule: Convolution,
        seen: Seen,
        parts: standardise.Statistics,
        dy: Float[Array, "b t o"],
    ) -> Float[Array, "b o"]:
        """Return vᵀG = Σ_t <p_t, v>·dy_t times the links' scale, up to its sign.

        <p_t, v> is the output itself, over a and the scale of the kernel.
        But not where the model rounds its outputs, as in bfloat16: a gradient along v
        is what standardisation takes away, and the rounding would pass for the rest.
        """

        def anew() -> Array:
            outputs = rule.apply(seen.exactly(), parts.centred)
            return jnp.sum(rule.by_position(outputs) * dy, axis=1) * self._scale

        def known() -> Array:
            outputs = rule.by_position(seen.results[0])
            return jnp.sum(outputs * dy, axis=1) / parts.factor[None]

        if not rule.exact:
            return anew()
        if not self._gained:
            return known()
        return jax.lax.cond(self._large_gains(parts), known, anew)

    def total_kept(
        self, kept: list[Kept], weights: Weights
    ) -> tuple[dict[jex.Var, Array], dict[int, Array]]:
        """See `Cell`."""
        total = weighted_sum(kept[0], weights)
        return {self.uses[0].anchor: total}, {}


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

    def squares(
        self, method: str, seen: Sequence[Seen], leaves: Sequence[Array], *, keep: bool
    ) -> tuple[Float[Array, " b"], list[Kept] | None]:
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
        squares = [_squares(gradient) for gradient in ordered]
        kept = [Kept([gradient], links.same) for gradient in ordered]
        return sum(squares[1:], squares[0]), kept if keep else None

    def total_kept(
        self, kept: list[Kept], weights: Weights
    ) -> tuple[dict[jex.Var, Array], dict[int, Array]]:
        """See `Cell`."""
        totals = [weighted_sum(gradients, weights) for gradients in kept]
        return {}, dict(zip(self.unit.leaves, totals, strict=True))
