"""What a run carries from step to step, and from one physical batch to the next."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int, PyTree

from tanager.parallel.layout import AXIS, Layout
from tanager.training import norms


class State(NamedTuple):
    """What training changes: all of it may be released, none of it is random state.

    `params` are the trained leaves, None elsewhere; `average` is their exponential
    moving average, float32 or wider; `clip_norm` is C of the next step, None where it
    does not change.
    """

    params: PyTree
    average: PyTree
    optimizer_state: PyTree
    clip_norm: Float[Array, ""] | None = None


class Counts(NamedTuple):
    """What is known of the examples of a logical batch. Private."""

    losses: Float[Array, "*n"]  # Σ lossᵢ over examples with a finite loss
    examples: Int[Array, "*n"]
    clipped: Int[Array, "*n"]  # whose gradient norm was above C
    dropped: Int[Array, "*n"]  # whose loss or gradient was not finite: they add nothing
    norms: Int[Array, "*n bins"]  # histogram of the others' gradient norms


class Accumulator(NamedTuple):
    """Sums over the physical batches of one logical batch. Private.

    `sum` is Σ clip_C(gᵢ) as a `Grid` adds it up, or `PlainSums`. Every device has sums
    of its own, over the rows it computed on: the n devices' counts are arrays of n.
    `Layout.scatter` says how the gradients are placed.
    """

    sum: PyTree
    counts: Counts


def empty(sums: PyTree, layout: Layout) -> Accumulator:
    """Return the accumulator of an empty logical batch with these shapes of its sum."""
    total = jax.tree.map(jnp.zeros_like, layout.accumulator_shapes(sums))
    none = jnp.zeros(layout.count, jnp.int32)
    losses = jnp.zeros(layout.count, jnp.float32)
    bins = jnp.zeros((layout.count, norms.BINS), jnp.int32)
    return Accumulator(total, Counts(losses, none, none, none, bins))


def specs(sums: PyTree, layout: Layout) -> Accumulator:
    """Return the partition specs of an accumulator; arguments as in `empty`."""
    each: Any = PartitionSpec(AXIS)
    counts = Counts(*(each,) * len(Counts._fields))
    return Accumulator(layout.accumulator_specs(sums), counts)


def count(
    gradient_norms: Float[Array, " b"],
    losses: Float[Array, " b"],
    mask: Bool[Array, " b"],
    clip_norm: float | Array,
) -> Counts:
    """Count the examples, those rows that `mask` names, of one physical batch.

    A norm is not finite where the example contributes nothing.
    """
    finite = jnp.isfinite(gradient_norms)
    usable = mask & finite & jnp.isfinite(losses)
    how_many = functools.partial(jnp.sum, dtype=jnp.int32)
    return Counts(
        jnp.sum(jnp.where(usable, losses, 0).astype(jnp.float32)),
        how_many(mask),
        how_many(mask & finite & (gradient_norms > clip_norm)),
        how_many(mask & ~finite),
        norms.histogram(gradient_norms, mask & finite),
    )


def update_average(
    average: PyTree, params: PyTree, step: Int[Array, ""], decay: float
) -> PyTree:
    """Return the exponential moving average after one more update to `params`.

    After t updates it decays by min(decay, (1 + t)/(10 + t)). It costs no privacy,
    since it is computed from released parameters.

    References:
        Unlocking paper, appendix C.3, after Tan and Le 2019.
    """
    t = step.astype(jnp.float32)
    weight = 1 - jnp.minimum(decay, (1 + t) / (10 + t))

    def mix(old: Array, new: Array) -> Array:
        return old + weight.astype(old.dtype) * (new.astype(old.dtype) - old)

    return jax.tree.map(mix, average, params)
