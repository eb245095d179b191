"""What clipped gradients must be, found the slow way in float64.

`check` puts one loss through many strategies, and optionally through every method of
every group, in one compiled program, and compares sums, norms and losses with explicit
per-example gradients. Masked rows are NaN throughout.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

import by_hand
from switch import FULL
from tanager.clipping import book_keeping, clipped_grad
from tanager.clipping.analysis import reading
from tanager.clipping.analysis.taps import Program
from tanager.clipping.planning import choices
from tanager.clipping.rules.factors import Limit
from tanager.clipping.rules.groups import RETAINED, Method, NormGroup


ALL = ("per_example", "bk", "bk_mixed", "bk_mixopt", "auto")
"""All but ghost and mixed_ghost, which take the methods of bk and bk_mixed."""
FAST = ("bk", "bk_mixopt")

TOLERANCE = {"float32": 1e-5, "float64": 1e-10}
SPREAD = 128
"""How much larger A² may be than ‖g‖² in ordinary data: norms from Gram matrices are
raised by η·A² (`Bilinear.excess`), which is most of what they are wrong by."""


class Clipped(NamedTuple):
    """Sum of clipped gradients (as leaves), norms and losses, in float64."""

    sum: list[np.ndarray]
    norms: np.ndarray
    losses: np.ndarray


def cast(tree: Any, dtype: Any) -> Any:
    """Return a tree with its float leaves in another dtype."""

    def one(leaf):
        if not is_float(leaf):
            return jnp.asarray(leaf)
        if isinstance(leaf, Tracer):
            return leaf.astype(dtype)
        return jnp.asarray(np.asarray(leaf).astype(dtype))  # compiles nothing

    return jax.tree.map(one, tree)


def is_float(leaf: Any) -> bool:
    """Return whether an array or a number is of floats."""
    return jnp.issubdtype(jnp.result_type(leaf), jnp.floating)


def gradients(loss: Callable, params: Any, batch: Any) -> tuple[Any, np.ndarray]:
    """Return float64 per-example gradients and losses; call it with x64 enabled."""
    every = jax.jit(jax.vmap(jax.value_and_grad(loss), in_axes=(None, 0)))
    losses, found = every(cast(params, np.float64), cast(batch, np.float64))
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), found), losses


def clip(
    found: Any, losses: Any, mask: np.ndarray, clip_norm: float | None = None
) -> tuple[Clipped, float]:
    """Clip and add per-example gradients; the median norm where none is given."""
    if clip_norm is None:
        clip_norm = float(np.median(by_hand.norms_of(found)[mask])) or 1.0
    total, norms = by_hand.clip(jax.tree.leaves(found), clip_norm, mask)
    return Clipped(total, norms * mask, np.asarray(losses) * mask), clip_norm


def exact(
    loss: Callable, params: Any, batch: Any, mask: np.ndarray, clip_norm: float
) -> Clipped:
    """Return sum, norms and losses in float64, from explicit per-example gradients."""
    with jax.enable_x64(True):
        found, losses = gradients(loss, params, batch)
        return clip(found, losses, np.asarray(mask), clip_norm)[0]


def each_method(all_cells: Sequence[NormGroup]) -> list[list[Method]]:
    """Return choices of methods that together use every method of every group."""
    options = []
    for group in all_cells:
        totals = tuple(group.totals()) or (RETAINED,)
        first = group.gradients()[0]
        pairs = [
            Method(n, totals[i % len(totals)]) for i, n in enumerate(group.grams())
        ]
        pairs += [Method(norm, RETAINED) for norm in group.gradients()]
        covered = {method.total for method in pairs}
        pairs += [Method(first, total) for total in totals if total not in covered]
        options.append(pairs)
    most = max(map(len, options))
    return [[own[n % len(own)] for own in options] for n in range(most)]


def read(loss: Callable, params: Any, batch: Any) -> tuple[Program, list[NormGroup]]:
    """Return the program of a loss and its groups."""
    params, batch = jax.tree.map(jnp.asarray, (params, batch))
    example = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), batch)
    program = reading.read_loss(loss, params, example)
    return program, choices.norm_groups(program)


def kinds(loss, params, batch):
    """Return the types of the groups that a loss is clipped by."""
    return [type(group) for group in read(loss, params, batch)[1]]


def raised(own: Sequence[NormGroup]) -> dict[str, float]:
    """Return by how much each way of clipping may raise a norm on purpose."""
    grams = max([0.0, *(c.excess(Method(n, "")) for c in own for n in c.grams())])
    ways: dict[str, float] = dict.fromkeys(ALL, SPREAD * grams / 2)
    for choice in each_method(own):
        excess = max(c.excess(m) for c, m in zip(own, choice, strict=True))
        ways[str([str(method) for method in choice])] = SPREAD * excess / 2
    return ways


def distinct(
    loss: Callable, params: Any, batch: Any, strategies: Sequence[str] = ALL
) -> list[str]:
    """Return the strategies that clip a loss in different ways, the first of each."""
    program, _ = read(loss, params, batch)
    return distinct_of(program, jax.tree.leaves(batch)[0].shape[0], strategies)


def distinct_of(program: Program, rows: int, strategies: Sequence[str]) -> list[str]:
    """Return the strategies that clip a program in different ways."""
    ways: dict[Any, str] = {}
    for strategy in strategies:
        whole = strategy == "per_example" or program.needs_definition
        plan = choices.plan_clipping(None if whole else program, rows, strategy)
        ways.setdefault(tuple(plan.methods) or plan.strategy, strategy)
    return list(ways.values())


def alone(
    loss: Callable, params: Any, batch: Any, clip_norm: float = 1.0
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return how far each example alone moves the sum, and its norm, by strategy."""
    found = one_by_one(loss, clip_norm)(params, batch)
    return {
        name: (
            lengths(out.sum, len(out.norms)),
            np.asarray(out.norms, np.float64)[:, 0],
        )
        for name, out in found.items()
    }


