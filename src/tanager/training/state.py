"""What a run carries from step to step, and from one physical batch to the next."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int, PyTree

from tanager.parallel.layout import AXIS, Layout
from tanager.training import norms


class State(NamedTuple):
    """What training changes: all of it may be released, none of it is random state.

    Attributes:
        params: the trained leaves (None where a leaf is not a float array).
        average: their exponential moving average, float32 or wider.
        optimizer_state: of the optax transformation.
    """

    params: PyTree
    average: PyTree
    optimizer_state: PyTree


class Counts(NamedTuple):
    """What is known of the examples of a logical batch. Private.

    Attributes:
        losses: Σ lossᵢ over examples with a finite loss.
        examples: how many examples the logical batch holds.
        clipped: how many of them had a gradient norm above C.
        dropped: how many contributed nothing because loss or gradient was not finite.
        norms: histogram of the others' gradient norms, see `tanager.training.norms`.
    """

    losses: Float[Array, "*n"]
    examples: Int[Array, "*n"]
    clipped: Int[Array, "*n"]
    dropped: Int[Array, "*n"]
    norms: Int[Array, "*n bins"]


class Accumulator(NamedTuple):
    """Sums over the physical batches of one logical batch. Private.

    Every device has sums of its own, over the rows it computed on: the n devices'
    counts are arrays of n. `Layout.scatter` says how the gradients are placed.

    Attributes:
        sum: Σ clip_C(gᵢ) as a `Grid` adds it up, or `PlainSums`.
        counts: of the examples.
    """

    sum: PyTree
    counts: Counts


def empty(sums: PyTree, layout: Layout) -> Accumulator:
    """Return the accumulator of a logical batch to which nothing was added yet.

    Args:
        sums: the shapes of its sum.
        layout: of the devices.
    """
    total = jax.tree.map(
        lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), layout.accumulator_shapes(sums)
    )
    none = jnp.zeros(layout.count, jnp.int32)
    losses = jnp.zeros(layout.count, jnp.float32)
    bins = jnp.zeros((layout.count, norms.BINS), jnp.int32)
    return Accumulator(total, Counts(losses, none, none, none, bins))


def specs(sums: PyTree, layout: Layout) -> Accumulator:
    """Return the partition specs of an accumulator; arguments as in `empty`."""
    each: Any = PartitionSpec(AXIS)
    return Accumulator(
        layout.accumulator_specs(sums), Counts(*(each,) * len(Counts._fields))
    )


def count(
    gradient_norms: Float[Array, " b"],
    losses: Float[Array, " b"],
    mask: Bool[Array, " b"],
    clip_norm: float,
) -> Counts:
    """Count the examples of one physical batch.

    Args:
        gradient_norms: ‖gᵢ‖, not finite where the example contributes nothing.
        losses: lossᵢ.
        mask: which rows are examples.
        clip_norm: C.
    """
    finite = jnp.isfinite(gradient_norms)
    usable = mask & finite & jnp.isfinite(losses)
    return Counts(
        jnp.sum(jnp.where(usable, losses, 0).astype(jnp.float32)),
        _how_many(mask),
        _how_many(mask & finite & (gradient_norms > clip_norm)),
        _how_many(mask & ~finite),
        norms.histogram(gradient_norms, mask & finite),
    )


def _how_many(rows: Bool[Array, " b"]) -> Int[Array, ""]:
    return jnp.sum(rows, dtype=jnp.int32)


def warm_decay(step: Int[Array, ""], decay: float) -> Float[Array, ""]:
    """Return min(decay, (1 + t)/(10 + t)), where t updates came before this one.

    References:
        Unlocking paper, appendix C.3, after Tan and Le 2019.
    """
    t = step.astype(jnp.float32)
    return jnp.minimum(decay, (1 + t) / (10 + t))


def update_average(
    average: PyTree, params: PyTree, step: Int[Array, ""], decay: float
) -> PyTree:
    """Return the exponential moving average after one more update to `params`.

    It costs no privacy, since it is computed from released parameters.
    """
    weight = 1 - warm_decay(step, decay)

    def mix(old: Array, new: Array) -> Array:
        return old + weight.astype(old.dtype) * (new.astype(old.dtype) - old)

    return jax.tree.map(mix, average, params)
