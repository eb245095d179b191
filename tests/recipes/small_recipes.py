"""Recipes on a few small images of noise."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from tanager.data import ArraySource, Dataset
from tanager.recipes import automatic


CLASSES = 5

# What the program of a step does not depend on, and how gradients are clipped.
NUMBERS = {
    "epsilon": None,
    "delta": 1e-3,
    "noise_multiplier": 1.0,
    "steps": 1,
    "batch_size": 4,
    "learning_rate": 0.1,
    "warmup_steps": 0,
    "train_examples": None,
    "classes": None,
    "image_size": None,
    "learning_rate_schedule": "constant",
    "evaluate_every": 1,
    "ema_decay": 0.5,
    "clip_norm": 1.0,
    "strategy": "bk_mixopt",
    "weights": None,
}

ALIKE = {"bit": "vit", "nf": "wrn", "lenet": "small"}
"""By family of models: another, whose first step stands for its own."""


def one_of_each(entries):
    """Mark as `full` all but the first recipe of a kind of model and of training."""
    marked = []
    # `test_runner` trains the digits by command.
    seen: set[tuple] = {("small", "fresh", "all", False)}
    for entry in entries:
        recipe = entry.recipe
        family = recipe.model.partition("-")[0]
        if recipe.fine_tune == "all":
            # These differ by the network alone: `test_fast_rules` clips all of them.
            family = ALIKE.get(family, family)
            if recipe.head == "zero":
                family = "vit"
        elif family in ("nf", "nfnet"):
            family = "wrn"  # their last layers are alike, and `tests/models` runs them
        # A whole network is trained without privacy by `test_fine_tuning`.
        non_private = recipe.non_private and recipe.fine_tune != "all"
        kind = family, recipe.head, recipe.fine_tune, non_private
        marks = [pytest.mark.full] if kind in seen else []
        marked.append(pytest.param(entry, id=entry.name, marks=marks))
        seen.add(kind)
    return marked


def alike(recipe, physical_batch_size):
    """The recipe with the numbers that programs do not depend on: many then are one."""
    recipe = automatic.resolved(recipe)
    own = recipe.dataset in ("digits", "mnist")
    fields: dict[str, Any] = NUMBERS | {
        "dataset": recipe.dataset if own else "folder",
        "physical_batch_size": physical_batch_size,
        "augmentation_multiplicity": min(recipe.augmentation_multiplicity, 2),
    }
    if recipe.non_private:
        fields |= {"noise_multiplier": None, "weight_decay": 1e-4}
    if not recipe.augmentation_multiplicity:
        fields |= {"crop_padding": 0, "flip": False}
    return dataclasses.replace(recipe, **fields)


def with_features(recipe, examples):
    """The recipe for a few features that some other program made."""
    rows = np.random.default_rng(0).normal(size=(examples, 6)).astype(np.float32)
    labels = (np.arange(examples) % CLASSES).astype(np.int32)
    source = ArraySource({"features": rows, "label": labels})
    dataset = Dataset("features", source, source, tuple("abcde"), (6,), (), ())
    return dataclasses.replace(recipe, features_from="made.npz"), dataset


def shrunk(recipe, examples=12):
    """The recipe for a few small images: everything else stays as it is."""
    recipe = automatic.resolved(recipe)
    if recipe.model == "linear":
        return with_features(recipe, examples)
    side = {"digits": 8, "mnist": 28}.get(recipe.dataset, 32)
    channels = 1 if recipe.dataset in ("digits", "mnist") else 3
    crop_size = None
    if recipe.crop_size is not None:
        crop_size, side = side, side + 8
    draw = np.random.default_rng(0)
    images = draw.integers(0, 256, (examples, side, side, channels), np.uint8)
    labels = (np.arange(examples) % CLASSES).astype(np.int32)
    source = ArraySource({"image": images, "label": labels})
    plain = (0.5,) * channels
    classes = tuple("abcde")
    shape = (side, side, channels)
    dataset = Dataset(recipe.dataset, source, source, classes, shape, plain, plain)
    small = dataclasses.replace(
        recipe, weights=None, image_size=None, crop_size=crop_size
    )
    return small, dataset
