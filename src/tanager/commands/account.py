"""`tanager account`: what all runs on the same data spent together."""

import abc
import dataclasses
import shlex
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro
from tyro.conf import Positional

from tanager import _validate as validate
from tanager._cache import expanded
from tanager._terminal import new_console
from tanager._text import clean
from tanager.commands import flags
from tanager.commands.spent import recorded, spent_by
from tanager.commands.tables import new_table, print_json, print_table
from tanager.privacy import accountant
from tanager.privacy.account import Account, Balance
from tanager.privacy.charges import together
from tanager.privacy.mechanism import Mechanism
from tanager.privacy.shown import format_bound, format_delta, format_epsilon
from tanager.recipes.accounts import NONE, default_path


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Named(abc.ABC):
    """An account, by its file or by its data."""

    account: str | None = None
    """File of the account. Default: the account of the data."""

    data: str | None = None
    """Folder or file with the data; not needed for digits."""

    dataset: str = "digits"
    """Name of the data set, without --data."""

    json: flags.Json = False

    def named(self) -> Account:
        """Return the account; refuse data that are not there and have none."""
        given = {
            name: getattr(self, name, None) for name in ("file", "account", "data")
        }
        given["dataset"] = None if self.dataset == "digits" else self.dataset
        first, *others = [name for name, value in given.items() if value] or [""]
        if others:
            rule = f"names the account, so --{others[0]} must be left out"
            validate.refuse(first, given[first], rule)
        if self.account == NONE:
            rule = "means no account"
            validate.refuse("account", NONE, rule, "give a file, or leave it out")
        if self.account is not None:
            return Account(Path(self.account))
        if self.data is None and self.dataset != "digits":
            rule = "is not brought by tanager, so its account is unknown"
            remedy = "name its folder with --data, or the account with --account"
            validate.refuse("dataset", self.dataset, rule, remedy)
        path = default_path(self.dataset, self.data)
        there = self.data is None or expanded(self.data).exists()
        if not there and not path.exists():
            remedy = "name the folder of the data, or the account with --account"
            validate.refuse("data", self.data, "does not exist", remedy)
        return Account(path)

    def existing(self) -> Account:
        """Return the account; refuse one that is not there."""
        found = self.named()
        if not found.path.exists():
            rule = "does not exist: no run was charged to it"
            remedy = "name its data with --data, or its file with --account"
            if self.data is not None:
                rule += " yet"
                remedy = f"`tanager account limit --data {shlex.quote(self.data)} "
                remedy += "--epsilon E --delta D` sets a limit"
            validate.refuse("account", str(found.path), rule, remedy)
        return found

    @abc.abstractmethod
    def apply(self) -> float | None:
        """Do what the command is for, and return the δ to show totals at, if any."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Show(_Named):
    """Show what all runs on the same data spent together, and what remains.

    `tanager account limit` sets a limit that no run may exceed; `add` charges runs that
    were made without the account; `accept` continues after the data were changed.
    """

    file: Positional[Annotated[str | None, tyro.conf.arg(metavar="[FILE]")]] = None
    """File of the account, in place of --account and --data."""

    delta: float | None = None
    """δ of the guarantee. Default: the limit's, or the smallest of a run."""

    def named(self) -> Account:
        named = super().named()
        return named if self.file is None else Account(Path(self.file))

    def apply(self) -> float | None:
        self.existing()
        return self.delta


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limit(_Named):
    """Set or change the limit for all runs on the data together."""

    epsilon: float
    """Largest ε of all runs together, earlier ones included."""

    delta: float
    """δ of that ε: give the δ of your runs."""

    def apply(self) -> float | None:
        self.named().set_limit(self.epsilon, self.delta)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Add(_Named):
    """Charge runs that were made without the account, from their ledgers.

    A run that was charged before is charged once. An unfinished run is charged in full,
    and one whose result.json differs from its ledger and config.json is refused.
    Give runs on the data of this account only: a ledger does not name its data.
    """

    runs: Positional[Annotated[tuple[str, ...], tyro.conf.arg(metavar="RUN")]]
    """Folders of runs or private searches, or ledgers."""

    delta: float | None = None
    """δ of a ledger without a config.json beside it. Default: 1e-5."""

    unit: Annotated[str | None, tyro.conf.arg(metavar="{example,person}")] = None
    """Unit of privacy of a ledger without a config.json beside it."""

    def apply(self) -> float | None:
        if self.unit is not None:
            validate.one_of(("example", "person"), unit=self.unit)
        if self.delta is not None:
            validate.probability(delta=self.delta)
        account, runs = self.named(), [*map(Path, self.runs)]
        delta = 1e-5 if self.delta is None else self.delta
        found = [spent_by(account, each, delta, self.unit) for each in runs]
        for name in set.intersection(*map(recorded, runs)):
            if (value := getattr(self, name)) is not None:
                rule = "does not apply to runs whose config.json says it"
                validate.refuse(name, value, rule, "leave it out")
        for each, charge in found:
            each.require_room(charge)
        for each, charge in found:
            each.charge(charge)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Accept(_Named):
    """Continue an account after its data were changed, such as by new images.

    The next run may use data that differ from earlier runs; it is charged as they were.
    """

    def apply(self) -> float | None:
        self.existing().accept_other_data()


