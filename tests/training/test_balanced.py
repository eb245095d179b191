"""Class counts are charged, released once with noise of their own, and used."""

import dataclasses
import json
import shutil
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tanager import DPSGD, Grouped, Problem, Runtime, train
from tanager.privacy import accountant, class_counts
from tanager.privacy.account import Account
from tanager.privacy.class_counts import deviation_of, release_of
from tanager.privacy.ledger import CLASS_COUNTS, Ledger
from tanager.privacy.mechanism import Mechanism
from tanager.seed import Seed
from tanager.training import class_weights, resume
from tanager.training import result as results
from tanager.training.step import Step


N, K, DELTA = 60, 3, 1e-3
RANDOM = np.random.default_rng(0)
LABELS = np.repeat([0, 1, 2], [40, 15, 5]).astype(np.int32)
DATA = {"x": RANDOM.normal(size=(N, 2)).astype(np.float32), "label": LABELS}
OWNERS = np.arange(N) // 2
STEPS = Mechanism(0.5, 2.0, 2)
OPTIMIZER = optax.sgd(1.0)  # one for all runs, so that they share programs
COUNTS = release_of(2.0, DELTA, N, K, "zero-out")


def loss(params, example):
    logits = example["x"] @ params
    return optax.softmax_cross_entropy_with_integer_labels(logits, example["label"])


def run(out, account=None, grouped=False, labels=LABELS, **changes):
    data = Grouped(DATA, OWNERS) if grouped else DATA
    problem = Problem(loss, jnp.zeros((2, K)), data, account=account)
    settings: dict[str, Any] = {"delta": DELTA, "ema_decay": 0.0}
    settings |= {"class_counts": COUNTS} | changes
    return train(
        class_weights.balanced(problem, lambda: labels, K),
        DPSGD(STEPS, OPTIMIZER, **settings),
        Runtime(physical_batch_size=16, strategy="per_example", progress=False),
        out=out,
    )


