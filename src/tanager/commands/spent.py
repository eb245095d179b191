"""What runs spent that were made without the account, from the files of each."""

import dataclasses
import hashlib
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tanager import _validate as validate
from tanager._record import Maybe, read_record
from tanager.privacy.account import Account
from tanager.privacy.charges import Charge
from tanager.privacy.ledger import Ledger
from tanager.privacy.mechanism import Mechanism
from tanager.privacy.selection import Selection
from tanager.seed import Seed


_MECHANISM = Mechanism.__annotations__ | {"adjacency": str}
_CONFIG = {
    "charge": Maybe(str),
    "private": Maybe(bool),
    "unit": Maybe(str),
    "delta": Maybe(float),
    "mechanism": Maybe(_MECHANISM),
    "class_counts": Maybe(_MECHANISM),
    "recipe": Maybe({"seed": Maybe(int)}),
}
_STUDY = {
    "private": Maybe(bool),
    "selection": Maybe({"mean": float, "shape": Maybe(float)}),
    "mechanism": Maybe(_MECHANISM),
    "delta": Maybe(float),
}


def spent_by(
    account: Account, run: Path, delta: float, unit: str | None = None
) -> tuple[Account, Charge]:
    """Return the charge of a run under the id that training gives it, and its account.

    The account returned is `account` with the run's unit of privacy. `run` is the
    folder of a run or of a private search, or a ledger; `delta` and `unit` are those
    of a ledger without a config.json beside it.

    Raises:
        ValueError: what was spent is unknown, or differs from what result.json claims.
    """
    # JAX is imported from here on: the command line was fine.
    from tanager.training import charging
    from tanager.training.export import check_claims
    from tanager.training.run_folder import seed_of

    if (run / "study.json").exists():
        return _spent_by_search(account, run)
    path = run / "ledger.jsonl" if run.is_dir() else run
    if not path.is_file():
        validate.refuse(
            "runs",
            str(run),
            "has no ledger.jsonl, so what it spent is unknown",
            "give the folder of a run or of a private search; a membership audit can "
            "only be charged when it is made",
        )
    made = Ledger.read(path).mechanisms()
    if not made:
        validate.refuse("runs", str(run), "charges no step in its ledger", "omit it")
    config, private, secret = {}, True, None
    if path.name == "ledger.jsonl":  # else what is beside it may be of another run
        config = _if_there(path.with_name("config.json"), _CONFIG)
        result = _if_there(path.with_name("result.json"), {"private": Maybe(bool)})
        if config and path.with_name("result.json").exists():
            check_claims(path.parent)
        fixed = (config.get("recipe") or {}).get("seed") is not None
        said = (config.get("private"), result.get("private"))
        private = not fixed and False not in said
        secret = seed_of(path.parent)
    if secret is None:
        first = path.read_bytes().partition(b"\n")[0]  # a run that goes on keeps it
        secret = _instead_of_seed(path, first, private)
    unit = config.get("unit") or unit
    if unit is None:  # A person's run does not cover an image, nor the other way round.
        rule = "has no config.json beside it that says its unit of privacy"
        remedy = (
            "give the run's folder; or, if its seed was secret, say --unit example "
        )
        validate.refuse("runs", str(run), rule, f"{remedy}or --unit person")
    account = dataclasses.replace(account, what="ledger", unit=unit)
    more = config.get("delta") or delta, path.parent if run.is_dir() else path, secret
    charge = charging.charge_of(account, made, *more)
    planned = filter(None, map(config.get, ("class_counts", "mechanism")))
    for one in planned:
        whole = Mechanism(**{name: one[name] for name in _MECHANISM})
        charge = charge.joined(charging.charge_of(account, [whole], *more))
    return account, dataclasses.replace(charge, id=config.get("charge") or charge.id)


def _spent_by_search(account: Account, folder: Path) -> tuple[Account, Charge]:
    """Return what a private search spends, however many of its runs were made."""
    from tanager.training import charging
    from tanager.training.export import check_claims
    from tanager.training.run_folder import seed_of

    path = folder / "study.json"
    study = read_record(path, _STUDY)
    if not study["private"] or not study["selection"]:
        rule = "is a search of simulations, which are charged one by one"
        validate.refuse("runs", str(folder), rule, "give the folders of its runs")
    if not study["mechanism"]:
        rule = "is of an older version of tanager, which did not record what runs spend"
        remedy = "add it with the version that made it"
        validate.refuse("runs", str(folder), rule, remedy)
    one = Mechanism(**{name: study["mechanism"][name] for name in _MECHANISM})
    mean, shape = study["selection"]["mean"], study["selection"]["shape"]
    selection = Selection(mean, math.inf if shape is None else shape)
    account = dataclasses.replace(account, what="ledger", unit="example")
    secret = seed_of(folder) or _instead_of_seed(path, path.read_bytes(), private=True)
    delta = study["delta"]
    charge = charging.charge_of(account, [one], delta, folder, secret, selection)
    config = _if_there(folder / "config.json", _CONFIG)
    if config and (folder / "result.json").exists():
        check_claims(folder)
    return account, dataclasses.replace(charge, id=config.get("charge") or charge.id)


def recorded(run: Path) -> set[str]:
    """Return which of `delta` and `unit` the files of a run say."""
    if (run / "study.json").exists():
        return {"delta", "unit"}
    ledger = run / "ledger.jsonl" if run.is_dir() else run
    if ledger.name != "ledger.jsonl":
        return set()
    config = _if_there(ledger.with_name("config.json"), _CONFIG)
    return {name for name in ("delta", "unit") if config.get(name)}


def _if_there(path: Path, shape: Mapping[str, Any]) -> Mapping[str, Any]:
    return read_record(path, shape) if path.exists() else {}


def _instead_of_seed(path: Path, content: bytes, private: bool) -> Seed:
    """Return what gives a file without a seed an id: it, and the place where it is."""
    whole = content + os.fsencode(path.resolve())
    return Seed(hashlib.blake2b(whole, digest_size=32).digest(), private)
