"""Simulations keep the noise of a step, and privacy parameters the noise of a run."""

import dataclasses

import pytest

from tanager import recipes
from tanager.privacy import accountant, tan
from tanager.search.simulation import plan_simulation
from tanager.search.space import Choices, Space


@pytest.fixture(scope="module")
def reference():
    """The TAN paper's reference on CIFAR-10."""
    entry = recipes.get("cifar10-wrn-16-4-tan")
    return plan_simulation(entry.name, entry.recipe, 50_000)


@pytest.mark.parametrize("batch_size", [1, 32, 512, 4096])
def test_a_simulation_keeps_noise_per_batch_steps_and_learning_rate(
    reference, batch_size
):
    recipe = reference.simulated(batch_size)
    assert recipe.batch_size == batch_size
    assert recipe.noise_multiplier / batch_size == pytest.approx(3 / 4096, rel=1e-12)
    assert recipe.steps == reference.steps == 2500
    assert recipe.learning_rate == reference.recipe.learning_rate
    assert recipe.epsilon is None
    assert recipe.physical_batch_size <= max(1, batch_size)
    scaled = tan.at_batch_size(reference.mechanism, factor=batch_size / 4096)
    assert tan.eta_step(scaled) == pytest.approx(tan.eta_step(reference.mechanism))


def test_simulations_claim_their_huge_epsilon(reference):
    small = reference.epsilon_at(64)
    assert small > 100 * reference.epsilon
    mechanism = tan.at_batch_size(reference.mechanism, factor=64 / 4096)
    assert small == accountant.epsilon(mechanism, reference.delta)


@pytest.mark.parametrize(
    ("steps", "batch_size", "rate"),
    [(9_000, 724, 64), (18_000, 512, 32), (72_000, 256, 8), (288_000, 128, 2)],
)
def test_privacy_parameters_are_those_of_table_3(steps, batch_size, rate):
    """But for B = 756 at 9K steps, where √8 · 256 is 724."""
    entry = recipes.get("imagenet-nf-resnet-50-tan")
    recipe = dataclasses.replace(
        entry.recipe,
        batch_size=256,
        steps=72_000,
        noise_multiplier=2.5 / 64,
        learning_rate=8.0,
        epsilon=None,
    )
    start = plan_simulation(entry.name, recipe, 1_271_167)
    other = start.at_steps(steps)
    assert other.recipe.batch_size == batch_size
    assert other.recipe.learning_rate == rate
    assert other.mechanism.noise_multiplier == start.mechanism.noise_multiplier
    eta = tan.eta(start.mechanism)
    assert tan.eta(other.mechanism) == pytest.approx(eta, rel=2e-3)
    # Nothing else is scaled, unless it is asked for.
    decay = start.recipe.ema_decay
    assert other.recipe.ema_decay == decay
    scaled = start.at_steps(steps, scale_average=True).recipe.ema_decay
    assert 1 - scaled == pytest.approx((1 - decay) * 72_000 / steps)


def test_constant_tan_is_constant_epsilon_above_the_wall(reference):
    for steps in (625, 10_000):
        other = reference.at_steps(steps)
        assert other.epsilon == pytest.approx(reference.epsilon, rel=0.02)
        assert other.epsilon == accountant.epsilon(other.mechanism, reference.delta)
    # And no longer below it: Table 5's setting at a tenth of the noise.
    low = dataclasses.replace(
        reference,
        mechanism=dataclasses.replace(reference.mechanism, noise_multiplier=0.5),
    )
    assert low.at_steps(10_000).epsilon != pytest.approx(
        accountant.epsilon(low.mechanism, low.delta), rel=0.02
    )


def test_more_data_divides_rate_and_delta(reference):
    """Section 4.4: β times the data, the same (B, σ, S), δ/β."""
    half = reference.at_examples(25_000)
    assert half.mechanism.sample_rate == 2 * reference.mechanism.sample_rate
    assert half.delta == 2 * reference.delta
    assert half.recipe.batch_size == reference.recipe.batch_size
    # "Doubling the data halves ε": Table 5 has 13.7 for 7.1, at a δ it does not tell.
    assert 1.9 < half.epsilon / reference.epsilon < 2.4
    assert half.examples * tan.eta(half.mechanism) == pytest.approx(
        reference.examples * tan.eta(reference.mechanism)
    )


