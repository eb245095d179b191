"""Membership inference: bounds below the truth, that go on where they were killed."""

import dataclasses
import gc
import json
import math
import weakref
from typing import Any

import bugs
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import integrate, stats

import mutations
from switch import FULL
from tanager.audit import many_models
from tanager.audit.bounds import Estimator
from tanager.audit.many_models import ManyModels
from tanager.audit.membership import Attack, _highest_provable, audit_membership
from tanager.audit.membership_trainer import Records, Setting, total_variation
from tanager.privacy.account import Account
from tanager.training.problem import Problem


FAR = {"far": (np.full(5, 4, np.float32), np.float32(-40))}
ONE = {"steps": (8,), "learning_rates": (0.1,), "clip_norms": (1.0,)}


def loss(params, example):
    x, y = example
    return jnp.sqrt(1 + (jnp.dot(params["w"], x) - y) ** 2)


def with_momentum(learning_rate):
    return optax.sgd(learning_rate, momentum=0.9)


@pytest.fixture(scope="module")
def membership(regression):
    def audit(canaries=FAR, data=regression, **changes):
        options: dict[str, Any] = {"models": 400, "batch_size": 30, "epsilon": 6.0}
        options |= {"confidence": 0.95, "models_at_once": 50, "strategy": "bk"}
        options |= {"seed": 1} | changes
        fields = {field.name for field in dataclasses.fields(Attack)} & options.keys()
        attack = Attack(delta=0.01, **{name: options.pop(name) for name in fields})
        account = options.pop("account", None)
        problem = Problem(loss, {"w": jnp.zeros(5)}, data, account=account)
        return audit_membership(problem, attack, canaries, **options)

    return audit


def test_bounds_are_between_nothing_and_the_claim(membership):
    found = membership(**ONE, models=1000, models_at_once=250)
    assert found.setting == Setting(0.1, 1.0, 8, "far")
    assert found.tried == ()
    assert found.models == 1000
    assert 5.9 < found.claimed_epsilon <= 6
    assert 0.5 < found.epsilon_lower_bound < found.highest_provable
    assert found.epsilon_lower_bound < found.trade_off_bound < found.claimed_epsilon
    assert 0.65 < found.audit.auc < 1
    assert not found.violated


def test_models_are_trained_in_the_style_of_the_attack(membership, monkeypatch):
    def made(self, problem, algorithm, *more):
        raise InterruptedError(algorithm.clipping_style.name)

    monkeypatch.setattr(ManyModels, "__init__", made)
    for options in ({}, {"style": "automatic"}):
        with pytest.raises(InterruptedError, match=options.get("style", "clip")):
            membership(**ONE, **options)


def test_phase_one_finds_the_canary_and_the_setting_that_tell_most(
    membership, regression, monkeypatch, tmp_path
):
    made, alive = ManyModels.__init__, weakref.WeakSet()

    def init(self, *arguments):
        gc.collect()
        assert not alive, "the memory of two programs would be needed at once"
        alive.add(self)
        made(self, *arguments)

    monkeypatch.setattr(ManyModels, "__init__", init)
    explain, told = lambda *given: given[-1]("conv"), []
    monkeypatch.setattr(many_models.tuning, "explain", explain)
    like_the_others = {"like": (regression[0][0], regression[1][0])}
    account = Account(tmp_path / "account")
    found = membership(
        like_the_others | FAR,
        account=account,
        steps=(8,),
        learning_rates=(0.1,),
        clip_norms=(1.0, 1e3),
        models=40,
        sweep_models=400,
        on_models=lambda *seen: told.append(seen),
    )
    counts = [seen[1] for seen in told]
    assert counts == sorted(counts)
    assert counts[-1] == 440
    assert found.setting == Setting(0.1, 1.0, 8, "far")
    assert len(found.tried) == 4
    best, *others = found.tried
    assert best.setting == found.setting
    assert best.models > others[-1].models == 50
    assert best.total_variation > 0.25
    assert sum(each.models for each in found.tried) == 400
    # All models were charged. Whoever gives a seed can compute their noise.
    [charge] = account.read().charges.values()
    spent = dataclasses.replace(
        found.mechanism, noise_multiplier=0.0, steps=8 * (400 + 40)
    )
    assert (charge.what, charge.mechanisms) == ("audit", (spent,))


