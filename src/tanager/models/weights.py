"""Save and load any pytree of arrays as one safetensors file.

A tensor is named by its path in the tree, joined by dots: ``blocks.0.conv1.weight``.
The file has only arrays and strings; loading it executes nothing.
"""

import os
import pathlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from tanager._files import write_atomically
from tanager._text import clean
from tanager.keys import is_key
from tanager.models.tensors import read_tensors


Tree = TypeVar("Tree")
_SHOWN = 4


def is_tensor(leaf: Any) -> bool:
    """Return whether a leaf of a model is an array, or the shape of one."""
    return eqx.is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct)


def named_tensors(tree: Any) -> dict[str, Any]:
    """Return the tree's arrays (or their shapes) by name, in the tree's order."""
    named = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if not is_tensor(leaf):
            continue
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        if name in named:
            raise ValueError(f"two arrays of the tree share the name {name!r}")
        if is_key(leaf):
            raise ValueError(f"{name} is a JAX key: randomness is not a weight")
        named[name] = leaf
    return named


def save(
    tree: Any, path: str | os.PathLike[str], metadata: Mapping[str, str] | None = None
) -> None:
    """Save every array of a pytree to a safetensors file, atomically.

    The metadata are strings beside the arrays. With at most one, equal trees give equal
    files.

    Raises:
        ValueError: two arrays share a name (a key holding a dot), or a leaf is a key.
    """
    from safetensors import numpy as safetensors

    arrays = {
        name: np.ascontiguousarray(leaf).reshape(leaf.shape)
        for name, leaf in named_tensors(tree).items()
    }
    write_atomically(pathlib.Path(path), safetensors.save(arrays, dict(metadata or {})))


def _differences(wanted: dict[str, Any], found: dict[str, np.ndarray]) -> list[str]:
    lines = [f"missing: {name}" for name in wanted if name not in found]
    lines += [f"extra: {name}" for name in sorted(found) if name not in wanted]
    for name, leaf in wanted.items():
        if name not in found:
            continue
        expected = f"{leaf.dtype}{list(leaf.shape)}"
        actual = f"{found[name].dtype}{list(found[name].shape)}"
        if expected != actual:
            lines.append(f"differs: {name} is {actual}, must be {expected}")
    return lines


def first_of_each_kind(lines: Iterable[str]) -> Iterator[str]:
    """Yield the first few lines of each kind, such as "missing", then a count.

    Another network's file differs in hundreds of tensors; the first ones tell.
    """
    kinds: dict[str, list[str]] = {}
    for line in lines:
        kinds.setdefault(line.partition(":")[0], []).append(line)
    for kind, those in kinds.items():
        yield from map(clean, those[:_SHOWN])
        if len(those) > _SHOWN:
            yield f"{kind}: {len(those) - _SHOWN} more"


def load(template: Tree, path: str | os.PathLike[str]) -> Tree:
    """Load a safetensors file into a tree like `template`.

    Args:
        template: tree whose arrays (or `jax.ShapeDtypeStruct`, as from
            `jax.eval_shape`) are replaced by those of the same name; other leaves and
            NumPy's kind of array stay.
        path: a file written by `save`, or any safetensors file with the same names.

    Raises:
        ValueError: tensors are missing, extra, or of another shape or dtype; the
            message names the first few. Or the file cannot be read, see `read_tensors`.
    """
    found = read_tensors(path)
    differences = _differences(named_tensors(template), found)
    if differences:
        raise ValueError(
            f"{clean(os.fspath(path))} does not fit the template:\n  "
            + "\n  ".join(first_of_each_kind(differences))
            + "\nload it into the model it was saved from"
        )
    return replace_tensors(template, found)


def replace_tensors(tree: Tree, arrays: Mapping[str, np.ndarray]) -> Tree:
    """Return the tree with some arrays replaced, by name; NumPy arrays stay NumPy's."""
    names = iter(named_tensors(tree))

    def replace(leaf: Any) -> Any:
        if not is_tensor(leaf):
            return leaf
        name = next(names)
        if name not in arrays:
            return leaf
        array = arrays[name]
        is_numpy = isinstance(leaf, np.ndarray)
        return array if is_numpy else jnp.asarray(array, array.dtype)

    return jax.tree.map(replace, tree)
