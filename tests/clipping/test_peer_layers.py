"""The layers that Opacus tests, in random configurations: all strategies agree.

Each is written in plain JAX, with the options of its namesake in PyTorch.
"""

import hypothesis
import hypothesis.strategies as some
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from oracle import ALL, check

from cases import in_full
from switch import FULL


ROWS = 3
EPS = 1e-2


def convolution(draw, axes):
    """One to three axes; strides, dilations, groups and paddings differ by axis."""
    of = [some.integers(1, 2)] * axes
    width, stride, dilation = (draw(some.tuples(*of)) for _ in range(3))
    groups, each = draw(some.sampled_from([(1, 2), (2, 1), (2, 2), (3, 1)]))
    padding = draw(
        some.one_of(
            some.sampled_from(["SAME", "VALID"]),
            some.tuples(
                *[some.tuples(some.integers(0, 2), some.integers(0, 2))] * axes
            ),
        )
    )
    space = "DHW"[-axes:]
    names = (f"NC{space}", f"OI{space}", f"NC{space}")
    out = groups * draw(some.integers(1, 2))

    def layer(params, x):
        y = lax.conv_general_dilated(
            x[None],
            params["w"],
            stride,
            padding,
            rhs_dilation=dilation,
            dimension_numbers=names,
            feature_group_count=groups,
        )[0]
        return y + params["b"].reshape(-1, *[1] * axes)

    side = draw(some.integers(3, 4 if axes == 3 else 5))
    shapes = {"w": (out, each, *width), "b": (out,)}
    return layer, shapes, (groups * each, *[side] * axes)


def linear(draw, axes):
    """A matrix product over the last of up to three axes, with or without a bias."""
    wide, bias = draw(some.integers(1, 4)), draw(some.booleans())
    shape = draw(some.tuples(*[some.integers(1, 4)] * axes))

    def layer(params, x):
        y = x @ params["w"].T
        return y + params["b"].reshape(*[1] * (axes - 1), -1) if bias else y

    shapes = {"w": (wide, shape[-1])} | ({"b": (wide,)} if bias else {})
    return layer, shapes, shape


def norm(draw, axes):
    """Layer, RMS, group or instance norm by the axes that statistics are taken over."""
    groups = draw(some.integers(1, 3))
    channels = groups * draw(some.integers(2, 3))
    space = draw(some.tuples(*[some.integers(2, 3)] * axes))
    centred = draw(some.booleans())

    def layer(params, x):
        y = x.reshape(groups, -1)
        if centred:
            y -= jnp.mean(y, axis=1, keepdims=True)
        y *= lax.rsqrt(jnp.mean(y**2, axis=1, keepdims=True) + EPS)
        own = (-1, *[1] * axes)
        y = y.reshape(x.shape) * params["w"].reshape(own)
        return y + params["b"].reshape(own)

    return layer, {"w": (channels,), "b": (channels,)}, (channels, *space)


def embedding(draw, axes):
    """Rows of a table, of words on one or two axes; a bag has their sum or mean."""
    words, wide = draw(some.integers(2, 5)), draw(some.integers(1, 4))
    shape = draw(some.tuples(*[some.integers(1, 4)] * axes))
    bag = draw(some.sampled_from([None, jnp.sum, jnp.mean]))

    def layer(params, ids):
        rows = params["w"][ids]
        return rows if bag is None else bag(rows, axis=-2)

    return layer, {"w": (words, wide)}, (words, shape)


FEW = [(convolution, 2), (linear, 3), (norm, 2), (embedding, 2)]
MORE = [(convolution, 1), (convolution, 3), (linear, 1), (linear, 2), (norm, 0)]
MORE += [(embedding, 1)]
LAYERS = in_full(FEW + MORE, *MORE)
IDS = [f"{kind.__name__}-{axes}" for kind, axes in FEW + MORE]


@pytest.mark.slow
@pytest.mark.parametrize("layer_of", LAYERS, ids=IDS)
@hypothesis.settings(
    max_examples=4 if FULL else 2,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
@hypothesis.given(data=some.data())
def test_all_strategies_agree_on_a_layer(layer_of, data):
    kind, axes = layer_of
    layer, shapes, inputs = kind(data.draw, axes)
    values = np.random.default_rng(data.draw(some.integers(0, 99)))
    params = {name: values.standard_normal(of) for name, of in shapes.items()}
    if kind is embedding:
        words, shape = inputs
        x = values.integers(0, words, (ROWS, *shape))
    else:
        x = values.standard_normal((ROWS, *inputs))

    def loss(params, x):
        y = layer(params, x)
        return jnp.sum(jnp.sin(y + 0.3)) + 0.1 * jnp.sum(y * y)

    check(loss, params, x, strategies=ALL if FULL else ("bk", "auto"))
