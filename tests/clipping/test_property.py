"""Random losses: all strategies agree with the oracle."""

from collections.abc import Callable
from typing import Any

import hypothesis
import hypothesis.strategies as some
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from oracle import FAST, check

from switch import FULL
from tanager.clipping.analysis.standardise import standardise


class Builder:
    """Draws a loss, one operation after the other, and the parameters it needs.

    The value that operations pass on has shape ``[positions, channels]``. A parameter
    is new or one drawn before, moved into the shape that is asked for.
    """

    def __init__(self, draw: Callable):
        self.draw = draw
        self.sizes: list[int] = []
        self.steps: list[tuple[Callable, list[Callable]]] = []

    def parameter(self, *shape: int) -> Callable[[list], Any]:
        """Return how to make a weight of this shape of the parameters."""
        size = int(np.prod(shape))
        reusable = [n for n, held in enumerate(self.sizes) if held >= size]
        if reusable and self.draw(some.booleans()):
            number = self.draw(some.sampled_from(reusable))
        else:
            self.sizes.append(size + self.draw(some.sampled_from([0, 0, 3])))
            number = len(self.sizes) - 1
        spare = self.sizes[number] - size
        start = self.draw(some.integers(0, spare))
        view = self.draw(some.sampled_from(["plain", "turned", "scaled", "curved"]))

        def make(params):
            flat = params[number][start : start + size]
            if view == "turned":
                return flat.reshape(shape[::-1]).T
            if view == "scaled":
                return -0.5 * flat.reshape(shape)
            if view == "curved":
                return jnp.sin(flat).reshape(shape)
            return flat.reshape(shape)

        return make

    def dense(self, t: int, c: int) -> tuple[int, int]:
        wide = self.draw(some.integers(1, 4))
        self.add(lambda y, _, w: y @ w, self.parameter(c, wide))
        return t, wide

    def mix(self, t: int, c: int) -> tuple[int, int]:
        new = self.draw(some.integers(1, 5))
        self.add(lambda y, _, w: w @ y, self.parameter(new, t))
        return new, c

    def heads(self, t: int, c: int) -> tuple[int, int]:
        self.add(
            lambda y, _, w: jnp.einsum("tc,chd->tdh", y, w).reshape(t, 4),
            self.parameter(c, 2, 2),
        )
        return t, 4

    def convolve(self, t: int, c: int) -> tuple[int, int]:
        width, stride = self.draw(some.integers(1, 3)), self.draw(some.integers(1, 2))
        groups = self.draw(some.sampled_from([1, c]))
        padding = self.draw(some.sampled_from([(0, width), (width, 1), (width - 1, 0)]))
        own = self.draw(some.booleans())

        def apply(y, _, w):
            return lax.conv_general_dilated(
                y[None],
                standardise(w, eps=0.1) if own else w,
                (stride,),
                (padding,),
                dimension_numbers=("NWC", "WIO", "NWC"),
                feature_group_count=groups,
            )[0]

        self.add(apply, self.parameter(width, c // groups, 2 * groups))
        return (t + sum(padding) - width) // stride + 1, 2 * groups

    def bias(self, t: int, c: int) -> tuple[int, int]:
        self.add(lambda y, _, b: y + b[None], self.parameter(c))
        return t, c

    def place(self, t: int, c: int) -> tuple[int, int]:
        self.add(lambda y, _, b: y + b, self.parameter(t, c))
        return t, c

    def scale(self, t: int, c: int) -> tuple[int, int]:
        self.add(lambda y, _, s: y * s[None], self.parameter(c))
        return t, c

    def divide(self, t: int, c: int) -> tuple[int, int]:
        self.add(lambda y, _, s: y / (2.0 + s * s)[:, None], self.parameter(t))
        return t, c

    def embed(self, t: int, c: int) -> tuple[int, int]:
        self.add(
            lambda y, example, table: (
                y + jnp.sum(table[example["words"]], axis=0)[None]
            ),
            self.parameter(5, c),
        )
        return t, c

    def bend(self, t: int, c: int) -> tuple[int, int]:
        kind = self.draw(some.sampled_from([jnp.tanh, jnp.sin, lambda y: 0.3 * y * y]))
        self.add(lambda y, _: kind(y))
        return t, c

    def turn(self, t: int, c: int) -> tuple[int, int]:
        self.add(lambda y, _: y.T)
        return c, t

    def add(self, apply: Callable, *parameters: Callable) -> None:
        self.steps.append((apply, list(parameters)))


@some.composite
def problems(draw):
    builder = Builder(draw)
    rows = draw(some.integers(1, 4))
    t, c = draw(some.integers(1, 5)), draw(some.integers(1, 3))
    shape = (rows, t, c)
    operations = [
        *(builder.dense, builder.mix, builder.heads, builder.convolve, builder.bias),
        *(builder.place, builder.scale, builder.divide, builder.embed, builder.turn),
    ]
    t, c = builder.dense(t, c)
    for _ in range(draw(some.integers(1, 4))):
        t, c = draw(some.sampled_from(operations))(t, c)
        t, c = builder.bend(t, c)
    views = draw(some.booleans())

    def one(params, example):
        y = example["x"]
        for apply, parameters in builder.steps:
            y = apply(y, example, *(make(params) for make in parameters))
        return jnp.sum(jnp.sin(y + 0.3)) + 0.1 * jnp.sum(y * y)

    def loss(params, example):
        if not views:
            return one(params, example)
        other = {**example, "x": jnp.flip(example["x"], axis=0)}
        return 0.5 * (one(params, example) + one(params, other))

    values = np.random.default_rng(draw(some.integers(0, 99)))
    params = [0.7 * values.standard_normal(size) for size in builder.sizes]
    batch = {
        "x": values.standard_normal(shape),
        "words": values.integers(0, 5, (rows, 3)),
    }
    mask = draw(some.lists(some.booleans(), min_size=rows, max_size=rows))
    dtype = draw(some.sampled_from(["float32", "float64"]))
    return loss, params, batch, [*mask[:-1], True], dtype


@pytest.mark.slow
@hypothesis.settings(
    max_examples=24 if FULL else 12,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
@hypothesis.given(problems())
def test_all_strategies_agree_on_random_losses(problem):
    loss, params, batch, mask, dtype = problem
    check(
        loss,
        params,
        batch,
        mask=mask,
        strategies=("per_example", "bk", "bk_mixed", "bk_mixopt") if FULL else FAST,
        dtypes=(dtype,),
    )
