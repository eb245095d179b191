"""How examples get to the devices: held there, or read ahead of them."""

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import jax

from tanager.data import ArraySource, Source
from tanager.data.loader import ChunkPlan, Unreadable, portions
from tanager.parallel.layout import Layout
from tanager.sampling import PhysicalBatch
from tanager.training.step import Step


_SHARE_OF_MEMORY = 4  # a device may hold a data set of this part of its memory

Feed = Callable[[int], Iterator[tuple[PhysicalBatch, int]]]
"""From a step to its physical batches, as `Step.accumulate` takes them, each with the
number of this host's examples that could not be read. Steps are asked for in order."""


def can_hold(source: Source, layout: Layout) -> bool:
    """Return whether each device has room for all examples beside the training.

    Where JAX does not know a device's memory, the device shares the host's.
    """
    if not isinstance(source, ArraySource):
        return False
    needed = sum(leaf.nbytes for leaf in jax.tree.leaves(source.tree))
    local = [d for d in layout.mesh.devices if d.process_index == jax.process_index()]
    memory = (local[0].memory_stats() or {}).get("bytes_limit")
    if memory is None:
        pages = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        memory = pages // len(local)
    return needed * _SHARE_OF_MEMORY <= memory


@contextlib.contextmanager
def feeding(
    source: Source,
    one: Any,
    step: Step,
    physical_batch_size: int,
    *,
    begun: int,
    workers: int,
    unreadable: Unreadable,
) -> Iterator[Feed]:
    """Give the feed of a run, for a `with` block.

    Args:
        source: the examples.
        one: any one of them, on a leading axis of 1.
        step: says who is in which batch, and whether the devices hold the examples.
        physical_batch_size: P.
        begun: the first step of this process.
        workers: processes that read where the devices do not hold the examples.
        unreadable: what to do about an example that cannot be read.
    """
    if step.in_memory:
        assert isinstance(source, ArraySource)
        yield _held(source, step, physical_batch_size)
        return
    plan = ChunkPlan(
        source,
        one,
        step.sampler,
        physical_batch_size,
        step.layout.rows_here(physical_batch_size),
        begun,
        unreadable,
    )
    with contextlib.closing(portions(plan, workers)) as read:

        def batches(number: int) -> Iterator[tuple[PhysicalBatch, int]]:
            chunk = 0
            while True:
                portion = next(read)
                assert (portion.step, portion.chunk) == (number, chunk)
                if portion.chunks:
                    yield step.layout.rows(portion.batch), portion.unreadable
                chunk += 1
                if chunk >= portion.chunks:
                    return

        yield batches


def _held(source: ArraySource, step: Step, physical_batch_size: int) -> Feed:
    """Return a feed of examples that every device holds; only indices travel."""
    examples = step.layout.everywhere(source.tree)
    here = step.layout.rows_here(physical_batch_size)

    def batches(number: int) -> Iterator[tuple[PhysicalBatch, int]]:
        for _, mask, indices in step.sampler.batches(number, physical_batch_size):
            rows = PhysicalBatch(None, mask[here], indices[here])
            yield step.layout.rows(rows)._replace(examples=examples), 0

    return batches
