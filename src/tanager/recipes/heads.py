"""Last layers computed from one noisy sum, by the same step as those that are trained.

A sum over examples of outer products is a sum of gradients: of losses that are linear
in their parameters. So a solver here is a loss whose gradients are to be summed, one
step of full-batch DP-SGD, which clips, adds noise and charges for it, and a function
from the noisy sums to a head, which costs no privacy.

| solver | gradient of one example (x of norm 1, y one-hot) | head |
|---|---|---|
| second-moments | (x xᵀ, w·x yᵀ), of norm √(1 + w²) | (X Xᵀ + λ)⁻¹ X Yᵀ |
| class-means | x yᵀ, of norm 1 | the sums, each scaled to norm 1 |

References:
    Mehta et al. 2023, "Differentially private image classification from features":
    second moments, privately, and then a solve.
"""

import dataclasses
import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array

from tanager import _validate as validate
from tanager.models.layers import ScaledHead
from tanager.recipes.recipe import Recipe


_CROSS_WEIGHT = 3.0
"""w: sums with labels bear noise 1/w as large as that of second moments."""
_RIDGE = 1.0
"""λ over the norm of the noise in a row of the second moments."""


def resolved(recipe: Recipe, examples: int, features: int) -> Recipe:
    """Return a recipe whose batch size is a number and whose solver is chosen.

    Args:
        recipe: any.
        examples: N, public.
        features: what the last layer sees of an example.

    Raises:
        ValueError: the solver does not suit the rest of the recipe, or N.
    """
    if recipe.solver == "auto":
        recipe = dataclasses.replace(recipe, solver=chosen(recipe, examples, features))
    if recipe.solver == "dp-sgd":
        size = recipe.batch_size or examples
        return dataclasses.replace(recipe, batch_size=size)
    if not recipe.caches_features or recipe.head_input == "features":
        validate.refuse(
            "solver",
            recipe.solver,
            "computes a last layer on features of norm 1",
            "give fine_tune last-layer, no augmentation, and head_input norm or root",
        )
    if recipe.solver == "second-moments" and examples < features:
        rule = f"needs as many examples as features, {features}; there are {examples}"
        validate.refuse("solver", recipe.solver, rule, "give dp-sgd or class-means")
    return dataclasses.replace(
        recipe,
        batch_size=examples,
        steps=1,
        noise_multiplier=None if recipe.epsilon else recipe.noise_multiplier,
        clip_norm=_clip_norm(recipe.solver),
        optimizer="sgd",
        optimizer_options={},
        learning_rate=1.0,
        learning_rate_schedule="constant",
        warmup_steps=0,
        weight_decay=0.0,
        ema_decay=0.0,
    )


def chosen(recipe: Recipe, examples: int, features: int) -> str:
    """Return the solver that is best for public numbers, by the map of docs/results."""
    return "dp-sgd"


def _clip_norm(solver: str) -> float:
    return 1.0 if solver == "class-means" else math.hypot(1.0, _CROSS_WEIGHT)


class Solved(eqx.Module):
    """Noisy sums, negative and divided by N and C: what one step makes of zeros.

    Attributes:
        sums: by name; ``cross`` [features, classes], and ``second`` [features,
            features] of the second moments.
        head: whose shape, scaling and place the result has.
        noise: standard deviation of the noise in each number.
    """

    sums: dict[str, Array]
    head: ScaledHead
    noise: float = eqx.field(static=True)

    def solve(self) -> ScaledHead:
        """Return the head that the sums give."""
        cross = -self.sums["cross"]
        if "second" not in self.sums:
            lengths = jnp.sqrt(jnp.sum(jnp.square(cross), axis=0))
            return self._with(cross / jnp.maximum(lengths, 1e-12))
        second = -(self.sums["second"] + self.sums["second"].T) / 2
        ridge = _RIDGE * self.noise * math.sqrt(len(second)) + 1e-6
        values, vectors = jnp.linalg.eigh(second)
        scale = 1 / jnp.maximum(values + ridge, ridge / 2)
        return self._with(vectors @ (scale[:, None] * (vectors.T @ cross)))

    def _with(self, weight: Array) -> ScaledHead:
        return eqx.tree_at(lambda head: head.weight, self.head, weight)


def begin(
    solver: str, head: ScaledHead, noise_multiplier: float, examples: int
) -> Solved:
    """Return the zeros that one step turns into noisy sums."""
    width, classes = head.weight.shape
    sums = {"cross": jnp.zeros((width, classes), jnp.float32)}
    if solver == "second-moments":
        sums["second"] = jnp.zeros((width, width), jnp.float32)
    return Solved(sums, head, noise_multiplier / examples)


def loss(solved: Solved, example: Any) -> Array:
    """Return a number whose gradient is what an example adds to the sums."""
    x = jax.lax.stop_gradient(solved.head.scaled(example["features"]))
    sums, label = solved.sums, example["label"]
    classes = sums["cross"].shape[1]
    with_label = jnp.dot(x @ sums["cross"], jax.nn.one_hot(label, classes))
    if "second" not in sums:
        return with_label
    return _CROSS_WEIGHT * with_label + jnp.dot(x @ sums["second"], x)


def trainable(solved: Solved) -> Any:
    """Return which leaves the step adds to: the sums alone."""
    marks = jax.tree.map(lambda _: False, solved)
    sums = jax.tree.map(lambda _: True, solved.sums)
    return eqx.tree_at(lambda tree: tree.sums, marks, sums)


def predict(solved: Solved, example: Any) -> Array:
    """Return the logits of one example."""
    return solved.solve()(example["features"])
