"""The account adds up all runs, keeps its limit, and never claims too little."""

import contextlib
import dataclasses
import errno
import functools
import json
import math
import threading
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from dp_accounting import NeighboringRelation
from dp_accounting.dp_event import RepeatAndSelectDpEvent
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant

import mutations
from forks import Fork
from switch import FULL
from tanager.privacy import account as accounts
from tanager.privacy import accountant, charges, hashed_file
from tanager.privacy.account import Account, Balance
from tanager.privacy.accountant import dp_event
from tanager.privacy.charges import Charge, together
from tanager.privacy.hashed_file import digest_of
from tanager.privacy.mechanism import Adjacency, Mechanism
from tanager.privacy.selection import Selection


THREE = (
    Mechanism(0.1, 2.0, 50),
    Mechanism(0.2, 3.0, 20),
    Mechanism(0.1, 2.0, 30, Adjacency.ADD_OR_REMOVE_ONE),
)
DELTA = 1e-5


def charge(mechanism, id="one", **fields):
    return Charge("run", id, id, DELTA, (mechanism,), **fields)


def charged(path, mechanisms=THREE):
    account = Account(path, "data")
    for number, mechanism in enumerate(mechanisms):
        account.charge(charge(mechanism, f"{number}"))
    return account


### What all of it spent


@functools.cache
def by_dp_accounting():
    theirs = PLDAccountant(NeighboringRelation.ADD_OR_REMOVE_ONE)
    for mechanism in THREE:
        theirs.compose(dp_event(mechanism))
    return theirs.get_epsilon(DELTA)


def check_three_runs(path):
    total = charged(path).read().total(DELTA)
    assert (total.adjacency, total.accountant) == ("zero-out", "pld")
    by_hand = [dataclasses.replace(one, adjacency=Adjacency.ZERO_OUT) for one in THREE]
    assert total.epsilon == accountant.composed_epsilon(by_hand, DELTA)
    assert total.epsilon == pytest.approx(by_dp_accounting(), rel=1e-3)
    alone = [accountant.epsilon(one, DELTA) for one in by_hand]
    assert 1.2 * max(alone) < total.epsilon < 0.8 * sum(alone)


def test_three_runs_spend_what_their_composition_does(tmp_path):
    check_three_runs(tmp_path / "account")


def of_the_largest(mechanisms, delta):
    return max(accountant.epsilon(one, delta) for one in mechanisms)


def of_their_sum(mechanisms, delta):
    return sum(accountant.epsilon(one, delta) for one in mechanisms)


@pytest.mark.parametrize("bug", [of_the_largest, of_their_sum])
def test_planted_no_composition(tmp_path, monkeypatch, bug):
    monkeypatch.setattr(charges.accountants, "composed_epsilon", bug)
    with pytest.raises(AssertionError):
        check_three_runs(tmp_path / "account")


def test_planted_only_the_last_run_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(
        Balance,
        "with_charge",
        lambda self, one: Balance({one.id: one}, unit="example", begun=True),
    )
    with pytest.raises(AssertionError):
        check_three_runs(tmp_path / "account")


def test_all_runs_are_composed_under_what_one_of_them_protects():
    exchanged = Mechanism(0.1, 2.0, 10, Adjacency.REPLACE_ONE)
    found = together([charge(THREE[0]), charge(exchanged)], DELTA)
    assert found.adjacency == "replace-one"
    same = Mechanism(0.1, 2.0, 60, Adjacency.REPLACE_ONE)
    assert found.epsilon == accountant.epsilon(same, DELTA)
    [hidden] = [one for one in THREE if one.adjacency == "add-or-remove-one"]
    assert together([charge(hidden)], DELTA).adjacency == "add-or-remove-one"
    assert together([], DELTA).epsilon == 0


SEARCH = charge(Mechanism(0.1, 4.0, 50), "s", selection=Selection(3.0))


