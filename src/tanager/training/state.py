"""What a run carries from step to step, and from one physical batch to the next."""

from typing import NamedTuple

from jaxtyping import Array, Float, Int, PyTree


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
    counts are arrays of n. How the gradients lie is `Layout.handed_over`.

    Attributes:
        sum: Σ clip_C(gᵢ), pytree like `State.params`.
        counts: of the examples.
    """

    sum: PyTree
    counts: Counts
