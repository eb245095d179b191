"""Models of the documentation of Equinox and diffrax."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
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


KEYS = jax.random.split(jax.random.key(0), 16)


def split(model: Any, apply: Callable, of: Callable, batch: object) -> Stranger:
    """Return a stranger whose parameters are the arrays of a module."""
    params, rest = eqx.partition(model, eqx.is_inexact_array)
    return of(lambda p, x: apply(eqx.combine(p, rest), x)), params, batch


def mlp() -> Stranger:
    """`eqx.nn.MLP`."""
    model = eqx.nn.MLP(784, 10, 512, 2, key=KEYS[0])
    return split(model, lambda m, x: m(x), classify, (*draw(1, (64, 784)), labels(64)))


def mnist() -> Stranger:
    """The convolutional network of the MNIST example."""
    model = eqx.nn.Sequential(
        [
            eqx.nn.Conv2d(1, 3, 4, key=KEYS[0]),
            eqx.nn.MaxPool2d(2),
            eqx.nn.Lambda(jax.nn.relu),
            eqx.nn.Lambda(jnp.ravel),
            eqx.nn.Linear(1728, 512, key=KEYS[1]),
            eqx.nn.Lambda(jax.nn.sigmoid),
            eqx.nn.Linear(512, 64, key=KEYS[2]),
            eqx.nn.Lambda(jax.nn.relu),
            eqx.nn.Linear(64, 10, key=KEYS[3]),
        ]
    )
    return split(model, lambda m, x: m(x), classify, images(64, 28, 1, first=True))


def gru() -> Stranger:
    """The recurrent example: a GRU cell by `lax.scan`, 16 steps of 2 numbers."""
    model = eqx.nn.GRUCell(2, 16, key=KEYS[0]), eqx.nn.Linear(16, 10, key=KEYS[1])

    def apply(m: tuple, x: jax.Array) -> jax.Array:
        return m[1](lax.scan(lambda h, now: (m[0](now, h), None), jnp.zeros(16), x)[0])

    return split(model, apply, classify, (*draw(1, (32, 16, 2)), labels(32)))


def bert() -> Stranger:
    """The BERT example: two embeddings, two blocks of attention."""
    blocks = [
        {
            "attention": eqx.nn.MultiheadAttention(4, 64, key=KEYS[n]),
            "norms": [eqx.nn.LayerNorm(64), eqx.nn.LayerNorm(64)],
            "mlp": eqx.nn.MLP(64, 64, 256, 1, jax.nn.gelu, key=KEYS[n + 1]),
        }
        for n in (0, 2)
    ]
    model = {
        "words": eqx.nn.Embedding(5000, 64, key=KEYS[4]),
        "places": eqx.nn.Embedding(32, 64, key=KEYS[5]),
        "blocks": blocks,
        "head": eqx.nn.Linear(64, 10, key=KEYS[6]),
    }

    def apply(m: dict, tokens: jax.Array) -> jax.Array:
        x = jax.vmap(m["words"])(tokens) + jax.vmap(m["places"])(jnp.arange(32))
        for block in m["blocks"]:
            x = jax.vmap(block["norms"][0])(x + block["attention"](x, x, x))
            x = jax.vmap(block["norms"][1])(x + jax.vmap(block["mlp"])(x))
        return m["head"](x[0])

    return split(model, apply, classify, (words(16, 32, 5000), labels(16)))


def vit() -> Stranger:
    """The vision transformer example: patches by a product, one block."""
    model = {
        "patch": eqx.nn.Linear(48, 64, key=KEYS[0]),
        "places": draw(0, (65, 64), scale=0.02)[0],
        "class": draw(1, (1, 64), scale=0.02)[0],
        "norm": eqx.nn.LayerNorm(64),
        "attention": eqx.nn.MultiheadAttention(4, 64, key=KEYS[1]),
        "mlp": eqx.nn.MLP(64, 64, 128, 1, jax.nn.gelu, key=KEYS[2]),
        "head": eqx.nn.Linear(64, 10, key=KEYS[3]),
    }

    def apply(m: dict, x: jax.Array) -> jax.Array:
        x = x.reshape(3, 8, 4, 8, 4).transpose(1, 3, 2, 4, 0).reshape(64, 48)
        x = jnp.concatenate([m["class"], jax.vmap(m["patch"])(x)]) + m["places"]
        y = jax.vmap(m["norm"])(x)
        x = x + m["attention"](y, y, y)
        return m["head"]((x + jax.vmap(m["mlp"])(x))[0])

    return split(model, apply, classify, images(16, 32, 3, first=True))


def mixer() -> Stranger:
    """The mixer of the score-based diffusion example; the time is one channel."""
    model = {
        "in": eqx.nn.Conv2d(2, 32, 4, 4, key=KEYS[0]),
        "patches": eqx.nn.MLP(49, 49, 128, 1, key=KEYS[1]),
        "hidden": eqx.nn.MLP(32, 32, 128, 1, key=KEYS[2]),
        "norms": [eqx.nn.LayerNorm((32, 49)), eqx.nn.LayerNorm((49, 32))],
        "out": eqx.nn.ConvTranspose2d(32, 1, 4, 4, key=KEYS[3]),
    }

    def apply(m: dict, x: jax.Array) -> jax.Array:
        time = jnp.full_like(x, 0.3)
        y = m["in"](jnp.concatenate([x, time])).reshape(32, 49)
        y = y + jax.vmap(m["patches"])(m["norms"][0](y))
        y = y.T + jax.vmap(m["hidden"])(m["norms"][1](y.T))
        return m["out"](y.T.reshape(32, 7, 7))

    return split(model, apply, reconstruct, images(16, 28, 1, first=True)[0])


def unet() -> Stranger:
    """A small U-Net: down, up by `ConvTranspose2d`, skip, group norm."""
    model = {
        "in": eqx.nn.Conv2d(3, 16, 3, padding=1, key=KEYS[0]),
        "down": eqx.nn.Conv2d(16, 32, 3, 2, 1, key=KEYS[1]),
        "norm": eqx.nn.GroupNorm(4, 32),
        "middle": eqx.nn.Conv2d(32, 32, 3, padding=1, key=KEYS[2]),
        "up": eqx.nn.ConvTranspose2d(32, 16, 4, 2, padding=1, key=KEYS[3]),
        "out": eqx.nn.Conv2d(32, 3, 3, padding=1, key=KEYS[4]),
    }

    def apply(m: dict, x: jax.Array) -> jax.Array:
        top = jax.nn.silu(m["in"](x))
        y = jax.nn.silu(m["norm"](m["down"](top)))
        y = m["up"](jax.nn.silu(m["middle"](y)))
        return m["out"](jnp.concatenate([top, y]))

    return split(model, apply, reconstruct, images(16, 32, 3, first=True)[0])


def weight_norm() -> Stranger:
    """`eqx.nn.WeightNorm` around linear layers."""
    layers = [eqx.nn.WeightNorm(eqx.nn.Linear(256, 256, key=k)) for k in KEYS[:3]]

    def apply(m: list, x: jax.Array) -> jax.Array:
        for layer in m:
            x = jnp.tanh(layer(x))
        return x

    return split(layers, apply, reconstruct, draw(1, (64, 256))[0])


def stacked() -> Stranger:
    """Layers made by `filter_vmap` and run by `lax.scan`, as "tricks" shows."""
    model = eqx.filter_vmap(lambda key: eqx.nn.Linear(128, 128, key=key))(KEYS[:4])

    def apply(m: Any, x: jax.Array) -> jax.Array:
        slices, rest = eqx.partition(m, eqx.is_array)

        def step(x: jax.Array, one: Any) -> tuple:
            return jnp.tanh(eqx.combine(one, rest)(x)), None

        return lax.scan(step, x, slices)[0]

    return split(model, apply, reconstruct, draw(1, (64, 128))[0])


def language_lstm() -> Stranger:
    """An LSTM cell over tokens, its logits by the shared embedding."""
    model = eqx.nn.Embedding(500, 64, key=KEYS[0]), eqx.nn.LSTMCell(64, 64, key=KEYS[1])

    def apply(m: tuple, tokens: jax.Array) -> jax.Array:
        start = (jnp.zeros(64), jnp.zeros(64))

        def step(carry: tuple, x: jax.Array) -> tuple:
            carry = m[1](x, carry)
            return carry, carry[0]

        found = lax.scan(step, start, jax.vmap(m[0])(tokens))[1]
        return found @ m[0].weight.T

    return split(model, apply, predict_next, words(8, 33, 500))


def neural_ode() -> Stranger:
    """Diffrax's neural ODE: Tsit5 through an MLP."""
    import diffrax

    model = eqx.nn.MLP(2, 2, 64, 2, jax.nn.softplus, key=KEYS[0])

    def apply(m: Any, x: jax.Array) -> jax.Array:
        return diffrax.diffeqsolve(
            diffrax.ODETerm(lambda t, y, args: m(y)),
            diffrax.Tsit5(),
            t0=0.0,
            t1=1.0,
            dt0=0.1,
            y0=x[0],
            saveat=diffrax.SaveAt(ts=jnp.linspace(0, 1, 10)),
            stepsize_controller=diffrax.PIDController(rtol=1e-3, atol=1e-6),
        ).ys

    return split(model, apply, reconstruct, draw(1, (16, 10, 2))[0])


