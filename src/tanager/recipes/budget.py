"""From a recipe and what was typed over it to the mechanism that will run.

Noise multiplier σ, steps T and ε cannot all be free. Which of them gives way:

| typed | kept | solved or computed |
|---|---|---|
| nothing | the recipe's σ and T | ε; above the recipe's, σ is raised |
| steps, or batch size | T and ε | σ |
| noise multiplier | σ and T | ε |
| noise multiplier and ε | σ and ε | T |
| noise multiplier and steps | σ and T | ε, refused above a typed ε |
"""

import dataclasses
import math
from collections.abc import Collection

from tanager import _validate as validate
from tanager.privacy import accountant
from tanager.privacy.calibrate import calibrate
from tanager.privacy.mechanism import Adjacency, Mechanism
from tanager.privacy.plan import default_delta
from tanager.privacy.shown import upper
from tanager.recipes.recipe import Recipe


@dataclasses.dataclass(frozen=True)
class Budget:
    """What a run will spend.

    Attributes:
        mechanism: sample rate, noise multiplier, steps and adjacency.
        epsilon: by PLD, at `delta`.
        delta: of the guarantee.
    """

    mechanism: Mechanism
    epsilon: float
    delta: float


def settle(recipe: Recipe, typed: Collection[str], examples: int) -> Budget:
    """Return the budget of a recipe on a training set of N `examples`.

    Args:
        recipe: with every typed field in place.
        typed: names of the fields a person set, which always stand.
        examples: how many there are; see `Recipe.public_size`.

    Raises:
        ValueError: the fields cannot be met together.
    """
    examples = recipe.public_size(examples)
    if recipe.batch_size > examples:
        validate.refuse(
            "batch_size",
            recipe.batch_size,
            f"must be at most the {examples} training examples",
            "it is the expected size of a Poisson batch; q = batch size / examples",
        )
    delta = default_delta(examples) if recipe.delta is None else recipe.delta
    rate = recipe.batch_size / examples
    adjacency = Adjacency(recipe.adjacency)
    if recipe.non_private:
        assert recipe.steps is not None
        mechanism = Mechanism(rate, 0.0, recipe.steps, adjacency)
        return Budget(mechanism, math.inf, delta)
    noise, steps = recipe.noise_multiplier, recipe.steps
    typed_noise = "noise_multiplier" in typed
    if typed_noise and "epsilon" in typed and "steps" not in typed:
        steps = None
    elif not typed_noise and ("steps" in typed or "batch_size" in typed):
        noise = None
    if noise is not None and steps is not None:
        mechanism = Mechanism(rate, noise, steps, adjacency)
        epsilon = accountant.epsilon(mechanism, delta)
        target = recipe.epsilon
        fits = target is None or epsilon <= target
        if fits or (typed_noise and "epsilon" not in typed):
            return Budget(mechanism, epsilon, delta)
        if typed_noise:
            validate.refuse(
                "epsilon",
                target,
                f"is less than these settings spend, {upper(epsilon)}",
                "leave out one of --epsilon, --noise-multiplier and --steps",
            )
        noise = None
    if recipe.epsilon is None or (noise is None and steps is None):
        raise ValueError(
            "two of epsilon, noise_multiplier and steps must be given: the third is "
            f"solved for; found epsilon={recipe.epsilon}, noise_multiplier={noise}, "
            f"steps={steps}"
        )
    mechanism = calibrate(
        epsilon=recipe.epsilon,
        delta=delta,
        sample_rate=rate,
        noise_multiplier=noise,
        steps=steps,
        adjacency=adjacency,
    )
    return Budget(mechanism, accountant.epsilon(mechanism, delta), delta)
