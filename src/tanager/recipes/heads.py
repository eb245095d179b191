"""Last layers from features, by the solver that is best for public numbers.

`class-means` is one noisy sum. The sum of outer products x yᵀ (x of norm 1, y one-hot)
is a sum of gradients of a loss that is linear in its parameters; so it is one step of
full-batch DP-SGD, which clips, adds noise and charges. The head is the sums, each
scaled to norm 1, which costs no privacy.

Sums of second moments as well, and a solve (Mehta et al. 2023), won nowhere: at ε from
0.1 to 8 and 1,000 to 45,000 images of CIFAR-10 they were 1 to 6 points below the better
of the two (docs/results.md).
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array

from tanager import _validate as validate
from tanager.models.layers import ScaledHead
from tanager.recipes.fields import CLASS_MEANS, unlike_class_means
from tanager.recipes.recipe import Recipe


class _Rule(NamedTuple):
    """What suits one kind of features, by the signal s = N·ε/√features.

    Attributes:
        clip_norm: C.
        share: the learning rate is s / share,
        most: and at most this.
        few: below this s, class means.
        many: from this s on,
        then: these settings instead.
    """

    clip_norm: float
    share: float
    most: float = math.inf
    few: float = 0.0
    many: float = math.inf
    then: Mapping[str, Any] = {}


_PUBLIC = _Rule(1.0, share=80, most=20, few=20, many=3000, then={"steps": 150})
FIXED = {
    "scattering-linear": _Rule(
        0.1,
        share=10,
        many=1000,  # as the recipe cifar10-scattering
        then={
            "batch_size": 8192,
            "steps": 240,
            "clip_norm": 0.04,
            "learning_rate": 50.0,
        },
    ),
    "dead-leaves-linear": _Rule(0.3, share=40),
}
"""Models of a last layer on fixed features. Class means were never best for them."""
_STEPS, _MOMENTUM = 60, 0.9
_WHOLE_BATCHES = (1024, 4096)


def resolved(recipe: Recipe, examples: int, features: int) -> Recipe:
    """Return a recipe whose batch size is a number and whose solver is chosen.

    `examples` is N, public. `features` are how many the last layer sees of an example;
    they only count where it alone is trained.
    """
    on_features = recipe.caches_features and recipe.head_input != "features"
    chooses = recipe.leaves_open
    if chooses and recipe.solver != "class-means" and not recipe.caches_features:
        recipe, chooses = _whole(recipe, examples), False
    if (chooses or recipe.solver != "dp-sgd") and not on_features:
        rule = "is for a last layer on features of norm 1, if settings are left open"
        remedy = "give fine_tune last-layer, no augmentation, and head_input norm or "
        remedy += "root; or solver dp-sgd, steps, learning_rate and clip_norm"
        validate.refuse("solver", recipe.solver, rule, remedy)
    if chooses and recipe.solver != "class-means":
        recipe = _chosen(recipe, examples, features)
    if recipe.solver == "dp-sgd":
        return dataclasses.replace(recipe, batch_size=recipe.batch_size or examples)
    if recipe.class_weights:
        rule = "must be left out for class-means, which takes each class by itself"
        validate.refuse("class_weights", recipe.class_weights, rule)
    if recipe.solve_for == "steps":
        rule = "must be left out beside epsilon for class-means, of 1 step"
        validate.refuse("noise_multiplier", recipe.noise_multiplier, rule)
    return dataclasses.replace(recipe, batch_size=examples, **CLASS_MEANS)


def compares_solvers(recipe: Recipe) -> bool:
    """Return whether class means may be taken for a recipe, or DP-SGD.

    Not where something is given that only DP-SGD heeds, beyond what is usual there.
    """
    usual = {"ema_decay"}
    if recipe.optimizer_options == {"momentum": _MOMENTUM}:
        usual.add("optimizer_options")
    plain = usual.issuperset(unlike_class_means(recipe))
    plain = plain and recipe.steps is None and not recipe.learning_rate
    plain = plain and recipe.solve_for != "steps"
    plain = plain and not recipe.class_weights and not recipe.multi_label
    plain = plain and recipe.clipping == "clip" and recipe.solver == "auto"
    return plain and recipe.epsilon is not None and recipe.caches_features


def _chosen(recipe: Recipe, examples: int, features: int) -> Recipe:
    """Return the recipe with the solver, steps and learning rate of the measured map.

    What decides is N·ε/√features, the signal over the noise. The learning rate is in
    proportion to it, which keeps the noise on a logit the same however many classes
    share the signal.
    """
    epsilon, rule = recipe.epsilon, FIXED.get(recipe.model, _PUBLIC)
    settings: dict[str, Any] = {"clip_norm": rule.clip_norm}
    if epsilon is not None:
        signal = examples * epsilon / math.sqrt(features)
        if signal < rule.few and compares_solvers(recipe):
            return dataclasses.replace(recipe, solver="class-means")
        rate = min(rule.most, signal / rule.share)
        settings |= {"steps": _STEPS, "learning_rate": rate}
        settings |= rule.then if signal >= rule.many else {}
    elif recipe.non_private and not recipe.learning_rate:
        must = "must be given for a run without a budget"
        validate.refuse("learning_rate", None, must, "give --learning-rate")
    elif recipe.steps is None or not recipe.learning_rate:
        must = "must be given for solver auto, which chooses by it"
        validate.refuse("epsilon", None, must, "or give steps and learning_rate")
    if "batch_size" in settings:
        settings["batch_size"] = min(settings["batch_size"], examples)
    if recipe.solve_for == "steps":
        settings.pop("steps", None)
    left = {name: settings[name] for name in settings if not getattr(recipe, name)}
    if recipe.optimizer == "sgd":
        left["optimizer_options"] = {"momentum": _MOMENTUM} | recipe.optimizer_options
    return dataclasses.replace(recipe, solver="dp-sgd", **left)


def _whole(recipe: Recipe, examples: int) -> Recipe:
    """Return the recipe with settings for training more than the last layer.

    The learning rate is in proportion to N·ε, up to a limit; where σ is given in place
    of ε, as at ε = 1. Many examples are taken in batches of a quarter, which was better
    than all of them, and quicker.
    """
    least, most = _WHOLE_BATCHES
    batch = recipe.batch_size or min(examples, max(least, min(examples // 4, most)))
    signal = examples * (recipe.epsilon or 1.0)
    if recipe.weights is None:
        rate, steps = min(2.0, signal / 8000), _STEPS if batch == examples else 150
    else:
        rate, steps = min(5.0, signal / 25_000), _STEPS
        if recipe.optimizer == "sgd":
            options = {"momentum": _MOMENTUM} | recipe.optimizer_options
            recipe = dataclasses.replace(recipe, optimizer_options=options)
    if recipe.steps is None and recipe.solve_for != "steps":
        recipe = dataclasses.replace(recipe, steps=steps)
    return dataclasses.replace(
        recipe,
        solver="dp-sgd",
        batch_size=batch,
        learning_rate=recipe.learning_rate or rate,
        clip_norm=recipe.clip_norm or 1.0,
    )


class ClassMeans(eqx.Module):
    """Noisy sums of the features of each class, negative and divided by N.

    Attributes:
        sums: float32 [features, classes].
        head: whose scaling and place the result has.
    """

    sums: Array
    head: ScaledHead

    def solve(self) -> ScaledHead:
        """Return the head that the sums give."""
        lengths = jnp.sqrt(jnp.sum(jnp.square(self.sums), axis=0, keepdims=True))
        weight = -self.sums / jnp.maximum(lengths, 1e-12)
        return eqx.tree_at(lambda head: head.weight, self.head, weight)


def class_means(head: ScaledHead) -> ClassMeans:
    """Return the zeros that one step turns into noisy sums."""
    return ClassMeans(jnp.zeros_like(head.weight), head)


def loss(means: ClassMeans, example: Any) -> Array:
    """Return a number whose gradient is what an example adds to the sums."""
    x = jax.lax.stop_gradient(means.head.scaled(example["features"]))
    classes = means.sums.shape[1]
    return jnp.dot(x @ means.sums, jax.nn.one_hot(example["label"], classes))


def trainable(means: ClassMeans) -> ClassMeans:
    """Return which leaves the step adds to: the sums alone."""
    marks = jax.tree.map(lambda _: False, means)
    return eqx.tree_at(lambda tree: tree.sums, marks, True)
