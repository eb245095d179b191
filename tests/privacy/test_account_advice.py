"""What an account advises, typed as it is shown, keeps within the limit."""

import re
import shlex

import pytest

from tanager.cli import main
from tanager.privacy import accountant
from tanager.privacy.account import Account, Balance
from tanager.privacy.charges import Charge, together
from tanager.privacy.mechanism import Mechanism


DELTA = 1.4285668e-05  # six digits of it are more
SPENT = Charge("run", "one", "one", DELTA, (Mechanism(1.0, 9.0, 1),))
EDGE = Mechanism(0.2, 2.10061, 20)
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
    command = re.search("`tanager (account limit .*)`", text)
    assert command and main(shlex.split(command[1])) == 0
    assert account.read().limit[1] == DELTA
    account.require_room(charge(Mechanism(0.2, 1.0, 22)))


def test_what_remains_of_a_limit_fits(account, capsys):
    assert main(["account", str(account.path)]) == 0
    text = capsys.readouterr().out
    limit, at = account.read().limit
    remains = limit - account.read().total(at).epsilon
    assert 0.999 * remains < float(text.split(" remains;")[0].split()[-1]) <= remains
    alone = accountant.epsilon(EDGE, DELTA)
    assert 0.999 * alone < shown(text, "whose ε alone is ") <= alone
    assert shown(text, f"limit ε = {shown(text, 'limit ε = '):g} at δ = ") == DELTA