def test_with_a_private_search_all_are_composed_by_rdp():
    found = together([charge(THREE[0]), SEARCH], DELTA)
    assert found.accountant == "rdp"
    theirs = RdpAccountant(accountant.RDP_ORDERS)
    theirs.compose(dp_event(THREE[0]))
    theirs.compose(RepeatAndSelectDpEvent(dp_event(SEARCH.mechanisms[0]), 3.0, 1.0))
    assert found.epsilon == pytest.approx(theirs.get_epsilon(DELTA), rel=1e-9)
    assert found.epsilon > accountant.epsilon(THREE[0], DELTA)
    theirs.compose(RepeatAndSelectDpEvent(dp_event(SEARCH.mechanisms[0]), 3.0, 1.0))
    found = together([charge(THREE[0]), SEARCH, SEARCH], DELTA)
    assert found.epsilon == pytest.approx(theirs.get_epsilon(DELTA), rel=1e-9)
    unprotected = Mechanism(0.1, 0.0, 5)
    bare = charge(unprotected, selection=Selection(3.0))
    for both in ([charge(unprotected), SEARCH], [bare], [charge(THREE[0]), bare]):
        assert together(both, DELTA).epsilon == math.inf


def test_a_search_has_nothing_in_common_with_replace_one(tmp_path):
    account = Account(tmp_path / "account")
    account.charge(SEARCH)
    before = account.path.read_bytes()
    with pytest.raises(
        ValueError, match=r"replace-one.* has no ε for a private search"
    ):
        account.charge(charge(Mechanism(0.1, 2.0, 10, Adjacency.REPLACE_ONE)))
    assert account.path.read_bytes() == before


def test_without_noise_the_total_is_infinite(tmp_path):
    account = charged(tmp_path / "account", [THREE[0], Mechanism(0.1, 0.0, 5)])
    assert account.read().total(DELTA).epsilon == math.inf
    account.set_limit(100.0, DELTA)
    with pytest.raises(ValueError, match=r"∞ is spent.*no further run fits"):
        account.charge(charge(THREE[0], "other"))
    account = Account(tmp_path / "new")
    account.set_limit(100.0, DELTA)
    with pytest.raises(ValueError, match="that is not private never fits"):
        account.charge(charge(Mechanism(0.1, 0.0, 5)))


### One run


def test_a_run_counts_once_with_the_most_steps_of_any_charge(tmp_path):
    account = Account(tmp_path / "account")
    half, whole = Mechanism(0.1, 2.0, 25), Mechanism(0.1, 2.0, 50)
    for mechanism in (half, whole, half, whole):
        account.charge(charge(mechanism))
    [found] = account.read().charges.values()
    assert found.mechanisms == (whole,)
    assert len(account.path.read_text().splitlines()) == 2 + 2
    account.charge(charge(Mechanism(0.2, 2.0, 5)))
    [found] = account.read().charges.values()
    assert found.mechanisms == (whole, Mechanism(0.2, 2.0, 5))
    twice = charge(whole, "two")
    account.charge(twice)
    assert len(account.read().charges) == 2


def test_what_is_no_charge_is_refused():
    with pytest.raises(ValueError, match=r"what .='walk'. must be one of run, search"):
        Charge("walk", "n", "i", DELTA, THREE)
    with pytest.raises(ValueError, match=r"delta .=1. must be strictly between"):
        Charge("run", "n", "i", 1, THREE)
    with pytest.raises(ValueError, match=r"mechanisms .=... must be one or more"):
        Charge("run", "n", "i", DELTA, ())
    both = Charge("run", "a\x1b", "i", DELTA, (THREE[0], Mechanism(0.1, 2.0, 3)))
    assert (both.name, both.mechanisms) == ("a\ufffd", (Mechanism(0.1, 2.0, 53),))
    for search in ((3.0,), (3.0, math.inf), (2e6, 2e6), (1 + 1e-9, 0.0), None):
        selection = None if search is None else Selection(*search)
        one = charge(THREE[0], selection=selection)
        assert Charge.from_json(json.loads(json.dumps(one.to_json()))) == one


