"""Physical batches read ahead of the devices, in worker processes.

One element of the grain pipeline is one physical batch. The run's seed decides who is
in it and which rows are padding, so any worker can make any element alone, and a
resumed run continues with the next element.
"""

import dataclasses
import functools
import multiprocessing
import operator
import os
import shutil
import sys
import threading
from collections.abc import Callable, Generator
from multiprocessing import util
from typing import Any, Literal, NamedTuple

import numpy as np

from tanager import _validate as validate
from tanager.data.source import Source, UnreadableExample, gather, map_leaves
from tanager.data.unnamed import Unnamed
from tanager.sampling import PhysicalBatch, PoissonSampler, pad


Unreadable = Literal["error", "skip"]


class Portion(NamedTuple):
    """One physical batch, or this host's rows of it, with the pixels.

    Attributes:
        step: whose logical batch it is part of.
        chunk: its number in that batch, from 0.
        chunks: how many physical batches that batch has; 0 for an empty one, which
            has one portion nevertheless, without any example.
        batch: its examples are zeros where the mask is False; the mask is False where
            an example could not be read.
        unreadable: how many rows could not be read and were skipped.
    """

    step: int
    chunk: int
    chunks: int
    batch: PhysicalBatch
    unreadable: int


@dataclasses.dataclass(eq=False, repr=False)
class ChunkPlan:
    """Every physical batch of a run from a step on, by its number: a grain source.

    Attributes:
        source: the examples.
        one: any one of them, on a leading axis of 1, for its shapes.
        sampler: who is in which logical batch.
        size: P, the physical batch size.
        rows: which of the P rows are wanted.
        begun: the first step.
        unreadable: what to do about an example that cannot be read: ``"error"``, or
            ``"skip"``, which gives a row of padding for it.
    """

    source: Source
    one: dataclasses.InitVar[Any]
    sampler: PoissonSampler
    size: int
    rows: np.ndarray
    begun: int
    unreadable: Unreadable = "error"

    def __post_init__(self, one: Any):
        self._shapes = _zeros(one, 0)
        self._ends = [0]
        self._drawn: tuple[int, np.ndarray] = (-1, np.empty(0, np.int64))

    def __len__(self) -> int:
        """Return an upper bound of the number of elements, which is secret itself."""
        most = max(1, -(-self.sampler.examples // self.size))
        return (self.sampler.mechanism.steps - self.begun) * most

    def __getitem__(self, index: int) -> Portion:
        """Return an element; one past the end of the run has step −1."""
        step, chunk = self._find(index)
        if step == self.sampler.mechanism.steps:
            return Portion(-1, 0, 0, pad(np.empty(0, np.int64), 0), 0)
        indices = self._indices(step)
        part = indices[chunk * self.size : (chunk + 1) * self.size]
        _, mask, rows = self.sampler.chosen(step, pad(part, self.size))
        batch = self._read(rows[self.rows], mask[self.rows])
        unreadable = int(mask[self.rows].sum() - batch.mask.sum())
        chunks = -(-len(indices) // self.size)
        return Portion(step, chunk, chunks, batch, unreadable)

    def _find(self, element: int) -> tuple[int, int]:
        steps = self.sampler.mechanism.steps - self.begun
        while self._ends[-1] <= element and len(self._ends) <= steps:
            drawn = len(self._indices(self.begun + len(self._ends) - 1))
            self._ends.append(self._ends[-1] + max(1, -(-drawn // self.size)))
        if element >= self._ends[-1]:
            return self.sampler.mechanism.steps, 0
        number = int(np.searchsorted(self._ends, element, side="right")) - 1
        return self.begun + number, element - self._ends[number]

    def _indices(self, step: int) -> np.ndarray:
        if self._drawn[0] != step:
            self._drawn = (step, self.sampler.indices(step))
        return self._drawn[1]

    def _read(self, rows: np.ndarray, mask: np.ndarray) -> PhysicalBatch:
        shape, mask, rows = mask.shape, mask.flatten(), rows.ravel()
        examples, wanted = _zeros(self._shapes, len(rows)), np.flatnonzero(mask)
        if wanted.size and self.unreadable == "error":
            _put(examples, wanted, gather(self.source, rows[wanted]))
        elif wanted.size:
            for row in wanted:
                one = slice(row, row + 1)
                try:
                    _put(examples, one, gather(self.source, rows[one]))
                except UnreadableExample:
                    mask[row] = False
        examples = map_leaves(
            lambda leaf: leaf.reshape(*shape, *leaf.shape[1:]), examples
        )
        return PhysicalBatch(examples, mask.reshape(shape), rows.reshape(shape))


def an_example(source: Source, unreadable: Unreadable = "error") -> Any:
    """Return one example on a leading axis of 1, for its shapes: the first there is."""
    last = min(100, len(source)) if unreadable == "skip" else 1
    for index in range(last):
        try:
            return gather(source, np.array([index]))
        except UnreadableExample:
            if index == last - 1:
                raise
    raise AssertionError


def portions(plan: ChunkPlan, workers: int) -> Generator[Portion, None, None]:
    """Read a plan's elements in order, ahead of whoever asks for them.

    Each worker is a process; 0 takes one thread of this one. It holds at most three
    physical batches: one it reads, one it has read, and one on its way.
    """
    import grain
    from absl import flags

    # Grain's settings are flags of absl, which refuses to be asked before a program
    # says that it has none on its command line.
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()
    ahead = 0 if workers else 2
    options = grain.ReadOptions(num_threads=min(ahead, 1), prefetch_buffer_size=ahead)
    if workers:
        # No files in /dev/shm: they would outlive a process that is killed.
        sent = functools.partial(_with_leaves, Unnamed)
        pipes = grain.experimental.DatasetOptions(min_shm_size=sys.maxsize)
        dataset = grain.MapDataset.source(plan).map(sent).to_iter_dataset(options)
        dataset = grain.experimental.WithOptionsIterDataset(dataset, pipes).mp_prefetch(
            grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=1),
            die_with_parent,
        )
    else:
        dataset = grain.MapDataset.source(plan).to_iter_dataset(options)
    iterator, opened = iter(dataset), operator.methodcaller("open")
    try:
        for portion in iterator:
            yield _with_leaves(opened, portion) if workers else portion
    finally:
        iterator.close()


def _with_leaves(function: Callable, portion: Portion) -> Portion:
    batch = portion.batch
    if batch.examples is None:
        return portion
    examples = map_leaves(function, batch.examples)
    return portion._replace(batch=batch._replace(examples=examples))


def die_with_parent(*_: int) -> None:
    """End this process, a worker, as soon as the process that started it is gone."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        shutil.rmtree(util.get_temp_dir(), ignore_errors=True)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _zeros(batch: Any, rows: int) -> Any:
    return map_leaves(lambda leaf: np.zeros((rows, *leaf.shape[1:]), leaf.dtype), batch)


def _put(batch: Any, rows: np.ndarray | slice, found: Any) -> None:
    def put(into: np.ndarray, leaf: np.ndarray) -> None:
        # NumPy would repeat a row that is smaller, or round one of another dtype.
        if (into.shape[1:], into.dtype) != (leaf.shape[1:], leaf.dtype):
            wanted, given = (f"{each.dtype}{each.shape[1:]}" for each in (into, leaf))
            rule = f"must be {wanted} in every example of the source"
            validate.refuse("data", given, rule)
        into[rows] = leaf

    map_leaves(put, batch, found)
