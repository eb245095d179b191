"""Models as strangers write them: what clipping costs beside SGD and `vmap(grad)`.

    python benchmarks/strangers.py [NAME...] [--json FILE] [--keep-memory]

Those in this file follow some library's documentation in plain JAX; those in
`strangers_of/` use the libraries themselves (`pip install -e .[strangers]`), and are
left out where a library is not installed. `strangers_of/measured.py` says what the
columns are.
"""

import itertools
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


def mobile_net_stages() -> Stranger:
    """MobileNetV2 as a whole: blocks that widen and halve the image."""
    shapes, channels = [(3, 3, 3, 16)], 16
    strides = (1, 2, 1, 2, 1)
    for out in (16, 24, 24, 48, 48):
        wide = 4 * channels
        shapes += [(channels, wide), (3, 3, 1, wide), (wide, out)]
        channels = out
    stem, *p = draw(0, *shapes, (48, 10), scale=0.1)

    def loss(p: Any, example: Any) -> jax.Array:
        x, y = example
        x = jax.nn.relu6(convolve(x, p[0]))
        for n, stride in enumerate(strides):
            up, deep, down = p[1 + 3 * n : 4 + 3 * n]
            wide = convolve(jax.nn.relu6(x @ up), deep, stride, deep.shape[3])
            z = jax.nn.relu6(wide) @ down
            x = x + z if x.shape == z.shape else z
        return cross_entropy(jnp.mean(x, (0, 1)) @ p[-1], y)

    return loss, [stem, *p], (*draw(9, (16, 32, 32, 3)), labels(16))


def res_next() -> Stranger:
    """ResNeXt blocks: 3×3 convolutions in 8 groups of 8 channels."""
    p = [draw(n, (128, 64), (3, 3, 8, 64), (64, 128), scale=0.1) for n in range(3)]

    def loss(p: Any, x: jax.Array) -> jax.Array:
        for down, grouped, up in p:
            y = convolve(jax.nn.relu(x @ down), grouped, groups=8)
            x = jax.nn.relu(x + jax.nn.relu(y) @ up)
        return jnp.mean(x**2)

    return loss, p, draw(9, (8, 16, 16, 128))[0]


def u_net() -> Stranger:
    """A U-Net of many shapes, as Keras segments pets: down to 4×4 and up again."""
    sizes = (24, 48, 96, 192)
    shapes, channels = [], 3
    for out in sizes:
        shapes += [(3, 3, channels, out), (3, 3, out, out)]
        channels = out
    for out in sizes[-2::-1]:
        shapes += [(3, 3, channels + out, out), (3, 3, out, out)]
        channels = out
    p = draw(0, *shapes, scale=0.05)

    def twice(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
        return jax.nn.relu(convolve(jax.nn.relu(convolve(x, w)), v))

    def loss(p: Any, x: jax.Array) -> jax.Array:
        skips, left = [], list(p)
        for n in range(4):
            x = twice(x, left.pop(0), left.pop(0))
            if n < 3:
                skips.append(x)
                x = x.reshape(x.shape[0] // 2, 2, x.shape[1] // 2, 2, -1).max((1, 3))
        for skip in skips[::-1]:
            x = jnp.concatenate([x.repeat(2, 0).repeat(2, 1), skip], -1)
            x = twice(x, left.pop(0), left.pop(0))
        return jnp.mean(x**2)

    return loss, p, draw(9, (8, 32, 32, 3))[0]


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


def layer_scan() -> Stranger:
    """A transformer whose 12 blocks are one scan over stacked parameters."""
    width, shapes = 64, {"scale": (64,), "mix": (64, 192), "up": (64, 256)}
    shapes |= {"out": (64, 64), "bias": (256,), "down": (256, 64)}
    arrays = draw(0, *((12, *shape) for shape in shapes.values()), scale=0.05)

    def block(x: jax.Array, p: Any) -> Any:
        x = jax.nn.standardize(x, epsilon=1e-5) * (1 + p["scale"])
        query, key, value = jnp.split(x @ p["mix"], 3, axis=-1)
        seen = jax.nn.softmax(query @ key.T / np.sqrt(width)) @ value
        x = x + seen @ p["out"]
        return x + jax.nn.gelu(x @ p["up"] + p["bias"]) @ p["down"], None

    def loss(p: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(lax.scan(block, x, p)[0] ** 2)

    return loss, dict(zip(shapes, arrays, strict=True)), draw(1, (16, 32, 64))[0]


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


def wide_resnet() -> Stranger:
    """WRN-16-4 with group norm, its kernels standardised in plain JAX."""
    widths, shape = [16, 64, 128, 256], (32, 32, 32, 3)
    (stem,) = draw(0, (3, 3, 3, 16), scale=0.1)
    blocks = []
    for stage, (before, width) in enumerate(itertools.pairwise(widths)):
        for number in range(2):
            size = width if number else before
            kernels = (3, 3, size, width), (3, 3, width, width), (1, 1, size, width)
            own = draw(10 * stage + number, *kernels[: 2 + (size != width)])
            scales = [(jnp.ones(n), jnp.zeros(n)) for n in (size, width)]
            blocks.append({"kernels": own, "scales": scales})
    last, head = (jnp.ones(256), jnp.zeros(256)), draw(99, (256, 10), scale=0.05)[0]
    strides = [1, 1, 2, 1, 2, 1]

    def kernel(w: jax.Array) -> jax.Array:
        mean = jnp.mean(w, axis=(0, 1, 2), keepdims=True)
        deviation = jnp.sqrt(jnp.var(w, axis=(0, 1, 2), keepdims=True) + 1e-5)
        return (w - mean) / deviation / np.sqrt(w[..., 0].size)

    def normal(x: jax.Array, scale: Any) -> jax.Array:
        grouped = x.reshape(-1, 16, x.shape[-1] // 16)
        grouped = jax.nn.standardize(grouped, axis=(0, 2), epsilon=1e-5)
        return jax.nn.relu(grouped.reshape(x.shape) * scale[0] + scale[1])

    def loss(p: Any, example: Any) -> jax.Array:
        x, y = example
        x = convolve(x, kernel(p["stem"]))
        for own, stride in zip(p["blocks"], strides, strict=True):
            kernels = [kernel(w) for w in own["kernels"]]
            hidden = normal(x, own["scales"][0])
            x = convolve(hidden, kernels[2], stride) if len(kernels) > 2 else x
            hidden = normal(convolve(hidden, kernels[0], stride), own["scales"][1])
            x = x + convolve(hidden, kernels[1])
        return cross_entropy(jnp.mean(normal(x, p["last"]), (0, 1)) @ p["head"], y)

    params = {"stem": stem, "blocks": blocks, "last": last, "head": head}
    return loss, params, (*draw(1, shape), labels(32))


STRANGERS: dict[str, Callable[[], Stranger]] = {
    "adversarial": adversarial,
    "conv_next": conv_next,
    "embedding": embedding,
    "gru": gru,
    "label_embedding": label_embedding,
    "layer_scan": layer_scan,
    "lstm": lstm,
    "made": made,
    "masked_kernels": masked_kernels,
    "mlp": mlp,
    "mobile_net": mobile_net,
    "mobile_net_stages": mobile_net_stages,
    "res_next": res_next,
    "siamese": siamese,
    "standardised": standardised,
    "u_net": u_net,
    "weight_normalised": weight_normalised,
    "wide_resnet": wide_resnet,
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