### The limit


def test_a_run_that_exceeds_the_limit_is_refused_and_says_what_fits(tmp_path):
    account = charged(tmp_path / "account", THREE[:1])
    account.set_limit(3.0, DELTA)
    account.charge(charge(THREE[1], "fits"))
    before = account.path.read_bytes()
    for attempt in (account.charge, account.require_room):
        with pytest.raises(ValueError) as refused:
            attempt(charge(Mechanism(0.2, 1.0, 20), "too much"))
        assert account.path.read_bytes() == before
    text = str(refused.value)
    spent = accountant.composed_epsilon(THREE[:2], DELTA)
    assert "has a limit of ε = 3 at δ = 1e-05: " in text
    assert accounts.format_epsilon(spent) in text
    noise = float(text.partition("noise multiplier ")[2].partition(" ")[0])
    alone = float(text.partition("fits is ε = ")[2].partition(" ")[0])
    tight = Mechanism(0.2, noise, 20)
    assert alone == pytest.approx(accountant.epsilon(tight, DELTA), rel=2e-3)
    with pytest.raises(ValueError, match="has a limit"):
        account.charge(charge(Mechanism(0.2, 0.99 * noise, 20), "near"))
    account.charge(charge(tight, "tight"))
    # It is charged already; and what was made is charged however much it is.
    account.charge(charge(tight, "tight"))
    account.charge(dataclasses.replace(charge(THREE[0], "made"), what="ledger"))
    with pytest.raises(ValueError, match="no further run fits"):
        account.charge(charge(tight, "more"))
    account.set_limit(30.0, DELTA)
    account.charge(charge(tight, "more"))
    for epsilon, delta in ((-1, DELTA), (math.inf, DELTA), (1.0, 1.0)):
        with pytest.raises(ValueError, match="must be"):
            account.set_limit(epsilon, delta)