def neural_cde() -> Stranger:
    """Diffrax's neural CDE by Euler steps along a linear path."""
    import diffrax

    model = eqx.nn.MLP(8, 8 * 3, 64, 1, key=KEYS[0]), eqx.nn.Linear(8, 10, key=KEYS[1])

    def apply(m: tuple, x: jax.Array) -> jax.Array:
        path = diffrax.LinearInterpolation(jnp.linspace(0, 1, 16), x)
        term = diffrax.ControlTerm(lambda t, y, args: m[0](y).reshape(8, 3), path)
        solved = diffrax.diffeqsolve(
            term, diffrax.Euler(), t0=0.0, t1=1.0, dt0=1 / 16, y0=jnp.ones(8)
        )
        return m[1](solved.ys[-1])

    return split(model, apply, classify, (*draw(1, (16, 16, 3)), labels(16)))


MODELS = {
    "eqx_bert": bert,
    "eqx_gru": gru,
    "eqx_language_lstm": language_lstm,
    "eqx_mixer": mixer,
    "eqx_mlp": mlp,
    "eqx_mnist": mnist,
    "eqx_stacked": stacked,
    "eqx_unet": unet,
    "eqx_vit": vit,
    "eqx_weight_norm": weight_norm,
    "diffrax_cde": neural_cde,
    "diffrax_ode": neural_ode,
}