@functools.cache
def one_by_one(loss: Callable, clip_norm: float) -> Callable:
    """Return a program that clips each example alone, by all distinct strategies."""

    def every(params, example):
        rows = jax.tree.map(lambda leaf: leaf[None], example)
        return {
            name: clipped_grad(loss, clip_norm=clip_norm, strategy=name)(params, rows)
            for name in distinct(loss, params, rows)
        }

    return jax.jit(
        lambda params, batch: lax.map(functools.partial(every, params), batch)
    )


def lengths(tree: Any, rows: int) -> np.ndarray:
    """Return the norm of each row of a tree, in float64."""
    leaves = [np.float64(leaf).reshape(rows, -1) for leaf in jax.tree.leaves(tree)]
    return np.sqrt(sum(np.sum(leaf**2, axis=1) for leaf in leaves))


def norms_of(loss: Callable, params: Any, batch: Any, wide: bool = True) -> np.ndarray:
    """Return the norm of each example's gradient, in float64 or in its own dtypes."""
    rows = jax.tree.leaves(batch)[0].shape[0]
    if not wide:
        return lengths(
            jax.jit(jax.vmap(jax.grad(loss), (None, 0)))(params, batch), rows
        )
    with jax.enable_x64(True):
        return lengths(gradients(loss, params, batch)[0], rows)


def by_method(
    own: Sequence[NormGroup], clip_norm: float, few: bool = False
) -> dict[str, Callable]:
    """Return functions that clip by every method: of leaves, tap values and a mask.

    `few` leaves the first, of Gram matrices, and the last, of gradients.
    """
    choices = each_method(own)
    if few and len(choices) > 2 and not FULL:
        choices = [choices[0], choices[-1]]

    def clip_at(choice, leaves, found, mask):
        (losses,), seen = found
        limit = Limit((clip_norm,))
        totals, (norms,) = book_keeping.clip_at_taps(own, choice, seen, mask, limit)
        sums = [totals.get(n, jnp.zeros_like(x)) for n, x in enumerate(leaves)]
        return sums, jnp.where(mask, norms, 0), jnp.where(mask, losses, 0)

    return {
        str([str(method) for method in choice]): functools.partial(clip_at, choice)
        for choice in choices
    }


