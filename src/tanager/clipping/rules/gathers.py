"""The rule for embeddings: rows of a table chosen by integers in the example."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from tanager.clipping.analysis import links
from tanager.clipping.analysis.dtypes import widen
from tanager.clipping.analysis.jaxprs import aval
from tanager.clipping.analysis.rounding import PRODUCT_ROWS, tree
from tanager.clipping.analysis.taps import Tap, Use
from tanager.clipping.rules.base import DIRECT, Bilinear, TapValues, Work, product
from tanager.clipping.rules.grams import Gram, gram_excess, gram_of, terms_of


def axis_taken(equation: jex.JaxprEqn) -> int | None:
    """Return the axis that a gather or slice indexes, 0 for ``table[i]``, or None.

    All other axes are taken whole, by `gather` or by `dynamic_slice`.
    """
    table, params = aval(equation.invars[0]).shape, equation.params
    sizes = tuple(params["slice_sizes"])
    if equation.primitive.name == "gather":
        numbers = params["dimension_numbers"]
        if numbers.operand_batching_dims or len(numbers.collapsed_slice_dims) > 1:
            return None
        mapped, collapsed = numbers.start_index_map, numbers.collapsed_slice_dims
    else:
        mapped, collapsed = range(len(table)), ()
    cut = [axis for axis, size in enumerate(sizes) if size != table[axis]]
    axes = cut or list(collapsed) or [n for n in mapped if sizes[n] == 1][:1]
    fits = len(axes) == 1 and sizes[axes[0]] == 1 and axes[0] in mapped
    return axes[0] if fits and set(collapsed) <= set(axes) else None


def takes_rows(tap: Tap) -> bool:
    """Whether examples choose what is taken of a parameter, along one axis."""
    axis = axis_taken(tap.equation)
    if tap.equation.primitive.name == "gather":
        return axis is not None
    return axis is not None and 1 + axis in tap.data


class Gather(Bilinear):
    """`gather` or `dynamic_slice` of a parameter: rows along one axis, of any place."""

    name = "gather"

    def __init__(self, tap: Tap, use: Use):
        super().__init__(tap, use)
        equation, axis = tap.equation, axis_taken(tap.equation)
        assert axis is not None
        self._axis, self._shape = axis, aval(equation.invars[0]).shape
        self._rows = self._shape[axis]
        rank = len(aval(equation.outvars[0]).shape)
        self._numbers = equation.params.get("dimension_numbers")
        offsets = self._numbers.offset_dims if self._numbers else tuple(range(rank))
        where = tuple(axis for axis in range(rank) if axis not in offsets)
        self._order = (*where, *offsets)
        width = math.prod(self._shape) // max(self._rows, 1)
        self.positions = aval(equation.outvars[0]).size // max(width, 1)
        self._width = width
        dtype = aval(equation.outvars[0]).dtype
        self.alike = self.name, axis, self._shape, str(dtype)

    def gather(self, seen: Sequence[TapValues]) -> TapValues:
        if len(self.parts) == 1:
            return seen[0]
        found = [part._in_order(at) for part, at in zip(self.parts, seen, strict=True)]
        *data, dy = (jnp.concatenate(own, axis=1) for own in zip(*found, strict=True))
        return replace(seen[0], data=data, results=[], gradients=[dy])

    def operands(self, seen: TapValues) -> tuple[Array, Array, Array]:
        """Return row numbers, which of them are in the table, and dy."""
        if len(self.parts) == 1:
            return self._in_order(seen)
        (indices, inside), (dy,) = seen.data, seen.gradients
        return indices, inside, dy

    def _in_order(
        self, seen: TapValues
    ) -> tuple[Int[Array, "b t"], Bool[Array, "b t"], Float[Array, "b t d"]]:
        (dy,) = seen.gradients
        rows = dy.shape[0]
        indices, inside = self._indices(seen, rows)
        dy = jnp.transpose(dy, (0, *(axis + 1 for axis in self._order)))
        dy = widen(dy.reshape(rows, indices.shape[1], -1))
        return indices, inside, jnp.where(inside[..., None], dy, 0)

    def _indices(
        self, seen: TapValues, rows: int
    ) -> tuple[Int[Array, "b t"], Bool[Array, "b t"]]:
        last = self._rows - 1
        if self._numbers is None:
            indices = seen.data[self.tap.data.index(1 + self._axis)].reshape(rows, 1)
            clipped = jnp.clip(_counting(indices), 0, last)
            return clipped, jnp.ones_like(clipped, bool)
        mapped = self._numbers.start_index_map
        starts = _counting(seen.data[0].reshape(rows, -1, len(mapped)))
        indices = starts[..., mapped.index(self._axis)]
        if self.tap.equation.params["mode"] == lax.GatherScatterMode.CLIP:
            indices = jnp.clip(indices, 0, last)
            return indices, jnp.ones_like(indices, bool)
        # Of an axis that is taken whole, the one start inside the table is 0.
        most = [last if axis == self._axis else 0 for axis in mapped]
        most = jnp.array(most, starts.dtype)[None, None]
        return indices, jnp.all((starts >= 0) & (starts <= most), axis=-1)

    def grams(self) -> dict[str, Callable[[TapValues], Gram]]:
        return {"gram": self.gram}

    def gram(self, seen: TapValues) -> Gram:
        """Σ_{t,s} [i_t = i_s]·<dy_t, dy_s>."""
        indices, _, dy = self.operands(seen)
        same = _equal(indices)[:, None].astype(dy.dtype)
        right = product("btd,bsd->bts", dy, dy)[:, None]
        return gram_of(same, right, (0, self._width), self.excess("gram"))

    def excess(self, method: str) -> float:
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
        empty = jnp.zeros((self._rows, self._width), dy.dtype)
        parts = []
        for start in range(0, own.shape[0], PRODUCT_ROWS):
            rows = slice(start, start + PRODUCT_ROWS)
            where = indices[rows].reshape(-1)
            parts.append(empty.at[where].add(own[rows].reshape(-1, self._width)))
        return self._at_anchor(tree(parts))

    def _at_anchor(self, total: Float[Array, "r d"]) -> Array:
        rest = (n for axis, n in enumerate(self._shape) if axis != self._axis)
        total = total.reshape(self._rows, *rest)
        return links.back(self.use.links, jnp.moveaxis(total, 0, self._axis))

    def gradients_by_vmap(self, seen: TapValues) -> Array:
        if len(self.parts) == 1:
            return super().gradients_by_vmap(seen)
        empty = jnp.zeros((self._rows, self._width), self.dtype)

        def one(indices: Array, inside: Array, dy: Array) -> Array:
            where = jnp.where(inside, indices, 0)
            return self._at_anchor(empty.at[where].add(dy.astype(empty.dtype)))

        return jax.vmap(one)(*self.operands(seen))

    def work(self, rows: int) -> Work:
        positions, width = self.positions, self._width
        return Work(rows, 1, positions, self._rows, width, positions, positions * width)


def _counting(indices: Array) -> Array:
    """Return indices of a width that counts all rows of a table."""
    return indices.astype(jnp.int32) if indices.dtype.itemsize < 4 else indices


def _equal(indices: Int[Array, "b t"]) -> Bool[Array, "b t s"]:
    return indices[:, :, None] == indices[:, None, :]
