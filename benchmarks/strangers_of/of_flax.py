"""Models of the documentation of Flax, in nnx and in linen."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx
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


def graph(model: Any, apply: Callable, of: Callable, batch: Any) -> Stranger:
    """Return a stranger whose parameters are the `nnx.Param` of a module."""
    definition, params, rest = nnx.split(model, nnx.Param, ...)
    return of(lambda p, x: apply(nnx.merge(definition, p, rest), x)), params, batch


def linen(model: nn.Module, of: Callable, batch: Any, first: Any) -> Stranger:
    """Return a stranger whose parameters `model.init` makes for the input `first`."""
    return of(model.apply), model.init(jax.random.key(0), first), batch


class ImageNet(nnx.Module):
    """The convolutional network of the MNIST tutorial, dropout switched off."""

    def __init__(self, rngs: nnx.Rngs):
        self.conv1 = nnx.Conv(1, 32, (3, 3), rngs=rngs)
        self.conv2 = nnx.Conv(32, 64, (3, 3), rngs=rngs)
        self.dropout = nnx.Dropout(0.025, deterministic=True)
        self.linear1 = nnx.Linear(3136, 256, rngs=rngs)
        self.linear2 = nnx.Linear(256, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.avg_pool(nnx.relu(self.conv1(x[None])), (2, 2), (2, 2))
        x = nnx.avg_pool(nnx.relu(self.conv2(x)), (2, 2), (2, 2))
        return self.linear2(nnx.relu(self.dropout(self.linear1(x.ravel()))))


class Transformer(nnx.Module):
    """The block of the miniGPT tutorial."""

    def __init__(self, rngs: nnx.Rngs):
        self.words = nnx.Embed(1000, 64, rngs=rngs)
        self.places = nnx.Embed(32, 64, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, 64, decode=False, rngs=rngs)
        self.norms = nnx.List([nnx.LayerNorm(64, rngs=rngs) for _ in range(2)])
        self.up = nnx.Linear(64, 256, rngs=rngs)
        self.down = nnx.Linear(256, 64, rngs=rngs)
        self.head = nnx.Linear(64, 1000, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.words(tokens) + self.places(jnp.arange(32))
        mask = nnx.make_causal_mask(tokens)
        x = self.norms[0](x + self.attention(x, mask=mask))
        x = self.norms[1](x + self.down(nnx.relu(self.up(x))))
        return self.head(x)


class Residual(nnx.Module):
    """A residual block with group norm, as bonsai writes its networks."""

    def __init__(self, rngs: nnx.Rngs):
        self.stem = nnx.Conv(3, 32, (3, 3), rngs=rngs)
        self.convs = nnx.List([nnx.Conv(32, 32, (3, 3), rngs=rngs) for _ in range(4)])
        self.norms = nnx.List(
            [nnx.GroupNorm(32, num_groups=8, rngs=rngs) for _ in range(4)]
        )
        self.head = nnx.Linear(32, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.stem(x)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = x + conv(nnx.relu(norm(x)))
        return self.head(jnp.mean(x, (0, 1)))


class Depthwise(nnx.Module):
    """bonsai's EfficientNet block: depthwise convolution, squeeze and excite."""

    def __init__(self, rngs: nnx.Rngs):
        self.up = nnx.Conv(24, 96, (1, 1), rngs=rngs)
        self.deep = nnx.Conv(96, 96, (5, 5), feature_group_count=96, rngs=rngs)
        self.squeeze = nnx.Linear(96, 8, rngs=rngs)
        self.excite = nnx.Linear(8, 96, rngs=rngs)
        self.down = nnx.Conv(96, 24, (1, 1), rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = nnx.silu(self.deep(nnx.silu(self.up(x))))
        gate = self.excite(nnx.silu(self.squeeze(jnp.mean(y, (0, 1)))))
        return x + self.down(y * nnx.sigmoid(gate))


def nnx_lora() -> Stranger:
    """`nnx.LoRA` around frozen dense layers."""
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(
        nnx.LoRALinear(256, 256, lora_rank=8, rngs=rngs),
        nnx.tanh,
        nnx.LoRALinear(256, 10, lora_rank=8, rngs=rngs),
    )
    definition, params, rest = nnx.split(model, nnx.LoRAParam, ...)
    apply = classify(lambda p, x: nnx.merge(definition, p, rest)(x))
    return apply, params, (*draw(1, (64, 256)), labels(64))


def nnx_lstm() -> Stranger:
    """`nnx.RNN` of an LSTM cell."""
    rnn = nnx.RNN(nnx.LSTMCell(16, 64, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(0))
    carry = (jnp.zeros(64),) * 2

    def squares(apply: Callable) -> Callable:
        return lambda p, x: jnp.mean(apply(p, x) ** 2)

    return graph(
        rnn, lambda m, x: m(x, initial_carry=carry), squares, draw(1, (16, 32, 16))[0]
    )


def call(model: Any, x: Any) -> Any:
    """Call a module."""
    return model(x)


class LinenCNN(nn.Module):
    """The convolutional network of linen's MNIST example."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.avg_pool(nn.relu(nn.Conv(32, (3, 3))(x)), (2, 2), (2, 2))
        x = nn.avg_pool(nn.relu(nn.Conv(64, (3, 3))(x)), (2, 2), (2, 2))
        return nn.Dense(10)(nn.relu(nn.Dense(256)(x.ravel())))


class LinenVAE(nn.Module):
    """linen's VAE, at its mean: encoder, decoder."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        hidden = nn.relu(nn.Dense(500)(x))
        mean, deviation = nn.Dense(20)(hidden), nn.Dense(20)(hidden)
        latent = mean + 0.1 * jnp.exp(0.5 * deviation)
        return nn.sigmoid(nn.Dense(784)(nn.relu(nn.Dense(500)(latent))))


class LinenTagger(nn.Module):
    """linen's classifier of text: embedding, LSTM, dense layer."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(2000, 64)(tokens)
        x = nn.RNN(nn.OptimizedLSTMCell(64))(x)
        return nn.Dense(10)(x[-1])


class LinenSeq2Seq(nn.Module):
    """linen's seq2seq: the carry of one LSTM begins the other."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = jax.nn.one_hot(tokens, 15)
        carry, _ = nn.RNN(nn.LSTMCell(64), return_carry=True, name="encoder")(x)
        x = nn.RNN(nn.LSTMCell(64), name="decoder")(x, initial_carry=carry)
        return nn.Dense(15)(x)


class LinenEncoder(nn.Module):
    """A block of linen's transformer examples."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(1000, 64)(tokens)
        y = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(4)(y, y)  # pyrefly: ignore[unsupported-operation]
        y = nn.LayerNorm()(x)
        x = x + nn.Dense(64)(nn.gelu(nn.Dense(256)(y)))
        return nn.Dense(1000)(x)


class LinenActor(nn.Module):
    """The network of linen's PPO example: strided convolutions, two heads."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.relu(nn.Conv(32, (8, 8), (4, 4))(x))
        x = nn.relu(nn.Conv(64, (4, 4), (2, 2))(x))
        x = nn.relu(nn.Dense(256)(x.ravel()))
        return nn.Dense(10)(x) + nn.Dense(1)(x)


class LinenWeightNorm(nn.Module):
    """`nn.WeightNorm` around dense layers."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(3):
            x = nn.tanh(nn.WeightNorm(nn.Dense(256))(x))
        return x


def nnx_of(cls: Any, of: Callable, batch: Any) -> Callable[[], Stranger]:
    """Return what makes a stranger of an nnx class."""
    return lambda: graph(cls(nnx.Rngs(0)), call, of, batch)


TOKENS = words(8, 33, 1000)

MODELS = {
    "nnx_depthwise": nnx_of(Depthwise, reconstruct, draw(1, (8, 16, 16, 24))[0]),
    "nnx_lora": nnx_lora,
    "nnx_lstm": nnx_lstm,
    "nnx_mnist": nnx_of(ImageNet, classify, images(32, 28, 1)),
    "nnx_residual": nnx_of(Residual, classify, images(16, 16, 3)),
    "nnx_transformer": nnx_of(Transformer, predict_next, TOKENS),
    "linen_actor": lambda: linen(
        LinenActor(), classify, images(16, 84, 4), jnp.zeros((84, 84, 4))
    ),
    "linen_encoder": lambda: linen(LinenEncoder(), predict_next, TOKENS, TOKENS[0]),
    "linen_mnist": lambda: linen(
        LinenCNN(), classify, images(32, 28, 1), jnp.zeros((28, 28, 1))
    ),
    "linen_seq2seq": lambda: linen(
        LinenSeq2Seq(), predict_next, words(16, 17, 15), TOKENS[0, :16]
    ),
    "linen_text": lambda: linen(
        LinenTagger(), classify, (words(16, 32, 2000), labels(16)), TOKENS[0]
    ),
    "linen_vae": lambda: linen(
        LinenVAE(), reconstruct, draw(1, (64, 784))[0], jnp.zeros(784)
    ),
    "linen_weight_norm": lambda: linen(
        LinenWeightNorm(), reconstruct, draw(1, (64, 256))[0], jnp.zeros(256)
    ),
}
