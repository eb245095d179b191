"""What one run, search or audit spends, and what several of them spend together."""

import dataclasses
import math
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any, Self

import numpy as np

from tanager import _validate as validate
from tanager._text import clean
from tanager.privacy import accountant as accountants
from tanager.privacy.accountant import Accountant
from tanager.privacy.mechanism import Adjacency, Mechanism
from tanager.privacy.selection import PrivateSearch, Selection


WHAT = ("run", "search", "audit", "ledger")
"""What can be charged."""


@dataclasses.dataclass(frozen=True)
class Charge:
    """What one run, search or audit spends, from its first step to its last.

    Attributes:
        what: one of `WHAT`.
        name: of the run, such as its folder.
        id: the same whenever this run is charged again; then it counts once.
        delta: the δ of its own guarantee.
        mechanisms: what it spends; those of the same settings count as one.
        selection: of a private search, whose every run spends the mechanism.
        time: when it was charged, in UTC.

    Raises:
        ValueError: a field is out of range.
    """

    what: str
    name: str
    id: str
    delta: float
    mechanisms: tuple[Mechanism, ...]
    selection: Selection | None = None
    time: str = ""

    def __post_init__(self):
        validate.one_of(WHAT, what=self.what)
        validate.probability(delta=self.delta)
        if not self.mechanisms:
            validate.refuse("mechanisms", (), "must be one or more")
        steps: Counter[Mechanism] = Counter()
        for one in self.mechanisms:
            steps[dataclasses.replace(one, steps=1)] += one.steps
        merged = [dataclasses.replace(one, steps=many) for one, many in steps.items()]
        object.__setattr__(self, "mechanisms", tuple(merged))
        object.__setattr__(self, "name", clean(self.name))
        object.__setattr__(self, "delta", float(self.delta))

    def joined(self, other: "Charge") -> "Charge":
        """Return this charge where `other` is the same run: the most steps count."""
        most: dict[Mechanism, int] = {}
        for one in (*self.mechanisms, *other.mechanisms):
            setting = dataclasses.replace(one, steps=1)
            most[setting] = max(most.get(setting, 0), one.steps)
        merged = [dataclasses.replace(one, steps=many) for one, many in most.items()]
        return dataclasses.replace(self, mechanisms=tuple(merged))

    def to_json(self) -> dict[str, Any]:
        """Return the fields as plain values; the shape of poisson is None."""
        fields = dataclasses.asdict(self)
        if self.selection is not None and math.isinf(self.selection.shape):
            fields["selection"]["shape"] = None
        return fields

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        """Return the charge of what `to_json` returned."""
        for name in ("name", "id", "time"):
            if not isinstance(fields[name], str):
                raise TypeError(name)
        selection = fields["selection"]
        if selection is not None:
            shape = selection["shape"]
            selection = Selection(
                selection["mean"], math.inf if shape is None else shape
            )
        mechanisms = tuple(Mechanism(**each) for each in fields["mechanisms"])
        more: dict[str, Any] = {"mechanisms": mechanisms, "selection": selection}
        return cls(**{**fields, **more})


@dataclasses.dataclass(frozen=True)
class Total:
    """What several charges spend together.

    Attributes:
        epsilon: their ε; infinite if one of them is not private.
        delta: the δ it holds at.
        adjacency: which data sets are neighbours, for all of them.
        accountant: "pld"; or "rdp" if a private search is among them.
    """

    epsilon: float
    delta: float
    adjacency: Adjacency
    accountant: Accountant

    def to_json(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return dataclasses.asdict(self)


def together(charges: Collection[Charge], delta: float) -> Total:
    """Compose charges on the same data, which may depend on one another's results.

    With a private search among them, which only has a Rényi divergence, all are
    composed by RDP: a guarantee, a little above what PLD would give.

    Raises:
        ValueError: δ is out of range, or they have no common adjacency.
    """
    validate.probability(delta=delta)
    adjacency = common_adjacency(charges)
    runs: list[Mechanism] = []
    searches: list[PrivateSearch] = []
    for charge in charges:
        for one in charge.mechanisms:
            one = dataclasses.replace(one, adjacency=adjacency)
            if charge.selection is None:
                runs.append(one)
            else:
                searches.append(PrivateSearch(one, charge.selection))
    if not searches:
        epsilon = accountants.composed_epsilon(runs, delta)
        return Total(epsilon, delta, adjacency, Accountant.PLD)
    orders = accountants.RDP_ORDERS
    spent = [accountants.rdp(one, orders) for one in runs]
    spent += [search.rdp() for search in searches]
    epsilon = accountants.epsilon_from_rdp(orders, np.sum(spent, axis=0), delta)
    return Total(epsilon, delta, adjacency, Accountant.RDP)


def common_adjacency(charges: Collection[Charge]) -> Adjacency:
    """Return the adjacency under which charges are composed.

    DP-SGD is the same algorithm under every adjacency; only its ε differs. So all of
    them have an ε under zero-out and under replace-one. It is replace-one if a run
    protects that, add-or-remove-one if all do, and else zero-out.

    Raises:
        ValueError: a run protects replace-one, under which a private search has no ε.
    """
    kinds = {one.adjacency for charge in charges for one in charge.mechanisms}
    if Adjacency.REPLACE_ONE in kinds:
        if any(charge.selection for charge in charges):
            validate.refuse(
                "adjacency",
                str(Adjacency.REPLACE_ONE),
                "has no ε for a private search, so runs that protect it and a search "
                "have none together",
                "charge one of them to another account",
            )
        return Adjacency.REPLACE_ONE
    return kinds.pop() if len(kinds) == 1 else Adjacency.ZERO_OUT
