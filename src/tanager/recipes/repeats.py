"""The same recipe several times: the median of its runs, and their deviation.

Every run has noise and initial weights of its own, and spends its own ε.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tanager import _validate as validate
from tanager.measures import HEADLINES
from tanager.parallel import hosts
from tanager.privacy import accountant
from tanager.privacy.account import Account
from tanager.privacy.shown import format_delta, format_epsilon
from tanager.recipes.runner import Prepared
from tanager.training import charging
from tanager.training.result import TrainResult
from tanager.training.run_folder import refuse_foreign


def repeated(prepared: Prepared, repeats: int) -> Iterator[Prepared]:
    """Return what to run: the recipe itself, or in OUT/1, OUT/2, … of its `out`.

    A seed is that of the first run; the next has the next seed. They share the features
    of frozen layers, in OUT/private.
    """
    recipe = prepared.recipe
    for number in range(repeats):
        fields: dict[str, Any] = {}
        if repeats > 1:
            fields["out"] = f"{recipe.out}/{number + 1}"
            if recipe.caches and recipe.features is None:
                fields["features"] = f"{recipe.out}/private/features"
        if recipe.seed is not None:
            fields["seed"] = recipe.seed + number
        yield dataclasses.replace(
            prepared, recipe=dataclasses.replace(recipe, **fields)
        )


def require_room(prepared: Prepared, repeats: int, account: Account | None) -> None:
    """Refuse runs that could not all be charged, or a folder with files of others."""
    recipes = [each.recipe for each in repeated(prepared, repeats)]
    if repeats > 1:
        own = [str(number + 1) for number in range(repeats)]
        refuse_foreign(str(prepared.recipe.out), [*own, "repeats.json", "private"])
        if (Path(str(prepared.recipe.out)) / "config.json").exists():
            rule, remedy = "holds a single run", "name another folder for --repeats"
            validate.refuse("out", str(prepared.recipe.out), rule, remedy)

    def to_begin() -> list[int]:
        ledgers = [Path(str(recipe.out)) / "ledger.jsonl" for recipe in recipes]
        return [n for n, ledger in enumerate(ledgers) if not ledger.exists()]

    if new := hosts.from_chief(to_begin):
        first, delta = recipes[new[0]], prepared.budget.delta
        spent = prepared.budget.mechanisms() * len(new)
        words = f"these {len(new)} runs" if len(new) > 1 else None
        charging.require_room(account, spent, delta, first.out, first.seed, words)


def summary(prepared: Prepared, results: Sequence[TrainResult]) -> dict[str, Any]:
    """Return median and standard deviation of each headline, and ε of all together.

    The scores are those of the average of parameters on the test examples; the
    deviation is None of one run.
    """
    budget = prepared.budget
    spent = budget.mechanisms() * len(results)
    scores = {}
    for name in HEADLINES:
        found = [each.summary.get(f"test_{name}_ema") for each in results]
        values = [value for value in found if value is not None]
        if values:
            deviation = float(np.std(values, ddof=1)) if len(values) > 1 else None
            median = float(np.median(values))
            scores[name] = {"median": median, "deviation": deviation, "runs": values}
    return {
        "runs": [str(each.out) for each in results],
        "private": all(each.summary["private"] for each in results),
        "epsilon": budget.epsilon,
        "epsilon_together": None
        if prepared.recipe.non_private
        else accountant.composed_epsilon(
            spent, budget.delta, prepared.recipe.accountant
        ),
        "delta": budget.delta,
        "scores": scores,
    }


def sentence(found: dict[str, Any]) -> str:
    """Return what `summary` found in words."""
    parts = []
    for name, score in found["scores"].items():
        spread = score["deviation"]
        around = "" if spread is None else f" ± {100 * spread:.2f}"
        parts.append(f"{HEADLINES[name]} {100 * score['median']:.2f}{around} %")
    text = "" if found["private"] else "NOT PRIVATE (see the reports): "
    if len(found["runs"]) > 1:
        text += f"median ± standard deviation of {len(found['runs'])} runs: "
    text += ", ".join(parts) + " (test examples, average of parameters)" * bool(parts)
    if found["epsilon_together"] is not None:
        together = format_epsilon(found["epsilon_together"])
        all_of_them = " all of them together" * (len(found["runs"]) > 1)
        text += f";{all_of_them} spent ε = {together} at "
        text += f"δ = {format_delta(found['delta'])}"
    return text