TWO_PHASES = {**ONE, "steps": (4,), "learning_rates": (0.1, 0.2), "models": 40}
TWO_PHASES |= {"models_at_once": 8, "sweep_models": 32}


@pytest.fixture(scope="module")
def whole(membership):
    """What an audit in two phases found, and in which order it trained and told."""
    order: list[Any] = []
    train = ManyModels.train

    def trained(self, *given):
        order.append("training")
        return train(self, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ManyModels, "train", trained)
        patch.setattr("tanager.audit.membership.guess_update", lambda *_: 2.0)
        found = membership(**TWO_PHASES, on_models=lambda *told: order.append(told))
    return found, order


def test_all_that_takes_long_is_told_before_it_is_begun(whole):
    order = [*whole[1]]
    one = "phase I, round 1 of 1"
    ready, *count, known = order.pop(0)
    assert (ready, *count) == ("getting ready", 0, 72)
    assert known.startswith("about 10 minutes left (first guess: 2 s an update of one")
    assert order[:6] == [
        (one, 0, 72, "compiling"),
        "training",
        *((one, trained, 72, "") for trained in (2, 4, 6, 8)),
    ]
    numbers = [told[1] for told in order if told != "training"]
    assert numbers == sorted(numbers)
    phase, *count, known = order[-1]
    assert (phase, *count) == ("phase II", 72, 72)
    assert known.startswith("ε ≥ ")


@pytest.mark.parametrize("quick", [True, False])
def test_a_guess_is_two_gradients_of_zeros_and_the_drawing(
    regression, monkeypatch, quick
):
    rows = math.ceil(6 + 6 * math.sqrt(5.4) + 1)
    few = [0.0625 if quick else 1.0, 3.0, 2.0]
    lasting = [*few, *[1.5, 4.0, 2.0] * quick, 0.5, 1.0, 0.75]
    seen, times = [], iter([n + more for n, x in enumerate(lasting) for more in (0, x)])

    def watched(params, example):
        jax.debug.callback(lambda x: seen.append(np.asarray(x)), example[0])
        return loss(params, example)

    monkeypatch.setattr(many_models.time, "perf_counter", lambda: next(times))
    monkeypatch.setattr(many_models, "_FEW", 2)
    monkeypatch.setattr(many_models, "_MANY", 5)
    problem = Problem(watched, {"w": jnp.zeros(5)}, regression)
    guess = many_models.guess_update(problem, 0.1, 0)
    assert guess == 2 * (1.5 * rows / 5 if quick else 1.0 * rows / 2) + 0.5
    assert len(seen) == 4 * 2 + 4 * 5 * quick
    assert not np.any(seen)


def test_a_loss_that_fails_is_refused_in_plain_words(regression):
    def pair(params, example):
        return loss(params, example), 0

    problem = Problem(pair, {"w": jnp.zeros(5)}, regression)  # pyrefly: ignore[bad-argument-type]
    attack = Attack(epsilon=6.0, delta=0.01, batch_size=30, **ONE)
    with pytest.raises(ValueError, match="loss"):
        audit_membership(problem, attack, FAR, models=40, seed=1)


LINE = {"phase": 0, "setting": 1, "model": 2, "score": 0.5}


@pytest.mark.parametrize("before", [b"", json.dumps(LINE).encode() + b"\n"])
def test_damaged_lines_are_refused(tmp_path, before):
    path = tmp_path / "scores.jsonl"
    fuzzed = mutations.Fuzz(path.name)
    for text in mutations.of_json(LINE, 400 if FULL else 200):
        path.write_bytes(before + text + b"\n")
        fuzzed(Records, path)
    fuzzed.end()


