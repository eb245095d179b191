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
from switch import FULL
from tanager.adaptive import AdaptiveClipping
from tanager.audit import canaries
from tanager.audit.replay import Replay, replay
from tanager.clipping import Style
from tanager.privacy.account import Account
from tanager.privacy.mechanism import Mechanism
from tanager.training import step


SEEDS = [1, *(pytest.param(seed, marks=pytest.mark.full) for seed in (2, 3))]
# One of each kind; the replays below find the others.
MOST_AUDITED = {
    bugs.half_the_noise,
    bugs.one_leaf_not_clipped,
    bugs.sampled_at_twice_the_rate,
}
AUDITED = [
    pytest.param(bug.plant, marks=[pytest.mark.full] * (bug.plant not in MOST_AUDITED))
    for bug in BUGS
    if bug.by_audit
]
# The check that finds these finds another bug below as well.
LEFT_OUT = {
    bugs.no_noise,
    bugs.one_leaf_without_noise,
    bugs.noise_of_physical_batches_wrongly_scaled,
    bugs.the_same_noise_in_every_step,
    bugs.one_leaf_not_clipped,
}
# One replay finds both: by different checks.
TOGETHER = [
    (bugs.noise_of_the_step_counter_only, bugs.the_same_noise_in_every_leaf),
    (bugs.sampled_at_twice_the_rate, bugs.the_same_index_twice_in_a_batch),
    (bugs.clipped_to_the_first_norm, bugs.norms_counted_after_clipping),
]


def planted(known, left_out=()):
    """Return cases of bugs that are planted at once: pairs, and each by itself.

    In `make test`, those of pairs and those left out are not planted by themselves.
    """
    by_plant = {bug.plant: bug for bug in known}
    pairs = [pair for pair in TOGETHER if by_plant.keys() >= {*pair}]
    only_in_full = {*left_out}.union(*pairs)
    return [
        pytest.param(
            [by_plant[plant] for plant in plants],
            marks=[pytest.mark.full]
            * (only_in_full >= {*plants} and plants not in pairs),
            id=" and ".join(plant.__name__ for plant in plants),
        )
        for plants in [*pairs, *((plant,) for plant in by_plant)]
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


def require_found(together, replayed):
    """Each bug, by all parts of a replay that it names; in `make test` by the first."""
    wanted = {}
    for bug in together:
        for part in [*bug.found_by][: None if FULL else 1]:
            wanted.setdefault(part, set()).update(bug.found_by[part])
    for part, checks in wanted.items():
        found = getattr(replayed, part)()
        assert checks <= {each.check for each in found if not each.passed}


@pytest.mark.parametrize("together", planted(BUGS, LEFT_OUT))
def test_a_replay_finds_the_bug(problem, monkeypatch, together):
    # What is not random shows in few steps, who is sampled in many.
    options = {}
    if all({*bug.found_by} == {"sampling"} for bug in together):
        options = {"steps": 24, "adaptive": AdaptiveClipping()} | VIEWS
    for bug in together:
        bug.plant(monkeypatch)
        options = VIEWS if bug.plant is bugs.clipped_per_view else options
    require_found(together, Replay(*problem(**options)))


@pytest.mark.parametrize("together", planted(bugs.ADAPTIVE))
def test_a_replay_finds_the_bug_of_adaptive_clipping(problem, monkeypatch, together):
    for bug in together:
        bug.plant(monkeypatch)
    require_found(together, Replay(*problem(adaptive=AdaptiveClipping())))


def test_without_a_bug_a_replay_finds_nothing_and_charges_nothing(problem, tmp_path):
    account = Account(tmp_path / "account")
    spent = {"class_counts": Mechanism(1.0, 5.0, 1), "labels": list}
    options = {"strategy": "bk", "style": "automatic", "account": account}
    *parts, _ = problem(**options, **spent)
    found = replay(*parts, steps=24)
    assert [each for each in found if not each.passed] == []
    assert len(found) == 12
    assert not account.read().charges
    with pytest.raises(ValueError, match=r"steps \(=3\) must be at least 4"):
        replay(*parts, steps=3)


def test_without_a_bug_a_replay_of_all_settings_finds_nothing(problem):
    """What it samples is looked at above: these settings do not reach it."""
    # A count of so little noise shares much of it with the gradients.
    adaptive = {"adaptive": AdaptiveClipping(0.3, 0.5, count_noise=0.8)}
    adaptive |= {"clip_norm": 0.3, "steps": 24}
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


@pytest.mark.full  # of a sampled run, `test_white_box` has one more audit
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("claimed", [{}, WHOLE], ids=["sampled", "whole"])
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
