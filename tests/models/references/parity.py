"""Our models with the weights of another library, and what is known of them there."""

import functools
import json
import math
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from references import draw

from tanager import models
from tanager.models import weights
from tanager.models.foreign.layouts import Table
from tanager.models.pretrained import table_of


HERE = pathlib.Path(__file__).parent


def read(file: str) -> dict[str, dict[str, Any]]:
    """Return the references of a file (without its ending), by our names."""
    return json.loads((HERE / f"{file}.json").read_text())["models"]


def shapes(model: Any, table: Table) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of a model's tensors in another library's file."""
    ours = weights.named_tensors(model)
    assert table.keys() == ours.keys()
    found = {}
    for name, leaf in ours.items():
        parts = table[name].to_theirs(np.broadcast_to(np.float32(0), leaf.shape))
        for part, array in zip(table[name].names, parts, strict=True):
            assert part not in found
            found[part] = array.shape
    return found


def fill(
    model: Any, table: Table, tensor: Callable[[str, Sequence[int]], np.ndarray]
) -> Any:
    """Return a model whose arrays are those of another library.

    Args:
        model: of arrays or shapes.
        table: their tensor for each of ours; must hold all of ours, none twice.
        tensor: returns theirs from its name and shape, with their axes.
    """
    theirs = {name: tensor(name, shape) for name, shape in shapes(model, table).items()}
    arrays = {
        name: foreign.to_ours([theirs[part] for part in foreign.names])
        for name, foreign in table.items()
    }
    return weights.replace_tensors(model, arrays)


def named(
    name: str, image_shape: tuple[int, ...] = (224, 224, 3), classes: int = 10, **more
) -> Any:
    """Return the shapes of a named model."""
    sizes = {"classes": classes, "image_shape": image_shape, "key": jax.random.key(0)}
    return eqx.filter_eval_shape(models.create, name, **sizes, **more)


def drawn(name: str, reference: dict[str, Any]) -> Any:
    """Return the model that a reference of timm's is of, with the weights of `draw`."""
    channels, height, width = reference["image_shape"]
    shapes = named(name, (height, width, channels), len(reference["logits"]))
    tensor = functools.partial(draw.tensor, conv_scale=reference["conv_scale"])
    return fill(shapes, table_of(shapes, "timm"), tensor)


def distance(model: Any, reference: dict[str, Any]) -> float:
    """Return how far our logits (and features) are from theirs, relative to them."""
    pixels = draw.image(reference["image_shape"]).transpose(1, 2, 0)

    @jax.jit
    def run(model, image):
        features = model.features(image)
        return features, model.head(features)

    features, logits = (
        np.asarray(output, np.float64) for output in run(model, jnp.asarray(pixels))
    )
    pairs = [(logits, np.asarray(reference["logits"]))]
    if "features" in reference:
        assert len(features) > draw.EVERY
        pairs += [(features[:: draw.EVERY], np.asarray(reference["features"]))]
    return max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in pairs)


def random(build: Callable[[], Any], size: float = 0.3) -> Any:
    """Return a model with weights from NumPy: no gain of 1 or bias of 0 hides.

    Nothing is compiled, as it would be for JAX's own draws of every new shape.
    """
    numbers = np.random.default_rng(1).standard_normal

    def draw(path: Any, leaf: Any) -> np.ndarray:
        drawn = np.asarray(numbers(leaf.shape, np.float32))
        if leaf.ndim > 1:
            return drawn / np.float32(math.sqrt(math.prod(leaf.shape[:-1])))
        middle = path[-1].name in ("scale", "gain", "skip_gain")
        return np.float32(size) * drawn + np.float32(middle)

    return jax.tree_util.tree_map_with_path(draw, eqx.filter_eval_shape(build))
