"""Privacy bugs, each switched on for one test: the audit or a replay must find it.

The audit, at a confidence of 95 %, claims a violation without cause in at most 5 of 100
runs; with a bug it does so at every seed tried here. The checks of a replay fail
without cause in one of 10⁶ at the most, those of sums and of parameters never.
"""

import bugs
import jax
import jax.numpy as jnp
import pytest
from bugs import BUGS

from parts import parts
from tanager.adaptive import AdaptiveClipping
from tanager.audit import canaries
from tanager.audit.replay import Replay, replay
from tanager.clipping import Style
from tanager.privacy.mechanism import Mechanism
from tanager.training import step


SEEDS = [1, *(pytest.param(seed, marks=pytest.mark.full) for seed in (2, 3))]
# Of two bugs of a kind, each of which a replay finds, the audit looks for one.
NOT_AUDITED = {
    bugs.no_noise,
    bugs.noise_of_physical_batches_wrongly_scaled,
    bugs.clipped_after_averaging,
    bugs.clipped_to_twice_the_norm,
}
AUDITED = [
    pytest.param(bug.plant, marks=[pytest.mark.full] * (bug.plant in NOT_AUDITED))
    for bug in BUGS
    if bug.by_audit
]
# Audits find these; what finds them in a replay finds another bug below as well.
NOT_REPLAYED = {bugs.no_noise, bugs.half_the_noise, bugs.one_leaf_without_noise}
# One replay finds both: the checks are of different things.
TOGETHER = [bugs.noise_of_the_step_counter_only, bugs.the_same_noise_in_every_leaf]
REPLAYED = [
    pytest.param(
        bug,
        marks=[pytest.mark.full] * (bug.plant in {*NOT_REPLAYED, *TOGETHER}),
        id=bug.plant.__name__,
    )
    for bug in BUGS
]
MECHANISM = Mechanism(0.2, 0.8, 60)
# Of whole batches, whose trade-off curve has a closed form.
WHOLE = {"mechanism": Mechanism(1.0, 2.0, 4), "physical_batch_size": 128}


def loss(params, example):
    x, y = example
    return (jnp.dot(params["w"], x) + params["b"] - y) ** 2


@pytest.fixture(scope="module")
def problem(regression):
    """Return problem, algorithm, runtime and number of steps of least squares."""

    def made(**options):
        quick = {"strategy": "per_example", "steps": 8, "physical_batch_size": 8}
        # A bias of many parts: few steps draw as much noise as many of a small model.
        params = {"w": jnp.zeros(5), "b": jnp.zeros(60)}

        def with_two(params, example):
            return loss({"w": params["w"], "b": params["b"].sum()}, example)

        own = {"loss": with_two, "params": params, "data": regression}
        *made, rest = parts({"mechanism": MECHANISM} | own | quick | options)
        return *made, rest["steps"]

    return made


def shaken(key, example):
    return example[0] + jax.random.normal(key, (5,)), example[1]


VIEWS = {"augment": shaken, "augmentation_multiplicity": 3}


def require_found(bug, replayed):
    for part, checks in bug.found_by.items():
        assert checks <= {
            each.check for each in getattr(replayed, part)() if not each.passed
        }


@pytest.mark.parametrize("bug", REPLAYED)
def test_a_replay_finds_the_bug(problem, monkeypatch, bug):
    # What is not random shows in few steps, who is sampled in many.
    steps = 24 if bug.found_by.keys() == {"sampling"} else 8
    views = VIEWS if bug.plant is bugs.clipped_per_view else {}
    bug.plant(monkeypatch)
    require_found(bug, Replay(*problem(steps=steps, **views)))


def test_a_replay_finds_two_bugs_of_the_noise(problem, monkeypatch):
    replayed = Replay(*problem())
    for bug in TOGETHER:
        bug(monkeypatch)
    failed = {each.check for each in replayed.noise() if not each.passed}
    both = {"noise is of the run's secret", "noise of no leaf is another's"}
    assert failed >= both and "noise is new in every step" not in failed