def check_at_once(path, monkeypatch):
    """Two charges at the same moment: each alone keeps within the limit, not both."""
    account = Account(path)
    account.set_limit(1.2 * accountant.epsilon(THREE[0], DELTA), DELTA)
    require, both = Account._require, threading.Barrier(2)

    def slowly(self, balance, charge):
        require(self, balance, charge)
        # Where the other one waits for the lock, it never comes.
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(0.5)

    def attempt(id):
        try:
            account.charge(charge(THREE[0], id))
        except ValueError as error:
            refused.append(error)

    refused = []
    monkeypatch.setattr(Account, "_require", slowly)
    threads = [threading.Thread(target=attempt, args=(id,)) for id in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    charged = [line for line in path.read_text().splitlines() if "charge" in line]
    assert (len(charged), len(refused)) == (1, 1)


def test_two_at_once_do_not_exceed_the_limit_together(tmp_path, monkeypatch):
    check_at_once(tmp_path / "account", monkeypatch)


def test_planted_no_lock(tmp_path, monkeypatch):
    monkeypatch.setattr(hashed_file.fcntl, "flock", lambda *of: None)
    monkeypatch.setattr(hashed_file.HashedFile, "_refuse", lambda *of: None)
    with pytest.raises(AssertionError):
        check_at_once(tmp_path / "account", monkeypatch)


def check_replaced(path, monkeypatch, replace):
    """While a charge waits for the lock, another file takes the place of this one."""
    charged(path, THREE[:1])
    other = charged(path.with_name("other"), THREE[:2]).path
    flock = hashed_file.fcntl.flock

    def slowly(file, how):
        monkeypatch.setattr(hashed_file.fcntl, "flock", flock)
        replace(path, other)
        flock(file, how)

    monkeypatch.setattr(hashed_file.fcntl, "flock", slowly)
    Account(path, "data").charge(charge(THREE[2], "new"))
    return [*Account(path).read().charges]


def test_a_charge_is_in_the_file_that_is_there_after_the_wait(tmp_path, monkeypatch):
    path = tmp_path / "account"
    assert check_replaced(
        path, monkeypatch, lambda path, other: other.rename(path)
    ) == [
        "0",
        "1",
        "new",
    ]
    path.unlink()
    gone = check_replaced(path, monkeypatch, lambda path, other: path.unlink())
    assert gone == ["new"]


def test_planted_a_file_that_is_gone_is_charged(tmp_path, monkeypatch):
    monkeypatch.setattr(hashed_file, "_is_at", lambda file, path: True)
    lost = check_replaced(
        tmp_path / "account", monkeypatch, lambda path, other: other.rename(path)
    )
    assert lost == ["0", "1"]


CHARGING = """
import sys
from tanager.privacy.account import Account
from tanager.privacy.charges import Charge
from tanager.privacy.mechanism import Mechanism

for number in range(3):
    one = Charge("run", "", f"{sys.argv[2]} {number}", 1e-5, (Mechanism(0.1, 2.0, 50),))
    try:
        Account(sys.argv[1]).charge(one)
    except ValueError as error:
        print(error)
"""


@pytest.mark.slow
def test_processes_together_keep_within_the_limit(tmp_path):
    account, script = Account(tmp_path / "account"), tmp_path / "script.py"
    account.set_limit(accountant.epsilon(Mechanism(0.1, 2.0, 4 * 50), DELTA), DELTA)
    script.write_text(CHARGING)
    processes = [Fork(script, [account.path, name]) for name in "ab"]
    for process in processes:
        process.wait()
        assert process.code == 0, process.errors
    assert len(account.read().charges) == 4
    assert sum(process.out.count("has a limit") for process in processes) == 2


### The file


def test_without_a_limit_delta_is_the_smallest_of_a_charge():
    assert Balance().delta() is None
    smaller = dataclasses.replace(charge(THREE[1], "two"), delta=DELTA / 10)
    balance = Balance().with_charge(smaller).with_charge(charge(THREE[0]))
    assert balance.delta() == DELTA / 10


def test_reading_changes_nothing_and_needs_no_file(tmp_path):
    account = Account(tmp_path / "none" / "account")
    assert account.read() == Balance()
    account.require_room(charge(THREE[0]))
    assert not (tmp_path / "none").exists()
    account.charge(charge(THREE[0]))
    assert account.path.stat().st_mode & 0o777 == 0o600
    assert account.path.parent.stat().st_mode & 0o777 == 0o700
    with account.path.open("ab") as file:
        file.write(b'{"charge": {"wha')
    before = account.path.read_bytes()
    account.read()
    assert account.path.read_bytes() == before
    account.charge(charge(THREE[1], "two"))  # the torn line is cut
    assert [*account.read().charges] == ["one", "two"]


def alter(line, **changes):
    return json.dumps(json.loads(line) | changes)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda lines: lines[1:],
        lambda lines: lines[:2] + lines[3:],
        lambda lines: [*lines[:2], lines[3], lines[2], *lines[4:]],
        lambda lines: [*lines, lines[-1]],
        lambda lines: [*lines[:-1], alter(lines[-1], charge={"id": "x"})],
        lambda lines: [lines[0], lines[1].replace("example", "person"), *lines[2:]],
    ],
    ids=["first-gone", "line-gone", "swapped", "repeated", "altered", "other-unit"],
)
def test_an_altered_account_is_refused_and_left_alone(tmp_path, spoil):
    account = charged(tmp_path / "account")
    text = "\n".join(spoil(account.path.read_text().splitlines())) + "\n"
    account.path.write_text(text)
    for attempt in (account.read, lambda: account.charge(charge(THREE[0], "more"))):
        with pytest.raises(
            ValueError, match="changed or damaged, or is not an account"
        ):
            attempt()
    assert account.path.read_text() == text


def test_a_last_charge_without_its_line_break_counts(tmp_path):
    account = charged(tmp_path / "account")
    before = account.read()
    account.path.write_bytes(account.path.read_bytes().rstrip())
    assert account.read() == before
    account.charge(charge(THREE[0], "more"))
    assert [*account.read().charges] == [*before.charges, "more"]


