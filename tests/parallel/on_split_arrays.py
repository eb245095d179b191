"""Clips arrays that XLA splits over N devices, and prints errors as JSON.

Run by `test_split_arrays`, as the number of virtual devices is fixed when JAX starts:
`python on_split_arrays.py N`. With the word `unguarded`, as if `clipped_grad` did not
know of several devices.
"""

import json
import os
import sys


DEVICES = int(sys.argv[1])
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} "
    f"--xla_force_host_platform_device_count={DEVICES}"
)
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tanager import clipped_grad
from tanager.clipping import transform
from tanager.clipping.autotune import Timings
from tanager.clipping.choices import STRATEGIES
from tanager.clipping.transform import ClippedGrad
from tanager.training.plain import PlainGrad


jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
Timings.measure = lambda *arguments, **options: False
GUARDED = "unguarded" not in sys.argv
if not GUARDED:
    transform.may_be_split = lambda leaves: False

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


def standardised(kernel, gain):
    """Weight standardisation."""
    mean = jnp.mean(kernel, (0, 1, 2), keepdims=True)
    spread = jnp.mean(jnp.square(kernel - mean), (0, 1, 2), keepdims=True)
    return (kernel - mean) * lax.rsqrt(spread + 1e-3) * gain[None, None, None]


@jax.custom_vjp
def opaque(image, kernel):
    """A convolution that tanager cannot look into."""
    return jnp.tanh(convolve(image, kernel))


def _forward(image, kernel):
    value, pull = jax.vjp(lambda x, w: jnp.tanh(convolve(x, w)), image, kernel)
    return value, pull


opaque.defvjp(_forward, lambda pull, gradient: pull(gradient))


def loss(params, example):
    """Convolutions of all kinds, normalisations, products, an embedding."""

    def view(image):
        h = jnp.tanh(convolve(image, params["stem"]))
        h = normalised(h, params["scale"])
        h = h + convolve(h, params["depthwise"], groups=WIDTH)
        h = jnp.tanh(convolve(h, params["groups"], groups=2))
        h = convolve(h, standardised(params["kernel"], params["gain"]), 2)
        h = h + opaque(h, params["opaque"])
        return jnp.mean(h, (0, 1))

    h = view(example["image"])
    h = h + jnp.mean(params["table"][example["words"]], 0)
    once = jnp.tanh(jnp.mean(jax.vmap(lambda x: convolve(x, params["stem"]))(
        example["views"]), (0, 1, 2)))
    logits = (h + once) @ params["head"]
    return -jax.nn.log_softmax(logits)[example["label"]]


def drawn():
    draw = np.random.default_rng(DEVICES)

    def normal(*shape, scale=1.0):
        return (scale * draw.normal(size=shape)).astype(np.float32)

    params = {
        "stem": normal(3, 3, 1, WIDTH),
        "scale": normal(WIDTH),
        "depthwise": normal(3, 3, 1, WIDTH),
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
        "views": normal(ROWS, 2, 6, 6, 1),
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


def distance(one, other):
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return float(np.sqrt(sum(np.sum((np.asarray(a) - b) ** 2) for a, b in pairs)))


def rows_first(tree, mesh=MESH, axis="d"):
    return jax.device_put(tree, NamedSharding(mesh, P(axis)))


def spec(leaf):
    """How a parameter is split, as FSDP does: along its longest axis that divides."""
    fits = [axis for axis, size in enumerate(leaf.shape) if size % DEVICES == 0]
    axis = max(fits, key=lambda axis: leaf.shape[axis], default=None)
    return P() if axis is None else P(*[None] * axis, "d")


SHARES = jax.tree.map(lambda leaf: NamedSharding(MESH, spec(leaf)), PARAMS)
BY_ROWS = NamedSharding(MESH, P("d"))
WHOLE = NamedSharding(MESH, P())


def grad_fns(memory="default"):
    return {
        name: clipped_grad(loss, clip_norm=C, strategy=name, memory=memory)
        for name in STRATEGIES
    }


def all_of(functions):
    """Return one function that clips in every way, to be compiled once."""
    return lambda *arguments: {k: f(*arguments) for k, f in functions.items()}


def eager(mask):
    placed = rows_first(BATCH)
    return all_of(EAGER)(PARAMS, placed, mask)


def eager_in_shares(mask):
    shares = jax.device_put(PARAMS, SHARES)
    return all_of(EAGER)(shares, rows_first(BATCH), rows_first(mask))


EAGER = grad_fns()
IN_SHARDINGS = jax.jit(all_of(grad_fns()), in_shardings=(WHOLE, BY_ROWS, BY_ROWS))


@jax.jit
def CONSTRAINED(params, batch, mask):
    batch, mask = lax.with_sharding_constraint((batch, mask), BY_ROWS)
    return all_of(grad_fns())(params, batch, mask)


@jax.jit
def IN_SHARES(params, batch, mask):
    params = lax.with_sharding_constraint(params, SHARES)
    batch = lax.with_sharding_constraint(batch, BY_ROWS)
    return all_of(grad_fns(memory="low"))(params, batch, mask)


@jax.jit
def ALONG_IMAGES(params, batch, mask):
    within = {"image": NamedSharding(MESH, P(None, "d")), "views": WHOLE}
    rest = {"words": BY_ROWS, "label": WHOLE}
    batch = lax.with_sharding_constraint(batch, within | rest)
    return all_of(grad_fns())(params, batch, mask)


@jax.jit
def BY_SCAN(params, batch, mask):
    """Add up two physical batches, each of them split."""
    parts = jax.tree.map(lambda x: x.reshape(DEVICES, 2, *x.shape[1:]), (batch, mask))
    parts = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), parts)
    sharding = NamedSharding(MESH, P(None, "d"))
    parts = lax.with_sharding_constraint(parts, sharding)
    fns = all_of(grad_fns())

    def add(total, part):
        found = fns(params, *part)
        sums = {name: out.sum for name, out in found.items()}
        return jax.tree.map(jnp.add, total, sums), found

    zeros = jax.tree.map(jnp.zeros_like, dict.fromkeys(STRATEGIES, params))
    total, found = lax.scan(add, zeros, parts)

    def together(x):
        return jnp.moveaxis(x, 0, 1).reshape(-1)

    return {
        name: (total[name], together(out.norms), together(out.losses))
        for name, out in found.items()
    }


def on_a_mesh_that_is_set(mask):
    mesh = jax.make_mesh((DEVICES,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))

    @jax.jit
    def clip(params, batch, mask):
        batch = lax.with_sharding_constraint(batch, P("d"))
        return all_of(grad_fns())(params, batch, mask)

    with jax.set_mesh(mesh):
        return clip(PARAMS, BATCH, mask)
