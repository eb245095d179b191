"""Groups: persons with several examples each, protected as a whole.

A person is sampled like an example. In a step in which a person is sampled, at most k
of their examples are used, chosen again in every step. Their gradient is the mean over
these, clipped once. So a person contributes at most the clipping norm, however many
examples they have, and the accountant's ε is that of a person.
"""

import numbers
from collections.abc import Sequence
from typing import Any, Self

import numpy as np

from tanager import _validate as validate
from tanager.seed import Seed


MOST_EXAMPLES = 4096
"""Largest `examples_per_group`: every row of a physical batch has room for as many."""


class Groups:
    """Which person owns each example: every example has one owner.

    Groups are numbered in the order of their owners. Only their number and
    `examples_per_group` are public; owners are as private as the examples.

    Attributes:
        numbers: int64[n], the group of each example.

    Args:
        owners: [n] whole numbers or texts, one for each example.
        examples_per_group: k, how many examples of a group a step uses at most; public.

    Raises:
        ValueError: there is not one owner for each example, or k is not from 1 to
            `MOST_EXAMPLES`. The message names no owner.
    """

    def __init__(self, owners: Any, examples_per_group: int):
        validate.whole(examples_per_group=examples_per_group, at_least=1)
        if examples_per_group > MOST_EXAMPLES:
            rule = f"must be at most {MOST_EXAMPLES}"
            remedy = "every step reserves memory for this many examples of each person"
            validate.refuse("examples_per_group", examples_per_group, rule, remedy)
        self.examples_per_group = int(examples_per_group)
        _, numbers = np.unique(_checked(owners), return_inverse=True)
        self.numbers = numbers.astype(np.int64)
        self._order = np.argsort(self.numbers, kind="stable")
        self._ends = np.cumsum(np.bincount(self.numbers))

    def __len__(self) -> int:
        return len(self._ends)

    def members(self, group: int) -> np.ndarray:
        """Return the examples of a group, int64[m], in their order."""
        start = self._ends[group - 1] if group else 0
        return self._order[start : self._ends[group]]

    def choose(
        self, seed: Seed, step: int, groups: Sequence[int] | np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Choose examples of groups for a step: all of them, or k drawn uniformly.

        A group's draw depends on the secret, the step and the group's number alone.

        Returns:
            The mask, bool[b, k], False where a group has fewer than k examples; and the
            examples, int32[b, k], of the same group also where the mask is False.
        """
        most = self.examples_per_group
        mask = np.zeros((len(groups), most), bool)
        indices = np.zeros((len(groups), most), np.int32)
        for row, group in enumerate(groups):
            own = self.members(int(group))
            if len(own) > most:
                words = seed.words(len(own), "examples of a group", step, int(group))
                own = own[np.sort(np.argpartition(words, most - 1)[:most])]
            indices[row] = own[0]
            indices[row, : len(own)] = own
            mask[row, : len(own)] = True
        return mask, indices

    def joined(self, groups: int, examples: int = 1) -> Self:
        """Return these groups and more after them, of so many examples each."""
        more = len(self) + np.repeat(np.arange(groups), examples)
        numbers = np.concatenate([self.numbers, more])
        return type(self)(numbers, self.examples_per_group)


def _checked(owners: Any) -> np.ndarray:
    if owners is None:
        remedy = "load the data with groups, such as groups='folder', or a column"
        validate.refuse("owners", None, "must be given to protect persons", remedy)
    try:
        array = np.asarray(owners)
    except ValueError:  # lists of several lengths
        array = np.empty((0, 0))
    if array.ndim != 1 or not len(array):
        validate.refuse(
            "owners",
            f"of shape {list(array.shape)}",
            "must be one row with one owner for each example",
            "an example of several persons cannot be protected for each of them: leave "
            "it out, or name as its owner the group that they form",
        )
    if array.dtype == object and all(isinstance(owner, str) for owner in array):
        array = array.astype(str)
    elif array.dtype.kind in "fO" and all(
        isinstance(owner, numbers.Integral) and not isinstance(owner, bool)
        for owner in owners
    ):
        return np.array([*owners], object)  # NumPy rounds those from 2⁶³ on
    masked = np.ma.is_masked(owners)
    if array.dtype.kind not in "iuU" or masked:
        validate.refuse(
            "owners",
            "masked" if masked else f"of dtype {array.dtype}",
            "must be whole numbers or texts, none of them missing",
            "give an example without an owner an owner of its own",
        )
    return array
