"""Which of σ, T and ε gives way when fields are typed over a recipe."""

import dataclasses
import re

import pytest

from tanager import recipes
from tanager.privacy import accountant
from tanager.privacy.mechanism import Mechanism
from tanager.recipes.budget import settle


DIGITS = recipes.get("digits").recipe
CIFAR = recipes.get("cifar10-wrn-16-4").recipe
N = 50_000


def typed_over(recipe, examples, **fields):
    changed = dataclasses.replace(recipe, **fields)
    budget = settle(changed, set(fields), examples)
    assert budget.epsilon == accountant.epsilon(budget.mechanism, budget.delta)
    assert budget.mechanism.sample_rate == changed.batch_size / examples
    return budget.mechanism, budget.epsilon


def test_the_recipe_alone_spends_at_most_its_epsilon():
    mechanism, epsilon = typed_over(DIGITS, 1437)
    assert mechanism.steps == DIGITS.steps
    assert 0.99 * 3 < epsilon <= 3


def test_published_noise_and_steps_are_taken_as_they_are():
    mechanism, epsilon = typed_over(CIFAR, N)
    assert mechanism == Mechanism(4096 / N, 3.0, 2468)
    assert 6 < epsilon < 8


def test_on_fewer_examples_the_noise_is_raised_to_keep_the_budget():
    assert accountant.epsilon(Mechanism(4096 / 40_000, 3.0, 2468), 1e-5) > 8
    mechanism, epsilon = typed_over(CIFAR, 40_000)
    assert mechanism.noise_multiplier > 3
    assert mechanism.steps == 2468
    assert 7.9 < epsilon <= 8


@pytest.mark.parametrize("fields", [{"steps": 500}, {"batch_size": 1024}])
def test_typed_steps_or_batch_size_solve_for_the_noise(fields):
    mechanism, epsilon = typed_over(CIFAR, N, **fields)
    assert mechanism.steps == fields.get("steps", 2468)
    assert mechanism.noise_multiplier != 3
    assert 7.9 < epsilon <= 8


def test_a_typed_noise_multiplier_gives_the_epsilon_it_gives():
    mechanism, epsilon = typed_over(CIFAR, N, noise_multiplier=1.0)
    assert mechanism == Mechanism(4096 / N, 1.0, 2468)
    assert epsilon > 8


def test_typed_noise_and_epsilon_solve_for_the_steps():
    mechanism, epsilon = typed_over(CIFAR, N, noise_multiplier=4.0, epsilon=2.0)
    assert mechanism.noise_multiplier == 4
    assert epsilon <= 2
    more = dataclasses.replace(mechanism, steps=mechanism.steps + 1)
    assert accountant.epsilon(more, 1e-5) > 2


def test_typed_noise_and_steps_stand():
    mechanism, epsilon = typed_over(
        CIFAR, N, noise_multiplier=0.5, steps=20, batch_size=128
    )
    assert mechanism == Mechanism(128 / N, 0.5, 20)
    assert epsilon > 0


def test_typed_noise_and_steps_above_a_typed_epsilon_are_refused():
    with pytest.raises(ValueError, match=re.escape("epsilon (=1.0) is less than")):
        typed_over(CIFAR, N, noise_multiplier=1.0, steps=1000, epsilon=1.0)


def test_without_a_delta_it_is_the_power_of_ten_below_one_over_n():
    bare = dataclasses.replace(DIGITS, delta=None)
    assert settle(bare, (), 1437).delta == 1e-4
    assert settle(bare, (), 50_000).delta == 1e-5


def test_a_batch_larger_than_the_data_is_refused():
    with pytest.raises(ValueError, match=re.escape("batch_size (=512) must be at mo")):
        settle(DIGITS, (), 500)


def test_replace_one_costs_more_noise():
    one, _ = typed_over(DIGITS, 1437)
    two, _ = typed_over(DIGITS, 1437, adjacency="replace-one")
    assert two.noise_multiplier > 1.5 * one.noise_multiplier
