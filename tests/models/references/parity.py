"""Our models with the weights of another library, and what is known of them there."""

import functools
import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from references import draw

from tanager import models
from tanager.models.foreign.layouts import Table


HERE = pathlib.Path(__file__).parent


def read(file: str) -> dict[str, dict[str, Any]]:
    """Return the references of a file (without its ending), by our names."""
    return json.loads((HERE / f"{file}.json").read_text())["models"]


def names_of(model: Any) -> list[str]:
    """Return the names of a model's arrays, as `tanager.models.weights` has them."""
    leaves = jax.tree_util.tree_leaves_with_path(model)
    return [jax.tree_util.keystr(p, simple=True, separator=".") for p, _ in leaves]


def fill(
    model: Any, table: Table, tensor: Callable[[str, Sequence[int]], np.ndarray]
) -> Any:
    """Return a model whose arrays are those of another library.

    Args:
        model: of arrays or shapes.
        table: their tensor for each of ours; must hold all of ours, none twice.
        tensor: returns theirs from its name and shape, with their axes.
    """
    assert sorted(table) == sorted(names_of(model))
    assert len({foreign.names for foreign in table.values()}) == len(table)
    leaves, tree = jax.tree.flatten(model)
    filled = []
    for name, leaf in zip(names_of(model), leaves, strict=True):
        (theirs,), layout = table[name]
        like = layout.to_theirs(np.broadcast_to(np.float32(0), leaf.shape))
        array = layout.to_ours(tensor(theirs, like.shape))
        assert array.shape == leaf.shape, name
        filled.append(jnp.asarray(array, leaf.dtype))
    return tree.unflatten(filled)


def drawn(name: str, reference: dict[str, Any], names: Callable[[Any], Table]) -> Any:
    """Return the model that a reference is of, with the weights of `draw`."""
    channels, height, width = reference["image_shape"]
    shapes = eqx.filter_eval_shape(
        models.create,
        name,
        classes=len(reference["logits"]),
        image_shape=(height, width, channels),
        key=jax.random.key(0),
    )
    tensor = functools.partial(draw.tensor, conv_scale=reference["conv_scale"])
    return fill(shapes, names(shapes), tensor)


def difference(
    name: str, reference: dict[str, Any], names: Callable[[Any], Table]
) -> float:
    """Return how far our float32 logits are from the reference, relative to it."""
    model = drawn(name, reference, names)
    pixels = draw.image(reference["image_shape"]).transpose(1, 2, 0)
    run = jax.jit(lambda model, image: model(image))
    logits = np.asarray(run(model, jnp.asarray(pixels)), np.float64)
    expected = np.asarray(reference["logits"])
    return float(np.abs(logits - expected).max() / np.abs(expected).max())


def shaken(model: Any, size: float, seed: int = 1) -> Any:
    """Return a model whose every parameter is moved, so that no 1 or 0 hides."""
    numbers = np.random.default_rng(seed).standard_normal

    def move(leaf: Any) -> np.ndarray:
        return np.asarray(leaf + size * numbers(leaf.shape), np.float32)

    leaves, tree = jax.tree.flatten(model)
    return tree.unflatten(map(move, leaves))
