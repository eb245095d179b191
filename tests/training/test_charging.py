"""A run is charged to the account of its data: in full, once, before its first step."""

import pickle
import shutil

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from PIL import Image

import parts
from tanager import Account, Grouped, Mechanism, Problem
from tanager.audit.black_box import audit_one_run
from tanager.audit.replay import Replay
from tanager.audit.white_box import audit_white_box
from tanager.data import load, subset
from tanager.privacy import accountant
from tanager.privacy.account import Balance
from tanager.seed import Seed
from tanager.training import charging, loop, resume


MECHANISM, DELTA = Mechanism(0.3, 2.0, 4), 1e-3
OPTIMIZER = optax.sgd(0.1)  # one for all runs, so that they share programs


def data(examples=40):
    x = np.random.default_rng(0).normal(size=(examples, 3)).astype(np.float32)
    return x, x.sum(1)


def loss(params, example):
    return (params @ example[0] - example[1]) ** 2


def settings(account, **changes):
    return {
        "loss": loss,
        "params": jnp.zeros(3),
        "data": data(),
        "mechanism": MECHANISM,
        "delta": DELTA,
        "optimizer": OPTIMIZER,
        "physical_batch_size": 8,
        "strategy": "per_example",
        "account": account,
        "progress": False,
    } | changes


def train(account, out=None, **changes):
    return parts.train(**settings(account, **changes), out=out)


@pytest.fixture
def account(tmp_path):
    return Account(tmp_path / "account.jsonl")


def mechanisms(account):
    return [one for each in account.read().charges.values() for one in each.mechanisms]


def check_killed_and_resumed(account, out, monkeypatch):
    """Kill a run between its charge and its first step, resume it, delete it."""

    def killed(self, mechanism, step):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(resume.Position, "charge", killed)
        with pytest.raises(KeyboardInterrupt):
            train(account, out)
    assert mechanisms(account) == [MECHANISM]
    result = train(account, out)
    assert mechanisms(account) == [MECHANISM]
    assert result.summary["account"] == {
        "epsilon": result.epsilon,
        "delta": DELTA,
        "adjacency": "zero-out",
        "accountant": "pld",
    }
    assert "this one included, had spent ε" in (out / "report.html").read_text()
    train(account, out)
    assert mechanisms(account) == [MECHANISM]
    shutil.rmtree(out)
    train(account, out)
    both = [MECHANISM, MECHANISM]
    assert mechanisms(account) == both
    total = account.read().total(DELTA).epsilon
    assert total == accountant.composed_epsilon(both, DELTA)


def test_a_run_is_charged_once_in_full_before_its_first_step(
    account, tmp_path, monkeypatch
):
    check_killed_and_resumed(account, tmp_path / "run", monkeypatch)


def after_the_run(patch):
    charge, hand_over = charging.charge, loop.hand_over
    waiting = []

    def late(*arguments):
        found = hand_over(*arguments)
        charge(*waiting.pop())
        return found

    patch.setattr(charging, "charge", lambda *arguments: waiting.append(arguments))
    patch.setattr(loop, "hand_over", late)


def twice(patch):
    patch.setattr(
        Seed, "fingerprint", lambda self, content: Seed.from_os().secret.hex()[:32]
    )


def never(patch):
    patch.setattr(Balance, "holds", lambda self, charge: True)


def one_step(patch):
    charge_of = charging.charge_of

    def of_a_step(account, mechanisms, *more):
        return charge_of(account, [Mechanism(0.3, 2.0, 1)], *more)

    patch.setattr(charging, "charge_of", of_a_step)


@pytest.mark.parametrize("bug", [after_the_run, twice, never, one_step])
def test_planted_charges(account, tmp_path, monkeypatch, bug):
    with monkeypatch.context() as patch:
        bug(patch)
        with pytest.raises((AssertionError, ValueError)):
            check_killed_and_resumed(account, tmp_path / "run", monkeypatch)


def test_a_run_beyond_the_limit_is_refused_before_anything_is_made(account, tmp_path):
    account.set_limit(accountant.epsilon(MECHANISM, DELTA), DELTA)
    train(account, tmp_path / "one")
    before = account.path.read_bytes()
    with pytest.raises(ValueError, match="has a limit of"):
        train(account, tmp_path / "two")
    assert not (tmp_path / "two").exists()
    assert account.path.read_bytes() == before
    train(account, tmp_path / "one")  # which has been charged


