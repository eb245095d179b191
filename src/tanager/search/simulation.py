"""Cheap runs that train like an expensive one: TAN's simulation.

At a smaller batch with the noise scaled by the same factor every update keeps its
signal-to-noise ratio; with the same number of steps and learning rate the run trains
much alike, at a fraction of the cost and with next to no privacy.

References:
    Sander, Stock and Sablayrolles 2023, TAN Without a Burn, sections 3.4, 4.3 and 4.4.
"""

import dataclasses
import math
from typing import Any

from tanager import _validate as validate
from tanager.privacy import accountant, tan
from tanager.privacy.mechanism import Mechanism
from tanager.recipes.budget import solve_budget
from tanager.recipes.recipe import Recipe


@dataclasses.dataclass(frozen=True)
class Target:
    """The run that one wants in the end, with its budget settled.

    Attributes:
        name: of its recipe.
        recipe: with noise multiplier, steps and δ in place.
        examples: how many it trains on, N.
        mechanism: what it spends.
        epsilon: how much that is, by PLD.
    """

    name: str
    recipe: Recipe
    examples: int
    mechanism: Mechanism
    epsilon: float

    @classmethod
    def settle(cls, name: str, recipe: Recipe, examples: int) -> "Target":
        """Settle the budget of a recipe on a number of training examples.

        Raises:
            ValueError: the recipe is not private, or its budget cannot be kept.
        """
        if recipe.non_private:
            validate.refuse(
                "non_private",
                True,
                "has no noise, so there is nothing for TAN to keep",
                "search for a private recipe",
            )
        budget = solve_budget(recipe, examples)
        mechanism = budget.mechanism
        if mechanism.noise_multiplier == 0:
            validate.refuse(
                "noise_multiplier", 0, "must be positive: TAN keeps the noise of a step"
            )
        recipe = dataclasses.replace(
            recipe,
            noise_multiplier=mechanism.noise_multiplier,
            steps=mechanism.steps,
            delta=budget.delta,
            epsilon=None,
            solve_for=None,
        )
        return cls(name, recipe, examples, mechanism, budget.epsilon)

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
        """Return the recipe of a simulation at another batch size.

        σ/B, steps and learning rate are those of the target (section 3.4). Which
        device computes how many images at once is chosen for the small batch.

        Args:
            batch_size: expected examples in a batch, B.
            fields: of the recipe, to be varied.

        Raises:
            ValueError: the batch expects fewer than one example, or is larger than the
                target's data.
        """
        validate.whole(
            batch_size=batch_size,
            at_least=1,
            remedy="a batch in which fewer than one example is expected trains nothing",
        )
        if batch_size > self.examples:
            validate.refuse(
                "batch_size",
                batch_size,
                f"must be at most the {self.examples} training examples",
            )
        factor = batch_size / self.recipe.batch_size
        return dataclasses.replace(
            self.recipe,
            batch_size=batch_size,
            noise_multiplier=self.mechanism.noise_multiplier * factor,
            physical_batch_size=_physical(self.recipe, batch_size),
            **fields,
        )

    def at_steps(self, steps: int) -> "Target":
        """Return the target with other steps at the same η and σ (section 4.3).

        B goes with 1/√S, and the learning rate inversely with S: the noise of an update
        falls with B, so that each of fewer can be larger (Table 3: 18K steps, B = 512
        and rate 32 for 72K, 256 and 8). A decay keeps its share of the run.

        Raises:
            ValueError: so few steps would need a batch larger than the data.
        """
        mechanism = tan.at_steps(self.mechanism, steps)
        batch_size = max(1, round(mechanism.sample_rate * self.examples))
        mechanism = dataclasses.replace(
            mechanism, sample_rate=min(1.0, batch_size / self.examples)
        )
        recipe = dataclasses.replace(
            self.recipe,
            steps=steps,
            batch_size=batch_size,
            learning_rate=self.recipe.learning_rate * self.steps / steps,
            warmup_steps=round(self.recipe.warmup_steps * steps / self.steps),
            ema_decay=_same_horizon(self.recipe.ema_decay, self.steps / steps),
        )
        return self._with(recipe, mechanism, self.examples)

    def at_examples(self, examples: int) -> "Target":
        """Return the target with more or fewer examples at the same B, σ and S (4.4).

        q and δ go with 1/N, and so Nη is kept.

        Raises:
            ValueError: the batch is larger than so few examples.
        """
        validate.whole(examples=examples, at_least=1)
        if self.recipe.batch_size > examples:
            validate.refuse(
                "examples",
                examples,
                f"must be at least the batch size, {self.recipe.batch_size}",
            )
        mechanism = dataclasses.replace(
            self.mechanism, sample_rate=self.recipe.batch_size / examples
        )
        recipe = dataclasses.replace(
            self.recipe, delta=self.delta * self.examples / examples
        )
        return self._with(recipe, mechanism, examples)

    def _with(self, recipe: Recipe, mechanism: Mechanism, examples: int) -> "Target":
        assert recipe.delta is not None
        spent = accountant.epsilon(mechanism, recipe.delta)
        return Target(self.name, recipe, examples, mechanism, spent)

    def epsilon_at(self, batch_size: int, examples: int | None = None) -> float:
        """Return the ε that a simulation would spend, were anyone to claim it.

        Args:
            batch_size: of the simulation.
            examples: it trains on; the target's by default.
        """
        rate = batch_size / (examples or self.examples)
        factor = batch_size / self.recipe.batch_size
        mechanism = dataclasses.replace(
            self.mechanism,
            sample_rate=min(1.0, rate),
            noise_multiplier=self.mechanism.noise_multiplier * factor,
        )
        return accountant.epsilon(mechanism, self.delta)


def _physical(recipe: Recipe, batch_size: int) -> int:
    """Return half a small batch: few rows are left empty, and few batches begun."""
    return max(1, min(recipe.physical_batch_size, math.ceil(batch_size / 2)))


def _same_horizon(decay: float, factor: float) -> float:
    """Return the decay that averages over the same share of a run, per step."""
    return max(0.0, 1 - min(1.0, (1 - decay) * factor))
