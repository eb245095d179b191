"""The rule for products of matrices: `dot_general` in any orientation.

Whatever the order of axes, a tap y = dot(x, w) is brought to x `[B, G, T, K]` and dy
`[B, G, T, N]`: G batched contractions, T positions, K inputs, N outputs, so that one
example's gradient is x[g]ᵀ·dy[g]. For one position its norm is ‖x‖·‖dy‖.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from tanager.clipping.analysis import links, rounding
from tanager.clipping.analysis.dtypes import widen
from tanager.clipping.analysis.jaxprs import aval
from tanager.clipping.analysis.rounding import PRODUCT_ROWS, gamma
from tanager.clipping.analysis.taps import Tap, Use
from tanager.clipping.rules.base import (
    DIRECT,
    Formation,
    Products,
    TapValues,
    Work,
    product,
)
from tanager.clipping.rules.grams import Gram, gram_excess, gram_of, guarded, terms_of


class _Axes(NamedTuple):
    batch: tuple[int, ...]
    contracted: tuple[int, ...]
    free: tuple[int, ...]


def _axes(rank: int, batch: Sequence[int], contracted: Sequence[int]) -> _Axes:
    used = (*batch, *contracted)
    free = tuple(axis for axis in range(rank) if axis not in used)
    return _Axes(tuple(batch), tuple(contracted), free)


class Dot(Products):
    """`dot_general` with the parameter on either side."""

    name = "dot"

    def __init__(self, tap: Tap, use: Use):
        super().__init__(tap, use)
        equation = tap.equation
        contracted, batch = equation.params["dimension_numbers"]
        self._on_right = use.position == 1
        sides = [
            _axes(len(aval(atom).shape), batch[side], contracted[side])
            for side, atom in enumerate(equation.invars)
        ]
        shapes = [aval(atom).shape for atom in equation.invars]
        self._x, self._w = sides if self._on_right else sides[::-1]
        self._w_shape = shapes[use.position]
        x_shape = shapes[1 - use.position]
        self.groups = math.prod(x_shape[axis] for axis in self._x.batch)
        self.positions = math.prod(x_shape[axis] for axis in self._x.free)
        self.inputs = math.prod(x_shape[axis] for axis in self._x.contracted)
        self.outputs = math.prod(self._w_shape[axis] for axis in self._w.free)
        self._own = self.positions
        alone = self.groups == 1 and len(self._w.free) == 1
        self.outputs_axis = self._w.free[0] if alone else None
        dtypes = [aval(atom).dtype for atom in (*equation.invars, *equation.outvars)]
        self.alike = self.name, self._w, self._w_shape, *map(str, dtypes)

    def gather(self, seen: Sequence[TapValues]) -> TapValues:
        if len(self.parts) == 1:
            return seen[0]
        pairs = [
            part._in_order(at.data[0], at.gradients[0])
            for part, at in zip(self.parts, seen, strict=True)
        ]
        x, dy = (jnp.concatenate(sides, axis=2) for sides in zip(*pairs, strict=True))
        return replace(seen[0], data=[x], results=[], gradients=[dy])

    def operands(self, seen: TapValues) -> tuple[Array, Array]:
        """Return x `[B, G, T, K]` and dy `[B, G, T, N]`."""
        (x,), (dy,) = seen.data, seen.gradients
        return self._in_order(x, dy) if len(self.parts) == 1 else (x, dy)

    def _in_order(self, x: Array, dy: Array) -> tuple[Array, Array]:
        order = (*self._x.batch, *self._x.free, *self._x.contracted)
        x = jnp.transpose(x, (0, *(axis + 1 for axis in order)))
        rows = x.shape[0]
        x = x.reshape(rows, self.groups, self._own, self.inputs)
        if self._on_right:
            return x, dy.reshape(rows, self.groups, self._own, self.outputs)
        dy = dy.reshape(rows, self.groups, self.outputs, self._own)
        return x, jnp.swapaxes(dy, 2, 3)

    def by_position(self, result: Array) -> Float[Array, "b t o"]:
        if not self._on_right and len(self.parts) == 1:
            result = jnp.moveaxis(result, 1, -1)
        return result.reshape(result.shape[0], -1, self.outputs)

    def scaled_outputs(self, seen: TapValues, scale: Float[Array, " o"]) -> TapValues:
        (dy,) = seen.gradients
        shape = [1] * dy.ndim
        shape[-1 if self._on_right or len(self.parts) > 1 else 1] = self.outputs
        return seen.with_gradients([widen(dy) * scale.reshape(shape)])

    def patch_sums(
        self, seen: TapValues
    ) -> tuple[Float[Array, "b t g"], Float[Array, "b t g f"]]:
        x, dy = self.operands(seen)
        sums = jnp.sum(widen(x), axis=-1)
        return jnp.swapaxes(sums, 1, 2), jnp.swapaxes(widen(dy), 1, 2)

    def respond(self, seen: TapValues, parameter: Array) -> Float[Array, "b t o"]:
        x, _ = self.operands(seen)
        order = (*self._w.contracted, *self._w.free)
        matrix = jnp.transpose(parameter, order).reshape(self.inputs, self.outputs)
        return product("bgtk,kn->btn", x, matrix, exact=seen.exact)

    def _at_anchor(self, gradient: Float[Array, "g k n"]) -> Array:
        order = (*self._w.batch, *self._w.contracted, *self._w.free)
        shape = [self._w_shape[axis] for axis in order]
        gradient = jnp.transpose(gradient.reshape(shape), list(np.argsort(order)))
        return links.back(self.use.links, gradient)

    def grams(self) -> dict[str, Callable[[TapValues], Gram]]:
        return {"gram": self.gram}

    def gram(self, seen: TapValues) -> Gram:
        """Σ_{t,s} <x_t, x_s>·<dy_t, dy_s>, or ‖x‖²·‖dy‖² for one position."""
        x, dy = self.operands(seen)
        summands = self.inputs, self.outputs
        if self.positions == 1:
            left, right = (self._square_lengths(side) for side in (x, dy))
            squares = jnp.sum(left * right, axis=(1, 2)) * (1 + self.excess("gram"))
            return Gram(guarded(squares, left, right, summands), squares)
        left = product("bgtk,bgsk->bgts", x, x)
        right = product("bgtn,bgsn->bgts", dy, dy)
        return gram_of(left, right, summands, self.excess("gram"))

    def excess(self, method: str) -> float:
        if self.positions == 1:
            return gamma(self.groups + 4, self.dtype)
        summands = self.inputs, self.outputs
        return gram_excess((self.groups, self.positions), summands, self.dtype)

    def _square_lengths(self, side: Float[Array, "b g 1 k"]) -> Float[Array, "b g 1"]:
        # Without axes of length 1, for which XLA would copy the array.
        flat = side.reshape(-1, side.shape[-1])
        return rounding.squares(flat).reshape(-1, self.groups, 1)

    def terms(self, seen: TapValues) -> Float[Array, " b"]:
        left, right = (
            jnp.sum(jnp.square(widen(side)), axis=-1) for side in self.operands(seen)
        )
        return terms_of(left, right, (self.inputs, self.outputs))

    def gradients(self) -> dict[str, Formation]:
        own = (self.groups, self.inputs, self.outputs)
        scale = links.scale(self.use.links)
        return {"vmap": Formation(self.gradients_by_vmap, self._at_anchor, own, scale)}

    def gradients_by_vmap(self, seen: TapValues) -> Float[Array, "b g k n"]:
        """One batched product."""
        x, dy = self.operands(seen)
        return product("bgtk,bgtn->bgkn", x, dy, exact=seen.exact)

    def totals(self) -> tuple[str, ...]:
        """See `Rule.totals`: directly where a gradient is one outer product."""
        return (DIRECT,) if self.positions == 1 else ("vmap",)

    def direct(self, seen: TapValues) -> Array:
        """Return Σ g_i at the anchor by one product over some of the rows at a time.

        dy is scaled and cleaned. The steps are `rounding.product_steps`.
        """
        x, dy = self.operands(seen)
        parts = []
        for start in range(0, x.shape[0], PRODUCT_ROWS):
            rows = slice(start, start + PRODUCT_ROWS)
            parts.append(product("bgtk,bgtn->gkn", x[rows], dy[rows]))
        return self._at_anchor(rounding.tree(parts))

    def work(self, rows: int) -> Work:
        sides = self.groups, self.positions, self.inputs, self.outputs
        data = self.groups * self.positions * self.inputs
        return Work(rows, *sides, data, self.groups * self.positions * self.outputs)
