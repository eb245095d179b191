"""From a recipe to the mechanism that will run.

Noise multiplier σ, steps T and ε cannot all be chosen. `Recipe.solve_for` says which of
them follows from the others:

| solve_for | given | solved or computed |
|---|---|---|
| None | σ and T | ε; if it exceeds the recipe's, σ is raised |
| noise_multiplier | T and ε | σ |
| epsilon | σ and T | ε |
| steps | σ and ε | T |
| nothing | σ, T and ε | refused if σ and T spend more than ε |

With None, the σ of a published run is that of its N. For another N it is solved for.
"""

import dataclasses
import math
from typing import Any

from tanager import _validate as validate
from tanager.privacy import accountant
from tanager.privacy.calibrate import calibrate_beside
from tanager.privacy.class_counts import release_of
from tanager.privacy.mechanism import Adjacency, Mechanism
from tanager.privacy.plan import default_delta
from tanager.privacy.shown import format_epsilon
from tanager.recipes.papers import PUBLISHED
from tanager.recipes.recipe import Recipe


_PUBLISHED = ("epsilon", "delta", "batch_size", "noise_multiplier", "steps")


@dataclasses.dataclass(frozen=True)
class Budget:
    """What a run will spend: its mechanism, and ε by the recipe's accountant at δ.

    ε includes the release of the class counts before the first step, if there is one.
    """

    mechanism: Mechanism
    epsilon: float
    delta: float
    class_counts: Mechanism | None = None

    def mechanisms(self) -> list[Mechanism]:
        """Return all that the run spends."""
        return [*filter(None, (self.class_counts,)), self.mechanism]


def solve_budget(recipe: Recipe, examples: int, classes: int = 1) -> Budget:
    """Solve a recipe's budget on a training set of N `examples`.

    How many `classes` there are only counts for class weights from noisy counts.
    """
    examples = recipe.public_size(examples)
    if recipe.batch_size > examples:
        rule = f"must be at most the {examples} training examples"
        remedy = "it is the expected size of a Poisson batch; q = batch size / examples"
        validate.refuse("batch_size", recipe.batch_size, rule, remedy)
    delta = default_delta(examples) if recipe.delta is None else recipe.delta
    rate = recipe.batch_size / examples
    adjacency, by = Adjacency(recipe.adjacency), recipe.accountant
    balances = recipe.class_weights == "balanced"

    def counts_within(epsilon: float) -> list[Mechanism]:
        run = epsilon, delta, examples, classes, adjacency
        return [release_of(*run)] if balances else []

    if recipe.non_private:
        assert recipe.steps is not None
        mechanism = Mechanism(rate, 0.0, recipe.steps, adjacency)
        return Budget(mechanism, math.inf, delta, *counts_within(math.inf))
    solve, target = recipe.solve_for, recipe.epsilon
    noise, steps = recipe.noise_multiplier, recipe.steps
    given: dict[str, Any] = {"steps": steps}
    if solve == "steps" or steps is None:
        given = {"noise_multiplier": noise}
    elif solve != "noise_multiplier" and noise is not None:
        mechanism = Mechanism(rate, noise, steps, adjacency)
        epsilon = accountant.epsilon(mechanism, delta, by)
        counts = counts_within(epsilon)
        epsilon = accountant.composed_epsilon([mechanism, *counts], delta, by)
        within = target is None or epsilon <= target
        if solve == "epsilon" or (within and not _is_of_other_data(recipe, examples)):
            return Budget(mechanism, epsilon, delta, *counts)
        if solve == "nothing":
            rule = f"is less than these settings spend, {format_epsilon(epsilon)}"
            remedy = "leave out one of --epsilon, --noise-multiplier and --steps"
            validate.refuse("epsilon", target, rule, remedy)
    assert target is not None
    counts = counts_within(target)
    mechanism = calibrate_beside(
        counts,
        epsilon=target,
        delta=delta,
        sample_rate=rate,
        accountant=by,
        adjacency=adjacency,
        **given,
    )
    epsilon = accountant.composed_epsilon([mechanism, *counts], delta, by)
    return Budget(mechanism, epsilon, delta, *counts)


def _is_of_other_data(recipe: Recipe, examples: int) -> bool:
    """Whether the recipe has a published σ, but none published for this N."""
    alike = {
        row.examples
        for row in PUBLISHED
        if recipe.solve_for is None
        and all(getattr(recipe, name) == getattr(row, name) for name in _PUBLISHED)
    }
    return bool(alike) and examples not in alike
