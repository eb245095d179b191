"""Recipes: the papers' runs, and starting points, by name.

Every table of the papers' runs is here. Some need images or weights of your own.
"""

from tanager import _validate as validate
from tanager.recipes import (
    cifar10,
    cifar_fine_tuned,
    class_split,
    fixed_features,
    imagenet,
    public_features,
    starters,
)
from tanager.recipes.papers import PUBLISHED as PUBLISHED
from tanager.recipes.papers import PublishedRun as PublishedRun
from tanager.recipes.recipe import Recipe as Recipe
from tanager.recipes.recipe import RecipeEntry as RecipeEntry


RECIPES: dict[str, RecipeEntry] = {
    entry.name: entry
    for entry in (
        starters.DIGITS,
        cifar10.WRN_16_4,
        cifar10.WRN_40_4,
        cifar10.WRN_16_4_TAN,
        cifar10.WRN_16_4_TAN_PRE_ACTIVATION,
        cifar10.WRN_16_4_TAN_VIEWS,
        *cifar10.TAN_FRACTIONS,
        *cifar_fine_tuned.FROM_IMAGENET32,
        cifar_fine_tuned.FROM_CIFAR100,
        cifar_fine_tuned.IMAGENET32_PRETRAINING,
        cifar_fine_tuned.CIFAR100_PRETRAINING,
        *cifar_fine_tuned.EFFICIENCY,
        public_features.LITE0,
        public_features.LITE2,
        fixed_features.CIFAR10_DEAD_LEAVES,
        fixed_features.CIFAR10_SCATTERING,
        fixed_features.MNIST_SCATTERING,
        class_split.PRETRAINING,
        class_split.OTHER_FIVE,
        imagenet.NF_RESNET_50,
        imagenet.NF_RESNET_50_TAN,
        imagenet.NF_RESNET_50_TAN_LONGER,
        imagenet.NF_RESNET_200_LAST_LAYER,
        imagenet.NFNET_F3_LAST_LAYER,
        imagenet.PLACES_ALL,
        imagenet.PLACES_LAST_LAYER,
        *imagenet.PLACES_WITHOUT_PRIVACY,
        starters.MNIST_LENET,
        starters.MNIST_SMALL_CNN,
        starters.FOLDER,
        public_features.FEATURES,
    )
}
"""Every recipe, by name."""


def get(name: str) -> RecipeEntry:
    """Return the recipe of a name.

    Raises:
        ValueError: there is none; the message has the nearest.
    """
    validate.one_of(RECIPES, recipe=name)
    return RECIPES[name]


def listing() -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return headings and one row for each recipe: text for people to read."""
    headings = ("recipe", "data set", "model", "budgets ε", "source", "accuracy")
    rows = []
    for name, entry in RECIPES.items():
        recipe, accuracy = entry.recipe, entry.expected_accuracy
        epsilons = [row.epsilon for row in entry.published] or [recipe.epsilon]
        budgets = ", ".join(f"{each:g}" for each in epsilons if each is not None)
        without = "none: NOT PRIVATE" if recipe.non_private else "from σ and steps"
        budgets = budgets or without
        rows.append(
            (name, recipe.dataset, recipe.model, budgets, entry.source, accuracy)
        )
    return headings, rows
