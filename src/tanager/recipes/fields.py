"""What the fields of a recipe may be, and which do not go together."""

import dataclasses
import functools
import math
from typing import Any, Literal, get_args, get_origin, get_type_hints

from tanager import _validate as validate


NormalisationOrder = Literal["pre-activation", "post-activation", "none"]
AdjacencyName = Literal["zero-out", "add-or-remove-one", "replace-one"]
FineTuning = Literal[
    "all", "last-layer", "last-stage", "biases-and-norms", "film", "lora", "auto"
]
Head = Literal["load", "fresh", "zero"]
HeadInput = Literal["features", "norm", "root", "auto"]
SolverName = Literal["dp-sgd", "class-means", "auto"]
Schedule = Literal["constant", "step", "cosine"]
PrecisionName = Literal["float32", "tf32", "bfloat16"]
PaddingMode = Literal["reflect", "symmetric"]
Solved = Literal["epsilon", "noise_multiplier", "steps", "nothing"]
AccountantName = Literal["pld", "rdp"]
ClassWeights = Literal["balanced"]
Clipping = Literal["clip", "automatic", "adaptive"]
UnitName = Literal["example", "group"]
AugmentationName = Literal["none", "crop-flip", "rrc", "tan", "simclr", "inception"]

_OF_IMAGES = ("features", "image_size", "crop_fraction", "crop_size", "preprocessing")
_OF_IMAGES += ("stream", "implementation")
LAYOUT_FIELDS = ("labels", "image_column", "label_column", "labels_from_name")
LAYOUT_FIELDS += ("multi_label", "uncertain")
"""Fields that are those of `tanager.data.Layout`."""
_BUDGET = ("epsilon", "noise_multiplier", "steps")
_AT_LEAST = {
    "image_size": 8,
    "lora_rank": 1,
    "batch_size": 0,
    "examples_per_group": 1,
    "steps": 1,
    "declared_examples": 1,
    "warmup_steps": 0,
    "augmentation_multiplicity": 0,
    "crop_padding": 0,
    "crop_size": 8,
    "test_views": 0,
    "validation_examples": 0,
    "train_examples": 1,
    "devices": 1,
    "workers": 0,
    "evaluate_every": 1,
    "seed": 0,
}
"""The least that a whole number may be."""
CLASS_MEANS: dict[str, Any] = {
    "steps": 1,
    "clip_norm": 1.0,
    "optimizer": "sgd",
    "optimizer_options": {},
    "learning_rate": 1.0,
    "learning_rate_schedule": "constant",
    "warmup_steps": 0,
    "weight_decay": 0.0,
    "ema_decay": 0.0,
}
"""The settings of class means: one noisy sum of all examples."""


@functools.cache
def _choices(kind: type) -> dict[str, tuple[str, ...]]:
    """Return what each field may be whose type is a list of words, or None."""
    found = {}
    for name, hint in get_type_hints(kind).items():
        parts = [each for each in get_args(hint) if each is not type(None)]
        for each in (hint, *parts[: len(parts) == 1]):
            if get_origin(each) is Literal:
                found[name] = get_args(each)
    return found


def check(recipe: Any) -> None:
    """Refuse a field that is out of range, or fields that do not go together."""
    choices = _choices(type(recipe))
    for field in dataclasses.fields(recipe):
        name, value = field.name, getattr(recipe, field.name)
        named: Any = {name: value}
        if value is None and field.default is None:
            continue
        if name in ("dataset", "model", "optimizer", "strategy"):
            if not isinstance(value, str) or not value:
                validate.refuse(name, value, "must be a name")
        elif words := choices.get(name):
            validate.one_of(words, **named)
        elif name == "physical_batch_size":
            validate.size_or_auto(**named)
        elif name in _AT_LEAST:
            validate.whole(**named, at_least=_AT_LEAST[name], remedy="")
    if recipe.unit == "group" and recipe.groups is None:
        remedy = "give --groups folder, or the name of the column with the owners"
        validate.refuse("groups", None, "must be given to protect persons", remedy)
    for name in LAYOUT_FIELDS:
        value, usual = getattr(recipe, name), getattr(type(recipe), name)
        if value != usual and recipe.data is None:
            remedy = "give the images' folder: --data"
            validate.refuse(name, value, "needs data", remedy)
    if recipe.strategy.partition(":")[2] not in ("", "low", "default"):
        rule = "must be a strategy, or one with :low after it, for less memory"
        validate.refuse("strategy", recipe.strategy, rule)
    _check_labels(recipe)
    _check_budget(recipe)
    if recipe.clip_norm:
        validate.clipping_norm(recipe.clip_norm)
    unclipped = recipe.non_private or recipe.solver == "class-means"
    if unclipped and recipe.clipping != "clip":
        rule = "must be left out for class means, and without privacy"
        validate.refuse("clipping", recipe.clipping, rule)
    if recipe.learning_rate:
        validate.positive(learning_rate=recipe.learning_rate)
    if isinstance(recipe.class_weights, str):
        validate.one_of(get_args(ClassWeights), class_weights=recipe.class_weights)
    else:
        for name, value in recipe.class_weights.items():
            validate.positive(**{f"class_weights of {name}": value})
    for option, value in recipe.optimizer_options.items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not math.isfinite(value):
            rule = f"must be a finite number for {option}"
            validate.refuse("optimizer_options", value, rule)
    validate.not_negative(
        weight_decay=recipe.weight_decay, checkpoint_seconds=recipe.checkpoint_seconds
    )
    validate.ema_decay(recipe.ema_decay)
    if recipe.crop_fraction is not None:
        validate.share(crop_fraction=recipe.crop_fraction)
        validate.positive(crop_fraction=recipe.crop_fraction)
    _check_features(recipe)
    _check_views(recipe)


