"""The run that simulations stand for, as a recipe and the words typed ask for it."""

import dataclasses
from typing import TYPE_CHECKING

from tanager.recipes.recipe import Recipe


if TYPE_CHECKING:
    from tanager.search.simulation import Target


def target_of(name: str, recipe: Recipe, typed: set[str]) -> "Target":
    """Return the run that simulations stand for.

    Where a person asks for held-out examples, they are those of the simulations: the
    run itself trains on all.
    """
    from tanager.search import jobs
    from tanager.search.simulation import Target

    examples = jobs.training_examples(recipe)
    if "validation_examples" in typed:
        recipe = dataclasses.replace(recipe, validation_examples=0)
    elif recipe.train_examples is None:
        examples -= recipe.validation_examples
    return Target.settle(name, recipe, examples, typed)


def held_out(recipe: Recipe, target: "Target") -> int:
    """Return how many training examples simulations are compared on: a tenth."""
    return recipe.validation_examples or max(1, target.examples // 10)
