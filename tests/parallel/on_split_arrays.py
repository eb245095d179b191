"""Clips arrays that XLA splits over N devices, and prints errors as JSON.

Run by `test_split_arrays`, see `scripts.on_devices`. With the word `unguarded`, as if
`clipped_grad` did not know of several devices.
"""

import functools
import json
import sys
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
import quick  # noqa: F401
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from switch import FULL
from tanager import clipped_grad
from tanager.clipping import per_example
from tanager.clipping.analysis import batches
from tanager.clipping.analysis.standardise import standardise
from tanager.clipping.planning.choices import STRATEGIES
from tanager.clipping.rules import base
from tanager.clipping.rules.convolutions import Convolution
from trees import distance


DEVICES = jax.device_count()
GUARDED = "unguarded" not in sys.argv
if not GUARDED:
    batches.may_be_split = lambda leaves: False
    per_example.safe_to_split = base.safe_to_split = lambda function: function

# All but ghost and mixed_ghost, which take the methods of bk and bk_mixed.
WAYS = sorted(STRATEGIES.keys() - {"ghost", "mixed_ghost"})


def ways(path):
    """Every other strategy, in turns; where rows are constrained, all."""
    if not (GUARDED or FULL):
        return ["per_example"]
    if FULL or path == "rows_constrained":
        return WAYS
    turn = [each.__name__ for each in PATHS[DEVICES]].index(path) + DEVICES
    return WAYS[turn % 2 :: 2]


ROWS, WIDTH, CLASSES, C = 2 * DEVICES, 2 * DEVICES, 5, 0.4
MESH = Mesh(np.array(jax.devices()), ("d",))
ORDER = ("NHWC", "HWIO", "NHWC")


def convolve(image, kernel, stride=1, groups=1):
    return lax.conv_general_dilated(
        image[None],
        kernel,
        (stride, stride),
        "SAME",
        dimension_numbers=ORDER,
        feature_group_count=groups,
    )[0]


def normalised(h, scale):
    """Group normalisation with two groups."""
    parts = h.reshape(*h.shape[:2], 2, -1)
    mean = jnp.mean(parts, (0, 1, 3), keepdims=True)
    spread = jnp.mean(jnp.square(parts - mean), (0, 1, 3), keepdims=True)
    parts = (parts - mean) * lax.rsqrt(spread + 1e-3)
    return parts.reshape(h.shape) * scale[None, None]


@jax.custom_vjp
def opaque(image, kernel):
    """A convolution that tanager cannot look into."""
    return jnp.tanh(convolve(image, kernel))


def _forward(image, kernel):
    value, pull = jax.vjp(lambda x, w: jnp.tanh(convolve(x, w)), image, kernel)
    return value, pull


opaque.defvjp(_forward, lambda pull, gradient: pull(gradient))


def loss(params, example):
    """Convolutions of all kinds, normalisations, a product, an embedding."""
    h = jnp.tanh(convolve(example["image"], params["stem"]))
    h = normalised(h, params["scale"])
    h = jnp.tanh(convolve(h, params["groups"], groups=2))
    h = convolve(h, standardise(params["kernel"], params["gain"]), 2)
    h = jnp.mean(h + opaque(h, params["opaque"]), (0, 1))
    h = h + jnp.mean(params["table"][example["words"]], 0)
    return -jax.nn.log_softmax(h @ params["head"])[example["label"]]


