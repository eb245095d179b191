"""Arrays and losses that the models share."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


Stranger = tuple[Callable, Any, Any]  # loss of one example, parameters, batch


def draw(seed: int, *shapes: tuple[int, ...], scale: float = 1.0) -> list[jax.Array]:
    """Return normal arrays."""
    generator = np.random.default_rng(seed)
    return [jnp.float32(scale * generator.standard_normal(s)) for s in shapes]


def labels(rows: int, classes: int = 10) -> jax.Array:
    """Return random labels."""
    return jnp.asarray(np.random.default_rng(1).integers(0, classes, rows))


def words(rows: int, length: int, size: int) -> jax.Array:
    """Return random token numbers [rows, length]."""
    return jnp.asarray(np.random.default_rng(2).integers(0, size, (rows, length)))


def images(rows: int, side: int, channels: int, first: bool = False) -> Any:
    """Return images with labels; channels first for Equinox."""
    shape = (channels, side, side) if first else (side, side, channels)
    return draw(1, (rows, *shape))[0], labels(rows)


def cross_entropy(logits: jax.Array, label: jax.Array) -> jax.Array:
    """Return the loss of one example."""
    return -jax.nn.log_softmax(logits)[label]


def classify(apply: Callable) -> Callable:
    """Return the loss of a classifier `apply(params, x)`."""

    def loss(params: Any, example: Any) -> jax.Array:
        x, y = example
        return cross_entropy(apply(params, x), y)

    return loss


def predict_next(apply: Callable) -> Callable:
    """Return the loss of a language model `apply(params, tokens) -> [T, classes]`."""

    def loss(params: Any, tokens: Any) -> jax.Array:
        found = jax.nn.log_softmax(apply(params, tokens[:-1]))
        return -jnp.mean(jnp.take_along_axis(found, tokens[1:, None], 1))

    return loss


def reconstruct(apply: Callable) -> Callable:
    """Return the squared error of an autoencoder `apply(params, x)`."""

    def loss(params: Any, x: Any) -> jax.Array:
        return jnp.mean((apply(params, x) - x) ** 2)

    return loss
