"""Weights of classes multiply the loss, whose gradient is clipped as ever."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from tanager import recipes
from tanager.cli import main
from tanager.data import gather
from tanager.recipes import heads, runner, tasks
from tanager.seed import Seed


LINEAR = dataclasses.replace(recipes.get("digits").recipe, model="linear")


def test_the_loss_of_each_class_is_multiplied_by_its_weight(tmp_path):
    dataset = runner.load(LINEAR)
    weighted = dataclasses.replace(LINEAR, class_weights={"3": 5.0, "8": 0.25})
    losses = {}
    for recipe in (LINEAR, weighted):
        task = tasks.make(recipe, dataset, Seed.from_int(0), tmp_path, False)
        batch = gather(dataset.train, np.arange(100))
        loss = jax.vmap(task.problem.loss, (None, 0))
        losses[recipe is weighted] = np.asarray(loss(task.problem.params, batch))
    factors = np.ones(10, np.float32)
    factors[[3, 8]] = 5.0, 0.25
    assert {3, 8} <= {*batch["label"]}
    np.testing.assert_allclose(
        losses[True], losses[False] * factors[batch["label"]], rtol=1e-6
    )


def test_weights_are_given_by_name_and_recorded(tmp_path, capsys):
    words = ["train", "digits", "--model", "linear", "--strategy", "bk"]
    words += ["--steps", "1", "--noise-multiplier", "2", "--out", str(tmp_path / "a")]
    words += ["--account", "none", "--class-weights"]
    assert main([*words, "3", "5", "8", "0.25"]) == 0
    config = json.loads((tmp_path / "a/config.json").read_text())
    assert config["recipe"]["class_weights"] == {"3": 5.0, "8": 0.25}
    for given, message in (
        (["eight", "2"], "class_weights (='eight')"),
        (["3", "0"], "class_weights of 3 (=0.0) must be positive"),
    ):
        assert main([*words[:-3], "--class-weights", *given]) == 2
        assert message in capsys.readouterr().err


def test_weights_choose_dp_sgd():
    recipe = dataclasses.replace(
        recipes.get("features").recipe, class_weights={"a": 2.0}, features_from="f.npz"
    )
    assert heads.resolved(recipe, 100, 1280).solver == "dp-sgd"
    alone = dataclasses.replace(recipe, class_weights={})
    assert heads.resolved(alone, 100, 1280).solver == "class-means"
    means = dataclasses.replace(recipe, solver="class-means")
    with pytest.raises(ValueError, match="takes each class by itself"):
        heads.resolved(means, 100, 1280)
