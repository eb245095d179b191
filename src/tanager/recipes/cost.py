"""Estimate what a recipe costs: operations, and hours on a named GPU."""

from typing import NamedTuple

import jax

from tanager import models
from tanager.models.model import StagedModel
from tanager.recipes.recipe import Recipe


GPU = "A100"
SUSTAINED = 40e12
"""Floating-point operations a second that an A100 is taken to sustain: a quarter of its
peak of 156e12 in TF32. An assumption, not a measurement."""

_PASSES = 3
"""Forward, gradient in the activations, gradient in the weights."""


class Cost(NamedTuple):
    """The model's parameters, the run's operations, and its hours on one `GPU`.

    Operations are multiplications and additions of all matrix products and
    convolutions, clipping and padding not among them.
    """

    parameters: int
    flops: float
    hours: float


def estimate(
    recipe: Recipe, steps: int, classes: int, image_shape: tuple[int, ...]
) -> Cost:
    """Return the cost of a recipe from shapes alone.

    `image_shape` is (height, width, channels) of what the model sees, or (features,).
    """
    from tanager.recipes.tasks import model_shapes

    model = model_shapes(recipe, classes, image_shape)
    once = models.count_flops(model, image_shape)
    seen = float(recipe.batch_size) * steps
    if recipe.caches_features:
        head = 2 * sum(leaf.size for leaf in jax.tree.leaves(model.head))
        flops = _PASSES * head * seen
    elif recipe.caches_front and isinstance(model, StagedModel):
        front = models.count_flops(model.fronts, image_shape)
        flops = _PASSES * (once - front) * seen
    else:
        views = max(1, recipe.augmentation_multiplicity)
        passes = 1 if recipe.fine_tune == "last-layer" else _PASSES
        flops = passes * once * views * seen
    return Cost(models.count_parameters(model), flops, flops / SUSTAINED / 3600)
