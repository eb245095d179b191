"""Fully connected networks on one flattened image or feature vector."""

import math
from collections.abc import Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from tanager import _validate as validate
from tanager.models import layers


class MLP(layers.Model):
    """Hidden layers with ReLU, then one linear layer; without hidden layers, linear.

    Attributes:
        hidden: linear maps, each followed by a ReLU.
        head: the last linear map.
        image_shape: the only shape the first map fits.

    Args:
        classes: number of logits.
        image_shape: of one example: (height, width, channels), or (features,).
        hidden: units of each hidden layer.
        key: JAX key of the initial weights.

    Raises:
        ValueError: a size is not a whole number of at least 1, or, when called, the
            input is not one floating-point array of `image_shape`.
    """

    hidden: tuple[layers.Linear, ...]
    head: layers.Linear
    image_shape: tuple[int, ...] = eqx.field(static=True)

    def __init__(
        self,
        classes: int,
        image_shape: tuple[int, ...],
        *,
        hidden: Sequence[int] = (1024, 1024),
        key: PRNGKeyArray,
    ):
        for size in image_shape:
            validate.whole(image_size=size, at_least=1)
        features = math.prod(image_shape)
        linears = []
        for units in (*hidden, classes):
            key, own_key = jax.random.split(key)
            linears.append(layers.Linear(features, units, key=own_key))
            features = units
        self.hidden = tuple(linears[:-1])
        self.head = linears[-1]
        self.image_shape = tuple(image_shape)

    def features(self, image: Array) -> Float[Array, " features"]:
        """Return the input of the head: the last hidden units, or the flat input."""
        self._check(image)
        values = image.reshape(-1)
        for linear in self.hidden:
            values = jax.nn.relu(linear(values))
        return values

    def _check(self, image: Array) -> None:
        if len(self.image_shape) == 3:
            layers.check_image(image, self.image_shape[2])
        if image.shape != self.image_shape:
            validate.refuse(
                "input shape",
                image.shape,
                f"must be {self.image_shape}",
                "a model takes ONE example; use jax.vmap(model) on a batch",
            )
        if not jnp.issubdtype(image.dtype, jnp.floating):
            validate.refuse(
                "input dtype", str(image.dtype), "must be floating point", "cast it"
            )
