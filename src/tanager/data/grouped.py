"""Examples with their owners, for a guarantee that protects persons."""

import dataclasses
import functools
from typing import Any

from tanager import _validate as validate
from tanager.data.source import Source, as_source
from tanager.groups import Groups


@dataclasses.dataclass(frozen=True, eq=False)
class Grouped:
    """Say which person each example belongs to, to protect whole persons.

    Given to `tanager.Problem` as its data: persons are sampled, and the guarantee is
    for all examples of a person together; N is the number of persons. See
    `tanager.groups`.

    Attributes:
        data: the examples, as `tanager.Problem` takes them.
        owners: [n] whole numbers or texts: the owner of each example.
        examples_per_group: k, how many examples of a person a step uses at most; chosen
            without looking at the data, because it is public. A step computes on up to
            k times as many examples as it samples persons.

    Raises:
        ValueError: there is not one owner for each example, or k is below 1.
    """

    data: Any = dataclasses.field(repr=False)
    owners: Any = dataclasses.field(repr=False)
    examples_per_group: int = 4

    def __post_init__(self):
        examples, owners = len(self.source), len(self.groups.numbers)
        if examples != owners:
            rule = f"must be one for each of the {examples} examples"
            validate.refuse("owners", owners, rule)

    @functools.cached_property
    def source(self) -> Source:
        """The examples with random access."""
        return as_source(self.data)

    @functools.cached_property
    def groups(self) -> Groups:
        """The examples of each person."""
        return Groups(self.owners, self.examples_per_group)
