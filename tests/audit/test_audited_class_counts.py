"""Audits of runs that release class counts: they claim more than the steps."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from cases import in_full
from tanager import DPSGD, Problem, Runtime
from tanager.audit.black_box import audit_one_run
from tanager.audit.membership import Attack, audit_membership
from tanager.audit.replay import Replay
from tanager.audit.white_box import audit_white_box
from tanager.privacy import accountant
from tanager.privacy.account import Account
from tanager.privacy.class_counts import release_of
from tanager.privacy.mechanism import Mechanism
from tanager.training import class_weights


N, K, DELTA = 40, 2, 1e-4
RANDOM = np.random.default_rng(0)
LABELS = np.repeat([0, 1], [30, 10]).astype(np.int32)
DATA = {"x": RANDOM.normal(size=(N, 3)).astype(np.float32), "label": LABELS}
CANARIES = {
    "x": RANDOM.normal(size=(60, 3)).astype(np.float32),
    "label": np.ones(60, np.int32),
}
STEPS, COUNTS = Mechanism(1.0, 2.0, 3), release_of(2.0, DELTA, N, K, "zero-out")
ALGORITHM = DPSGD(STEPS, optax.sgd(1.0), delta=DELTA, class_counts=COUNTS)
RUNTIME = Runtime(physical_batch_size=32, strategy="per_example", progress=False)


def loss(params, example):
    logits = example["x"] @ params
    return optax.softmax_cross_entropy_with_integer_labels(logits, example["label"])


def problem(account=None):
    plain = Problem(loss, jnp.zeros((3, K)), DATA, account=account)
    return class_weights.balanced(plain, lambda: LABELS, K)


def one_run(account=None):
    options = {"seed": 1, "guessed": 0.3, "confidence": 0.9}
    return audit_one_run(problem(account), ALGORITHM, CANARIES, RUNTIME, **options)


def white_box(account=None):
    options = {"seed": 1, "canaries": 100, "confidence": 0.9}
    return audit_white_box(problem(account), ALGORITHM, RUNTIME, **options)


def claims_everything(found):
    both = accountant.composed_epsilon([COUNTS, STEPS], DELTA)
    assert both > accountant.epsilon(STEPS, DELTA)
    return found.claimed_epsilon >= both


def test_the_claim_counts_the_class_counts():
    """The bound, which refutes nothing of the claimed noise, is never above it."""
    found = white_box()
    assert claims_everything(found)
    assert found.epsilon_lower_bound <= found.claimed_epsilon
    assert not found.violated


@pytest.mark.parametrize("audit", in_full([one_run, white_box], white_box))
def test_a_claim_of_the_steps_alone_is_found(audit, monkeypatch):
    def steps_alone(algorithm):
        return accountant.epsilon(algorithm.mechanism, algorithm.delta)

    monkeypatch.setattr(DPSGD, "claimed_epsilon", steps_alone)
    assert not claims_everything(audit())


def test_one_run_counts_canaries_and_claims_and_charges_both(tmp_path, monkeypatch):
    counted, noisy_counts = [], class_weights.noisy_counts

    def watched(release, labels, *rest):
        counted.append(labels)
        return noisy_counts(release, labels, *rest)

    monkeypatch.setattr(class_weights, "noisy_counts", watched)
    account = Account(tmp_path / "account")
    found = one_run(account)
    assert claims_everything(found)
    [labels] = counted
    assert len(labels) == N + len(found.inside)
    assert labels[N:].all()
    [charge] = account.read().charges.values()
    # With a person's seed nothing is private, and full batches add up.
    assert sum(each.steps for each in charge.mechanisms) == COUNTS.steps + STEPS.steps


def test_other_audits_release_nothing():
    assert all(each.passed for each in Replay(problem(), ALGORITHM, RUNTIME, 4).sums())
    attack = Attack(epsilon=2.0, delta=DELTA, batch_size=20, confidence=0.5)
    canary = {"x": np.ones(3, np.float32), "label": np.int32(1)}
    with pytest.raises(ValueError, match=r"labels .*no class counts are released"):
        audit_membership(problem(), attack, {"one": canary})