def unlike_class_means(recipe: Any) -> list[str]:
    """Return the fields that class means would not heed; what is left open is not."""
    return [
        name
        for name, value in {"batch_size": 0, **CLASS_MEANS}.items()
        if (own := getattr(recipe, name)) and own != value
    ]


def _check_labels(recipe: Any) -> None:
    """Refuse what takes one class an image, where it has any number of labels."""
    if not recipe.multi_label:
        if recipe.uncertain != "refuse":
            rule = "is for --multi-label"
            validate.refuse("uncertain", recipe.uncertain, rule, "leave it out")
        return
    of_one_class = {
        "class_weights": recipe.class_weights,
        "features_from": recipe.features_from,
        "test_views": recipe.test_views,
        "solver": recipe.solver if recipe.solver == "class-means" else None,
    }
    for name, value in of_one_class.items():
        if value:
            rule = "is for one class an image, and must be left out with multi_label"
            validate.refuse(name, value, rule)


def _check_features(recipe: Any) -> None:
    if recipe.features_from is not None:
        for name in _OF_IMAGES:
            if (value := getattr(recipe, name)) is not None:
                rule = "must be left out with features_from, which has no images"
                validate.refuse(name, value, rule)
        if recipe.model != "linear" or not recipe.caches_features:
            rule = "trains a last layer alone, without augmentation"
            remedy = "start from the recipe features (tanager train features), or give "
            remedy += "model linear and fine_tune last-layer"
            validate.refuse("features_from", recipe.features_from, rule, remedy)
    later = "auto" in (recipe.model, recipe.fine_tune)
    if recipe.features is not None and not (recipe.caches or later):
        rule = "must be left out unless the last layer or stage alone is trained, or a "
        rule += "network on fixed features, without augmentation"
        remedy = "give fine_tune last-layer and augmentation_multiplicity 0"
        validate.refuse("features", recipe.features, rule, remedy)
    views = recipe.augmentation_multiplicity or recipe.test_views
    cached = recipe.caches_features
    cached |= recipe.model == recipe.fine_tune == "auto" and not views
    if recipe.unreadable == "skip" and cached:
        rule = "must be 'error' when features are cached"
        remedy = "remove the images that cannot be read"
        if recipe.model == "auto":
            remedy += ", or train a network (--model wrn-16-4)"
        validate.refuse("unreadable", recipe.unreadable, rule, remedy)


def _check_views(recipe: Any) -> None:
    moves = recipe.crop_padding or recipe.flip or recipe.crop_size
    same = recipe.augmentation == "crop-flip" and not moves
    for name in ("augmentation_multiplicity", "test_views"):
        number = getattr(recipe, name)
        if number and (same or recipe.augmentation == "none"):
            remedy = "its views would all be the same: give crop_padding or flip, or "
            remedy += "another augmentation"
            validate.refuse(name, number, "must be 0 without augmentation", remedy)


def _check_budget(recipe: Any) -> None:
    if recipe.non_private:
        _check_no_budget(recipe)
        return
    if recipe.epsilon is not None:
        remedy = "it is the privacy budget, often 1 to 8"
        validate.positive(epsilon=recipe.epsilon, remedy=remedy)
    if recipe.delta is not None:
        remedy = "it is a probability, at most 0.1/N"
        validate.probability(delta=recipe.delta, remedy=remedy)
    if recipe.noise_multiplier is not None:
        validate.not_negative(noise_multiplier=recipe.noise_multiplier)
    given = {name: getattr(recipe, name) for name in _BUDGET}
    missing = {name for name in _BUDGET if given[name] is None}
    unknown = len(missing - {recipe.solve_for})
    if recipe.epsilon is not None and (recipe.solver != "dp-sgd" or recipe.leaves_open):
        return
    if unknown > (recipe.solve_for is None):
        which = "all" if recipe.solve_for == "nothing" else "two"
        raise ValueError(
            f"{which} of epsilon, noise_multiplier and steps must be given beside "
            f"solve_for={recipe.solve_for}; found "
            + ", ".join(f"{name}={value}" for name, value in given.items())
        )


def _check_no_budget(recipe: Any) -> None:
    for name in ("epsilon", "noise_multiplier"):
        if getattr(recipe, name):
            rule = "must be left out of a run that is not private"
            remedy = "leave out non_private for a private run"
            validate.refuse(name, getattr(recipe, name), rule, remedy)
    if recipe.steps is None:
        flags = "--steps" if recipe.learning_rate else "--steps and --learning-rate"
        rule = "must be given for a run without a budget"
        validate.refuse("steps", None, rule, f"give {flags}")
