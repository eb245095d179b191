"""What the cost model expects of a method, beside what it takes.

    python benchmarks/costs.py [--keep-memory]
    python benchmarks/costs.py --model wrn-16-4 --rows 128 --precision tf32

Milliseconds measured, and expected by `clipping/planning/cost.py`, whose figures were
fitted to this table, with their ratio. The rows are of

- convolutions of H×H×C, k×k, with stride s, in G groups, x dilated by d (d > 1 is a
  transposed convolution): each way to form the gradients of B examples;
- tables of R rows and D columns, from which each of B examples takes T rows;
- products of T positions of K numbers with a matrix K×N.

By ``--keep-memory`` the process keeps the memory that it frees; without it the system
clears large arrays at every call.

With ``--model``, the layers of one model are measured instead, each kind once. The last
column is the time of compiling and measuring: on a GPU, it can be long.
"""

import argparse
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

import tanager
from tanager.bench.workload import Workload
from tanager.clipping.analysis.reading import read_loss
from tanager.clipping.planning import autotune, cost
from tanager.clipping.planning.choices import norm_groups
from tanager.clipping.rules.groups import RETAINED, NormGroup
from tanager.models import zoo
from tanager.training.precision import PRECISIONS


TITLE = "method               measured  expected  ratio compiling, s"

# H, channels in, channels out, k, G, s, d, B
CONVOLUTIONS = [
    # depthwise: MobileNetV2, ConvNeXt
    (8, 32, 32, 3, 32, 1, 1, 4),
    (8, 32, 32, 3, 32, 1, 1, 16),
    (8, 128, 128, 3, 128, 1, 1, 4),
    (16, 32, 32, 3, 32, 2, 1, 4),
    (16, 96, 96, 3, 96, 1, 1, 8),
    (16, 96, 96, 3, 96, 2, 1, 8),
    (14, 384, 384, 3, 384, 1, 1, 4),
    (8, 48, 48, 7, 48, 1, 1, 8),
    (16, 48, 48, 7, 48, 1, 1, 8),
    (7, 384, 384, 7, 384, 1, 1, 4),
    # in groups of several channels: ResNeXt, ShuffleNet
    (8, 32, 64, 3, 32, 1, 1, 4),
    (8, 32, 32, 3, 8, 1, 1, 4),
    (8, 32, 32, 3, 8, 1, 1, 16),
    (8, 32, 32, 3, 2, 1, 1, 4),
    (16, 64, 64, 3, 8, 2, 1, 4),
    (8, 64, 64, 1, 8, 1, 1, 4),
    # in one group
    (16, 64, 64, 3, 1, 1, 1, 16),
    (32, 64, 64, 3, 1, 1, 1, 16),
    (8, 256, 256, 3, 1, 1, 1, 16),
    (7, 512, 512, 3, 1, 1, 1, 2),
    # to few channels
    (28, 32, 1, 4, 1, 1, 1, 16),
    (32, 32, 3, 3, 1, 1, 1, 16),
    (32, 3, 16, 3, 1, 1, 1, 16),
    # transposed: the decoders of mixers, U-Nets, autoencoders
    (7, 32, 1, 4, 1, 1, 4, 16),
    (7, 32, 16, 4, 1, 1, 4, 16),
    (16, 32, 16, 4, 1, 1, 2, 16),
    (8, 64, 64, 4, 1, 1, 2, 8),
    (8, 8, 8, 4, 1, 1, 2, 8),
    (4, 256, 128, 4, 1, 1, 2, 4),
]

# R, D, T, B
TABLES = [
    (100, 64, 32, 16),
    (1000, 64, 128, 16),
    (5000, 64, 1, 16),
    (5000, 64, 128, 16),
    (30000, 128, 64, 8),
    (30000, 16, 128, 16),
    (200, 512, 197, 8),
]

# K, N, T, B
PRODUCTS = [
    (128, 128, 64, 16),
    (256, 256, 256, 8),
    (128, 10000, 32, 8),
    (768, 3072, 64, 8),
    (2048, 1000, 16, 8),
]


