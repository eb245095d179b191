"""Recipes: the papers' runs, and starting points, by name.

recipes.toml holds them, and papers.csv what was published of them.
"""

import tomllib
from importlib import resources
from typing import Any

from tanager import _validate as validate
from tanager.recipes.papers import PUBLISHED as PUBLISHED
from tanager.recipes.papers import PublishedRun as PublishedRun
from tanager.recipes.papers import rows_of
from tanager.recipes.recipe import Recipe as Recipe
from tanager.recipes.recipe import RecipeEntry as RecipeEntry


def _read() -> dict[str, RecipeEntry]:
    """Return the recipes of recipes.toml, which says what its blocks mean."""
    text = (resources.files("tanager.recipes") / "recipes.toml").read_text("utf-8")
    blocks = tomllib.loads(text)
    bases: dict[str, dict[str, Any]] = blocks.pop("shared")
    found = {}
    for name, block in blocks.items():
        texts: dict[str, str] = {"source": "tanager"}
        fields: dict[str, Any] = {}
        for base in block.pop("like", ()):
            fields |= bases[base]
        for left_out in block.pop("without", ()):
            del fields[left_out]
        if rows := rows_of(name):
            texts["source"] = f"{rows[-1].paper}, Table {rows[-1].table}"
            fields |= rows[-1].fields
        for text in {"summary", "source", "expected", "pretrained_on"} & block.keys():
            texts[text] = block.pop(text)
        bases[name] = fields | block
        recipe = Recipe.from_json(bases[name])
        found[name] = RecipeEntry(name=name, recipe=recipe, published=rows, **texts)
    return found


RECIPES: dict[str, RecipeEntry] = _read()
"""Every recipe, by name."""


def get(name: str) -> RecipeEntry:
    """Return the recipe of a name.

    Raises:
        ValueError: there is none; the message has the nearest.
    """
    if name not in RECIPES:
        near = validate.nearest(str(name), RECIPES)
        remedy = f"did you mean {near}? " if near else ""
        remedy += f"`tanager train --list` prints all {len(RECIPES)}"
        validate.refuse("recipe", name, "is unknown", remedy)
    return RECIPES[name]


def listing() -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return headings and one row for each recipe: text for people to read."""
    headings = ("recipe", "data set", "model", "budgets ε", "source", "accuracy")
    rows: list[tuple[str, ...]] = []
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