def check(folder, monkeypatch, grouped=False):
    """Watch a run from its charge to its result, and once more when it is resumed."""
    out, account = folder / "run", Account(folder / "account")
    used, released, derived, before = [], [], [], []
    accumulate, derive = Step.accumulate, Seed.derive
    noisy_counts = class_weights.noisy_counts
    exact = np.array([20, 7.5, 2.5] if grouped else [40, 15, 5])
    quiet = dataclasses.replace(COUNTS, noise_multiplier=0.0)

    def watched(self, *arguments):
        used.append(np.asarray(self._placed.class_weights))
        return accumulate(self, *arguments)

    def counted(*arguments):
        first = Ledger.read(out / "ledger.jsonl")
        assert first.mechanisms() == [COUNTS]
        [charge] = account.read().charges.values()
        assert charge.mechanisms == (COUNTS, STEPS)
        assert json.loads((out / "private/seed.json").read_text())["used"]
        before.append(json.loads((out / "config.json").read_text()))
        assert noisy_counts(quiet, *arguments[1:]) == exact.tolist()
        released.append(noisy_counts(*arguments))
        return released[-1]

    def named(self, purpose, *position, size=32):
        derived.append((purpose, *position))
        return derive(self, purpose, *position, size=size)

    monkeypatch.setattr(Step, "accumulate", watched)
    monkeypatch.setattr(class_weights, "noisy_counts", counted)
    monkeypatch.setattr(Seed, "derive", named)
    result = run(out, account, grouped)
    [found] = released
    config = json.loads((out / "config.json").read_text())
    weights = class_counts.balancing_weights(found, COUNTS, config["examples"])
    record = {"noisy_counts": {"counts": found, "weights": weights}}
    assert config == before[0] | record  # and nothing else is published
    for own in used:
        np.testing.assert_allclose(own, weights)
    # Noise is there, of the right size (false alarm 1e-8), and of a stream of its own.
    assert 0 < np.abs(found - exact).max() < 6.2 * deviation_of(COUNTS)
    streams = [name for name in derived if name[0] in ("noise", "class counts")]
    assert sorted(streams) == [("class counts",), ("noise", 0), ("noise", 1)]
    # Everything that is spent is reported.
    ledger = Ledger.read(out / "ledger.jsonl")
    assert ledger.mechanisms() == [COUNTS, STEPS]
    spent = accountant.composed_epsilon([COUNTS, STEPS], DELTA)
    assert result.epsilon == ledger.epsilon(DELTA) == spent
    assert result.summary["account"]["epsilon"] == spent
    assert result.summary["epsilon_rdp"] == accountant.composed_epsilon(
        [COUNTS, STEPS], DELTA, "rdp"
    )
    lines = (out / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["epsilon"] == spent
    page = (out / "report.html").read_text()
    assert "Class weights are from noisy counts" in page
    # A run that begins its steps again reads what was released.
    shutil.rmtree(out / "checkpoints")
    (out / "result.json").unlink()
    again = run(out, account, grouped)
    assert released == [found]
    assert again.epsilon == spent
    assert again.params.tolist() == result.params.tolist()
    assert account.read().total(DELTA).epsilon == spent


@pytest.mark.parametrize("grouped", [False, True])
def test_counts_are_charged_released_once_and_used(tmp_path, monkeypatch, grouped):
    check(tmp_path, monkeypatch, grouped)


def without_noise(patch):
    draw = class_counts.rounded_normals
    patch.setattr(class_counts, "rounded_normals", lambda *of: 0 * draw(*of))


def not_charged(patch):
    patch.setattr(resume.Position, "charge_class_counts", lambda self, release: None)


def charged_late(patch):
    own, charge = resume.Position.charge_class_counts, resume.Position.charge

    def late(self, *arguments):
        own(self, COUNTS)
        charge(self, *arguments)

    not_charged(patch)
    patch.setattr(resume.Position, "charge", late)


def not_on_the_account(patch):
    patch.setattr(DPSGD, "mechanisms", lambda self: [self.mechanism])


def not_reported(patch):
    patch.setattr(results, "release_in", lambda config: None)


def noise_of_the_first_step(patch):
    words = Seed.words

    def same(self, count, purpose, *position, **start):
        if purpose == "class counts":
            purpose, position = "noise", (0,)
        return words(self, count, purpose, *position, **start)

    patch.setattr(Seed, "words", same)


def drawn_again(patch):
    patch.setattr(class_weights, "recorded", lambda out: {})


def not_used(patch):
    patch.setattr(Step, "with_class_weights", lambda self, weights: self)


@pytest.mark.parametrize(
    "bug",
    [
        without_noise,
        not_charged,
        charged_late,
        not_on_the_account,
        not_reported,
        noise_of_the_first_step,
        drawn_again,
        not_used,
    ],
)
def test_planted_releases(tmp_path, monkeypatch, bug):
    bug(monkeypatch)
    with pytest.raises((AssertionError, ValueError)):
        check(tmp_path, monkeypatch)


def test_killed_before_the_record_it_draws_the_same_counts(tmp_path, monkeypatch):
    found = []
    noisy_counts = class_weights.noisy_counts

    def killed(*arguments):
        found.append(noisy_counts(*arguments))
        if len(found) == 1:
            raise KeyboardInterrupt
        return found[-1]

    monkeypatch.setattr(class_weights, "noisy_counts", killed)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "run")
    assert json.loads((tmp_path / "run/private/seed.json").read_text())["used"]
    run(tmp_path / "run")
    assert len(found) == 2
    assert found[0] == found[1]
    ledger = Ledger.read(tmp_path / "run/ledger.jsonl")
    assert ledger.mechanisms() == [COUNTS, STEPS]


def test_a_ledger_with_other_counts_or_none_is_of_another_run():
    other = Mechanism(1.0, 99.0, 1)
    ledger = Ledger()
    for step in range(2):
        ledger.charge(STEPS, step)
    ledger.require(STEPS, 2)
    with pytest.raises(ValueError, match="does not charge the class counts"):
        ledger.require(STEPS, 2, class_counts=COUNTS)
    ledger.charge(other, 0, CLASS_COUNTS)
    assert (ledger.steps(), ledger.next_step()) == (2, 2)
    for claimed in (COUNTS, None):
        with pytest.raises(ValueError, match="does not charge the class counts"):
            ledger.require(STEPS, 0, class_counts=claimed)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (
            np.repeat(LABELS, 10),
            r"labels \(=600\) must be one for each of the",
        ),
        (LABELS[1:], r"labels \(=59\) must be one for each of the 60 examples"),
        (LABELS + 1, "labels must be from 0 to 2, and one is not"),
    ],
)
@pytest.mark.parametrize("grouped", [False, True])
def test_labels_that_are_not_one_for_each_example_are_refused_before_a_charge(
    tmp_path, labels, message, grouped
):
    account = Account(tmp_path / "account")
    with pytest.raises(ValueError, match=message):
        run(tmp_path / "run", account, grouped, labels=labels)
    assert not (tmp_path / "run").exists()
    assert not account.read().charges


def test_labels_need_a_model_with_weights():
    problem = Problem(loss, jnp.zeros((2, K)), DATA, labels=lambda: LABELS)
    algorithm = DPSGD(STEPS, OPTIMIZER, delta=DELTA, class_counts=COUNTS)
    with pytest.raises(ValueError, match="must be Weighted with labels"):
        train(problem, algorithm)


def test_counts_without_labels_are_refused():
    with pytest.raises(ValueError, match="must be given with the labels"):
        run(None, class_counts=None)
