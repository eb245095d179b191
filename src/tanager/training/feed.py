"""How examples get to the devices: held there, or read ahead of them."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
from jaxtyping import PyTree

from tanager import _processor
from tanager.data import ArraySource, Source
from tanager.data.loader import ChunkPlan, portions
from tanager.parallel.layout import Layout
from tanager.sampling import PhysicalBatch
from tanager.training.problem import Problem, Runtime
from tanager.training.step import Step


_SHARE_OF_MEMORY = 4  # a device may hold a data set of this part of its memory


class Feed(NamedTuple):
    """Where a run's physical batches come from, as `Step.accumulate` takes them.

    Attributes:
        batches: from a step to its physical batches, each with the number of this
            host's examples that could not be read. Steps are asked for in order.
        empty: makes a physical batch without an example.
    """

    batches: Callable[[int], Iterator[tuple[PhysicalBatch, int]]]
    empty: Callable[[], PhysicalBatch]


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
        memory = _processor.memory() // len(local)
    return needed * _SHARE_OF_MEMORY <= memory


@contextlib.contextmanager
def feeding(
    problem: Problem, runtime: Runtime, source: Source, one: Any, step: Step, begun: int
) -> Iterator[Feed]:
    """Give the feed of a run from step `begun` on, for a `with` block.

    `one` is any one of the examples, on a leading axis of 1.
    """
    size = runtime.physical_batch_size
    assert size != "auto"  # the loop has chosen one
    if step.in_memory:
        assert isinstance(source, ArraySource)
        yield held(step, step.layout.everywhere(source.tree), size)
        return
    here = step.layout.rows_here(size)
    plan = ChunkPlan(source, one, step.sampler, size, here, begun, problem.unreadable)
    with contextlib.closing(portions(plan, runtime.workers)) as read:

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

        def empty() -> PhysicalBatch:
            return step.layout.rows(step.unit.padding(one, len(here)))

        yield Feed(batches, empty)


def held(step: Step, examples: PyTree, size: int) -> Feed:
    """Return the feed of a step whose examples are all on every device."""
    here = step.layout.rows_here(size)

    def batches(number: int) -> Iterator[tuple[PhysicalBatch, int]]:
        for _, mask, indices in step.sampler.batches(number, size):
            rows = PhysicalBatch(None, mask[here], indices[here])
            yield step.layout.rows(rows)._replace(examples=examples), 0

    def empty() -> PhysicalBatch:
        rows = step.unit.padding(None, len(here))
        return step.layout.rows(rows)._replace(examples=examples)

    return Feed(batches, empty)
