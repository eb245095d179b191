"""The account: what all runs on one data set spend together.

A run is charged in full, and the charge is on the disk, before its first step. So a run
that was killed or deleted stays charged. A limit refuses a run that would exceed it
before anything is made. The file is like a ledger, see `tanager.privacy.hashed_file`:

    {"account": 2, "hash": "…"}
    {"unit": "example", "hash": "…"}
    {"data": "9f0c…", "hash": "…"}
    {"limit": {"epsilon": 4.0, "delta": 1e-05}, "hash": "…"}
    {"charge": {"what": "run", "name": "runs/one", "mechanisms": […], …}, "hash": "…"}

`data` is a digest of the data set. It is not keyed, so the file is private (mode 0600):
whoever knows all examples except one could test guesses at that one.
"""

import contextlib
import dataclasses
import datetime
import errno
import math
import os
import shlex
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tanager import _validate as validate
from tanager._cache import expanded
from tanager._reading import UnreadableFile, is_count
from tanager._version import __version__
from tanager.privacy import accountant as accountants
from tanager.privacy.charges import WHAT, Charge, Total, common_adjacency, together
from tanager.privacy.hashed_file import Accept, HashedFile, read_lines
from tanager.privacy.mechanism import Mechanism
from tanager.privacy.shown import format_bound, format_epsilon


_VERSION = 2
_MOST_NOISE = 1e5
_ANOTHER = (
    "begin another with --account FILE, and add the runs that you know of: "
    "tanager account add RUN --account FILE"
)


@dataclasses.dataclass
class Balance:
    """What an account says.

    Attributes:
        charges: by id, in the order of their first charge.
        limit: (ε, δ) that all charges together must keep within; None for no limit.
        unit: of privacy of all charges; None while there is none.
        data: digests of the data sets that may be charged.
        accepts_other: whether the next data set is added to these.
        begun: whether anything was written.
    """

    charges: dict[str, Charge] = dataclasses.field(default_factory=dict)
    limit: tuple[float, float] | None = None
    unit: str | None = None
    data: set[str] = dataclasses.field(default_factory=set, repr=False)
    accepts_other: bool = True
    begun: bool = False

    def total(self, delta: float) -> Total:
        """Return what all charges spend together."""
        return together(self.charges.values(), delta)

    def delta(self) -> float | None:
        """Return the δ of the limit, else the smallest of a charge; None without."""
        if self.limit is not None:
            return self.limit[1]
        return min((each.delta for each in self.charges.values()), default=None)

    def holds(self, charge: Charge) -> bool:
        """Return whether a charge was made before, with as many steps."""
        before = self.charges.get(charge.id)
        return before is not None and before.joined(charge) == before

    def with_charge(self, charge: Charge) -> "Balance":
        """Return the balance after a charge."""
        before = self.charges.get(charge.id)
        after = charge if before is None else before.joined(charge)
        return dataclasses.replace(self, charges=self.charges | {charge.id: after})

    def fitting(self, like: Mechanism) -> Mechanism | None:
        """Return `like` with the least noise that the limit leaves room for.

        Its noise multiplier is within a relative 1e-3 of the smallest. None if there is
        no limit, or no noise is enough.
        """
        if self.limit is None:
            return None
        (most, delta), spent = self.limit, [*self.charges.values()]

        def fits(logarithm: float) -> Mechanism | None:
            one = dataclasses.replace(like, noise_multiplier=math.exp(logarithm))
            run = Charge("run", "", "", delta, (one,))
            return one if together([*spent, run], delta).epsilon <= most else None

        low, high = math.log(1e-2), math.log(_MOST_NOISE)
        found = fits(high)
        while found is not None and high - low > 1e-3:
            middle = (low + high) / 2
            if (less := fits(middle)) is None:
                low = middle
            else:
                high, found = middle, less
        return found

    def accept(self, entry: dict[str, Any]) -> None:
        """Take one line of the file; raise an error if it means nothing."""
        if self.begun == ("account" in entry):
            raise ValueError("first line")
        match entry:
            case {"account": version} if version == _VERSION:
                self.begun = True
            case {"unit": str(unit)} if self.unit is None:
                self.unit = unit
            case {"data": None}:
                self.accepts_other = True
            case {"data": str(data)}:
                self.data.add(data)
                self.accepts_other = False
            case {"limit": {"epsilon": epsilon, "delta": delta}}:
                validate.positive(epsilon=epsilon)
                validate.probability(delta=delta)
                self.limit = epsilon, delta
            case {"charge": {"id": str()} as fields}:
                charge = Charge.from_json(fields)
                before = self.charges.get(charge.id)
                if before is not None and before.selection != charge.selection:
                    raise ValueError("selection")
                self.charges = self.with_charge(charge).charges
            case _:
                raise ValueError("kind of line")


