"""How examples get to the devices: held there, or read ahead of them."""

import os
from collections.abc import Iterator
from contextlib import closing
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from jaxtyping import PyTree

from tanager.data import ArraySource, Source
from tanager.data.loader import ChunkPlan, Unreadable, portions
from tanager.parallel.layout import Layout
from tanager.sampling import PoissonSampler


_SHARE_OF_MEMORY = 4  # a data set held on a device may take one part in so many


class Fed(NamedTuple):
    """A physical batch on the devices.

    Attributes:
        rows: batch, mask (bool[P]) and indices (int32[P]) as `Step.accumulate` takes
            them; where the devices hold all examples, these are the batch.
        unreadable: rows of this host that could not be read and were skipped.
    """

    rows: tuple[PyTree, jax.Array, jax.Array]
    unreadable: int = 0


class Feed(Protocol):
    """The physical batches of a run, one logical batch after the other."""

    def batches(self, step: int) -> Iterator[Fed]:
        """Give the physical batches of a step; steps must be asked for in order."""
        ...

    def close(self) -> None:
        """Let go of files and processes."""
        ...


class Held:
    """Every device holds all examples; only indices travel.

    Args:
        source: the examples.
        sampler: who is in which logical batch.
        physical_batch_size: P.
        layout: of the devices.
    """

    def __init__(
        self,
        source: ArraySource,
        sampler: PoissonSampler,
        physical_batch_size: int,
        layout: Layout,
    ):
        self._examples = layout.everywhere(source.tree)
        self._sampler = sampler
        self._size = physical_batch_size
        self._layout = layout
        self._rows = layout.rows_here(physical_batch_size)

    def batches(self, step: int) -> Iterator[Fed]:
        """Give the physical batches of a step."""
        for indices, mask in self._sampler.batches(step, self._size):
            here = mask[self._rows], indices[self._rows].astype(np.int32)
            yield Fed((self._examples, *self._layout.rows(here)))

    def close(self) -> None:
        """Let the examples go."""
        self._examples = None


class Streamed:
    """Each host reads its own rows of every physical batch, ahead of its devices.

    Args:
        plan: the physical batches, from the first step of this process on.
        layout: of the devices.
        workers: processes that read, see `tanager.data.loader.portions`.
    """

    def __init__(self, plan: ChunkPlan, layout: Layout, workers: int):
        self._portions = portions(plan, workers)
        self._layout = layout

    def batches(self, step: int) -> Iterator[Fed]:
        """Give the physical batches of a step, the one after the step before."""
        chunk = 0
        while True:
            portion = next(self._portions)
            assert (portion.step, portion.chunk) == (step, chunk)
            if portion.chunks:
                here = portion.batch, portion.mask, portion.indices
                yield Fed(self._layout.rows(here), portion.unreadable)
            chunk += 1
            if chunk >= portion.chunks:
                return

    def close(self) -> None:
        """End the processes that read."""
        self._portions.close()


def can_hold(source: Source, layout: Layout) -> bool:
    """Return whether each device has room for all examples beside the training.

    A device that does not tell its memory is taken for the host, whose it shares.
    """
    if not isinstance(source, ArraySource):
        return False
    needed = sum(leaf.nbytes for leaf in jax.tree.leaves(source.tree))
    local = [d for d in layout.mesh.devices if d.process_index == jax.process_index()]
    told = (local[0].memory_stats() or {}).get("bytes_limit")
    if told is None:
        told = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // len(local)
    return needed * _SHARE_OF_MEMORY <= told


def feed(
    source: Source,
    one: Any,
    sampler: PoissonSampler,
    physical_batch_size: int,
    layout: Layout,
    *,
    hold: bool,
    begun: int,
    workers: int,
    unreadable: Unreadable,
) -> closing[Feed]:
    """Return the feed of a run, to be closed at the end of a `with` block.

    Args:
        source: the examples.
        one: any one of them, on a leading axis of 1.
        sampler: who is in which logical batch.
        physical_batch_size: P.
        layout: of the devices.
        hold: whether the devices hold the examples.
        begun: the first step of this process.
        workers: processes that read where they do not.
        unreadable: what to do about an example that cannot be read.
    """
    if hold:
        assert isinstance(source, ArraySource)
        return closing(Held(source, sampler, physical_batch_size, layout))
    plan = ChunkPlan(
        source,
        one,
        sampler,
        physical_batch_size,
        layout.rows_here(physical_batch_size),
        begun,
        unreadable,
    )
    return closing(Streamed(plan, layout, workers))