def test_other_data_are_refused_and_a_seed_of_a_person_has_no_noise(account, tmp_path):
    train(account)
    before = account.path.read_bytes()
    with pytest.raises(ValueError, match="is of other data"):
        train(account, tmp_path / "other", data=data(41))
    assert not (tmp_path / "other").exists()
    assert account.path.read_bytes() == before
    train(account, seed=1)
    known = Mechanism(0.3, 0.0, 4)
    assert mechanisms(account) == [MECHANISM, known]
    assert train(account, seed=1).summary["account"]["epsilon"] == np.inf
    train(account, tmp_path / "run", seed=1)  # another run of the same seed
    assert mechanisms(account) == [MECHANISM, known, known]


def check_deleted_while_it_runs(account, tmp_path):
    def delete(line):
        account.path.unlink(missing_ok=True)
        account.set_limit(0.01, DELTA)  # which what was made exceeds

    train(account)
    before = account.path.read_bytes()
    result = train(account, tmp_path / "run", on_metrics=delete)
    assert mechanisms(account) == [MECHANISM]
    assert result.summary["account"]["epsilon"] == result.epsilon
    account.path.write_bytes(before)
    result = train(account, tmp_path / "run")
    assert result.summary["account"]["epsilon"] > result.epsilon


def test_a_total_has_its_own_run_whatever_became_of_the_file(account, tmp_path):
    check_deleted_while_it_runs(account, tmp_path)


def test_planted_a_file_that_is_missing_has_spent_nothing(
    account, tmp_path, monkeypatch
):
    monkeypatch.setattr(
        charging, "total", lambda account, *of: account.read().total(DELTA).to_json()
    )
    with pytest.raises(AssertionError):
        check_deleted_while_it_runs(account, tmp_path)


@pytest.mark.parametrize("options", [{}, {"train_examples": 5}, {"stream": True}])
def test_what_load_returned_is_the_data_that_commands_charge(tmp_path, options):
    for name in ("a/1", "a/2", "a/3", "b/1", "b/2", "b/3", "b/4", "b/5"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        Image.new("L", (4, 4)).save(tmp_path / f"{name}.png")
    sets = [load("folder", tmp_path, image_size=4, **options)]
    sets += [load("digits")] if not options else []
    for found in sets:
        assert found.origin is not None
        account = Account(tmp_path / "account", found.origin().hex())
        owners = np.arange(len(found.train))
        some = subset(found.train, [0, 1])
        unpickled = pickle.loads(pickle.dumps(found.train))
        for data in (found.train, Grouped(found.train, owners), some, unpickled):
            problem = Problem(loss, None, data, account=Account(account.path))
            charged = charging.account_of(problem)
            assert charged is not None and charged.data == account.data
        other = {"image": np.zeros((2, 4, 4, 1))}
        problem = Problem(loss, None, other, account=Account(account.path))
        charged = charging.account_of(problem)
        assert charged is not None and charged.data != account.data


def test_an_account_of_persons_knows_whose_each_example_is(account):
    """Charged as of the same persons, runs with other persons cannot be added up."""

    def charged(owners):
        grouped = Grouped({"x": np.zeros((6, 2), np.float32)}, owners)
        found = charging.account_of(Problem(loss, None, grouped, account=account))
        assert found is not None and found.unit == "person"
        return found.data

    assert charged([0, 0, 1, 1, 2, 2]) == charged(["a", "a", "b", "b", "c", "c"])
    assert charged([0, 0, 1, 1, 2, 2]) != charged([0, 1, 2, 3, 4, 5])


def test_what_fails_before_the_first_step_is_not_charged(account):
    with pytest.raises(ValueError, match="evaluate fails before the next step"):
        train(account, evaluate=lambda model: 1 / 0)
    assert not account.path.exists()


def test_audits_charge_the_steps_that_they_make_and_no_replay(account):
    white = settings(account, mechanism=Mechanism(0.3, 1.0, 6))
    problem, algorithm, runtime, _ = parts.parts(white)
    audit_white_box(problem, algorithm, runtime, canaries=20, steps=2)
    assert mechanisms(account) == [Mechanism(0.3, 1.0, 2)]
    audit_one_run(problem, algorithm, data(20), runtime, guessed=1.0)
    assert mechanisms(account) == [Mechanism(0.3, 1.0, 2), Mechanism(0.3, 1.0, 6)]
    assert {each.what for each in account.read().charges.values()} == {"audit"}
    train(account)  # of the same data, though audits add canaries
    before = account.path.read_bytes()
    assert all(each.passed for each in Replay(problem, algorithm, runtime, 4).sums())
    assert account.path.read_bytes() == before
