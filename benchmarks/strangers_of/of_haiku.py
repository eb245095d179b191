"""Models of the documentation of Haiku."""

from collections.abc import Callable
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
from strangers_of.drawn import (
    Stranger,
    classify,
    draw,
    images,
    labels,
    predict_next,
    reconstruct,
    words,
)


def made(network: Callable, of: Callable, batch: Any) -> Stranger:
    """Return a stranger of a function that calls Haiku's modules."""
    transformed = hk.without_apply_rng(hk.transform(network))
    first = jax.tree.map(lambda leaf: leaf[0], batch)
    first = first[0] if isinstance(first, tuple) else first
    first = first[:-1] if of is predict_next else first
    return of(transformed.apply), transformed.init(jax.random.key(0), first), batch


def mlp(x: jax.Array) -> jax.Array:
    """The network of the MNIST example."""
    return hk.nets.MLP([300, 100, 10])(x)


def vae(x: jax.Array) -> jax.Array:
    """The network of the VAE example, at its mean."""
    hidden = jax.nn.relu(hk.Linear(512)(x))
    latent = hk.Linear(10)(hidden) + 0.1 * jnp.exp(hk.Linear(10)(hidden))
    return jax.nn.sigmoid(hk.Linear(784)(jax.nn.relu(hk.Linear(512)(latent))))


def recurrent(tokens: jax.Array) -> Any:
    """The character model: two LSTM layers with skips, unrolled by `dynamic_unroll`."""
    core = hk.DeepRNN([hk.LSTM(64), jax.nn.relu, hk.LSTM(64), hk.nets.MLP([128])])
    inputs = jax.nn.one_hot(tokens, 128)
    return hk.dynamic_unroll(core, inputs, core.initial_state(None))[0]


def gru(x: jax.Array) -> jax.Array:
    """A GRU over 32 steps."""
    core = hk.GRU(64)
    return hk.Linear(10)(hk.dynamic_unroll(core, x, core.initial_state(None))[1])


def transformer(tokens: jax.Array) -> jax.Array:
    """A block of the transformer example."""
    x = hk.Embed(1000, 64)(tokens)
    y = hk.LayerNorm(-1, True, True)(x)
    scale = hk.initializers.VarianceScaling(1.0)
    x = x + hk.MultiHeadAttention(4, 16, w_init=scale)(y, y, y)
    y = hk.LayerNorm(-1, True, True)(x)
    return hk.Linear(1000)(x + hk.nets.MLP([256, 64], activation=jax.nn.gelu)(y))


def convolutional(x: jax.Array) -> jax.Array:
    """Convolutions, pooled, with dense layers (LeNet)."""
    x = jax.nn.relu(hk.Conv2D(32, 5)(x[None]))
    x = hk.max_pool(x, 2, 2, "VALID")
    x = jax.nn.relu(hk.Conv2D(64, 5)(x))
    return hk.nets.MLP([256, 10])(hk.max_pool(x, 2, 2, "VALID").ravel())


def separable(x: jax.Array) -> jax.Array:
    """Depthwise and separable convolutions."""
    x = jax.nn.relu(hk.Conv2D(32, 3)(x[None]))
    x = jax.nn.relu(hk.SeparableDepthwiseConv2D(1, 3)(x))
    x = jax.nn.relu(hk.DepthwiseConv2D(1, 3)(x))
    return hk.Linear(10)(jnp.mean(x, (0, 1, 2)))


MODELS = {
    "hk_conv": lambda: made(convolutional, classify, images(32, 28, 1)),
    "hk_gru": lambda: made(gru, classify, (*draw(1, (16, 32, 16)), labels(16))),
    "hk_lstm": lambda: made(recurrent, predict_next, words(16, 33, 128)),
    "hk_mlp": lambda: made(mlp, classify, (*draw(1, (64, 784)), labels(64))),
    "hk_separable": lambda: made(separable, classify, images(16, 16, 3)),
    "hk_transformer": lambda: made(transformer, predict_next, words(8, 33, 1000)),
    "hk_vae": lambda: made(vae, reconstruct, draw(1, (64, 784))[0]),
}
