"""Charge a run to the account of its data: once, in full, before its first step."""

import dataclasses
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tanager.parallel import hosts
from tanager.privacy.account import Account
from tanager.privacy.charges import Charge
from tanager.privacy.mechanism import Mechanism
from tanager.privacy.selection import Selection
from tanager.seed import Seed
from tanager.training import fingerprint
from tanager.training.problem import Problem
from tanager.training.run_folder import seed_of


def account_of(problem: Problem, what: str | None = None) -> Account | None:
    """Return a problem's account with its data, its unit, and what is charged.

    `what` is that of the account if it is None. So is the data, if the account has any;
    else it is the `origin` of what `tanager.data.load` returned, as for a command; or
    else the examples, and whose each is.
    """
    account = problem.account
    if account is None:
        return None
    data = account.data
    if data is None:
        source = problem.source()
        if (origin := getattr(source, "origin", None)) is not None:
            data = origin().hex()
        else:
            content = fingerprint.sample(source)
            if problem.groups is not None:
                content += fingerprint.contents(problem.groups.numbers)
            data = hashlib.blake2b(content, digest_size=32).hexdigest()
    return dataclasses.replace(
        account, data=data, what=what or account.what, unit=problem.unit
    )


def require_room(
    account: Account | None,
    mechanisms: Sequence[Mechanism],
    delta: float,
    out: str | Path | None,
    seed: int | None,
    words: str | None = None,
) -> None:
    """Refuse a run that could not be charged, before anything of it is made.

    `out` is its folder, which may hold a part of it, and `seed` a person's number;
    `words` say what it is.
    """

    def check() -> None:
        if account is not None:
            secret = None if out is None else seed_of(out)
            if secret is None:
                secret = Seed.from_os() if seed is None else Seed.from_int(seed)
            spent = charge_of(account, mechanisms, delta, out, secret)
            account.require_room(spent, words)

    hosts.from_chief(check)


def charge(account: Account | None, own: Charge) -> None:
    """Charge a run, unless it was charged before; on several hosts the chief does."""

    def write() -> None:
        if account is not None:
            account.charge(own)

    hosts.from_chief(write)


def total(account: Account | None, own: Charge) -> dict[str, Any] | None:
    """Return what all charges spend together, at the end of a run that is one of them.

    It is charged again if the file was deleted or replaced since, even beyond its
    limit. On several hosts the chief does so.
    """

    def spent() -> dict[str, Any] | None:
        if account is None:
            return None
        made = dataclasses.replace(own, what="ledger")  # whatever the limit
        return account.charge(made).total(own.delta).to_json()

    return hosts.from_chief(spent)


def record(out: str | Path | None, secret: Seed) -> dict[str, Any]:
    """Return what config.json says, so that a run is charged once without its seed."""
    return {"charge": id_of(out, secret), "private": secret.private}


def id_of(out: str | Path | None, secret: Seed) -> str:
    """Return the id of a run's charge: public, and the same whenever it is charged."""
    # Many runs may have a person's seed.
    known = b"" if secret.private else os.fsencode(_name(out))
    return secret.fingerprint(b"account" + known)


def charge_of(
    account: Account | None,
    mechanisms: Sequence[Mechanism],
    delta: float,
    out: str | Path | None,
    secret: Seed,
    selection: Selection | None = None,
) -> Charge:
    """Return what is charged for a run; with a person's seed it is not private."""
    spent = tuple(
        one if secret.private else dataclasses.replace(one, noise_multiplier=0.0)
        for one in mechanisms
    )
    what = "run" if account is None else account.what
    return Charge(what, _name(out), id_of(out, secret), delta, spent, selection)


def _name(out: str | Path | None) -> str:
    return "without a folder" if out is None else str(Path(out).absolute())
