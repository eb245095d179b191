"""Models as strangers write them: what clipping costs beside SGD and `vmap(grad)`.

    python benchmarks/strangers.py [NAME...] [--json FILE] [--keep-memory]

Those in this file follow some library's documentation in plain JAX; those in
`strangers_of/` use the libraries themselves (`pip install -e .[strangers]`), and are
left out where a library is not installed. `strangers_of/measured.py` says what the
columns are.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from strangers_of.drawn import Stranger, cross_entropy, draw, labels
from strangers_of.measured import main


def convolve(x: jax.Array, w: jax.Array, stride: int = 1, groups: int = 1) -> jax.Array:
    """Convolve one image [H, W, C]."""
    layout = ("NHWC", "HWIO", "NHWC")
    options = {"dimension_numbers": layout, "feature_group_count": groups}
    return lax.conv_general_dilated(x[None], w, (stride,) * 2, "SAME", **options)[0]


def adversarial() -> Stranger:
    """Optax's adversarial training: FGSM, behind `stop_gradient`."""
    p = draw(0, (784, 512), (512, 512), (512, 10), scale=0.04)

    def net(p: Any, x: jax.Array) -> jax.Array:
        return jax.nn.relu(jax.nn.relu(x @ p[0]) @ p[1]) @ p[2]

    def loss(p: Any, example: Any) -> jax.Array:
        x, y = example
        slope = jax.grad(lambda x: cross_entropy(net(p, x), y))(x)
        return cross_entropy(net(p, lax.stop_gradient(x + 0.1 * jnp.sign(slope))), y)

    return loss, p, (*draw(1, (64, 784)), labels(64))


def embedding() -> Stranger:
    """Equinox: `jax.vmap(eqx.nn.Embedding)`."""
    p = draw(0, (30522, 128), (128, 10), scale=0.1)
    ids = jnp.asarray(np.random.default_rng(2).integers(0, 30522, (8, 64)))

    def loss(p: Any, example: Any) -> jax.Array:
        ids, y = example
        words = jax.vmap(lambda i: p[0][i])(ids)
        return cross_entropy(jnp.mean(jnp.tanh(words), 0) @ p[1], y)

    return loss, p, (ids, labels(8))


def masked_kernels() -> Stranger:
    """PixelCNN: kernels times a constant mask."""
    p = draw(0, *[(3, 3, 32, 32)] * 4, scale=0.05)
    mask = np.ones((3, 3, 1, 1), np.float32)
    mask[2] = mask[1, 2:] = 0

    def loss(p: Any, x: jax.Array) -> jax.Array:
        for w in p:
            x = jax.nn.relu(convolve(x, w * mask))
        return jnp.mean(x**2)

    return loss, p, draw(1, (16, 16, 16, 32))[0]


def made() -> Stranger:
    """MADE: products with triangular masks."""
    p, mask = draw(0, *[(256, 256)] * 3, scale=0.06), np.tri(256, dtype=np.float32)

    def loss(p: Any, x: jax.Array) -> jax.Array:
        for w in p:
            x = jnp.tanh(x @ (w * mask))
        return jnp.mean(x**2)

    return loss, p, draw(1, (64, 256))[0]


def conv_next() -> Stranger:
    """ConvNeXt blocks: depthwise 7×7, layer norm, two dense layers."""
    one = [(7, 7, 1, 48), (48, 192), (192, 48)]
    p = [draw(n, *one, scale=0.1) for n in range(3)]

    def loss(p: Any, x: jax.Array) -> jax.Array:
        for deep, up, down in p:
            y = convolve(x, deep, groups=48)
            x = x + jax.nn.gelu(jax.nn.standardize(y) @ up) @ down
        return jnp.mean(x**2)

    return loss, p, draw(9, (8, 16, 16, 48))[0]


def mobile_net() -> Stranger:
    """MobileNetV2's inverted residuals."""
    p = [draw(n, (32, 96), (3, 3, 1, 96), (96, 32), scale=0.1) for n in range(3)]

    def loss(p: Any, x: jax.Array) -> jax.Array:
        for up, deep, down in p:
            y = convolve(jax.nn.relu6(x @ up), deep, groups=96)
            x = x + jax.nn.relu6(y) @ down
        return jnp.mean(x**2)

    return loss, p, draw(9, (8, 16, 16, 32))[0]


def siamese() -> Stranger:
    """Keras's siamese network: one encoder, called twice."""
    (c1,) = draw(0, (3, 3, 1, 16), scale=0.3)
    c2, dense = draw(1, (3, 3, 16, 32), (1568, 64), scale=0.05)

    def encode(p: Any, x: jax.Array) -> jax.Array:
        x = jax.nn.relu(convolve(x, p[0], 2))
        return jax.nn.relu(convolve(x, p[1], 2)).ravel() @ p[2]

    def loss(p: Any, pair: jax.Array) -> jax.Array:
        return jnp.sum((encode(p, pair[0]) - encode(p, pair[1])) ** 2)

    return loss, [c1, c2, dense], draw(2, (16, 2, 28, 28, 1))[0]


