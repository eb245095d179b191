"""A physical batch: what it must be, where it lies, its pieces under little memory."""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import equinox as eqx
import jax
import jax.extend.backend
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AxisType
from jaxtyping import Array, ArrayLike, Bool, PyTree

from tanager import _validate as validate


MEMORY = {"default": 1, "low": 2}
"""In how many pieces, one after the other, a physical batch is clipped."""

EXCHANGED = "are the arguments exchanged? They are (params, batch)"

_NO_NUMBERS = "OSUTMm"
"""Kinds of NumPy's dtypes: objects, texts, dates."""


def rows_of(batch: PyTree, params: PyTree = None) -> int:
    """Return the rows of a physical batch, whose arrays must share a leading axis.

    `params`, if given, tell whether the two arguments were exchanged.
    """
    leaves = jax.tree.leaves_with_path(batch)
    named = [(f"batch{jax.tree_util.keystr(path)}", leaf) for path, leaf in leaves]
    for name, leaf in named:
        _require_numbers(name, leaf)
    sizes = _sizes(batch)
    if len(sizes) != 1 or sizes == {()}:
        exchanged = f"; {EXCHANGED}" if has_labels(params) else ""
        raise ValueError(_no_rows(batch, named) + exchanged)
    (rows,) = sizes.pop()
    if not isinstance(rows, int | np.integer):
        raise ValueError(
            f"batch (with {rows} rows) must have a known number of rows: give "
            "jax.export a number in place of the symbol"
        )
    return int(rows)


def _sizes(tree: PyTree) -> set[tuple[Any, ...]]:
    return {np.shape(leaf)[:1] for leaf in jax.tree.leaves(tree)}


def has_labels(params: PyTree) -> bool:
    """Whether params look like a batch: rows, with whole numbers among them."""
    sizes = _sizes(params)
    whole = any(
        jnp.issubdtype(leaf.dtype, jnp.integer)
        for leaf in jax.tree.leaves(params)
        if hasattr(leaf, "dtype")
    )
    return whole and len(sizes) == 1 and sizes != {()}


def _require_numbers(name: str, leaf: Any) -> None:
    """Refuse what JAX takes for no array, whose own errors show what is in it."""
    if isinstance(leaf, np.ma.MaskedArray):
        remedy = "fill it with a value of your choice: array.filled(0)"
        validate.refuse(name, leaf, "must have no mask", remedy)
    numbers = not isinstance(leaf, str | bytes)
    if isinstance(leaf, np.ndarray | np.generic):
        numbers = leaf.dtype.kind not in _NO_NUMBERS and leaf.dtype.names is None
    if not numbers:
        raise ValueError(
            f"{name} ({_kind(leaf)}) must be an array of numbers: number texts with "
            "numpy.unique(texts, return_inverse=True)[1]"
        )


def _no_rows(batch: PyTree, named: list[tuple[str, Any]]) -> str:
    """Return what is wrong with a batch whose leaves share no leading axis."""
    rule = "arrays that share one leading axis of rows"
    if not named:
        return f"batch must be a pytree of {rule}: it holds no array"
    if _is_list_of_rows(batch):
        return (
            f"batch (a {type(batch).__name__} of length {len(batch)}) must be a pytree "
            f"of {rule}: stack the rows, jax.tree.map(lambda *rows: numpy.stack(rows), "
            "*batch)"
        )
    for name, leaf in named:
        if np.shape(leaf) == ():
            return (
                f"{name} ({_kind(leaf)}) must have an entry for each row, because "
                f"batch is a pytree of {rule}: make an array of a list, and use in "
                "the loss itself what all rows have in common"
            )
    (first, one), *others = named
    rows = np.shape(one)[0]
    name, leaf = next(each for each in others if np.shape(each[1])[0] != rows)
    return (
        f"{name} ({_kind(leaf)}) must have as many rows as {first} ({_kind(one)}): "
        f"batch is a pytree of {rule}"
    )


def _is_list_of_rows(batch: PyTree) -> bool:
    if not isinstance(batch, list | tuple) or jax.tree_util.all_leaves(batch):
        return False
    rows = [
        (jax.tree.structure(row), [np.shape(leaf) for leaf in jax.tree.leaves(row)])
        for row in batch
    ]
    return all(row == rows[0] for row in rows)


def _kind(leaf: Any) -> str:
    known = hasattr(leaf, "dtype") and hasattr(leaf, "shape")
    return f"={validate.shown(leaf)}" if known else f"of type {type(leaf).__name__}"


def mask_of(mask: ArrayLike | None, rows: int) -> Bool[Array, " b"]:
    """Return the mask as an array, all True for None; refuse all but bool[rows]."""
    rule = f"must be bool[{rows}], one entry for each row of the batch"
    with jax.transfer_guard("allow"):
        try:
            given = jnp.asarray(np.ones(rows, bool) if mask is None else mask)
        except (TypeError, ValueError):
            given = None  # JAX's own error shows what is in it
    if given is None:
        validate.refuse_type("mask", mask, rule, "give the mask of a PhysicalBatch")
    if given.shape != (rows,) or given.dtype != jnp.bool_:
        remedy = (
            "several arguments of the loss go into one tuple or dict, the batch; "
            "random keys go into keys=, and weights into the batch and the loss"
        )
        raise ValueError(f"mask (={given.dtype}{list(given.shape)}) {rule}: {remedy}")
    return given


