"""What commands say of the account that they charged."""

import shlex
from collections.abc import Mapping
from typing import Any

from tanager._text import clean
from tanager.privacy.account import Account
from tanager.privacy.plan import delta_warning
from tanager.privacy.shown import format_delta, format_epsilon
from tanager.recipes.accounts import path_of
from tanager.recipes.recipe import Recipe


def total_of(recipe: Recipe, delta: float) -> dict[str, Any] | None:
    """Return the total ε of a recipe's account; None if nothing is charged to it."""
    path = path_of(recipe)
    if path is None or not (balance := Account(path).read()).charges:
        return None
    return balance.total(delta).to_json()


def limit_warning(recipe: Recipe, delta: float, examples: int) -> str | None:
    """Return what is wrong with the δ of the account's limit, if above the run's."""
    path = path_of(recipe)
    limit = None if path is None else Account(path).read().limit
    if limit is None or limit[1] <= delta:
        return None
    text = delta_warning(limit[1], examples)
    return text and f"the limit of {path} allows more than it seems: its {text}"


def sentence(recipe: Recipe, total: Mapping[str, Any] | None) -> str:
    """Return a line on what was charged, with its end; nothing without an account."""
    path = path_of(recipe)
    if path is None:
        return ""
    if total is None:
        return (
            f"{clean(path)} has no charges: it was deleted since, or the runs were "
            "made without it. Charge them: tanager account add RUN --account "
            f"{shlex.quote(str(path))}\n"
        )
    return (
        f"charged to {clean(path)}: all runs on these data together ε = "
        f"{format_epsilon(total['epsilon'])} at δ = {format_delta(total['delta'])} "
        f"({total['adjacency']}, {total['accountant'].upper()})\n"
    )