def run(arguments: Sequence[str]) -> int:
    words = list(arguments)
    kinds = {"limit": Limit, "add": Add, "accept": Accept}
    if words[:1] and words[0] in kinds:
        options = flags.read(kinds[words[0]], f"account {words[0]}", words[1:])
    else:
        options = flags.read(Show, "account", words)
    delta = options.apply()
    account, balance = options.named(), options.named().read()
    if delta is None:
        delta = balance.delta() or 1e-5
    least = min((each.delta for each in balance.charges.values()), default=delta)
    if delta > least:
        warnings.warn(
            f"delta ({delta:g}) is above that of a charge ({least:g}): a larger δ "
            f"makes ε look smaller, and protects nobody better; use {least:g}",
            stacklevel=1,
        )
    with new_console(stderr=True).status("computing ε"):
        content = _content(account, balance, delta)
    if options.json:
        return print_json(content)
    _print(content)
    return 0


def _content(account: Account, balance: Balance, delta: float) -> dict[str, Any]:
    total = balance.total(delta)
    content = {
        "account": str(account.path),
        "unit": balance.unit,
        **total.to_json(),
        "limit": None,
        "charges": [
            {**charge.to_json(), "epsilon": together([charge], delta).epsilon}
            for charge in balance.charges.values()
        ],
    }
    if balance.limit is not None:
        most, at = balance.limit
        spent = balance.total(at)
        fits = balance.fitting(Mechanism(1.0, 1.0, 1, spent.adjacency))
        content["limit"] = {
            "epsilon": most,
            "delta": at,
            "remaining": max(most - spent.epsilon, 0.0),
            "fits": 0.0 if fits is None else accountant.epsilon(fits, at),
        }
    return content


def _print(content: dict[str, Any]) -> None:
    console = new_console(markup=False)
    headings = ("charged (UTC)", "what", "q", "σ", "steps", "ε alone", "name")
    table = new_table(*headings, texts=("what", "name"))
    for charge in content["charges"]:
        what, name = charge["what"], charge["name"]
        if found := charge["selection"]:
            what = f"search of about {found['mean']:g} private runs"
        when = charge["time"][:16].replace("T", " ")
        first = (when, what, format_epsilon(charge["epsilon"]), name)
        for one in charge["mechanisms"]:
            time, what, alone, name = first
            q, sigma = (
                f"{one[key]:.6g}" for key in ("sample_rate", "noise_multiplier")
            )
            table.add_row(time, what, q, sigma, f"{one['steps']}", alone, name)
            first = ("",) * 4
    print_table(table)
    unit = f", for each {content['unit']}" if content["unit"] else ""
    console.print(
        f"together ε = {format_epsilon(content['epsilon'])} at δ = "
        f"{format_delta(content['delta'])} ({content['adjacency']}, "
        f"{content['accountant'].upper()}){unit}"
    )
    limit = content["limit"]
    if limit is None:
        console.print("no limit: `tanager account limit` sets one")
    else:
        console.print(
            f"limit ε = {format_bound(limit['epsilon'])} at δ = {limit['delta']}: "
            f"{format_bound(limit['remaining'])} remains; a further run fits whose ε "
            f"alone is {format_bound(limit['fits'])}"
        )
    console.print(f"account: {clean(content['account'])}", soft_wrap=True)
