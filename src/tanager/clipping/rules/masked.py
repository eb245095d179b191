"""A parameter that is multiplied by an array without a gradient: a mask.

The array is a constant, as in MADE, or made of parameters, as in pruning.

Of one position, ‖M∘(x·dyᵀ)‖² = (x²)ᵀM²(dy²). Else gradients are formed.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from tanager.clipping.analysis import rounding
from tanager.clipping.analysis.dtypes import widen
from tanager.clipping.analysis.jaxprs import aval
from tanager.clipping.analysis.rounding import gamma
from tanager.clipping.rules.base import DIRECT, Rule, TapValues, product
from tanager.clipping.rules.dots import Dot
from tanager.clipping.rules.grams import Gram, guarded
from tanager.clipping.rules.groups import Method, Single


class Masked(Single):
    """Uses by one rule of a parameter times a mask."""

    @property
    def outer(self) -> bool:
        """Whether a gradient is one outer product, times the mask."""
        return isinstance(self.rule, Dot) and self.rule.positions == 1

    def grams(self) -> tuple[str, ...]:
        return ("gram",) if self.outer else ()

    def totals(self) -> tuple[str, ...]:
        return (DIRECT,) if self.outer else ()

    def excess(self, method: Method) -> float:
        return gamma(self._steps, self.rule.dtype, product=True)

    @property
    def _steps(self) -> int:
        work = self.rule.work(1)
        return work.groups + work.inputs + work.outputs + 2 * len(self.uses[0].links)

    def gram(self, method: str, seen: TapValues) -> Gram:
        rule = self.rule
        assert isinstance(rule, Dot)
        x, dy = (widen(side[:, :, 0]) for side in rule.operands(seen))
        mask, largest = self._mask(rule, x.dtype)
        # Scaled before it is squared: the square of a small number vanishes.
        left, right = rounding.square(x), rounding.square(dy * largest)
        met = product("bgk,gkn->bgn", left, rounding.square(mask))
        squares = jnp.sum(met * right, axis=(1, 2))
        squares *= 1 + gamma(self._steps + 24, squares.dtype, product=True)
        sides = [jnp.sum(side, axis=-1, keepdims=True) for side in (left, right)]
        # Squares of small entries of the mask may have vanished.
        tiny = 4 * float(jnp.finfo(jnp.float32).tiny)
        squares += jnp.sum(tiny * sides[0] * sides[1], axis=(1, 2))
        counts = rule.inputs, rule.outputs
        squares = guarded(squares, sides[0], sides[1], counts)
        return Gram(squares, squares)

    def terms(self, seen: TapValues) -> Float[Array, " b"]:
        return self.gram("gram", seen).terms

    def _mask(self, rule: Rule, dtype: jnp.dtype) -> tuple[Array, Array]:
        """Return the mask where the parameter is used, over its largest entry."""
        formation = rule.gradients()["vmap"]
        ones = jnp.ones(aval(self.unit.anchors[0]).shape, dtype)
        own = jax.ShapeDtypeStruct(formation.own, dtype)
        (mask,) = jax.linear_transpose(formation.to_param, own)(ones)
        largest = jnp.max(jnp.abs(mask), initial=0)
        return mask / jnp.where(largest > 0, largest, 1), largest
