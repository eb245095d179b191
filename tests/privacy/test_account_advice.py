"""Whoever types what an account advises stays within its limit."""

import dataclasses
import re
import shlex

import pytest

from tanager.cli import main
from tanager.privacy import accountant
from tanager.privacy.account import Account, Balance
from tanager.privacy.charges import Charge, together
from tanager.privacy.mechanism import Adjacency, Mechanism
from tanager.privacy.selection import Selection


DELTA = 1.4285668e-05  # six digits of it are more
SPENT = Charge("run", "one", "one", DELTA, (Mechanism(1.0, 9.0, 1),))
EDGE = Mechanism(0.2, 2.10041, 20)
"""Exactly what the limit leaves room for."""


@pytest.fixture
def account(tmp_path, monkeypatch):
    found = Account(tmp_path / "account")
    found.charge(SPENT)
    found.set_limit(together([SPENT, charge(EDGE)], DELTA).epsilon, DELTA)
    monkeypatch.setattr(Balance, "fitting", lambda self, like: EDGE)
    return found


def charge(mechanism):
    return Charge("run", "more", "more", DELTA, (mechanism,))


def shown(text, before):
    return float(text.partition(before)[2].split()[0].strip(";:)"))


def test_what_a_refusal_advises_fits(account):
    alone = accountant.epsilon(EDGE, DELTA)
    with pytest.raises(ValueError) as refused:
        account.require_room(charge(Mechanism(0.2, 1.0, 22)))
    text = str(refused.value)
    account.require_room(charge(Mechanism(0.2, shown(text, "multiplier "), 20)))
    assert 0.999 * alone < shown(text, "fits is ε = ") <= alone
    assert shown(text, "alone at δ = ") == DELTA
    assert f" at δ = {DELTA}: " in text
    most = account.read().limit[0]
    assert 0.999 * most < shown(text, "limit of ε = ") <= most
    command = re.search("`tanager (account limit .*)`", text)
    assert command and main(shlex.split(command[1])) == 0
    assert account.read().limit[1] == DELTA
    account.require_room(charge(Mechanism(0.2, 1.0, 22)))


@pytest.mark.parametrize("selection", [None, Selection(3.0)])
def test_for_more_than_steps_of_one_kind_an_epsilon_is_advised(
    tmp_path, monkeypatch, selection
):
    """No noise multiplier: it would be of one of the two, or of one run of a search."""
    kind = Adjacency.ZERO_OUT if selection else Adjacency.REPLACE_ONE
    more = (Mechanism(1.0, 5.0, 1, kind),) * (selection is None)
    first = Charge("run", "one", "one", DELTA, (Mechanism(1.0, 9.0, 1, kind),))
    steps = (Mechanism(0.2, 1.0, 9, kind), *more)
    account = Account(tmp_path / "account")
    account.charge(first)
    account.set_limit(1.0, DELTA)

    def fitting(self, like):
        assert like.adjacency == kind
        return dataclasses.replace(like, noise_multiplier=9.0)

    monkeypatch.setattr(Balance, "fitting", fitting)
    with pytest.raises(ValueError) as refused:
        account.require_room(Charge("search", "more", "more", DELTA, steps, selection))
    assert "what fits is ε = 0." in str(refused.value)
    assert "noise multiplier" not in str(refused.value)


def test_what_remains_of_a_limit_fits(account, capsys):
    assert main(["account", str(account.path)]) == 0
    text = capsys.readouterr().out
    limit, at = account.read().limit
    remains = limit - account.read().total(at).epsilon
    assert 0.999 * remains < float(text.split(" remains;")[0].split()[-1]) <= remains
    alone = accountant.epsilon(EDGE, DELTA)
    assert 0.999 * alone < shown(text, "whose ε alone is ") <= alone
    assert shown(text, f"limit ε = {shown(text, 'limit ε = '):g} at δ = ") == DELTA
