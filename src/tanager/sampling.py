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

import copy
from collections.abc import Iterator
from fractions import Fraction
from typing import Any, NamedTuple, Self

import numpy as np

from tanager import _validate as validate
from tanager.groups import Groups
from tanager.privacy.mechanism import Mechanism, require_step
from tanager.seed import Seed


_BLOCK = 1 << 18  # words drawn at a time: 2 MiB, whatever the number of examples
_MOST = 2**31  # examples that int32 can number


class PhysicalBatch(NamedTuple):
    """A part of a logical batch, padded to the one shape that is compiled.

    A pytree, which compiled functions take as one argument. On several devices or
    hosts, each has its own p of the P rows.

    Attributes:
        examples: pytree of arrays with a leading axis of P; None before they are read.
            Where a `Step` holds the data in memory, all N examples instead.
        mask: bool[P], False where the row is padding. Only the mask tells padding from
            the real example 0. Of groups, bool[P, k], see `tanager.groups`.
        indices: int32[P], which examples of the data set these are; 0 for padding.
            Of groups, int32[P, k].
    """

    examples: Any
    mask: Any
    indices: Any

    def __repr__(self) -> str:
        """Return dtypes and shapes: who was drawn is private."""
        fields = (f"{name}={validate.shown(of)}" for name, of in self._asdict().items())
        return f"PhysicalBatch({', '.join(fields)})"


def pack(indices: np.ndarray, physical_batch_size: int) -> Iterator[PhysicalBatch]:
    """Cut a logical batch into masked physical batches of one fixed shape.

    Every index appears in exactly one unmasked row, in the order given; only the last
    physical batch has padding. An empty logical batch has no physical batches: the sum
    of no gradients is zero, and the step that follows adds the noise as always.

    Args:
        indices: int64[b], the logical batch, each below 2³¹; b may be 0.
        physical_batch_size: P, rows per physical batch, at least 1.

    Returns:
        An iterator over ⌈b / P⌉ physical batches, without their examples.

    Raises:
        ValueError: `physical_batch_size` is not a whole number of at least 1.
    """
    validate.whole(physical_batch_size=physical_batch_size, at_least=1)
    size = physical_batch_size
    indices = np.asarray(indices, np.int64)
    return (pad(indices[at : at + size], size) for at in range(0, len(indices), size))


def pad(indices: np.ndarray, physical_batch_size: int) -> PhysicalBatch:
    """Return at most P examples, int64[b], as one masked physical batch of P rows."""
    rows = np.zeros(physical_batch_size, np.int32)
    rows[: len(indices)] = indices
    return PhysicalBatch(None, np.arange(physical_batch_size) < len(indices), rows)


class PoissonSampler:
    """The logical batches of a run; each can be drawn without those before it.

    Example i is in the batch of a step when the i-th 64-bit word of that step's stream
    falls below q·2⁶⁴. So who else is in the data has no bearing on whether i is drawn,
    nor on the rows of those before i: two data sets of which one lacks the last
    example, or has nothing in the place of some example, give batches that differ in
    one row.

    The probability is q exactly: a word that equals the whole part of q·2⁶⁴ is decided
    by 512 further bits. The words come from AES-256 in counter mode, with a key of its
    own for each step (`Seed.words`), the same in every version.

    Where examples are grouped, groups are drawn instead, in the same way.

    Attributes:
        mechanism: its sample rate is q, its steps are the horizon.
        examples: N, how many examples, or groups, the data set has.
        declared: the public size that updates are divided by, times q.
        expected_batch_size: q·declared, public.
        groups: whose each example is; None where examples are drawn.

    Args:
        examples: N; private under add-or-remove-one.
        seed: the run's secret.
        declared: a size chosen without looking at the data; N where N is public, which
            it is not under add-or-remove-one.

    Raises:
        ValueError: `examples` is not a whole number from 1 to 2³¹, or the size must be
            declared and is not.
    """

    def __init__(
        self,
        mechanism: Mechanism,
        examples: int,
        seed: Seed,
        declared: int | None = None,
        groups: Groups | None = None,
    ):
        validate.instance(Seed, seed=seed)
        validate.instance(Mechanism, mechanism=mechanism)
        validate.instance_or_none(Groups, groups=groups)
        validate.whole(examples=examples, at_least=1)
        if groups is not None and len(groups) != examples:
            rule = f"must be the number of groups, {len(groups)}"
            validate.refuse("examples", examples, rule)
        if examples > _MOST:
            validate.refuse("examples", examples, f"must be at most {_MOST}")
        if declared is None:
            mechanism.require_public_size()
            declared = examples
        validate.whole(declared=declared, at_least=1)
        self.mechanism = mechanism
        self.examples = int(examples)
        self.declared = int(declared)
        self.expected_batch_size = mechanism.sample_rate * self.declared
        self._seed = seed
        self.groups = groups

    def with_seed(self, seed: Seed) -> Self:
        """Return the same with another secret."""
        other = copy.copy(self)
        other._seed = seed
        return other

    def indices(self, step: int) -> np.ndarray:
        """Return the logical batch of a step. Secret, and so is its length.

        Args:
            step: from 0 to `mechanism.steps` − 1, in any order.

        Returns:
            int64[b], sorted and distinct, with b ~ Binomial(N, q).

        Raises:
            ValueError: `step` is outside the run. A step past the horizon has not been
                accounted for, and there is no batch for it. Also where JAX traces the
                call: the compiled program would repeat one batch.
        """
        remedy = "draw before, and give the program the rows and their mask"
        validate.not_traced("sampler.indices", remedy)
        remedy = "more steps cost more privacy: plan a mechanism that has them"
        require_step(self.mechanism, step, remedy)
        if self.mechanism.sample_rate == 1:
            return np.arange(self.examples, dtype=np.int64)
        below, rest = divmod(Fraction(self.mechanism.sample_rate) * 2**64, 1)
        drawn = []
        for start in range(0, self.examples, _BLOCK):
            size = min(_BLOCK, self.examples - start)
            words = self._seed.words(size, "sampling", step, start=start)
            joins = words < np.uint64(below)
            for place in np.flatnonzero(words == np.uint64(below)):
                joins[place] = self._joins(step, start + int(place), rest)
            drawn.append(start + np.flatnonzero(joins))
        return np.concatenate(drawn).astype(np.int64, copy=False)

    def batches(self, step: int, physical_batch_size: int) -> Iterator[PhysicalBatch]:
        """Return the batch of a step, packed, see `pack`.

        Raises:
            ValueError: as `indices` and `pack`.
        """
        packed = pack(self.indices(step), physical_batch_size)
        return (self.chosen(step, batch) for batch in packed)

    def chosen(self, step: int, batch: PhysicalBatch) -> PhysicalBatch:
        """Return a physical batch of groups with the examples that each uses.

        Without groups it is returned as it is.
        """
        groups, rows = self.groups, len(batch.mask)
        if groups is None:
            return batch
        mask = np.zeros((rows, groups.examples_per_group), bool)
        indices = np.zeros(mask.shape, np.int32)
        drawn = batch.indices[batch.mask]
        mask[batch.mask], indices[batch.mask] = groups.choose(self._seed, step, drawn)
        return PhysicalBatch(None, mask, indices)

    def _joins(self, step: int, index: int, chance: Fraction) -> bool:
        """Decide with a probability that 64 bits do not hold."""
        bits = self._seed.derive("sampling bits", step, index, size=64)
        return int.from_bytes(bits) < chance * 2**512
