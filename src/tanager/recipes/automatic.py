"""What a recipe leaves open is chosen here, from public numbers alone.

`resolved` chooses the model and what is trained of it by the size of the images, and
`heads` the steps and the rest when N is known. `reasons` says why, one line a field.
"""

import dataclasses
from typing import Any

from tanager import _validate as validate
from tanager import data, models
from tanager._cache import expanded
from tanager.models import packaged
from tanager.recipes import heads
from tanager.recipes.fields import LAYOUT_FIELDS
from tanager.recipes.recipe import FIXED_FRONTS, Recipe


AUTO = "auto"
PRETRAINED = "efficientnet-lite2"
"""Better than lite0 by 2 to 4 points (docs/results.md)."""
GREY, OTHERS = "scattering-linear", "dead-leaves-linear"
"""Small grey images take the first even where public weights are installed."""
SIDE = 32
"""Pixels per side for fixed features: at 16 and 24 scattering's accuracy was lower."""

LARGEST_SIDE = 224
"""Pixels per side for public weights: larger images take longer, and were not tried."""
SMALL_GREY = (
    "small grey images: on 1,000 images of MNIST it gave 93.6 %, and "
    "efficientnet-lite0 82.9 %"
)
_OF_SOLVER = ("solver", "steps", "learning_rate", "batch_size", "clip_norm")
_OF_SOLVER += ("optimizer_options",)
INSTALL = (
    "pip install 'tanager-dp[public-weights]' gave 95.8 % in place of 79.6 % on 960 "
    "images of CIFAR-10"
)


def resolved(recipe: Recipe) -> Recipe:
    """Return a recipe that names its model, what is trained of it, and an image size.

    Raises:
        ValueError: weights are given that do not say which model they are of, or the
            images cannot be read.
    """
    if AUTO not in (recipe.model, recipe.fine_tune, recipe.head_input):
        return recipe
    model, weights = recipe.model, recipe.weights
    if model == AUTO and weights is None:
        shape = _image_shape(recipe)
        if shape is not None and shape[2] == 1 and max(shape[:2]) <= SIDE:
            model = GREY
        elif packaged.is_installed(PRETRAINED):
            model = weights = PRETRAINED
        else:
            model = OTHERS
    elif model == AUTO:
        if weights not in packaged.PACKAGED:
            rule = "must be given for weights of your own"
            validate.refuse("model", AUTO, rule, "give --model, see tanager models")
        model = weights
    changes: dict[str, Any] = {"model": model, "weights": weights}
    size = recipe.image_size
    if weights is not None and weights in packaged.PACKAGED:
        size = size or min(packaged.PACKAGED[weights].image_size, LARGEST_SIDE)
        changes["crop_fraction"] = recipe.crop_fraction or 1.0
    elif model.startswith(FIXED_FRONTS):
        size = size or SIDE
    elif weights is None and size is None and recipe.crop_size is None:
        side, shape = models.find(model).image_side, _image_shape(recipe)
        if shape is not None and max(shape[:2]) > side:
            size = side
    if recipe.fine_tune == AUTO:
        late = weights is not None or model in heads.FIXED
        changes["fine_tune"] = "last-layer" if late else "all"
    recipe = dataclasses.replace(recipe, image_size=size, **changes)
    if recipe.head_input == AUTO:
        scaling = "root" if model.startswith("efficientnet-") else "norm"
        scaling = scaling if recipe.caches_features else "features"
        recipe = dataclasses.replace(recipe, head_input=scaling)
    return recipe


def _image_shape(recipe: Recipe) -> tuple[int, int, int] | None:
    """Return the shape of all images of a folder; None if they differ, or are not."""
    if recipe.dataset != "folder" or recipe.features_from is not None:
        return None
    if recipe.data is None or not expanded(recipe.data).exists():
        return None  # what loads the data says so
    fields = {name: getattr(recipe, name) for name in LAYOUT_FIELDS}
    return data.image_shape(data.Layout(recipe.data, **fields), recipe.groups)


def reasons(given: Recipe, recipe: Recipe, examples: int) -> dict[str, str]:
    """Return the value of each field that was chosen, and why, by field.

    A field that the others left no choice is not among them. `given` is the recipe
    before anything was chosen, `examples` is N, public.
    """
    public = recipe.weights in packaged.PACKAGED
    frozen = recipe.fine_tune == "last-layer"
    before, after = vars(given), vars(recipe)
    undecided = dataclasses.replace(
        recipe, **{name: before[name] for name in _OF_SOLVER}
    )
    compared = heads.compares_solvers(undecided)
    numbers = f"N = {examples}"
    if recipe.epsilon is not None:
        numbers += f" and ε = {recipe.epsilon:g}"
    why = {
        "model": "its public weights are installed"
        if public
        else SMALL_GREY
        if recipe.model == GREY
        else f"no public weights are installed ({INSTALL})",
        "fine_tune": "few trained parameters get little noise"
        if frozen
        else "there are no weights to start from",
        "head_input": "features of norm 1 need less noise"
        if recipe.head_input != "features"
        else "",
        "image_size": "it is the size that was measured with these weights"
        if public
        else "more pixels are more features, and more noise"
        if recipe.model.startswith(FIXED_FRONTS)
        else f"images differ in size, or are larger, and {recipe.model} takes this one",
        "batch_size": "with all examples an update has the least noise"
        if recipe.batch_size == examples
        else f"more updates on fewer images suit {numbers}",
        "solver": f"it suits {numbers}" if compared else "",
        "steps": f"it suits {numbers}",
        "learning_rate": f"it suits {numbers}"
        + (", and the number of features" if frozen else ""),
        "clip_norm": "it did best for this kind of model",
    }
    return {
        name: f"{_shown(after[name])}, because {text}"
        for name, text in why.items()
        if text and before[name] != after[name]
    }


def _shown(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