@pytest.mark.parametrize("text", ["a note", '{"a": 1}'])
def test_a_file_of_another_program_is_left_as_it_is(tmp_path, text):
    """Without a line break, its one line was taken for a torn one, and cut off."""
    account = Account(tmp_path / "note")
    account.path.write_text(text)
    with pytest.raises(ValueError, match="or is not an account"):
        account.charge(charge(THREE[0]))
    assert account.path.read_text() == text


@pytest.mark.parametrize("version", [1, 3])
def test_an_account_of_another_version_is_named_as_such(tmp_path, version):
    first = {"account": version}
    text = json.dumps(first | {"hash": digest_of("", first)}) + "\n"
    account = Account(tmp_path / "account")
    account.path.write_text(text)
    message = (
        f"of another version of tanager: it is an account of version {version}, an"
    )
    for attempt in (account.read, lambda: account.charge(charge(THREE[0]))):
        with pytest.raises(ValueError, match=message):
            attempt()
    assert account.path.read_text() == text


GOOD = charge(THREE[0]).to_json()


@pytest.mark.parametrize(
    "entry",
    [
        {"account": 1, "unit": "person"},
        {"account": 2},
        {"unit": "person"},
        {"data": 3},
        {"limit": {"epsilon": 0, "delta": DELTA}},
        {"limit": {"epsilon": 4.0, "delta": 2.0}},
        {"charge": GOOD | {"id": 7}},
        {"charge": GOOD | {"mechanisms": []}},
        {"charge": GOOD | {"delta": "1"}},
        {"charge": GOOD | {"more": 1}},
        {"charge": {**GOOD, "mechanisms": [{**GOOD["mechanisms"][0], "steps": -50}]}},
        {"charge": {**GOOD, "selection": {"mean": 0.1, "shape": 1.0}}},
        {"charge": {**GOOD, "id": "0", "selection": {"mean": 2.0, "shape": 1.0}}},
        {"refund": 1},
    ],
    ids=str,
)
def test_a_line_must_mean_something_whatever_its_hash(tmp_path, entry):
    account = charged(tmp_path / "account")
    last = json.loads(account.path.read_text().splitlines()[-1])["hash"]
    with account.path.open("a") as file:
        file.write(json.dumps({**entry, "hash": digest_of(last, entry)}) + "\n")
    with pytest.raises(
        ValueError, match="line 7, does not follow from the line before"
    ):
        account.read()


def test_damaged_accounts(tmp_path):
    account = charged(tmp_path / "account")
    good = account.path.read_bytes()
    fuzzed = mutations.Fuzz(account.path.name)
    for content in mutations.of_bytes(good, 300 if FULL else 100):
        account.path.write_bytes(content)
        fuzzed(lambda path: Account(path).read(), account.path)
    for text in mutations.of_json(
        json.loads(good.splitlines()[-1]), 300 if FULL else 100
    ):
        account.path.write_bytes(text + b"\n" + good)
        fuzzed(lambda path: Account(path).read(), account.path)
    fuzzed.end()


@pytest.mark.parametrize("what", ["Permission denied", "No space left on device"])
def test_a_place_that_cannot_be_written_is_refused_in_time(tmp_path, monkeypatch, what):
    """Not only by the charge, after hours in which features were computed."""
    account = Account(tmp_path / "new/account")
    account.require_room(charge(THREE[0]))
    if what == "Permission denied":
        monkeypatch.setattr(accounts.os, "access", lambda path, mode: path != tmp_path)
    else:
        full = accounts.shutil.disk_usage(tmp_path)._replace(free=0)
        monkeypatch.setattr(accounts.shutil, "disk_usage", lambda path: full)
    with pytest.raises(ValueError, match=f"cannot be read or written .{what}.: free"):
        account.require_room(charge(THREE[0]))
    assert not list(tmp_path.iterdir())


