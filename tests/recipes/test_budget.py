"""Which of σ, T and ε is solved for, from the command line to the mechanism."""

import dataclasses
import re
from types import SimpleNamespace
from typing import Any

import pytest

from tanager import recipes
from tanager.commands import flags
from tanager.privacy import accountant
from tanager.privacy.mechanism import Mechanism
from tanager.recipes import repeats
from tanager.recipes.budget import solve_budget
from tanager.recipes.runner import Prepared


DIGITS = recipes.get("digits").recipe
CIFAR = recipes.get("cifar10-wrn-16-4").recipe
N = 50_000


@dataclasses.dataclass(frozen=True)
class NoOptions:
    pass


def parsed(name, *words):
    _, recipe, _ = flags.parse("train", [name, *words], NoOptions)
    return recipe


@pytest.mark.parametrize(
    ("words", "solved"),
    [
        ("", None),
        ("--epsilon 2", None),
        ("--steps 500", "noise_multiplier"),
        ("--batch_size=1024", "noise_multiplier"),
        ("--steps 500 --epsilon 2", "noise_multiplier"),
        ("--noise-multiplier 1", "epsilon"),
        ("--noise-multiplier 1 --steps 500", "epsilon"),
        ("--noise-multiplier 1 --epsilon 2", "steps"),
        ("--noise-multiplier 1 --epsilon 2 --steps 500", "nothing"),
        ("--noise-multiplier None --steps 500", "noise_multiplier"),
        ("--non-private", None),
        ("--epsilon 7 --batch-size 1024", "noise_multiplier"),
    ],
)
def test_the_command_line_decides_what_is_solved_for(words, solved):
    assert parsed("cifar10-wrn-16-4", *words.split()).solve_for == solved


@pytest.mark.parametrize(
    ("words", "solved"),
    [
        ("--noise-multiplier 1", "epsilon"),
        ("--steps 50", "noise_multiplier"),
        ("--noise-multiplier 4 --epsilon 2", "steps"),
    ],
)
def test_the_number_that_is_solved_for_follows_from_the_others(words, solved):
    recipe = parsed("digits", *words.split())
    one = solve_budget(recipe, 1437)
    if solved == "epsilon":
        other = dataclasses.replace(recipe, epsilon=0.1)
    elif solved == "steps":
        other = dataclasses.replace(recipe, steps=1)
    else:
        other = dataclasses.replace(recipe, noise_multiplier=100.0)
    assert solve_budget(other, 1437) == one


def test_a_typed_batch_size_where_no_noise_can_be_solved_for():
    """The recipe has no ε, so that its σ and T stand and ε follows."""
    recipe = parsed("cifar10-wrn-16-4-tan-5k", "--batch-size", "512")
    assert recipe.solve_for is None
    mechanism = solve_budget(recipe, 5000).mechanism
    assert mechanism == Mechanism(512 / 5000, 3.0, 2500)


def budget_of(name, examples, **fields):
    words = [f"--{field}={value}" for field, value in fields.items()]
    changed = parsed(name, *words)
    budget = solve_budget(changed, examples)
    assert budget.epsilon == accountant.epsilon(budget.mechanism, budget.delta)
    assert budget.mechanism.sample_rate == changed.batch_size / examples
    return budget.mechanism, budget.epsilon


def test_the_recipe_alone_spends_at_most_its_epsilon():
    mechanism, epsilon = budget_of("digits", 1437)
    assert mechanism.steps == DIGITS.steps
    assert 0.99 * 3 < epsilon <= 3


def test_published_noise_and_steps_are_those_of_the_published_n():
    mechanism, epsilon = budget_of("cifar10-wrn-16-4", 45_000)
    assert mechanism == Mechanism(4096 / 45_000, 3.0, 2468)
    assert 7.3 < epsilon < 7.5  # by RDP: 8
    for fields in ({}, {"steps": 2468}, {"epsilon": 8.0}):
        mechanism, epsilon = budget_of("cifar10-wrn-16-4", N, **fields)
        assert (mechanism.sample_rate, mechanism.steps) == (4096 / N, 2468)
        assert 2.5 < mechanism.noise_multiplier < 2.6
        assert epsilon == pytest.approx(8, rel=1e-3)
    mechanism, epsilon = budget_of("cifar10-wrn-16-4", N, noise_multiplier=3.0)
    assert mechanism == Mechanism(4096 / N, 3.0, 2468)
    assert 6 < epsilon < 7