def test_a_killed_audit_goes_on_and_no_other_does(
    membership, whole, regression, tmp_path, monkeypatch
):
    class Killed(Exception):
        pass

    def killed_after(count):
        left = iter(range(count - 1))

        def kill(*told):
            if next(left, None) is None:
                raise Killed

        with pytest.raises(Killed):
            membership(**options, out=tmp_path, on_models=kill)

    (whole, _), options = whole, TWO_PHASES
    killed_after(10)  # in phase I
    killed_after(25)  # in phase II
    assert '"phase": 1' in (tmp_path / "scores.jsonl").read_text()
    scores = tmp_path / "scores.jsonl"
    before = scores.read_bytes()
    scores.write_bytes(before + b'{"phase": 1, "sett')  # torn by the kill
    told = []
    with monkeypatch.context() as patch:
        patch.setattr(many_models.tuning, "explain", lambda *given: given[-1]("conv"))
        found = membership(**options, out=tmp_path, on_models=lambda *o: told.append(o))
    trained = before.count(b"\n")
    assert trained > 32  # phase II had begun
    assert told[0][:3] == ("getting ready", trained, 72)
    assert told[1] == ("measuring how to clip", trained, 72, "conv")
    assert [seen[1] for seen in told] == sorted(seen[1] for seen in told)
    np.testing.assert_array_equal(found.inside, whole.inside)
    np.testing.assert_array_equal(found.outside, whole.outside)
    assert found.tried == whole.tried
    assert scores.read_bytes().startswith(before)
    lines = [json.loads(line) for line in scores.read_text().splitlines()]
    assert len({(o["phase"], o["setting"], o["model"]) for o in lines}) == len(lines)

    more = membership(**options | {"models": 60}, out=tmp_path)
    np.testing.assert_array_equal(more.inside[:20], whole.inside)

    other = (regression[0] + 1, regression[1])
    for changes, message in (
        ({"epsilon": 5.0}, "epsilon"),
        ({"learning_rates": (0.2,)}, "settings"),
        ({"data": other}, "data"),
        ({"optimizer": with_momentum}, "optimizer"),
        ({"canaries": {"far": (np.ones(5, np.float32), np.float32(0))}}, "data"),
        ({"seed": 2}, "seed"),
    ):
        with pytest.raises(ValueError, match=message):
            membership(**options | changes, out=tmp_path)


def test_the_audit_finds_out_that_there_is_no_noise(membership, monkeypatch):
    bugs.no_noise(monkeypatch)
    found = membership(**ONE, epsilon=0.5, models=1000, models_at_once=250)
    assert found.violated
    assert found.epsilon_lower_bound > found.claimed_epsilon


def test_total_variation_is_that_of_the_fitted_gaussians():
    rng = np.random.default_rng(0)
    for place, spread in ((0.0, 2.0), (1.0, 1.0), (3.0, 0.2), (0.5, 1.0 + 1e-13)):
        one = rng.normal(size=40)
        one = (one - one.mean()) / one.std(ddof=1)
        other = place + spread * one
        expected = integrate.quad(
            lambda x, place=place, spread=spread: (
                abs(stats.norm.pdf(x) - stats.norm.pdf(x, place, spread)) / 2
            ),
            -15,
            15,
            limit=400,
            points=[place],
        )[0]
        assert total_variation(one, other) == pytest.approx(expected, abs=1e-5)
    assert total_variation(np.zeros(5), np.zeros(5)) == 0
    assert total_variation(np.array([0, np.inf]), np.zeros(2)) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"models": 20, "confidence": 0.999}, r"models \(=20\) prove nothing at δ"),
        ({"batch_size": 61}, r"batch_size \(=61\) must be at most the 60 examples"),
        ({"learning_rates": ()}, r"learning_rates \(=\(\)\) must hold at least one"),
        ({"clip_norms": (1.0, -1.0)}, r"clip_norms \(=-1.0\)"),
        ({"steps": (0,)}, r"steps \(=0\) must be at least 1"),
        ({"canaries": {}}, r"canaries \(=\{\}\) must hold at least one"),
        ({"canaries": {"z": np.zeros(5)}}, r"canaries\['z'\].*like an example"),
        ({"confidence": 1.0}, r"confidence \(=1.0\)"),
    ],
)
def test_bad_input_is_refused(membership, options, message):
    with pytest.raises(ValueError, match=message):
        membership(**ONE | options)


def test_how_many_models_it_takes_is_said_and_true(membership):
    with pytest.raises(ValueError, match="takes at least") as refused:
        membership(**ONE, models=20, confidence=0.999)
    needed = int(str(refused.value).rsplit(" ", 1)[1])
    assert _highest_provable(Estimator(0.01, 0.999), needed, 6.0) >= 6
