"""What stays as it is of a model is computed once, and nothing else changes."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tanager import recipes
from tanager.data import as_source, gather
from tanager.recipes import runner, tasks
from tanager.seed import Seed


RECIPE = dataclasses.replace(
    recipes.get("digits").recipe, model="scattering-cnn", train_examples=8
)


@pytest.fixture(scope="module")
def dataset():
    loaded = runner.load(RECIPE)
    few = as_source(gather(loaded.test, np.arange(8)))
    return dataclasses.replace(loaded, test=few)


@pytest.fixture(scope="module")
def features(tmp_path_factory):
    """A folder for features that are computed once."""
    return str(tmp_path_factory.mktemp("features"))


def make(dataset, folder, **fields):
    recipe = dataclasses.replace(RECIPE, **fields)
    return tasks.make(recipe, dataset, Seed.from_int(0), folder, False)


def losses_and_gradients(problem, batch):
    """Of each example, by what is trained."""
    trained, fixed = eqx.partition(problem.params, problem.trainable or True)

    def loss(trained, example):
        return problem.loss(eqx.combine(trained, fixed), example)

    of_each = jax.jit(jax.vmap(jax.value_and_grad(loss), (None, 0)))
    return of_each(trained, {name: jnp.asarray(x) for name, x in batch.items()})


@pytest.mark.parametrize(
    ("fields", "shape"),
    [
        ({}, (2, 2, 81)),
        pytest.param(
            {"model": "wrn-10-1", "fine_tune": "last-stage"},
            (4, 4, 32),
            marks=pytest.mark.full,
        ),
        (
            {"model": "wrn-10-1", "fine_tune": "last-stage", "mirror": True},
            (2, 4, 4, 32),
        ),
        ({"model": "small-cnn", "fine_tune": "last-layer", "mirror": True}, (512,)),
    ],
    ids=["scattering", "last stage", "mirrored", "last layer"],
)
def test_losses_and_gradients_are_those_of_the_whole_model(
    dataset, tmp_path, fields, shape
):
    cached = make(dataset, tmp_path, **fields)
    views = {"augmentation_multiplicity": 2, "crop_padding": 1}
    whole = make(dataset, tmp_path / "whole", **fields, **views)  # so nothing is cached
    assert not (tmp_path / "whole/private").exists()
    assert {path.name for path in tmp_path.iterdir()} == {"private"}
    held = [gather(each, np.arange(8))["label"] for each in (cached.test, dataset.test)]
    np.testing.assert_array_equal(*held)
    index = np.arange(3)
    examples = [gather(task.problem.source(), index) for task in (cached, whole)]
    assert examples[0]["features"].shape == (3, *shape)
    assert "image" in examples[1]
    trained = whole.problem.trainable or True
    if cached.problem.trainable is not None:
        assert jax.tree.leaves(cached.problem.trainable) == jax.tree.leaves(trained)
    (losses, gradients), (expected, their_gradients) = (
        losses_and_gradients(task.problem, batch)
        for task, batch in zip((cached, whole), examples, strict=True)
    )
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    found = gradients, their_gradients
    for ours, theirs in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "fields",
    [
        {"model": "small-cnn"},
        {"augmentation_multiplicity": 2, "crop_padding": 1},
        {"unreadable": "skip"},
    ],
    ids=str,
)
def test_a_folder_for_features_is_refused_where_there_are_none(fields):
    with pytest.raises(ValueError, match=r"features \(='f'\) must be left out unless"):
        dataclasses.replace(RECIPE, features="f", **fields)


@pytest.mark.parametrize("solver", ["dp-sgd", "class-means"])
def test_a_head_on_cached_features_rounds_as_the_whole_model_does(
    dataset, features, tmp_path, solver
):
    fields = {"model": "small-cnn", "fine_tune": "last-layer", "head_input": "norm"}
    fields |= {"features": features}
    fields |= {"precision": "bfloat16", "solver": solver}
    task = make(dataset, tmp_path, **fields)
    example = jax.tree.map(jnp.asarray, gather(task.test, np.arange(1)))
    example = jax.tree.map(lambda leaf: leaf[0], example)
    params = task.problem.params
    if solver != "dp-sgd":  # sums of a first step, which are 0 before
        params = eqx.tree_at(lambda tree: tree.sums, params, params.sums + 0.37)
    model = task.problem.finish(params)
    found = task.predict(params, example)
    rounded, exact = (
        model.head(example["features"].astype(dtype)).astype(jnp.float32)
        for dtype in (jnp.bfloat16, jnp.float32)
    )
    np.testing.assert_array_equal(found, rounded)
    assert not np.array_equal(rounded, exact)