def test_on_fewer_examples_the_noise_is_raised_to_keep_the_budget():
    assert accountant.epsilon(Mechanism(4096 / 40_000, 3.0, 2468), 1e-5) > 8
    mechanism, epsilon = budget_of("cifar10-wrn-16-4", 40_000)
    assert mechanism.noise_multiplier > 3
    assert mechanism.steps == 2468
    assert 7.9 < epsilon <= 8


@pytest.mark.parametrize("fields", [{"steps": 500}, {"batch_size": 1024}])
def test_typed_steps_or_batch_size_solve_for_the_noise(fields):
    mechanism, epsilon = budget_of("cifar10-wrn-16-4", N, **fields)
    assert mechanism.steps == fields.get("steps", 2468)
    assert mechanism.noise_multiplier != 3
    assert 7.9 < epsilon <= 8


def test_typed_noise_and_epsilon_solve_for_the_steps():
    mechanism, epsilon = budget_of(
        "cifar10-wrn-16-4", N, noise_multiplier=4.0, epsilon=2.0
    )
    assert mechanism.noise_multiplier == 4
    assert epsilon <= 2
    more = dataclasses.replace(mechanism, steps=mechanism.steps + 1)
    assert accountant.epsilon(more, 1e-5) > 2


def test_typed_noise_and_steps_stand():
    mechanism, epsilon = budget_of(
        "cifar10-wrn-16-4", N, noise_multiplier=0.5, steps=20, batch_size=128
    )
    assert mechanism == Mechanism(128 / N, 0.5, 20)
    assert epsilon > 0


def test_typed_noise_and_steps_above_a_typed_epsilon_are_refused():
    with pytest.raises(ValueError, match=re.escape("epsilon (=1.0) is less than")):
        budget_of("cifar10-wrn-16-4", N, noise_multiplier=1.0, steps=1000, epsilon=1.0)


def test_without_a_delta_it_is_one_digit_up_to_a_tenth_of_one_over_n():
    bare = dataclasses.replace(DIGITS, delta=None)
    assert solve_budget(bare, 1437).delta == 6e-5
    assert solve_budget(bare, 50_000).delta == 2e-6


def test_a_batch_larger_than_the_data_is_refused():
    with pytest.raises(ValueError, match=re.escape("batch_size (=512) must be at mo")):
        solve_budget(DIGITS, 500)


def test_what_is_declared_is_spent_whatever_the_data_hold():
    public: dict[str, Any] = {"declared_examples": 1500, "delta": None}
    recipe = dataclasses.replace(DIGITS, adjacency="add-or-remove-one", **public)
    one = solve_budget(recipe, 1437)
    assert one == solve_budget(recipe, 1436)
    assert one.mechanism.sample_rate == DIGITS.batch_size / 1500


def test_several_runs_spend_what_each_releases_and_one_fixed_seed_is_no_privacy():
    balanced: dict[str, Any] = {"class_weights": "balanced", "accountant": "rdp"}
    recipe = dataclasses.replace(DIGITS, solve_for="noise_multiplier", **balanced)
    budget = solve_budget(recipe, 1437, 10)
    made: Any = [SimpleNamespace(summary={"private": n > 0}, out="") for n in (0, 1)]
    dataset: Any = None  # which does not count here
    found = repeats.summary(Prepared("digits", recipe, dataset, budget), made)
    together = accountant.composed_epsilon(budget.mechanisms() * 2, budget.delta, "rdp")
    assert found["epsilon_together"] == together
    assert found["private"] is False


def test_replace_one_costs_more_noise():
    one, _ = budget_of("digits", 1437)
    two, _ = budget_of("digits", 1437, adjacency="replace-one")
    assert two.noise_multiplier > 1.5 * one.noise_multiplier


def test_the_accountant_is_whose_epsilon_keeps_the_budget():
    solved: dict[str, Any] = {"solve_for": "noise_multiplier", "accountant": "rdp"}
    recipe = dataclasses.replace(DIGITS, **solved)
    by_rdp = solve_budget(recipe, 1437)
    by_pld = solve_budget(dataclasses.replace(recipe, accountant="pld"), 1437)
    assert by_rdp.mechanism.noise_multiplier > by_pld.mechanism.noise_multiplier
    spent = accountant.epsilon(by_rdp.mechanism, by_rdp.delta, "rdp")
    assert by_rdp.epsilon == spent <= 3
    with pytest.raises(ValueError, match="has no RDP bound"):
        solve_budget(dataclasses.replace(recipe, adjacency="replace-one"), 1437)
    with pytest.raises(ValueError, match="accountant"):
        dataclasses.replace(recipe, accountant="tan")  # pyrefly: ignore[bad-argument-type]
