"""Which leaves of parameters are trained."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from tanager.clipping.analysis.statistics import held_fixed, refuse_shared


_MOST = 4  # leaves that a message names


def split(
    params: PyTree, trainable: PyTree | Callable | None = None
) -> tuple[PyTree, PyTree]:
    """Return the leaves that are trained and the others, None in each other's place.

    Running statistics and other state of layers is never trained (`held_fixed`). The
    leaves of `params` may be shapes; `trainable` is as of `clipped_grad`.

    Raises:
        ValueError: `trainable` does not fit `params`, or an NNX module holds one
            variable twice.
    """
    refuse_shared(params)
    trains = jax.tree.map(
        lambda leaf, held: _is_float(leaf) and not held, params, held_fixed(params)
    )
    numbers, others = eqx.partition(params, trains)
    if trainable is None:
        return numbers, others
    try:
        trained, frozen = eqx.partition(numbers, trainable)
    except ValueError as error:
        raise ValueError(
            "trainable must be a function of a leaf, or a pytree of booleans with the "
            f"structure of params or of a part of it: {_no_choice(trainable, params)}"
        ) from error
    return trained, eqx.combine(frozen, others)


def _no_choice(trainable: PyTree, params: PyTree) -> str:
    """Return what is wrong with booleans that do not fit the parameters."""
    for path, leaf in _leaves(trainable):
        if not (isinstance(leaf, bool) or callable(leaf)):
            kind = f"{type(leaf).__module__}.{type(leaf).__name__}"
            kind = kind.removeprefix("builtins.")
            name = f"trainable{jax.tree_util.keystr(path)}"
            return f"{name} (of type {kind}) must be Python's True or False"
    return misfit(trainable, params)


def misfit(tree: PyTree, whole: PyTree) -> str:
    """Return which leaves of `whole` a tree lacks, and which it has in addition.

    A leaf of the tree stands for all leaves of the whole that are below it.
    """
    frozen = [path for path, leaf in _leaves(whole) if leaf is None]
    given = [own for own, leaf in _leaves(tree) if leaf is not None or own in frozen]
    wanted = [path for path, _ in _leaves(whole)]
    missing = [path for path in wanted if not any(_below(path, own) for own in given)]
    extra = [own for own in given if not any(_below(path, own) for path in wanted)]
    named = [
        f"{what} {_named(paths)}"
        for what, paths in (("it lacks", missing), ("it has", extra))
        if paths
    ]
    return ", and ".join(named) + (" in addition" if extra else "") or (
        "the same leaves are in containers of other types"
    )


def _leaves(tree: PyTree) -> list[tuple[tuple[Any, ...], Any]]:
    return jax.tree.leaves_with_path(tree, is_leaf=lambda leaf: leaf is None)


def _below(path: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    return path[: len(other)] == other


def _named(paths: list[tuple[Any, ...]]) -> str:
    names = [jax.tree_util.keystr(path) for path in paths[:_MOST]]
    shown = ", ".join(name or "one for the only leaf" for name in names)
    return shown + f" and {len(paths) - _MOST} more" * (len(paths) > _MOST)


def _is_float(leaf: Any) -> bool:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jnp.issubdtype(leaf.dtype, jnp.inexact)
    return eqx.is_inexact_array(leaf)
