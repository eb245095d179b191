"""What commands say of the account that they charged."""

from collections.abc import Mapping
from typing import Any

from tanager.privacy.account import Account
from tanager.privacy.shown import format_epsilon
from tanager.recipes.accounts import path_of
from tanager.recipes.recipe import Recipe


def total_of(recipe: Recipe, delta: float) -> dict[str, Any] | None:
    """Return what all charges to a recipe's account spend; None if it does without."""
    path = path_of(recipe)
    return None if path is None else Account(path).read().total(delta).to_json()


def sentence(recipe: Recipe, total: Mapping[str, Any] | None) -> str:
    """Return a line on what was charged, with its end; nothing without an account."""
    if total is None:
        return ""
    return (
        f"charged to {path_of(recipe)}: all runs on these data together ε = "
        f"{format_epsilon(total['epsilon'])} at δ = {total['delta']:g} "
        f"({total['adjacency']}, {total['accountant'].upper()})\n"
    )
