"""Cheap runs that train like an expensive one: TAN's simulation.

At a smaller batch, with the noise scaled by the same factor, every update keeps its
signal-to-noise ratio. With the same number of steps and the same learning rate the run
trains much alike, at a fraction of the cost and with almost no privacy.

References:
    Sander, Stock and Sablayrolles 2023, TAN Without a Burn, sections 3.4, 4.3 and 4.4.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from tanager import _validate as validate
from tanager.privacy import accountant, tan
from tanager.privacy.mechanism import Mechanism
from tanager.recipes.budget import solve_budget
from tanager.recipes.recipe import Recipe
from tanager.search.space import BUDGET, Space


TOO_SMALL = "a batch in which fewer than one example is expected trains nothing"


@dataclasses.dataclass(frozen=True)
class Target:
    """The run that simulations stand for; `plan_simulation` makes one.

    Attributes:
        name: of its recipe.
        recipe: with noise multiplier, steps and δ filled in.
        examples: how many it trains on, N.
        mechanism: what it spends.
        epsilon: its ε, by the recipe's accountant.
    """

    name: str
    recipe: Recipe
    examples: int
    mechanism: Mechanism
    epsilon: float

    @property
    def delta(self) -> float:
        """The δ of the target's guarantee."""
        assert self.recipe.delta is not None
        return self.recipe.delta

    @property
    def steps(self) -> int:
        """S, the same in every simulation."""
        return self.mechanism.steps

    def simulated(self, batch_size: int, **fields: Any) -> Recipe:
        """Return the recipe of a simulation at another batch size, with other `fields`.

        σ/B, steps and learning rate are those of the target (section 3.4). The physical
        batch is chosen for the small batch.

        Raises:
            ValueError: the batch expects fewer than one example, or is larger than the
                target's data.
        """
        validate.whole(batch_size=batch_size, at_least=1, remedy=TOO_SMALL)
        if batch_size > self.examples:
            rule = f"must be at most the {self.examples} training examples"
            validate.refuse("batch_size", batch_size, rule)
        factor = batch_size / self.recipe.batch_size
        # Half of a small batch: few rows stay empty, and few batches are begun.
        physical, given = math.ceil(batch_size / 2), self.recipe.physical_rows
        physical = physical if given == "auto" else min(given, physical)
        return dataclasses.replace(
            self.recipe,
            batch_size=batch_size,
            noise_multiplier=self.mechanism.noise_multiplier * factor,
            physical_batch_size=max(1, physical),
            **fields,
        )

    def varied(self, space: Space, values: Mapping[str, Any]) -> "Target":
        """Return the target with some choices of a space, at the same budget.

        ε stays, unless it is chosen, and σ is solved for; where σ is chosen, T is. Only
        where both are chosen, ε follows from them.

        Raises:
            ValueError: they make no recipe, or the budget cannot be met.
        """
        recipe = space.recipe(self.recipe, values)
        chosen = set(BUDGET) & set(values)
        if not chosen:
            return dataclasses.replace(self, recipe=recipe)
        solve = "noise_multiplier"
        if {"epsilon", "steps", "noise_multiplier"} <= chosen:
            rule = "cannot be varied together with steps and noise-multiplier"
            remedy = "leave one of the three out: it follows from the others"
            validate.refuse("vary", "epsilon", rule, remedy)
        if "noise_multiplier" in chosen:
            solve = "epsilon" if "steps" in chosen else "steps"
        epsilon = recipe.epsilon if "epsilon" in chosen else self.epsilon
        recipe = dataclasses.replace(recipe, epsilon=epsilon, solve_for=solve)
        return plan_simulation(self.name, recipe, self.examples)

    def at_steps(self, steps: int, *, scale_average: bool = False) -> "Target":
        """Return the target with other steps at the same η and σ (section 4.3).

        B is proportional to 1/√S, and the learning rate to 1/S: the noise of an update
        falls with B, so each of fewer updates can be larger (Table 3: 18K steps, B =
        512 and rate 32 for 72K, 256 and 8). Warm-up keeps its share of the run; so does
        the average of parameters, with `scale_average`.

        Raises:
            ValueError: so few steps would need a batch larger than the data.
        """
        mechanism = tan.at_steps(self.mechanism, steps)
        batch_size = max(1, round(mechanism.sample_rate * self.examples))
        mechanism = dataclasses.replace(
            mechanism, sample_rate=min(1.0, batch_size / self.examples)
        )
        factor = self.steps / steps
        recipe = dataclasses.replace(
            self.recipe,
            steps=steps,
            batch_size=batch_size,
            learning_rate=self.recipe.learning_rate * factor,
            warmup_steps=round(self.recipe.warmup_steps / factor),
        )
        if scale_average:
            decay = max(0.0, 1 - (1 - self.recipe.ema_decay) * factor)
            recipe = dataclasses.replace(recipe, ema_decay=decay)
        return self._spending(recipe, self.examples, mechanism)

    def at_examples(self, examples: int) -> "Target":
        """Return the target with more or fewer examples at the same B, σ and S (4.4).

        q and δ are proportional to 1/N, so Nη is constant.

        Raises:
            ValueError: the batch is larger than the data.
        """
        validate.whole(examples=examples, at_least=1)
        if self.recipe.batch_size > examples:
            rule = f"must be at least the batch size, {self.recipe.batch_size}"
            validate.refuse("examples", examples, rule)
        mechanism = dataclasses.replace(
            self.mechanism, sample_rate=self.recipe.batch_size / examples
        )
        recipe = dataclasses.replace(
            self.recipe, delta=self.delta * self.examples / examples
        )
        return self._spending(recipe, examples, mechanism)

    def _spending(
        self, recipe: Recipe, examples: int, mechanism: Mechanism
    ) -> "Target":
        assert recipe.delta is not None
        epsilon = accountant.epsilon(mechanism, recipe.delta, recipe.accountant)
        return Target(self.name, recipe, examples, mechanism, epsilon)

    def epsilon_at(self, batch_size: int) -> float:
        """Return the ε of a simulation at a batch size; it protects almost nothing."""
        factor = batch_size / self.recipe.batch_size
        mechanism = dataclasses.replace(
            self.mechanism,
            sample_rate=min(1.0, batch_size / self.examples),
            noise_multiplier=self.mechanism.noise_multiplier * factor,
        )
        return accountant.epsilon(mechanism, self.delta)


def plan_simulation(name: str, recipe: Recipe, examples: int) -> Target:
    """Return the run that simulations of a recipe stand for.

    Raises:
        ValueError: the recipe is not private, or its budget cannot be met.
    """
    if recipe.non_private:
        rule = "has no noise, and simulations scale the noise"
        validate.refuse("non_private", True, rule, "search for a private recipe")
    recipe.require_batches()
    budget = solve_budget(recipe, examples)
    mechanism = budget.mechanism
    if mechanism.noise_multiplier == 0:
        rule = "must be positive: simulations scale the noise"
        validate.refuse("noise_multiplier", 0, rule)
    if budget.epsilon == 0:
        name = "noise_multiplier" if recipe.epsilon is None else "epsilon"
        rule = f"spends nothing at δ = {budget.delta:g}: there is nothing to compare"
        less_noise = "allow a run less noise, by a larger ε"
        validate.refuse(name, getattr(recipe, name), rule, less_noise)
    recipe = dataclasses.replace(
        recipe,
        noise_multiplier=mechanism.noise_multiplier,
        steps=mechanism.steps,
        delta=budget.delta,
        epsilon=None,
        solve_for=None,
    )
    return Target(name, recipe, examples, mechanism, budget.epsilon)
