"""The rule for embeddings: rows of a table chosen by integers in the example."""

import math
from collections.abc import Callable

import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from tanager.clipping.analysis import links
from tanager.clipping.analysis.dtypes import widen
from tanager.clipping.analysis.jaxprs import aval
from tanager.clipping.analysis.rounding import PRODUCT_ROWS, tree
from tanager.clipping.rules.base import DIRECT, Bilinear, TapValues, Work, product
from tanager.clipping.rules.grams import Gram, gram_excess, gram_of, terms_of


def takes_rows(equation: jex.JaxprEqn) -> bool:
    """Whether a gather takes whole rows of its first axis, as ``table[i]`` does."""
    numbers, table = equation.params["dimension_numbers"], aval(equation.invars[0])
    rest = tuple(table.shape[1:])
    return (
        tuple(equation.params["slice_sizes"]) == (1, *rest)
        and numbers.collapsed_slice_dims == (0,)
        and numbers.start_index_map == (0,)
        and not numbers.operand_batching_dims
    )


class Gather(Bilinear):
    """`gather` of whole rows of a parameter."""

    name = "gather"

    def __init__(self, tap, use):
        super().__init__(tap, use)
        equation = tap.equation
        self._table = aval(equation.invars[0]).shape
        offsets = equation.params["dimension_numbers"].offset_dims
        rank = len(aval(equation.outvars[0]).shape)
        where = tuple(axis for axis in range(rank) if axis not in offsets)
        self._order = (*where, *offsets)
        width = math.prod(self._table[1:])
        self.positions = aval(equation.outvars[0]).size // max(width, 1)
        self._width = width
        self._clip = equation.params["mode"] == lax.GatherScatterMode.CLIP

    def operands(
        self, seen: TapValues
    ) -> tuple[Int[Array, "b t"], Bool[Array, "b t"], Float[Array, "b t d"]]:
        """Return row numbers, which of them are in the table, and dy."""
        (indices,), (dy,) = seen.data, seen.gradients
        rows = dy.shape[0]
        indices = indices.reshape(rows, -1)
        if indices.dtype.itemsize < 4:  # the table may have more rows than it counts
            indices = indices.astype(jnp.int32)
        last = self._table[0] - 1
        if self._clip:
            indices = jnp.clip(indices, 0, last)
        inside = (indices >= 0) & (indices <= last)
        dy = jnp.transpose(dy, (0, *(axis + 1 for axis in self._order)))
        dy = widen(dy.reshape(rows, indices.shape[1], -1))
        return indices, inside, jnp.where(inside[..., None], dy, 0)

    def grams(self) -> dict[str, Callable[[TapValues], Gram]]:
        return {"gram": self.gram}

    def gram(self, seen: TapValues) -> Gram:
        """Σ_{t,s} [i_t = i_s]·<dy_t, dy_s>."""
        indices, _, dy = self.operands(seen)
        same = _equal(indices)[:, None].astype(dy.dtype)
        right = product("btd,bsd->bts", dy, dy)[:, None]
        return gram_of(same, right, (0, self._width), self.excess("gram"))

    def excess(self, method: str) -> float:
        del method
        return gram_excess((1, self.positions), (0, self._width), self.dtype)

    def terms(self, seen: TapValues) -> Float[Array, " b"]:
        _, _, dy = self.operands(seen)
        right = jnp.sum(jnp.square(dy), axis=-1)[:, None]
        return terms_of(jnp.ones_like(right), right, (0, self._width))

    def totals(self) -> tuple[str, ...]:
        return (DIRECT,)

    def direct(self, seen: TapValues) -> Array:
        """Return Σ g_i at the anchor, dy being scaled and cleaned.

        It scatters some of the examples at a time.

        Each first adds up what it has for one row of the table, or its own rounding
        would grow with what others have there.
        """
        indices, inside, dy = self.operands(seen)
        same = _equal(indices)
        earlier = np.tri(self.positions, k=-1, dtype=bool)[None]
        first = ~jnp.any(same & earlier, axis=-1)
        own = product("bts,bsd->btd", same.astype(dy.dtype), dy)
        own = jnp.where(first[..., None], own, 0)
        # Outside the table dy is 0 already; row 0 takes it.
        indices = jnp.where(inside, indices, 0)
        empty = jnp.zeros((self._table[0], self._width), dy.dtype)
        parts = []
        for start in range(0, own.shape[0], PRODUCT_ROWS):
            rows = slice(start, start + PRODUCT_ROWS)
            where = indices[rows].reshape(-1)
            parts.append(empty.at[where].add(own[rows].reshape(-1, self._width)))
        return links.back(self.use.links, tree(parts).reshape(self._table))

    def work(self, rows: int) -> Work:
        positions, width = self.positions, self._width
        return Work(
            rows, 1, positions, self._table[0], width, positions, positions * width
        )


def _equal(indices: Int[Array, "b t"]) -> Bool[Array, "b t s"]:
    return indices[:, :, None] == indices[:, None, :]