@dataclasses.dataclass(frozen=True)
class Account:
    """The account of one data set: a file to which all its runs are charged.

    Processes that charge at once wait for one another, for the moment that it takes.

    Attributes:
        path: of the file; the first charge or limit creates it.
        data: digest of the data set; None lets `tanager.train` compute it. For other
            images made of what `tanager.data.load` returned, give
            ``dataset.origin().hex()``: by it a command knows the data.
        what: one of `WHAT`: what is charged.
        unit: of privacy of what is charged, "example" or "person"; None is that of
            the file, or "example" in a new one.
    """

    path: Path
    data: str | None = dataclasses.field(default=None, repr=False)
    what: str = "run"
    unit: str | None = None

    def __post_init__(self):
        object.__setattr__(self, "path", expanded(self.path))
        validate.one_of(WHAT, what=self.what)

    def read(self) -> Balance:
        """Return what the file says, without changing it; nothing if it is missing.

        Raises:
            ValueError: the file is damaged.
        """
        balance = Balance()
        with self._reachable(), contextlib.suppress(FileNotFoundError):
            read_lines(self.path, self._accept(balance), self._damaged)
        return balance

    def require_room(self, charge: Charge, words: str | None = None) -> None:
        """Refuse what `charge` would refuse, and charge nothing.

        `words` say what it is; None for its kind.

        Raises:
            ValueError: see `charge`; or the file cannot be written.
        """
        self._require(self.read(), charge, words)
        with self._reachable():
            _require_writable(self.path)

    def charge(self, charge: Charge) -> Balance:
        """Charge a run that is about to begin; return the balance, once on the disk.

        A run that was charged before counts once, with the most steps of any charge. A
        ledger, of steps that were made, is charged even beyond the limit.

        Raises:
            ValueError: the account is of other data or of another unit, its limit would
                be exceeded, its file is damaged, or the charge has no ε together with
                the others. Nothing is charged.
        """
        with self._open() as (balance, append):
            self._require(balance, charge)
            if balance.unit is None:
                append({"unit": self.unit or "example"})
            if self.data is not None and self.data not in balance.data:
                append({"data": self.data})
            if not balance.holds(charge):
                now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
                stamped = dataclasses.replace(charge, time=now)
                append({"charge": stamped.to_json()})
            return balance.with_charge(charge)

    def set_limit(self, epsilon: float, delta: float) -> None:
        """Set or change the limit of all charges together, those before included.

        Raises:
            ValueError: a number is out of range, or the file is damaged.
        """
        validate.positive(epsilon=epsilon)
        validate.probability(delta=delta)
        with self._open() as (_, append):
            append({"limit": {"epsilon": float(epsilon), "delta": float(delta)}})

    def accept_other_data(self) -> None:
        """Let the next charge be of other data: the same people may be in them.

        Raises:
            ValueError: there is no such account, or its file is damaged.
        """
        if not self.path.exists():
            rule = "does not exist"
            validate.refuse("account", str(self.path), rule, "the first run creates it")
        with self._open() as (_, append):
            append({"data": None})

    @contextlib.contextmanager
    def _open(self) -> Iterator[tuple[Balance, Callable[[dict[str, Any]], None]]]:
        """Lock the file, created if it is missing; yield its balance and `append`."""
        balance = Balance()

        def append(entry: dict[str, Any]) -> None:
            with self._reachable():
                if not balance.begun:
                    file.append({"account": _VERSION})
                    balance.begun = True
                file.append(entry)

        with self._reachable():
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            file = HashedFile(
                self.path, self._accept(balance), self._damaged, mode=0o600
            )
        with contextlib.closing(file):
            yield balance, append

    @contextlib.contextmanager
    def _reachable(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            validate.refuse(
                "account",
                str(self.path),
                f"cannot be read or written ({error.strerror})",
                "free space on its disk and make it a file that you can read and "
                "write, or name another with --account",
            )

    def _accept(self, balance: Balance) -> Accept:
        """Return what takes the lines of the file, of this version alone."""

        def accept(entry: dict[str, Any]) -> None:
            version = entry.get("account", _VERSION)
            if version != _VERSION and is_count(version) and not balance.begun:
                raise UnreadableFile(
                    f"account {self.path} is of another version of tanager: it is an "
                    f"account of version {version}, and tanager {__version__} reads "
                    f"version {_VERSION}. Use the tanager that wrote it; or {_ANOTHER}"
                )
            balance.accept(entry)

        return accept

    def _damaged(self, line: int) -> str:
        return (
            f"account {self.path}, line {line}, does not follow from the line before "
            "it: the file was changed or damaged, or is not an account. Restore it "
            f"from a copy; or {_ANOTHER}"
        )

    def _require_unit(self, balance: Balance) -> None:
        # Not even a person's run covers an image: without it, the person's clipped
        # gradient can turn round, twice as far as to zero.
        if None not in (balance.unit, self.unit) and balance.unit != self.unit:
            validate.refuse(
                "account",
                str(self.path),
                f"counts what each {balance.unit} spends, and this run's unit of "
                f"privacy is one {self.unit}; the two cannot be added up",
                "protect persons again, with --unit group and --groups, or "
                * (balance.unit == "person")
                + "name another with --account, which leaves out what these runs spent",
            )

    def _require(
        self, balance: Balance, charge: Charge, words: str | None = None
    ) -> None:
        """Refuse a charge of other data or unit, or one that exceeds the limit."""
        self._require_unit(balance)
        other = self.data is not None and self.data not in balance.data
        if other and not balance.accepts_other:
            persons = ", of other groups" if self.unit == "person" else ""
            validate.refuse(
                "account",
                str(self.path),
                f"is of other data{persons}, or the data were changed since, or read "
                "with another --groups, which splits them otherwise",
                "give --groups as before; or, if the same people may be in them, run "
                "`tanager account accept --account "
                f"{shlex.quote(str(self.path))}` and the same command again; else "
                "name another with --account",
            )
        if balance.holds(charge):
            return
        after = balance.with_charge(charge)
        common_adjacency(after.charges.values())
        if balance.limit is None or charge.what == "ledger":
            return
        most, delta = balance.limit
        total = after.total(delta).epsilon
        if total > most:
            spent = balance.total(delta).epsilon
            validate.refuse(
                "account",
                str(self.path),
                f"has a limit of ε = {format_bound(most)} at δ = {delta}: "
                f"{format_epsilon(spent)} is spent, and "
                f"{words or f'this {charge.what}'} would make it "
                f"{format_epsilon(total)}",
                _advice(balance, charge, self._raise_to(total, delta)),
            )

    def _raise_to(self, epsilon: float, delta: float) -> str:
        words = ["tanager", "account", "limit", "--epsilon", format_epsilon(epsilon)]
        words += ["--delta", str(delta), "--account", str(self.path)]
        return f"raise the limit with `{shlex.join(words)}`"


def _require_writable(path: Path) -> None:
    """Raise the `OSError` that writing a file would, and make nothing."""
    while not path.exists() and path != path.parent:
        path = path.parent
    if not os.access(path, os.W_OK):
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))
    disk = shutil.disk_usage(path)
    if disk.total and not disk.free:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _advice(balance: Balance, charge: Charge, raise_it: str) -> str:
    """Return what still fits, like a charge that does not."""
    like, *more = charge.mechanisms
    if not like.noise_multiplier:
        return "a run that is not private never fits: name another with --account"
    if more or charge.selection:
        like = Mechanism(1.0, 1.0, 1, like.adjacency)
    found = balance.fitting(like)
    if found is None:
        return f"no further run fits: {raise_it}"
    alone = accountants.epsilon(found, charge.delta)
    text = f"what fits is ε = {format_bound(alone)} alone at δ = {charge.delta}"
    if like is charge.mechanisms[0]:
        noise = format_epsilon(found.noise_multiplier)
        text += f" (noise multiplier {noise} in as many steps)"
    return f"{text}; or {raise_it}"