def ways(loss, strategies, methods, clip_norm, known=None) -> Callable:
    """Return a function that clips in every way, for one compilation.

    `known` is what `read` returns for this loss, where that is at hand.
    """

    def every(params, batch, mask):
        program, own = known or read(loss, params, batch)
        rows = jax.tree.leaves(batch)[0].shape[0]
        results: dict[str, Any] = {
            strategy: clipped_grad(loss, clip_norm=clip_norm, strategy=strategy)(
                params, batch, mask
            )
            for strategy in distinct_of(program, rows, strategies)
        }
        if methods:
            leaves = jax.tree.leaves(params)
            found = book_keeping.tap_values(program, leaves, jax.tree.leaves(batch))
            for name, clip_at in by_method(own, clip_norm, methods == "few").items():
                results[name] = clip_at(leaves, found, mask)
        return results

    return jax.jit(every)


def assert_close(name: str, got: Any, expected: Clipped, tolerance: float) -> None:
    """Compare sums leaf by leaf, norms and losses example by example."""
    total, norms, losses = got
    leaves = jax.tree.leaves(total)
    assert len(leaves) == len(expected.sum), name
    largest = max(np.max(np.abs(leaf), initial=0) for leaf in expected.sum)
    for number, (leaf, right) in enumerate(zip(leaves, expected.sum, strict=True)):
        error = np.max(np.abs(np.asarray(leaf, np.float64) - right), initial=0)
        assert error <= tolerance * largest, f"{name}: sum of leaf {number}: {error}"
    for what, one, other in (
        ("norms", norms, expected.norms),
        ("losses", losses, expected.losses),
    ):
        np.testing.assert_allclose(
            np.asarray(one, np.float64),
            other,
            rtol=tolerance,
            atol=tolerance * np.max(np.abs(other), initial=0) * 1e-2,
            err_msg=f"{name}: {what}",
        )


def check(
    loss: Callable,
    params: Any,
    batch: Any,
    *,
    mask: Sequence[bool] | None = None,
    strategies: Sequence[str] | None = None,
    methods: bool | Literal["few"] = False,
    dtypes: Sequence[str] = ("float64",),
) -> Clipped:
    """Compare every way of clipping a loss with the oracle.

    Args:
        loss: of one example; indifferent to float dtypes.
        params: pytree of float arrays.
        batch: pytree of arrays; float leaves are replaced by NaN in masked rows.
        mask: all but the second row by default.
        strategies: to try; `FAST` by default, or none where each method is tried.
        methods: whether to try every method of every group too; "few" tries a Gram
            matrix and gradients.
        dtypes: to compute in; the oracle computes in float64.
    """
    rows = jax.tree.leaves(batch)[0].shape[0]
    chosen = np.arange(rows) != 1 if mask is None else np.asarray(mask)
    with jax.enable_x64(True):
        found, losses = gradients(loss, params, batch)
        expected, clip_norm = clip(found, losses, chosen)

        def spoil(leaf):
            if not is_float(leaf):
                return leaf
            spoilt = np.array(leaf)
            spoilt[~chosen] = np.nan
            return spoilt

        if strategies is None:
            strategies = () if methods else FAST
        spoilt = jax.tree.map(spoil, batch)
        for dtype in dtypes:
            own = cast(params, dtype)
            known = read(loss, own, cast(batch, dtype))
            every = ways(loss, strategies, methods, clip_norm, known)
            results = every(own, cast(spoilt, dtype), chosen)
            more = raised(known[1])
            for name, got in results.items():
                tolerance = TOLERANCE[dtype]
                assert_close(f"{dtype} {name}", got, expected, tolerance + more[name])
                least = expected.norms * (1 - tolerance) - tolerance * 1e-2
                assert np.all(np.asarray(got[1], np.float64) >= least), name
    return expected


def curve(y: Any) -> Any:
    """Return a scalar whose gradient differs in every entry of y and every example."""
    return jnp.sum(jnp.sin(y)) + 0.1 * jnp.sum(y * y)


def draw(seed: int, *shapes: Sequence[int], scale: float = 1.0) -> list[Any]:
    """Return normal float64 arrays."""
    generator = np.random.default_rng(seed)
    return [scale * generator.standard_normal(shape) for shape in shapes]