def refuse_typed_axes(params: PyTree, batch: PyTree) -> None:
    """Refuse arrays that vary or are split over named axes of a mesh.

    Where `jax.shard_map` checks which values are the same on all devices, the gradient
    of one example would be summed over the devices that share parameters.
    """
    for leaf in jax.tree.leaves(eqx.filter((params, batch), eqx.is_array)):
        if axes := jax.typeof(leaf).manual_axis_type.varying:
            raise ValueError(
                f"batch or params vary over the mesh axes {sorted(map(str, axes))}, "
                "and jax.shard_map sums gradients over the devices that share "
                "parameters: use jax.shard_map(..., check_vma=False), and add up the "
                "clipped sums of the devices with noise.grid.add; or use tanager.train"
            )
        spec = jax.typeof(leaf).sharding.spec
        if any(part is not None for part in spec):
            raise ValueError(
                f"batch or params hold an array split as {spec} over a mesh with axes "
                "of type Explicit, which clipped_grad does not support: make the mesh "
                "with axis_types=(jax.sharding.AxisType.Auto,), or call clipped_grad "
                "inside jax.shard_map(..., check_vma=False) and add up the clipped "
                "sums of the devices with noise.grid.add; or use tanager.train"
            )


def traced(leaves: Iterable[Any]) -> bool:
    """Whether a computation with these arrays is part of an outer `jax.jit` or `vmap`.

    An outer `jax.jit` traces a computation even where all its arrays have values.
    """
    with jax.transfer_guard("allow"):
        new = jnp.zeros(())
    return any(isinstance(leaf, Tracer) for leaf in (*leaves, new))


def may_be_split(leaves: Iterable[Any]) -> bool:
    """Whether XLA may split a computation with these arrays over several devices.

    An outer `jax.jit` does not show where its arrays are: then it may, if the process
    has several devices.
    """
    held = [leaf for leaf in leaves if isinstance(leaf, jax.Array)]
    if not traced(held):
        return any(len(leaf.sharding.device_set) > 1 for leaf in held)
    if _divided():
        return False
    clients = jax.extend.backend.backends().values()
    return any(client.device_count() > 1 for client in clients)


def on_this_device() -> contextlib.AbstractContextManager:
    """Hide a mesh that `jax.shard_map` has divided already: rows are here alone.

    Loops of Equinox refuse their own arrays inside of it, where those name the mesh.
    """
    if not _divided():
        return contextlib.nullcontext()
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ()))


def _divided() -> bool:
    types = jax.sharding.get_abstract_mesh().axis_types
    return bool(types) and all(kind == AxisType.Manual for kind in types)


def example_of(batch: PyTree) -> PyTree:
    """Return the shapes and dtypes of one row of a batch."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(np.shape(leaf)[1:], jnp.result_type(leaf)),
        batch,
    )


def shapes_of(tree: PyTree) -> Any:
    """Return what a trace depends on: the shapes of arrays, and all other leaves."""
    leaves, structure = jax.tree.flatten(tree)
    arrays = jax.Array, np.ndarray, np.generic
    return structure, tuple(
        (np.shape(x), jnp.result_type(x)) if isinstance(x, arrays) else _fixed(x)
        for x in leaves
    )


def _fixed(value: Any) -> Any:
    try:
        hash(value)
    except TypeError:
        return object()  # equal to nothing, so that it is checked each time
    return type(value), value


def pieces(rows: int, memory: str) -> list[tuple[int, int]]:
    """Return where each piece of a physical batch starts and how many rows it has."""
    count = max(min(MEMORY[memory], rows), 1)
    edges = [number * rows // count for number in range(count + 1)]
    return [(start, stop - start) for start, stop in itertools.pairwise(edges)]


def in_pieces(
    clip: Callable[[int, PyTree, Array], tuple[PyTree, PyTree]],
    batch: PyTree,
    mask: Bool[Array, " b"],
    memory: str,
) -> tuple[PyTree, PyTree]:
    """Clip a physical batch piece by piece; return its sum, and what each row has."""
    (_, rows), *rest = pieces(mask.shape[0], memory)
    first = jax.tree.map(lambda leaf: leaf[:rows], (batch, mask))
    total, each = clip(rows, *first)
    for start, rows in rest:
        # Where this piece starts depends on the one before, whose memory it can then
        # have. XLA on CPU drops barriers before it orders operations; on TPU it orders
        # the norms of this piece before the sums of the one before.
        total, batch = jax.lax.optimization_barrier((total, batch))
        norms = jax.tree.leaves(each)[0]
        zero = jnp.minimum(jnp.sum(norms >= 0, dtype=jnp.int32), 0)
        own = functools.partial(
            jax.lax.dynamic_slice_in_dim, start_index=start + zero, slice_size=rows
        )
        piece = jax.tree.map(own, (batch, mask))
        total = _apart(zero, total)
        added, more = clip(rows, *piece)
        total = jax.tree.map(jnp.add, total, added)
        each = jax.tree.map(lambda *rows: jnp.concatenate(rows), each, more)
    return total, each


def _apart(zero: Array, sums: PyTree) -> PyTree:
    """Return the sums, which XLA cannot add up together with later ones.

    It would hold the gradients of both until then.
    """

    def never(sums: PyTree) -> PyTree:
        return jax.tree.map(jnp.zeros_like, sums)

    return jax.lax.cond(zero == 0, lambda sums: sums, never, sums)