@pytest.mark.parametrize(
    ("do", "message"),
    [
        (lambda t: t.simulated(0), "fewer than one example is expected"),
        (lambda t: t.simulated(60_000), "must be at most the 50000 training examples"),
        (lambda t: t.at_steps(10), "would need a sample rate"),
        (lambda t: t.at_examples(1000), "must be at least the batch size, 4096"),
    ],
)
def test_what_cannot_be_simulated_is_refused(reference, do, message):
    with pytest.raises(ValueError, match=message):
        do(reference)


def test_runs_without_noise_are_no_target():
    recipe = recipes.get("digits").recipe
    open_run = dataclasses.replace(recipe, non_private=True, epsilon=None, steps=3)
    with pytest.raises(ValueError, match=r"non_private .* has no noise"):
        plan_simulation("digits", open_run, 1437)
    silent = dataclasses.replace(recipe, noise_multiplier=0.0, epsilon=None, steps=3)
    with pytest.raises(ValueError, match=r"noise_multiplier .* must be positive"):
        plan_simulation("digits", silent, 1437)
    drowned = dataclasses.replace(recipe, epsilon=1e-9)
    with pytest.raises(ValueError, match=r"epsilon \(=1e-09\) spends nothing at δ = "):
        plan_simulation("digits", drowned, 1437)


def test_an_impossible_budget_is_refused_before_anything_runs():
    recipe = dataclasses.replace(
        recipes.get("digits").recipe, epsilon=0.1, noise_multiplier=0.5, steps=None
    )
    with pytest.raises(
        ValueError, match=r"epsilon .* is below what any value of steps spends"
    ):
        plan_simulation("digits", recipe, 1437)


@pytest.mark.parametrize(
    ("values", "kept", "solved"),
    [
        ({"batch_size": 1024}, {"steps": 2500}, "noise_multiplier"),
        ({"steps": 500}, {"batch_size": 4096}, "noise_multiplier"),
        ({"batch_size": 8192, "steps": 900}, {}, "noise_multiplier"),
        ({"noise_multiplier": 2.0}, {"batch_size": 4096}, "steps"),
    ],
)
def test_choices_share_the_budget(reference, values, kept, solved):
    space = Space({name: Choices((value,)) for name, value in values.items()})
    other = reference.varied(space, values)
    for name, value in (values | kept).items():
        assert getattr(other.recipe, name) == value
    assert getattr(other.recipe, solved) != getattr(reference.recipe, solved)
    within = other.epsilon / reference.epsilon
    assert 0.999 < within <= 1 + 1e-9 if solved != "steps" else 0.99 < within <= 1
    assert other.epsilon == accountant.epsilon(other.mechanism, reference.delta)
    assert other.mechanism.sample_rate == other.recipe.batch_size / 50_000


def test_a_chosen_epsilon_is_the_budget(reference):
    space = Space({"epsilon": Choices((1.0, 4.0))})
    spent = [reference.varied(space, {"epsilon": e}).epsilon for e in (1.0, 4.0)]
    assert spent == pytest.approx([1.0, 4.0], rel=1e-3)


def test_with_noise_and_steps_chosen_epsilon_follows(reference):
    values = {"noise_multiplier": 2.0, "steps": 100}
    space = Space({name: Choices((value,)) for name, value in values.items()})
    other = reference.varied(space, values)
    assert (other.mechanism.noise_multiplier, other.steps) == (2.0, 100)
    assert other.epsilon == accountant.epsilon(other.mechanism, reference.delta)


def test_other_choices_leave_the_budget_alone(reference):
    space = Space({"weight_standardisation": Choices((False, True))})
    other = reference.varied(space, {"weight_standardisation": False})
    assert other.mechanism == reference.mechanism
    assert not other.recipe.weight_standardisation
