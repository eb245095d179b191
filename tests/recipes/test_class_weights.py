"""Weights of classes multiply the loss, whose gradient is clipped as ever."""

import dataclasses
import json
from typing import Any

import jax
import numpy as np
import pytest

from tanager import load, recipes
from tanager.cli import main
from tanager.data import gather
from tanager.privacy import accountant
from tanager.privacy.class_counts import release_of
from tanager.recipes import budget, heads, runner, tasks
from tanager.recipes.budget import solve_budget
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


@pytest.mark.usefixtures("stops_when_charged")
def test_weights_are_given_by_name_and_recorded(tmp_path, capsys):
    words = ["train", "digits", "--model", "linear", "--strategy", "bk"]
    words += ["--steps", "1", "--noise-multiplier", "2", "--account", "none"]
    words += ["--out", str(tmp_path / "a"), "--class-weights"]
    assert main([*words, "3", "5", "8", "0.25"]) == 130
    config = json.loads((tmp_path / "a/config.json").read_text())
    assert config["recipe"]["class_weights"] == {"3": 5.0, "8": 0.25}
    for given, message in (
        (["eight", "2"], "--class-weights (='eight')"),
        (["3", "0"], "--class-weights of 3 (=0.0) must be positive"),
    ):
        words[-2] = str(tmp_path / "b")
        assert main([*words, *given]) == 2
        assert message in capsys.readouterr().err


def test_weights_choose_dp_sgd():
    recipe = dataclasses.replace(
        recipes.get("features").recipe, class_weights={"a": 2.0}, features_from="f.npz"
    )
    assert heads.resolved(recipe, 100, 1280).solver == "dp-sgd"
    alone = dataclasses.replace(recipe, class_weights={})
    assert heads.resolved(alone, 100, 1280).solver == "class-means"
    for weights in ({"a": 2.0}, "balanced"):
        means = dataclasses.replace(recipe, solver="class-means", class_weights=weights)
        with pytest.raises(ValueError, match="takes each class by itself"):
            heads.resolved(means, 100, 1280)


BALANCED = dataclasses.replace(
    LINEAR,
    class_weights="balanced",
    noise_multiplier=None,
    steps=3,
    epsilon=2.0,
    batch_size=700,
)


def check_budget():
    found = solve_budget(BALANCED, 1000, 10)
    assert found.class_counts == release_of(2.0, found.delta, 1000, 10, "zero-out")
    spent = accountant.composed_epsilon(found.mechanisms(), found.delta)
    assert 1.99 < found.epsilon == spent <= 2.0


def test_noise_is_solved_for_so_that_counts_and_steps_spend_epsilon():
    check_budget()


def test_planted_noise_that_is_solved_for_without_the_counts(monkeypatch):
    solve = budget.calibrate_beside
    monkeypatch.setattr(
        budget, "calibrate_beside", lambda others, **settings: solve([], **settings)
    )
    with pytest.raises(AssertionError):
        check_budget()


def test_counts_are_part_of_epsilon_whatever_is_solved_for():
    given: dict[str, Any] = {"noise_multiplier": 4.0, "steps": 3}
    given["solve_for"] = "epsilon"
    alone = dataclasses.replace(BALANCED, class_weights={}, **given)
    both = dataclasses.replace(BALANCED, **given)
    less, more = (solve_budget(each, 1000, 10) for each in (alone, both))
    assert less.epsilon < more.epsilon < 1.04 * less.epsilon
    exact: dict[str, Any] = {"solve_for": "nothing", "epsilon": less.epsilon}
    solve_budget(dataclasses.replace(alone, **exact), 1000, 10)
    with pytest.raises(ValueError, match="is less than these settings spend"):
        solve_budget(dataclasses.replace(both, **exact), 1000, 10)
    public = {"non_private": True, "epsilon": None}
    free = solve_budget(dataclasses.replace(BALANCED, **public), 1000, 10)
    assert {one.noise_multiplier for one in free.mechanisms()} == {0.0}
    assert free.epsilon == float("inf")


def test_balanced_weights_from_the_command_line(tmp_path, capsys):
    out = tmp_path / "a"
    words = ["train", "digits", "--model", "linear", "--strategy", "bk", "--steps", "1"]
    words += ["--epsilon", "2", "--account", "none", "--class-weights", "balanced"]
    assert main([*words, "--out", str(out)]) == 0
    assert "class weights: from noisy counts, in this budget" in capsys.readouterr().out
    config = json.loads((out / "config.json").read_text())
    assert config["recipe"]["class_weights"] == "balanced"
    found = config["noisy_counts"]
    counts = np.array(found["counts"])
    assert (np.abs(counts - 1437 / 10) < 100).all()  # 11 deviations of the noise
    np.testing.assert_allclose(found["weights"], counts.mean() / counts, rtol=1e-6)
    result = json.loads((out / "result.json").read_text())
    assert result["epsilon"] <= 2
    assert result["class_counts_noise"] == config["class_counts"]["noise_multiplier"]
    assert load(out).logits(np.zeros((1, 8, 8, 1), np.uint8)).shape == (1, 10)


def test_where_counts_would_not_be_counted_they_are_refused(tmp_path, capsys):
    words = ["digits", "--class-weights", "balanced", "--out", str(tmp_path / "a")]
    assert main(["audit", *words]) == 2
    assert "is not supported in an audit" in capsys.readouterr().err
    with pytest.raises(ValueError, match="is not supported in a search"):
        BALANCED.require_batches()
    assert not (tmp_path / "a").exists()