def lstm(steps: int = 32) -> Stranger:
    """Equinox's RNN example: an LSTM by `lax.scan`."""
    p = draw(0, (64, 256), (64, 256), (256,), scale=0.1)

    def loss(p: Any, x: jax.Array) -> jax.Array:
        def step(carry: Any, now: jax.Array) -> Any:
            hidden, cell = carry
            i, f, g, o = jnp.split(now @ p[0] + hidden @ p[1] + p[2], 4)
            cell = jax.nn.sigmoid(f) * cell + jax.nn.sigmoid(i) * jnp.tanh(g)
            hidden = jax.nn.sigmoid(o) * jnp.tanh(cell)
            return (hidden, cell), hidden

        return jnp.mean(lax.scan(step, (jnp.zeros(64),) * 2, x)[1] ** 2)

    return loss, p, draw(1, (8, steps, 64))[0]


def gru() -> Stranger:
    """A GRU over 100 steps."""
    p = draw(0, (128, 384), (128, 384), (384,), scale=0.08)

    def loss(p: Any, x: jax.Array) -> jax.Array:
        def step(hidden: jax.Array, now: jax.Array) -> Any:
            r, z, n = jnp.split(now @ p[0] + p[2], 3)
            s, y, m = jnp.split(hidden @ p[1], 3)
            new = jnp.tanh(n + jax.nn.sigmoid(r + s) * m)
            gate = jax.nn.sigmoid(z + y)
            return (1 - gate) * new + gate * hidden, None

        return jnp.mean(lax.scan(step, jnp.zeros(128), x)[0] ** 2)

    return loss, p, draw(1, (8, 100, 128))[0]


def standardised() -> Stranger:
    """Weight standardisation as a user writes it, in a small residual network."""
    stem, *p = draw(0, (3, 3, 3, 32), *[(3, 3, 32, 32)] * 4, scale=0.1)

    def kernel(w: jax.Array) -> jax.Array:
        mean = jnp.mean(w, axis=(0, 1, 2), keepdims=True)
        variance = jnp.var(w, axis=(0, 1, 2), keepdims=True)
        return (w - mean) / jnp.sqrt(variance * w[..., 0].size + 1e-5)

    def loss(p: Any, x: jax.Array) -> jax.Array:
        x = convolve(x, kernel(p[0]))
        for w in p[1:]:
            x = x + jax.nn.relu(convolve(x, kernel(w)))
        return jnp.mean(x**2)

    return loss, [stem, *p], draw(1, (16, 16, 16, 3))[0]


def weight_normalised() -> Stranger:
    """Weight norm: g·v/‖v‖ in dense layers."""
    p = [draw(n, (256, 256), (256,)) for n in range(3)]

    def loss(p: Any, x: jax.Array) -> jax.Array:
        for v, g in p:
            x = jnp.tanh(x @ (g * v / jnp.linalg.norm(v, axis=0)))
        return jnp.mean(x**2)

    return loss, p, draw(9, (64, 256))[0]


def mlp() -> Stranger:
    """The multilayer perceptron of every first tutorial."""
    p = draw(0, (784, 512), (512,), (512, 512), (512,), (512, 10), scale=0.04)

    def loss(p: Any, example: Any) -> jax.Array:
        x, y = example
        x = jax.nn.relu(x @ p[0] + p[1])
        return cross_entropy(jax.nn.relu(x @ p[2] + p[3]) @ p[4], y)

    return loss, p, (*draw(1, (64, 784)), labels(64))


def label_embedding() -> Stranger:
    """Conditional diffusion: one row of a table by the label, then dense layers."""
    p = draw(0, (1000, 256), (784, 256), (256, 784), scale=0.05)

    def loss(p: Any, example: Any) -> jax.Array:
        x, y = example
        return jnp.mean((jax.nn.relu(x @ p[1] + p[0][y]) @ p[2] - x) ** 2)

    return loss, p, (*draw(1, (32, 784)), labels(32, 1000))


STRANGERS: dict[str, Callable[[], Stranger]] = {
    "adversarial": adversarial,
    "conv_next": conv_next,
    "embedding": embedding,
    "gru": gru,
    "label_embedding": label_embedding,
    "lstm": lstm,
    "made": made,
    "masked_kernels": masked_kernels,
    "mlp": mlp,
    "mobile_net": mobile_net,
    "siamese": siamese,
    "standardised": standardised,
    "weight_normalised": weight_normalised,
}


LIBRARIES = {  # the first word of a model's name, and where its models are
    "diffrax": "of_equinox",
    "eqx": "of_equinox",
    "hk": "of_haiku",
    "keras": "of_keras",
    "linen": "of_flax",
    "nnx": "of_flax",
    "optax": "of_optax",
    "penzai": "of_penzai",
}


if __name__ == "__main__":
    main(__file__, __doc__, STRANGERS, LIBRARIES)