def drawn():
    draw = np.random.default_rng(DEVICES)

    def normal(*shape, scale=1.0):
        return (scale * draw.normal(size=shape)).astype(np.float32)

    params = {
        "stem": normal(3, 3, 1, WIDTH),
        "scale": normal(WIDTH),
        "groups": normal(3, 3, WIDTH // 2, WIDTH),
        "kernel": normal(3, 3, WIDTH, WIDTH),
        "gain": normal(WIDTH),
        "opaque": normal(3, 3, WIDTH, WIDTH, scale=0.3),
        "table": normal(4 * DEVICES, WIDTH),
        "head": normal(WIDTH, CLASSES),
    }
    # Gradients from far below C to far above it.
    size = np.geomspace(0.01, 30, ROWS).astype(np.float32)[:, None, None, None]
    batch = {
        "image": size * normal(ROWS, 6, 6, 1),
        "words": draw.integers(0, 4 * DEVICES, (ROWS, 3)),
        "label": draw.integers(0, CLASSES, ROWS),
    }
    return jax.tree.map(jnp.asarray, (params, batch))


PARAMS, BATCH = drawn()


def expected():
    """Return gradients `[rows, ...]` and losses in float64, on one device."""
    with jax.enable_x64(True):

        def wide(leaf):
            leaf = np.asarray(leaf)
            return leaf.astype(np.float64) if leaf.dtype.kind == "f" else leaf

        params, batch = jax.tree.map(wide, (PARAMS, BATCH))
        every = jax.jit(jax.vmap(jax.value_and_grad(loss), (None, 0)))
        losses, found = jax.tree.map(np.asarray, every(params, batch))
    return jax.tree.leaves(found), losses


FOUND, LOSSES = expected()
NORMS = np.sqrt(sum(np.sum(g.reshape(ROWS, -1) ** 2, 1) for g in FOUND))


def errors(got, mask):
    """Return how far sums (in C), norms and losses are from what they must be."""
    total, norms, losses = got
    factors = np.minimum(1, C / NORMS) * mask
    right = [np.tensordot(factors, g, axes=1) for g in FOUND]
    return {
        "sum": distance(total, right) / C,
        "norms": float(np.max(np.abs(norms - NORMS * mask) / NORMS)),
        "losses": float(np.max(np.abs(losses - LOSSES * mask) / (1 + LOSSES))),
    }


def spec(leaf):
    """How a parameter is split, as FSDP does: along its longest axis that divides."""
    fits = [axis for axis, size in enumerate(leaf.shape) if size % DEVICES == 0]
    axis = max(fits, key=lambda axis: leaf.shape[axis], default=None)
    return P() if axis is None else P(*[None] * axis, "d")


SHARES = jax.tree.map(lambda leaf: NamedSharding(MESH, spec(leaf)), PARAMS)
BY_ROWS = NamedSharding(MESH, P("d"))
WHOLE = NamedSharding(MESH, P())


@functools.cache
def clipped(strategy):
    return clipped_grad(loss, clip_norm=C, strategy=strategy)


def by(strategy, *arguments):
    """Clip; by bk_mixed with `vmap` for convolutions, which may be the fastest.

    It takes norms as bk_mixopt does, and sums as bk.
    """
    rule = base.Rule if strategy == "bk_mixed" else Convolution
    with patch.object(Convolution, "gradients", rule.gradients):
        return tuple(clipped(strategy)(*arguments))


def every_strategy(path):
    def clip(*arguments):
        return {name: by(name, *arguments) for name in ways(path)}

    return clip


def placed(params, batch, mask):
    """Arrays that lie in shares already, given to `clipped_grad` itself."""
    rows = jax.device_put((batch, mask), BY_ROWS)
    shares = jax.device_put(params, SHARES)
    # One program after the other: those of virtual devices wait for each other.
    return {
        name: jax.block_until_ready(by(name, shares, *rows)) for name in ways("placed")
    }


@jax.jit
def rows_constrained(params, batch, mask):
    """The layout is asked for within an outer jit, which does not show it."""
    batch, mask = lax.with_sharding_constraint((batch, mask), BY_ROWS)
    return every_strategy("rows_constrained")(params, batch, mask)


@jax.jit
def shares_constrained(params, batch, mask):
    params = lax.with_sharding_constraint(params, SHARES)
    within = {"image": NamedSharding(MESH, P(None, "d")), "words": BY_ROWS}
    batch = lax.with_sharding_constraint(batch, within | {"label": WHOLE})
    return every_strategy("shares_constrained")(params, batch, mask)


@functools.cache
def mapped():
    return jax.pmap(every_strategy("by_pmap"), in_axes=(None, 0, 0))


@functools.cache
def of_runs():
    return jax.jit(jax.vmap(every_strategy("by_run")))


def by_pmap(params, batch, mask):
    """Each device its own rows; their sums are added on the host."""
    parts = jax.tree.map(lambda x: x.reshape(DEVICES, 2, *x.shape[1:]), (batch, mask))
    return added(mapped()(params, *parts))


def by_run(params, batch, mask):
    """As many runs as rows, each with parameters of its own and one row."""
    runs = jax.tree.map(lambda x: jnp.stack([x] * ROWS), params)
    parts = jax.tree.map(lambda x: x[:, None], (batch, mask))
    runs, parts = jax.device_put((runs, parts), BY_ROWS)
    return added(of_runs()(runs, *parts))


def added(found):
    return {
        name: (jax.tree.map(lambda x: x.sum(0), total), norms.ravel(), losses.ravel())
        for name, (total, norms, losses) in found.items()
    }


def results_asked_for(params, batch, mask):
    """No argument is traced; only the results say how they are split."""

    def clip(one):
        del one
        return every_strategy("results_asked_for")(params, batch, mask)

    shardings = dict.fromkeys(ways("results_asked_for"), (WHOLE, BY_ROWS, BY_ROWS))
    return jax.jit(clip, out_shardings=shardings)(1.0)


def in_parts():
    """Return how far parts, aux and automatic clipping are from those on one device."""

    def with_aux(params, example):
        value = loss(params, example)
        return value, (jnp.sum(example["image"]), params["head"])

    options = {"clip_norm": jax.tree.map(lambda _: C, PARAMS), "style": "automatic"}
    shares = jax.device_put((PARAMS, BATCH), (SHARES, BY_ROWS))
    apart, right = {}, None
    for strategy in ("per_example", "bk"):
        grad_fn = clipped_grad(with_aux, has_aux=True, strategy=strategy, **options)
        right = grad_fn(PARAMS, BATCH) if right is None else right
        apart[strategy] = distance(jax.block_until_ready(grad_fn(*shares)), right) / C
    return apart


def refused():
    """What is said of axes that are part of an array's type."""
    mesh = jax.make_mesh(
        (DEVICES,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,)
    )
    with jax.set_mesh(mesh):
        rows = jax.device_put(BATCH, NamedSharding(mesh, P("d")))
        try:
            clipped_grad(loss, clip_norm=C)(PARAMS, rows)
        except ValueError as error:
            return str(error)
    return "nothing"


PATHS: dict[int, list[Any]] = {
    2: [placed, by_pmap],
    3: [rows_constrained, by_run],
    4: [shares_constrained, results_asked_for],
}


def main():
    everyone, one_less = np.ones(ROWS, bool), np.ones(ROWS, bool)
    one_less[ROWS // 2] = False
    found: dict[str, Any] = {"refused": refused() if GUARDED else ""}
    if DEVICES == 2:
        found["in parts"] = in_parts()
    for path in PATHS[DEVICES]:
        if not GUARDED and path is not rows_constrained:
            continue
        whole = path(PARAMS, BATCH, jnp.asarray(everyone))
        found[path.__name__] = {name: errors(whole[name], everyone) for name in whole}
        if (path is results_asked_for and not FULL) or not GUARDED:
            continue  # another mask would be another program
        less = path(PARAMS, BATCH, jnp.asarray(one_less))
        for name, error in found[path.__name__].items():
            error["masked"] = errors(less[name], one_less)["sum"]
            moved = distance(whole[name][0], jax.tree.leaves(less[name][0]))
            error["moved"] = moved / C
    print(json.dumps(found))


if __name__ == "__main__":
    main()
