"""Poisson subsampling: who is in the batch of step t.

The law, exactly: in every step each of the N examples joins the logical batch with
probability q, independently of all others and of all other steps. The batch size is
therefore Binomial(N, q), not a number anyone chose; an empty batch is a step like any
other (noise only), and nothing is truncated or dropped. The privacy accountant assumes
this law. Batches cut from shuffled epochs, or of a fixed size, do not follow it, and a
guarantee computed for Poisson does not hold for them: Chua et al. 2024,
arXiv:2403.17673.

The mechanism (q and the number of steps) and N are public. The indices are secret, and
so is the realised size of a batch: whoever learns them learns who is in the data, and
amplification by subsampling is gone. They grow from the run's secret seed, and must
reach neither a log nor a report.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from tanager import _validate as validate
from tanager.privacy.mechanism import Mechanism
from tanager.seed import Seed


_BLOCK = 1 << 18  # words drawn at a time: 2 MiB, whatever the number of examples


class PhysicalBatch(NamedTuple):
    """A part of a logical batch, of the one shape the device is compiled for.

    Attributes:
        indices: int64[P], examples of the data set; 0 where the row is padding.
        mask: bool[P], False where the row is padding. Only the mask tells padding from
            the real example 0.
    """

    indices: np.ndarray
    mask: np.ndarray


def pack(indices: np.ndarray, physical_batch_size: int) -> Iterator[PhysicalBatch]:
    """Cut a logical batch into masked physical batches of one fixed shape.

    Every index appears in exactly one unmasked row, in the order given; only the last
    physical batch has padding. An empty logical batch has no physical batches: the sum
    of no gradients is zero, and the step that follows adds the noise as always.

    Args:
        indices: int64[b], the logical batch; b may be 0.
        physical_batch_size: P, rows per physical batch, at least 1.

    Returns:
        An iterator over ⌈b / P⌉ physical batches.

    Raises:
        ValueError: `physical_batch_size` is not a whole number of at least 1.
    """
    validate.whole(physical_batch_size=physical_batch_size, at_least=1)
    return _pack(np.asarray(indices, np.int64), physical_batch_size)


def _pack(indices: np.ndarray, size: int) -> Iterator[PhysicalBatch]:
    for start in range(0, len(indices), size):
        part = indices[start : start + size]
        rows = np.zeros(size, np.int64)
        rows[: len(part)] = part
        yield PhysicalBatch(rows, np.arange(size) < len(part))


class PoissonSampler:
    """The logical batches of a run, each to be had without those before it.

    Example i is in the batch of a step when the i-th word of that step's stream falls
    below q·2⁶⁴. So who else is in the data has no bearing on whether i is drawn: two
    data sets that differ by a last example give, under one seed, batches that differ by
    at most that example.

    The words are 64 bits wide: the probability is q itself for q ≥ 2⁻¹² and less than
    2⁻⁶⁴ above it otherwise. They come from Philox-4x64 (Salmon et al. 2011), keyed for
    each step with 128 bits and started at a position of 256 bits, both derived from the
    seed. NumPy promises the same words from this generator in every version, so a
    resumed run sees the same batches. Philox passes statistical tests but is not a
    cipher; the seed itself is protected by the keyed hash behind `Seed.derive`.

    Attributes:
        mechanism: its sample rate is q, its steps are the horizon.
        examples: N, how many examples the data set has.
        expected_batch_size: q·N, the public number that an update is divided by.

    Raises:
        ValueError: `examples` is not a whole number of at least 1.
    """

    def __init__(self, mechanism: Mechanism, examples: int, seed: Seed):
        validate.whole(examples=examples, at_least=1)
        self.mechanism = mechanism
        self.examples = int(examples)
        self.expected_batch_size = mechanism.sample_rate * self.examples
        self._seed = seed

    def indices(self, step: int) -> np.ndarray:
        """Return the logical batch of a step. Secret, and so is its length.

        Args:
            step: from 0 to `mechanism.steps` − 1, in any order.

        Returns:
            int64[b], sorted and distinct, with b ~ Binomial(N, q).

        Raises:
            ValueError: `step` is outside the run. A step past the horizon has not been
                accounted for, and there is no batch for it.
        """
        steps = self.mechanism.steps
        validate.whole(step=step, at_least=0)
        if step >= steps:
            validate.refuse(
                "step",
                step,
                f"must be below the mechanism's {steps} steps",
                "more steps cost more privacy: plan a mechanism that has them",
            )
        words = self._words(step)
        rate = self.mechanism.sample_rate
        largest = np.uint64(math.ceil(math.ldexp(rate, 64)) - 1)
        drawn = [
            start
            + np.flatnonzero(
                words.random_raw(min(_BLOCK, self.examples - start)) <= largest
            )
            for start in range(0, self.examples, _BLOCK)
        ]
        return np.concatenate(drawn).astype(np.int64, copy=False)

    def batches(self, step: int, physical_batch_size: int) -> Iterator[PhysicalBatch]:
        """Return the batch of a step, packed: `pack(self.indices(step), ...)`.

        Raises:
            ValueError: as `indices` and `pack`.
        """
        return pack(self.indices(step), physical_batch_size)

    def _words(self, step: int) -> np.random.Philox:
        material = self._seed.derive("sampling", step, size=48)
        key, counter = np.split(np.frombuffer(material, "<u8"), [2])
        return np.random.Philox(key=key, counter=counter)
