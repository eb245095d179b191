"""Recipes: the papers' runs, and starting points, by name.

Only what runs from end to end is listed. The papers' other rows are data in
`tanager.recipes.published`.
"""

from tanager import _validate as validate
from tanager.recipes import cifar10, digits, folder, mnist
from tanager.recipes.published import PUBLISHED as PUBLISHED
from tanager.recipes.published import PublishedRun as PublishedRun
from tanager.recipes.recipe import Recipe as Recipe
from tanager.recipes.recipe import RecipeEntry as RecipeEntry


RECIPES: dict[str, RecipeEntry] = {
    entry.name: entry
    for entry in (
        digits.DIGITS,
        cifar10.WRN_16_4,
        cifar10.WRN_40_4,
        cifar10.WRN_16_4_TAN,
        mnist.MNIST_SMALL_CNN,
        folder.FOLDER,
    )
}


def get(name: str) -> RecipeEntry:
    """Return the recipe of a name.

    Raises:
        ValueError: there is none; the message has the nearest.
    """
    validate.one_of(RECIPES, recipe=name)
    return RECIPES[name]


def listing() -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return headings and one row for each recipe: text for people to read."""
    headings = (
        "recipe",
        "data set",
        "model",
        "budgets ε",
        "source",
        "published accuracy",
    )
    rows = []
    for entry in RECIPES.values():
        epsilons = [row.epsilon for row in entry.published] or [entry.recipe.epsilon]
        rows.append(
            (
                entry.name,
                entry.recipe.dataset,
                entry.recipe.model,
                ", ".join(f"{each:g}" for each in epsilons),
                entry.source,
                entry.published_accuracy,
            )
        )
    return headings, rows
