"""The rule for embeddings: rows of a table chosen by integers in the example."""

import math
from collections.abc import Callable

import jax.extend.core as jex
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from tanager.clipping import links
from tanager.clipping.jaxprs import aval
from tanager.clipping.precision import widen
from tanager.clipping.rules import Bilinear, Seen, Work, gram_squares, product


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
        self._clip = equation.params["mode"] == lax.GatherScatterMode.CLIP

    def operands(
        self, seen: Seen
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

    def grams(self) -> dict[str, Callable[[Seen], Float[Array, " b"]]]:
        """See `Rule.grams`."""
        return {"gram": self.gram}

    def gram(self, seen: Seen) -> Float[Array, " b"]:
        """Σ_{t,s} [i_t = i_s]·<dy_t, dy_s>."""
        indices, _, dy = self.operands(seen)
        same = indices[:, None, :, None] == indices[:, None, None, :]
        right = product("btd,bsd->bts", dy, dy)[:, None]
        return gram_squares(same.astype(dy.dtype), right, (0, dy.shape[-1]))

    def terms(self, seen: Seen) -> Float[Array, " b"]:
        """See `Bilinear.terms`."""
        _, _, dy = self.operands(seen)
        lengths = jnp.sqrt(jnp.sum(jnp.square(dy), axis=-1))
        return jnp.square(jnp.sum(lengths, axis=-1))

    def totals(self) -> dict[str, Callable[[Seen], Array]]:
        """See `Rule.totals`."""
        return {"batched": self.total}

    def total(self, seen: Seen) -> Array:
        """One scatter of all examples' rows."""
        indices, inside, dy = self.operands(seen)
        # Outside the table dy is 0 already; row 0 takes it.
        indices = jnp.where(inside, indices, 0).reshape(-1)
        flat = jnp.zeros((self._table[0], dy.shape[-1]), dy.dtype)
        flat = flat.at[indices].add(dy.reshape(-1, dy.shape[-1]))
        return links.back(self.use.links, flat.reshape(self._table))

    def work(self, rows: int) -> Work:
        """See `Rule.work`."""
        width = math.prod(self._table[1:])
        positions = aval(self.tap.equation.outvars[0]).size // max(width, 1)
        results = positions * width
        return Work(rows, 1, positions, self._table[0], width, positions, results)
