"""The run that simulations stand for."""

import dataclasses
from typing import TYPE_CHECKING

from tanager.recipes.recipe import Recipe


if TYPE_CHECKING:
    from tanager.search.simulation import Target


def target_of(name: str, recipe: Recipe) -> "Target":
    """Return the run that simulations of a recipe stand for.

    It trains on all examples: the simulations alone hold some out.
    """
    from tanager.search import jobs
    from tanager.search.simulation import plan_simulation

    examples = jobs.training_examples(recipe)
    recipe = dataclasses.replace(recipe, validation_examples=0)
    return plan_simulation(name, recipe, examples)


def held_out(recipe: Recipe, target: "Target") -> int:
    """Return how many training examples simulations are compared on: a tenth."""
    return recipe.validation_examples or max(1, target.examples // 10)
