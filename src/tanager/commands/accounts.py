"""What commands say of the account that they charged."""

from collections.abc import Mapping
from typing import Any

from tanager.privacy.account import Account
from tanager.privacy.shown import format_delta, format_epsilon
from tanager.recipes.accounts import path_of
from tanager.recipes.recipe import Recipe


def total_of(recipe: Recipe, delta: float) -> dict[str, Any] | None:
    """Return the total ε of a recipe's account; None if nothing is charged to it."""
    path = path_of(recipe)
    if path is None or not (balance := Account(path).read()).charges:
        return None
    return balance.total(delta).to_json()


def sentence(recipe: Recipe, total: Mapping[str, Any] | None) -> str:
    """Return a line on what was charged, with its end; nothing without an account."""
    path = path_of(recipe)
    if path is None:
        return ""
    if total is None:
        return (
            f"{path} has no charges: it was deleted since, or the runs were made "
            f"without it. Charge them: tanager account add RUN --account {path}\n"
        )
    return (
        f"charged to {path}: all runs on these data together ε = "
        f"{format_epsilon(total['epsilon'])} at δ = {format_delta(total['delta'])} "
        f"({total['adjacency']}, {total['accountant'].upper()})\n"
    )