def convolution(shape: tuple[int, ...]) -> tuple[NormGroup, int]:
    """Return the norm group of a convolution, and B."""
    side, into, out, k, groups, stride, spread, rows = shape

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        padding = "SAME" if spread == 1 else [(k - 1, k - 1)] * 2
        y = lax.conv_general_dilated(
            x[None],
            w,
            (stride,) * 2,
            padding,
            lhs_dilation=(spread,) * 2,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=groups,
        )
        return jnp.sum(y**2)

    w = jnp.ones((k, k, into // groups, out))
    return only_group(loss, w, jnp.ones((side, side, into))), rows


def table(shape: tuple[int, ...]) -> tuple[NormGroup, int]:
    """Return the norm group of a table, and B."""
    size, width, taken, rows = shape

    def loss(w: jax.Array, ids: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(w[ids]))

    ids = jnp.zeros(taken, jnp.int32)
    return only_group(loss, jnp.ones((size, width)), ids), rows


def matrix(shape: tuple[int, ...]) -> tuple[NormGroup, int]:
    """Return the norm group of a matrix, and B."""
    into, out, positions, rows = shape

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(x @ w))

    x = jnp.ones((positions, into))
    return only_group(loss, jnp.ones((into, out)), x), rows


def only_group(loss: Callable, w: jax.Array, x: jax.Array) -> NormGroup:
    """Return the norm group of a loss that has one."""
    (group,) = norm_groups(read_loss(loss, w, x))
    return group


def show(title: str, shapes: list, make: Callable, grams: bool) -> None:
    """Print one kind: its gradients, or with `grams` all ways."""
    print(f"{title:50} {TITLE}")
    for shape in shapes:
        group, rows = make(shape)
        methods = cost.candidates(group)
        if not grams:
            methods = [cost.Method(name, RETAINED) for name in group.gradients()]
        show_methods(" ".join(f"{n:5}" for n in shape), group, rows, methods)


def show_methods(
    name: str, group: NormGroup, rows: int, methods: Sequence[cost.Method]
) -> None:
    """Print the methods of one group."""
    bench = autotune._Bench(group, rows)
    taken: dict[str, float] = {}
    for method in methods:
        started = time.perf_counter()
        parts = autotune._parts(method)
        for part in parts:
            if part not in taken:
                taken[part], _ = bench.seconds(part)
        measured = 1e3 * sum(taken[part] for part in parts)
        expected = 1e3 * cost.estimate(group, method, rows).seconds
        print(
            f"{name:50} {f'{method.norm}, {method.total}':20} {measured:8.2f} "
            f"{expected:9.2f} {expected / measured:6.2f} "
            f"{time.perf_counter() - started:12.1f}",
            flush=True,
        )


def show_model(name: str, rows: int, precision: str) -> None:
    """Print all ways for each kind of layer of a model that has several."""
    workload = Workload(name, zoo.find(name).image_shape, precision=precision)
    with workload.computing():
        example = jax.tree.map(lambda leaf: leaf[0], workload.batch(1))
        groups = norm_groups(read_loss(workload.loss, workload.params(), example))
        alike = {autotune._signature(group, rows): group for group in groups}
        for group in alike.values():
            methods = cost.candidates(group)
            if len(methods) > 1:
                print(f"\n{group.rule.describe()}\n{'':50} {TITLE}")
                show_methods("", group, rows, methods)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--keep-memory", action="store_true")
    parser.add_argument("--model")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--precision", choices=PRECISIONS, default="float32")
    given = parser.parse_args()
    if given.keep_memory:
        tanager.keep_memory()
    if given.model:
        show_model(given.model, given.rows, given.precision)
        return
    show(
        "    H    in   out     k     G     s     d     B",
        CONVOLUTIONS,
        convolution,
        False,
    )
    show("    R     D     T     B", TABLES, table, True)
    show("    K     N     T     B", PRODUCTS, matrix, True)


if __name__ == "__main__":
    main()
