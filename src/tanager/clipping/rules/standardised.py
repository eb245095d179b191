"""A weight that is standardised or normalised: norms by formula, one pull-back.

The sum is made of G_i = ∂loss_i/∂Ŵ and carried back to the weight at the end, by a
linear map P that takes away G's mean and its projection on the weight. So rounding is
relative to W = ‖a∘G_i‖ and not to ‖P(G_i)‖, and an example's norm counts as at least
W/κ (`rounding.CANCELLATION`). Beside that the norm has the error of the formula, all of
whose parts are at most W², added: η·W², or η·A² where sums come from the layer's own
input and output.

A gain's gradient vᵀG_i·root can be far smaller than G_i: its per-example values, one
for each output unit, are retained from the norm and added up themselves.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from tanager.clipping.analysis import links, rounding, standardise
from tanager.clipping.analysis.dtypes import accumulation_dtype, widen
from tanager.clipping.analysis.jaxprs import aval
from tanager.clipping.analysis.rounding import gamma, root, run_steps
from tanager.clipping.analysis.taps import Program, Unit, Use
from tanager.clipping.rules.base import Formation, Products, TapValues, product
from tanager.clipping.rules.factors import ClipFactors
from tanager.clipping.rules.grams import Gram
from tanager.clipping.rules.groups import Held, Method, Single
from tanager.clipping.rules.retained import RetainedGradients, form, weighted_sum


_SMALLEST_GAIN = 2.0**-10
"""Outputs are not divided by a gain that is smaller; it may be 0."""


class Standardised(Single):
    """Uses by one rule of a weight that `unit.form` standardises."""

    def __init__(self, program: Program, unit: Unit, *uses: Use):
        super().__init__(program, unit, *uses)
        assert unit.form is not None
        self._form = unit.form
        shape = aval(unit.anchors[0]).shape
        self._outputs = shape[self._form.unit]
        self._fan_in = aval(unit.anchors[0]).size // self._outputs

    @property
    def plain(self) -> bool:
        rule = self.rule
        return (
            super().plain
            and isinstance(rule, Products)
            and rule.outputs_axis == self._form.unit
            and links.entrywise(rule.use.links)
        )

    @property
    def products(self) -> Products:
        """The rule, where norms can be taken without gradients."""
        assert isinstance(self.rule, Products)
        return self.rule

    def formation(self, method: str) -> Formation:
        formation = super().formation(method)
        if formation.to_param is not links.same:
            return formation
        return formation._replace(outputs=(self._form.unit,))

    def grams(self) -> tuple[str, ...]:
        """Return none on an accelerator, whose convolutions may round in unknown ways.

        The Gram methods use the results of the tap.
        """
        return super().grams() if jax.default_backend() == "cpu" else ()

    def sum_steps(self, method: Method, rows: int) -> float:
        steps = super().sum_steps(method, rows)
        wide = accumulation_dtype(aval(self.unit.anchors[0]).dtype)
        back = 2 * run_steps(self._fan_in) + 12
        return (steps + back + 2) * standardise.cancellation(wide)

    def excess(self, method: Method) -> float:
        """Return η of an ordinary example: of a gradient far from the mean and from v.

        Along them, up to 2·`_slip` is added.
        """
        if method.norm not in self.grams():
            return 0.0
        slip = self._slip(jnp.float32)
        statistics = 2 * gamma(self._statistics, jnp.float32)
        return self.products.excess(method.norm) + statistics + slip**2

    def squares(
        self, method: str, seen: Sequence[TapValues], *, retain: bool
    ) -> tuple[Float[Array, " b"], Held]:
        gram, (whole,) = self.rule.grams().get(method), self.by_rule(seen)
        parts = self._parts(whole.constants)
        if gram is not None:
            found, projection = self._from_outputs(gram, whole, parts)
            squares = self.formed_again(found, 1)
            return self._with_gain(squares, projection, parts, None)
        formation, chunk = self.formation(method), self.rule.chunk(method, whole.rows)
        norms = self._from_gradients(formation, parts)
        found, retained = form(formation, whole, chunk, norms, retain=retain)
        squares, projection = (jnp.concatenate(own) for own in zip(*found, strict=True))
        if retained is None:
            squares = self.formed_again(Gram(squares, self._terms(whole)), 2)
        return self._with_gain(squares, projection, parts, retained)

    def _with_gain(
        self,
        squares: Float[Array, " b"],
        projection: Float[Array, "b o"],
        parts: standardise.Statistics,
        retained: RetainedGradients | None,
    ) -> tuple[Float[Array, " b"], Held]:
        gradients = None if retained is None else [retained]
        if self._form.gain is None:
            return squares, Held(gradients)
        own = projection * parts.root[None]
        squares = squares + rounding.squares(own)
        return squares, Held(gradients, RetainedGradients([own], links.same))

    def _terms(self, seen: TapValues) -> Float[Array, " b"]:
        factor = self._parts(seen.constants).factor * self.scale
        return self.products.terms(self.products.scaled_outputs(seen, factor))

    def _from_gradients(
        self, formation: Formation, parts: standardise.Statistics
    ) -> Callable[[Array], tuple[Float[Array, " b"], Float[Array, "b o"]]]:
        """Return the function from gradients to squared norms and projections."""
        scale = formation.scale
        own = jax.ShapeDtypeStruct(formation.own, parts.centred.dtype)
        centred = self._as_kernel(parts.centred)
        (centred,) = jax.linear_transpose(formation.to_param, own)(centred)
        # v in the order of the gradient: `to_param` scales by `scale`, up to its sign.
        # Squares are of G times the largest factor, or those of small numbers vanish.
        lift = jnp.maximum(jnp.max(jnp.abs(parts.factor * scale)), 1)
        factor = parts.factor * scale / lift

        def norms(chunk: Array) -> tuple[Array, Array]:
            square, total, projection = standardise.from_gradient(
                chunk, centred, formation.outputs, lift
            )
            scaled = jnp.sum(square * jnp.square(factor)[None], axis=-1)
            relative = gamma(5 * self._fan_in + self._statistics, self._dtype(scaled))
            squares = standardise.squared_norms(
                self._fan_in, parts, scaled, total * scale, projection, relative
            )
            return squares, projection

        return norms

    @property
    def _statistics(self) -> int:
        """Roundings of the formula that do not come from sums over examples' data."""
        fixed = 48 + 4 * len(self.uses[0].links)
        return fixed + 3 * (run_steps(self._fan_in) + self._outputs)

    def _dtype(self, value: Array) -> Any:
        """Return the coarser of two: statistics are no more precise than the weight."""
        weight = accumulation_dtype(aval(self._form.weight).dtype)
        return max(weight, value.dtype, key=lambda dtype: float(jnp.finfo(dtype).eps))

    def _parts(self, constants: dict) -> standardise.Statistics:
        weight, gain = self._form.weight, self._form.gain
        own = None if gain is None else constants[gain]
        parts = standardise.parts_of(self._form, constants[weight], own)
        return parts.astype(self.rule.dtype)

    def _as_kernel(self, flat: Float[Array, "n o"]) -> Array:
        """Return an array of the anchor's shape: the inverse of `by_unit`."""
        shape, unit = aval(self.unit.anchors[0]).shape, self._form.unit
        moved = [*shape[:unit], *shape[unit + 1 :], shape[unit]]
        return jnp.moveaxis(flat.reshape(moved), -1, unit)

    def _slip(self, dtype: Any) -> float:
        """Return how far 1ᵀG and vᵀG are wrong, relative to A, as one vector.

        |1ᵀp_t| <= √n·‖p_t‖ and |vᵀp_t| <= ‖v‖·‖p_t‖, so that each is wrong by γ·A.
        """
        rule = self.products
        steps = rule.offsets * rule.inputs + rule.positions + 16
        return 1.5 * gamma(steps + 4 * len(self.uses[0].links), dtype)

    def _from_outputs(
        self, gram: Callable, seen: TapValues, parts: standardise.Statistics
    ) -> tuple[Gram, Float[Array, "b o"]]:
        """Return norms, and projections, from the tap's own input and output.

        The kernel is the standardised weight times the links' scale, up to its sign,
        which the squares do not see.
        """
        rule = self.products
        dy = rule.by_position(widen(seen.gradients[0]))
        scaled: Gram = gram(rule.scaled_outputs(seen, parts.factor * self.scale))
        total = product("btg,btgf->bgf", *rule.patch_sums(seen)).reshape(
            dy.shape[0], -1
        )
        total = total * self.scale
        projection, drift = self._projection(seen, parts, dy)
        dtype = self._dtype(scaled.squares)
        slip = self._slip(dtype) + drift
        squares = standardise.squared_norms(
            self._fan_in,
            parts,
            scaled.squares,
            total,
            projection,
            2 * gamma(self._statistics, dtype),
            slip * root(scaled.terms),
        )
        return Gram(squares, scaled.terms), projection

    def _drift(
        self, seen: TapValues, parts: standardise.Statistics
    ) -> Float[Array, ""]:
        """Return how far the model's own Ŵ/a is from v, as `_slip`."""
        kernel = widen(seen.constants[self.unit.anchors[0]])
        own = standardise.by_unit(self._form, kernel)
        apart = own / parts.factor[None] - parts.centred
        squares = jnp.sum(jnp.square(apart), axis=0) * parts.curb
        return root(jnp.max(squares))

    def _projection(
        self,
        seen: TapValues,
        parts: standardise.Statistics,
        dy: Float[Array, "b t o"],
    ) -> tuple[Float[Array, "b o"], Float[Array, ""]]:
        """Return vᵀG = Σ_t <p_t, v>·dy_t times the links' scale, and `_drift`.

        <p_t, v> is the output itself, over a and the scale of the kernel.
        But not where the model rounds its outputs, as in bfloat16: a gradient along v
        is what standardisation takes away, and the rounding would pass for the rest.
        """
        rule = self.products

        def again() -> tuple[Array, Array]:
            outputs = rule.respond(seen.exactly(), self._as_kernel(parts.centred))
            # Links of numbers and negations: they scale whatever they are given.
            found = links.back(self.uses[0].links, jnp.sum(outputs * dy, axis=1))
            return found, jnp.zeros((), found.dtype)

        def known() -> tuple[Array, Array]:
            outputs = rule.by_position(seen.results[0])
            found = jnp.sum(outputs * dy, axis=1) / parts.factor[None]
            return found, self._drift(seen, parts).astype(found.dtype)

        if not rule.exact or not seen.results:
            return again()
        if self._form.gain is None:
            return known()
        large = jnp.all(jnp.abs(parts.factor / parts.root) > _SMALLEST_GAIN)
        return jax.lax.cond(large, known, again)

    def total(
        self, method: str, seen: Sequence[TapValues], held: Held, factors: ClipFactors
    ) -> dict[int, Array]:
        (whole,) = self.by_rule(seen)
        total = self.total_at_anchor(method, whole, held, factors)
        form, parameters = self._form, self.program.parameters
        parts, own = self._parts(seen[0].constants), standardise.by_unit(form, total)
        back = self._as_kernel(standardise.pull_back(parts, own))
        back = jnp.transpose(back, [form.order.index(n) for n in range(back.ndim)])
        sums = {parameters.index(form.weight): back}
        if form.gain is not None and held.gain is not None:
            shape = aval(form.gain).shape
            gain = weighted_sum(held.gain, factors).reshape(shape)
            sums[parameters.index(form.gain)] = gain
        return sums
