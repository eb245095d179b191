"""Models of the documentation of Optax."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from strangers_of.drawn import Stranger, draw


def ctc() -> Stranger:
    """`optax.ctc_loss` over the outputs of a dense layer for each frame."""
    p = draw(0, (40, 128), (128,), (128, 20), scale=0.1)
    marks = jnp.asarray(np.random.default_rng(3).integers(1, 20, (16, 8)))

    def loss(p: Any, example: Any) -> jax.Array:
        frames, marks = example
        logits = jnp.tanh(frames @ p[0] + p[1]) @ p[2]
        padding = jnp.zeros((1, 32)), jnp.zeros((1, 8))
        return optax.ctc_loss(logits[None], padding[0], marks[None], padding[1])[0]

    return loss, p, (draw(1, (16, 32, 40))[0], marks)


def meta_learning() -> Stranger:
    """One step of MAML: the loss after a step of SGD on the task's examples."""
    p = draw(0, (1, 40), (40,), (40, 40), (40,), (40, 1), scale=0.3)
    inner = optax.sgd(0.01)

    def loss(p: Any, task: Any) -> jax.Array:
        def squares(p: Any, x: jax.Array, y: jax.Array) -> jax.Array:
            hidden = jax.nn.relu(jax.nn.relu(x @ p[0] + p[1]) @ p[2] + p[3])
            return jnp.mean(optax.squared_error(hidden @ p[4], y))

        updates, _ = inner.update(jax.grad(squares)(p, *task[:2]), inner.init(p))
        return squares(optax.apply_updates(p, updates), *task[2:])

    return loss, p, tuple(draw(1, *[(16, 10, 1)] * 4))


MODELS = {"optax_ctc": ctc, "optax_maml": meta_learning}
