"""The first step of every recipe runs, on a few small images and a shallow network.

Networks are of the recipe's own kind and options, with a block or two; images are
noise. Everything else that a step's program depends on is the recipe's. That the
networks of full size build is `tests/models`.
"""

import dataclasses
import functools
import json
from typing import Any
from unittest import mock

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_recipes
from small_recipes import CLASSES, one_of_each, shrunk

from tanager import models, recipes
from tanager.data import gather
from tanager.models import bit, efficientnet, layers, nf_resnet, nfnet, zoo
from tanager.models.vit import Variant
from tanager.models.wide_resnet import WideResNet, group_norm
from tanager.recipes import automatic, runner, tasks
from tanager.recipes.budget import solve_budget
from tanager.sampling import PhysicalBatch
from tanager.seed import Seed
from tanager.training.step import Step


ENTRIES = list(recipes.RECIPES.values())
SEED = Seed.from_int(3)
ROWS = 3

ONE_EACH = (1, 1, 1, 1)


def _wrn(image_shape, *, key, **options):
    """Return a Wide-ResNet with its second block alone: its skip path is convolved."""
    whole = WideResNet(10, 1, key=key, **options)
    head = layers.Linear(32, options["classes"], key=key)
    parts = whole.blocks[1:2], group_norm(whole.order, 32), head
    return eqx.tree_at(
        lambda model: (model.blocks, model.norm, model.head),
        whole,
        parts,
        is_leaf=lambda part: part is None,
    )


def _nf(image_shape, **options):
    with mock.patch.object(nf_resnet, "_WIDTHS", (256, 512)):
        return nf_resnet.NFResNet((1, 1), **options)


def _efficientnet(image_shape, **options):
    with mock.patch.object(efficientnet, "_STAGES", efficientnet._STAGES[:2]):
        return efficientnet.EfficientNetLite(
            efficientnet.Variant(1.0, 1.0, 224), **options
        )


SHALLOW: dict[str, tuple[str, Any]] = {
    "wrn": ("wrn-16-4", _wrn),
    "nf": ("nf-resnet-50", _nf),
    "nfnet": (
        "nfnet-f0",
        lambda image_shape, **options: nfnet.NFNet(ONE_EACH, **options),
    ),
    "bit": (
        "bit-50x1",
        lambda image_shape, **options: bit.BiT(
            bit.VARIANTS["50x1"]._replace(blocks=ONE_EACH), **options
        ),
    ),
    "vit": (
        "vit-base-16",
        functools.partial(models.VisionTransformer, Variant(12, 1, 3), 16),
    ),
    "efficientnet": ("efficientnet-lite0", _efficientnet),
}
"""By family: the name that stands for all of it, and what is built under it."""


def alike(recipe):
    """The recipe in small, with the name that stands for all of its family."""
    name, _ = SHALLOW.get(recipe.model.partition("-")[0], (recipe.model, None))
    return small_recipes.alike(dataclasses.replace(recipe, model=name), ROWS)


@pytest.fixture(scope="module")
def first_step(tmp_path_factory):
    """A function from a recipe to its first step, taken once for recipes alike."""

    @functools.cache
    def of(text):
        return step_once(text, tmp_path_factory.mktemp("first-step"))

    return of


def step_once(text, folder):
    """Return what is trained, before and after one step, the model, and the dropped."""
    recipe, dataset = shrunk(recipes.Recipe.from_json(json.loads(text)))
    if recipe.head != "fresh" or recipe.fine_tune != "all":
        model = models.create(
            recipe.model,
            classes=CLASSES + 1,
            image_shape=tasks.seen_shape(recipe, dataset),
            key=jax.random.key(0),
            **tasks.model_options(recipe),
        )
        models.save_weights(model, folder / "weights.safetensors")
        recipe = dataclasses.replace(
            recipe, weights=str(folder / "weights.safetensors")
        )
    task = tasks.make(recipe, dataset, SEED, folder, False)
    train, count = task.problem.data, len(task.problem.data)
    prepared = runner.Prepared("", recipe, dataset, solve_budget(recipe, count))
    step = Step(
        task.problem,
        runner.algorithm(prepared, count),
        runner.runtime(recipe),
        SEED,
        examples=count,
    )
    trained, fixed = step.params, step.fixed
    before = jax.device_get(trained)
    state = step.start(trained)
    rows = np.arange(ROWS, dtype=np.int32)
    accumulate, apply = (
        jax.jit(function) for function in (step._accumulate, step._update)
    )
    total = accumulate(
        state.params,
        step.frozen,
        step.zero(),
        PhysicalBatch(gather(train, rows), np.ones(ROWS, bool), rows),
        step.augmentation_key(0),
    )
    with jax.numpy_dtype_promotion("standard"):  # optax's own Adam needs it
        state, counts, _ = apply(state, total, step.draw(0), jnp.int32(0))
    whole = task.problem.finish(eqx.combine(state.params, fixed))
    return before, jax.device_get(state.params), whole, int(counts.dropped)


@pytest.mark.slow
@pytest.mark.parametrize("entry", one_of_each(ENTRIES))
def test_the_first_step_runs(entry, first_step, monkeypatch):
    recipe = alike(automatic.resolved(entry.recipe))
    family = recipe.model.partition("-")[0]
    if family in SHALLOW:
        name, builder = SHALLOW[family]
        shallow = dataclasses.replace(zoo.find(name), builder=builder)
        monkeypatch.setitem(zoo.ENTRIES, name, shallow)
    before, after, whole, dropped = first_step(json.dumps(recipe.to_json()))
    assert dropped == 0
    last_layer = recipe.fine_tune == "last-layer"
    changed = whole.head if last_layer else whole
    count = len(jax.tree.leaves(eqx.filter(changed, eqx.is_array)))
    assert len(jax.tree.leaves(after)) == count
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        assert np.all(np.isfinite(new))
        assert not np.array_equal(old, new)
    assert whole.head.weight.shape[1] == CLASSES