def test_what_is_no_account_is_refused(tmp_path):
    with pytest.raises(
        ValueError, match=r"cannot be read or written .Is a directory.*--account"
    ):
        Account(tmp_path).charge(charge(THREE[0]))
    (tmp_path / "file").write_text("{}\n")
    for path in (tmp_path / "file/account", Path("/proc/none/account")):
        with pytest.raises(ValueError, match="cannot be read or written"):
            Account(path).charge(charge(THREE[0]))
    with pytest.raises(ValueError, match="or is not an account"):
        Account(tmp_path / "file").charge(charge(THREE[0]))
    assert (tmp_path / "file").read_text() == "{}\n"
    with pytest.raises(ValueError, match="does not exist: the first run creates it"):
        Account(tmp_path / "none").accept_other_data()


def check_units(path, unit, other):
    """A limit is of either; the first charge says which, and no other is added."""
    account, wrong = Account(path, unit=unit), Account(path, unit=other)
    Account(path).set_limit(9.0, DELTA)
    wrong.require_room(charge(THREE[0]))
    account.charge(charge(THREE[0]))
    Account(path).set_limit(8.0, DELTA)
    assert Account(path).read().unit == unit
    assert wrong.read().limit == (8.0, DELTA)
    before = path.read_bytes()
    for attempt in (wrong.require_room, wrong.charge):
        with pytest.raises(
            ValueError, match=f"each {unit} spends.* is one {other};"
        ) as refused:
            attempt(charge(THREE[1], "two"))
        remedy = str(refused.value).partition("added up: ")[2]
        assert remedy.startswith("protect" if unit == "person" else "name another")
    assert path.read_bytes() == before
    Account(path).charge(charge(THREE[1], "two"))
    assert Account(path).read().unit == unit


@pytest.mark.parametrize("units", [("person", "example"), ("example", "person")])
def test_an_account_is_of_persons_or_of_examples(tmp_path, units):
    check_units(tmp_path / "account", *units)


def test_planted_units_are_added_up(tmp_path, monkeypatch):
    monkeypatch.setattr(Account, "_require_unit", lambda self, balance: None)
    with pytest.raises(pytest.fail.Exception):
        check_units(tmp_path / "account", "person", "example")


def test_numbers_of_numpy_are_charged(tmp_path):
    rate, noise, mean, shape = map(np.float32, (0.2, 2.0, 3.0, 1.0))
    steps: Any = np.int64(5)
    one = Mechanism(cast(Any, rate), cast(Any, noise), steps)
    search = Selection(cast(Any, mean), cast(Any, shape))
    account = Account(tmp_path / "account")
    account.charge(Charge("search", "", "", np.float64(DELTA), (one,), search))
    [found] = account.read().charges.values()
    assert found.mechanisms == (one,)


@pytest.mark.parametrize("charges", [0, 1])
def test_a_full_disk_is_told_and_charges_nothing(tmp_path, monkeypatch, charges):
    account = charged(tmp_path / "account", THREE[:charges])
    before = account.read()

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(hashed_file.os, "fsync", full)
        with pytest.raises(ValueError, match=r"No space left.*free space.*--account"):
            account.charge(charge(THREE[1], "two"))
    assert account.read() == before
    account.charge(charge(THREE[1], "two"))


### Its data


def test_other_data_are_refused_until_they_are_accepted(tmp_path):
    account = charged(tmp_path / "account")
    before = account.path.read_bytes()
    more = Account(account.path, "data and more")
    for attempt in (more.charge, more.require_room):
        with pytest.raises(ValueError, match=r"is of other data.*account accept"):
            attempt(charge(THREE[0], "more"))
    assert account.path.read_bytes() == before
    account.accept_other_data()
    more.charge(charge(THREE[0], "more"))
    more.charge(charge(THREE[0], "again"))
    account.charge(charge(THREE[0], "as before"))
    assert len(account.read().charges) == 6
    with pytest.raises(ValueError, match="is of other data"):
        Account(account.path, "third").charge(charge(THREE[0], "third"))