@pytest.mark.parametrize("bug", bugs.ADAPTIVE, ids=lambda bug: bug.plant.__name__)
def test_a_replay_finds_the_bug_of_adaptive_clipping(problem, monkeypatch, bug):
    bug.plant(monkeypatch)
    require_found(bug, Replay(*problem(adaptive=AdaptiveClipping())))


def test_without_a_bug_a_replay_finds_nothing(problem):
    *parts, _ = problem(strategy="bk", style="automatic")
    found = replay(*parts, steps=24)
    assert [each for each in found if not each.passed] == []
    assert len(found) == 12


def test_without_a_bug_a_replay_of_all_settings_finds_nothing(problem):
    """What it samples is looked at above: these settings do not reach it."""
    adaptive = {"adaptive": AdaptiveClipping(0.3, 0.5), "clip_norm": 0.3}
    part = {"trainable": {"w": False, "b": True}}
    part |= {"params": {"w": jnp.ones(5), "b": jnp.zeros(60)}}
    options = {"strategy": "auto", "physical_batch_size": 64} | adaptive | VIEWS
    replayed = Replay(*problem(**options, **part))
    found = [*replayed.sums(), *replayed.noise(), *replayed.after()]
    assert [each for each in found if not each.passed] == []
    assert len(found) == 9


def test_a_replay_finds_another_style_than_is_declared(problem, monkeypatch):
    right = step.clipped_grad
    monkeypatch.setattr(
        step, "clipped_grad", lambda *args, style, **rest: right(*args, **rest)
    )
    found = Replay(*problem(style=Style("automatic", gamma=0.5)))
    assert not all(each.passed for each in found.sums())


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("bug", AUDITED)
def test_the_audit_finds_the_bug_out(white_box, monkeypatch, bug, seed):
    bug(monkeypatch)
    claimed = {} if bug is bugs.sampled_at_twice_the_rate else WHOLE
    found = white_box(seed=seed, **claimed)
    assert found.violated, found.audit


@pytest.fixture(scope="module")
def whole(white_box):
    return white_box(**WHOLE)


def test_without_a_bug_nothing_is_found_in_whole_batches(whole):
    assert not whole.violated
    assert jnp.isfinite(whole.epsilon_lower_bound)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "claimed",
    [{}, pytest.param(WHOLE, marks=pytest.mark.full)],
    ids=["sampled", "whole"],
)
def test_without_a_bug_nothing_is_found(white_box, seed, claimed):
    found = white_box(seed=seed, **claimed)
    assert not found.violated
    assert jnp.isfinite(found.epsilon_lower_bound)


def test_adaptive_clipping_keeps_the_claim(white_box, monkeypatch):
    options = WHOLE | {"adaptive": AdaptiveClipping()}
    assert not white_box(**options).violated
    bugs.half_the_noise(monkeypatch)
    assert white_box(**options).violated


def test_canaries_count_in_full_in_automatic_style(white_box, whole):
    found = white_box(style=Style("automatic", gamma=10.0), **WHOLE)  # far above C
    assert found.epsilon_lower_bound > 0.95 * whole.epsilon_lower_bound > 0


def test_more_noise_than_claimed_is_no_violation(white_box, monkeypatch):
    with monkeypatch.context() as patch:
        bugs.times_the_noise(patch, 4)
        found = white_box(**WHOLE)
    assert not found.violated
    assert found.epsilon_lower_bound < found.claimed_epsilon / 4


@pytest.mark.parametrize("how", ["not trained", "no gradient"])
def test_canaries_on_a_frozen_leaf_are_noticed(white_box, monkeypatch, how):
    """Such an audit would find nothing, whatever the bug."""
    frozen = canaries.Canaries({"w": True, "b": True}, how == "no gradient")
    right = canaries.with_canaries

    def without_gradient(*arguments):
        loss = right(*arguments)
        return lambda params, example: loss(
            params._replace(scores=jax.lax.stop_gradient(params.scores)), example
        )

    monkeypatch.setattr("tanager.audit.white_box.trained_with", lambda *_: frozen)
    if how == "no gradient":
        monkeypatch.setattr("tanager.audit.white_box.with_canaries", without_gradient)
    with pytest.raises(RuntimeError, match="no canary shows in the updates"):
        white_box(**WHOLE)
