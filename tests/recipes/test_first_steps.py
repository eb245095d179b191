"""The first step of every recipe runs, on a few small images and a shallow network.

Networks are of the recipe's own kind and options, with one block in each stage; images
are noise. Everything else is the recipe's. That the networks of full size build and
trace is `test_tables`.
"""

import dataclasses
import functools
import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file
from small_recipes import CLASSES, shrunk

from tanager import models, recipes
from tanager.models import bit, nf_resnet, nfnet, zoo
from tanager.models.vit import Variant
from tanager.recipes import runner, tasks
from tanager.recipes.budget import settle


ONE_EACH = (1, 1, 1, 1)
SHALLOW = {
    "wrn": lambda name, **options: zoo.find("wrn-10-1").builder(**options),
    "nf": lambda name, image_shape, **options: nf_resnet.NFResNet(ONE_EACH, **options),
    "nfnet": lambda name, image_shape, **options: nfnet.NFNet(ONE_EACH, **options),
    "bit": lambda name, image_shape, **options: bit.BiT(
        bit.VARIANTS["50x1"]._replace(blocks=ONE_EACH), **options
    ),
    "vit": lambda name, **options: models.VisionTransformer(
        Variant(12, 1, 3), 16, **options
    ),
}
ENTRIES = list(recipes.RECIPES.values())
EXAMPLES = 12

# What the program of a step does not depend on.
NUMBERS = {
    "epsilon": 8.0,
    "delta": 1e-3,
    "noise_multiplier": None,
    "steps": 1,
    "batch_size": 4,
    "physical_batch_size": 3,
    "train_examples": None,
    "classes": None,
    "evaluate_every": 1,
    "ema_decay": 0.5,
    "strategy": "bk_mixopt",
    "weights": None,
}


def alike(recipe):
    """The recipe in small: many recipes then are one."""
    numbers = dict(NUMBERS)
    if recipe.non_private:
        numbers["epsilon"] = None
    views = min(recipe.augmentation_multiplicity, 2)
    family = recipe.model.partition("-")[0]
    models_alike = {"wrn": "wrn-16-4", "nf": "nf-resnet-50", "nfnet": "nfnet-f0"}
    return dataclasses.replace(
        recipe,
        model=models_alike.get(family, recipe.model),
        augmentation_multiplicity=views,
        learning_rate=0.1,
        clip_norm=1.0,
        warmup_steps=0,
        **numbers,
    )


@pytest.fixture(scope="module")
def first_step(tmp_path_factory):
    """A function from a recipe to the folder of its run of one step."""

    @functools.cache
    def of(text, needs_weights):
        recipe, dataset = shrunk(recipes.Recipe.from_json(json.loads(text)), EXAMPLES)
        folder = tmp_path_factory.mktemp("first-step")
        if needs_weights:
            weights = folder / "pretrained.safetensors"
            model = models.create(
                recipe.model,
                classes=CLASSES + 1,
                image_shape=tasks.seen_shape(recipe, dataset),
                key=jax.random.key(0),
                **tasks.model_options(recipe),
            )
            models.save_weights(model, weights)
            recipe = dataclasses.replace(recipe, weights=str(weights))
        recipe = dataclasses.replace(recipe, out=str(folder / "run"), seed=3)
        prepared = runner.Prepared(
            "small", recipe, dataset, settle(recipe, (), len(dataset.train))
        )
        runner.run(prepared, progress=False)
        return folder

    return of


@pytest.mark.slow
@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_the_first_step_runs(entry, first_step, monkeypatch):
    recipe = alike(entry.recipe)
    family = recipe.model.partition("-")[0]
    if family in SHALLOW:
        found = zoo.find(recipe.model)
        build = functools.partial(SHALLOW[family], recipe.model)
        shallow = dataclasses.replace(found, builder=build)
        monkeypatch.setitem(zoo.ENTRIES, recipe.model, shallow)
    folder = first_step(json.dumps(recipe.to_json()), bool(entry.pretrained_on))
    result = json.loads((folder / "run/result.json").read_text())
    assert result["steps"] == 1
    assert result["epsilon"] == pytest.approx(8, rel=1e-2) or recipe.non_private
    after = load_file(folder / "run/model.safetensors")
    assert all(np.isfinite(leaf).all() for leaf in after.values())
    assert np.any(after["head.bias"] != 0)
    if entry.pretrained_on:
        before = load_file(folder / "pretrained.safetensors")
        moved = {
            name
            for name in after
            if before[name].shape != after[name].shape
            or not np.array_equal(before[name], after[name])
        }
        everything = recipe.fine_tune == "all"
        assert moved == (set(after) if everything else {"head.weight", "head.bias"})
