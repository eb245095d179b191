"""Last layers on features: class means, and the choice between solvers."""

import dataclasses
import json
from types import SimpleNamespace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tanager
from tanager import models
from tanager.cli import main
from tanager.commands import flags
from tanager.commands.train import Options
from tanager.data import load
from tanager.models.layers import ScaledHead
from tanager.recipes import heads, tasks
from tanager.recipes.budget import solve_budget
from tanager.recipes.recipe import Recipe
from tanager.search.simulation import plan_simulation


WIDTH, CLASSES, N = 6, 3, 40
SCATTERING = "scattering-linear"  # whose batch is of 8192
AUTO = Recipe(
    dataset="digits",
    model="small-cnn",
    fine_tune="last-layer",
    head_input="root",
    solver="auto",
    epsilon=1.0,
    batch_size=0,
    learning_rate=0.0,
)


def examples(seed=0):
    draw = np.random.default_rng(seed)
    return {
        "features": draw.uniform(0, 3, (N, WIDTH)).astype(np.float32),
        "label": draw.integers(0, CLASSES, N).astype(np.int32),
    }


def head(scaling="root"):
    return ScaledHead(WIDTH, CLASSES, scaling, key=jax.random.key(0))


@pytest.mark.parametrize("scaling", ["norm", "root"])
def test_one_step_sums_the_features_of_each_class(scaling):
    """The same as adding them up by hand, and no example counts for more than C."""
    means, data = heads.class_means(head(scaling)), examples()
    grad_fn = tanager.clipped_grad(
        heads.loss, clip_norm=1.0, trainable=heads.trainable(means)
    )
    out = grad_fn(means, data, jnp.ones(N, bool))
    x = np.float64(data["features"])
    if scaling == "root":
        x = np.sqrt(x)
        x -= x.mean(axis=1, keepdims=True)
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    expected = x.T @ np.eye(CLASSES)[data["label"]]
    np.testing.assert_allclose(out.sum.sums, expected, rtol=2e-3, atol=1e-5)
    np.testing.assert_allclose(out.norms, 1.0, rtol=1e-3)
    assert out.sum.head.weight is None


def test_the_head_is_the_directions_of_the_sums():
    means = heads.class_means(head())
    sums = jnp.asarray(np.random.default_rng(1).normal(size=(WIDTH, CLASSES)))
    solved = eqx.tree_at(lambda tree: tree.sums, means, -3 * sums).solve()
    np.testing.assert_allclose(
        solved.weight, sums / jnp.linalg.norm(sums, axis=0, keepdims=True), rtol=1e-5
    )


def test_a_scaled_head_is_blind_to_the_length_of_features():
    one = head("norm")
    x = jnp.arange(1.0, 1.0 + WIDTH)
    np.testing.assert_allclose(one(x), one(7 * x), rtol=1e-5)
    gradient = jax.grad(lambda x: head("root")(x).sum())(jnp.zeros(WIDTH))
    assert np.isfinite(gradient).all()


@pytest.mark.parametrize(
    ("given", "examples", "solver", "steps", "rate"),
    [
        ({}, 600, "class-means", 1, 1.0),
        ({}, 700, "class-means", 1, 1.0),
        ({}, 720, "dp-sgd", 60, 0.25),
        ({"epsilon": 4.0}, 600, "dp-sgd", 60, 0.84),
        ({}, 50_000, "dp-sgd", 60, 17.47),
        ({"epsilon": 8.0}, 50_000, "dp-sgd", 150, 20.0),
        ({"model": SCATTERING, "epsilon": 16.0}, 5000, "dp-sgd", 240, 50.0),
        ({"steps": 7}, 600, "dp-sgd", 7, 0.21),
        ({"learning_rate": 3.0}, 600, "dp-sgd", 60, 3.0),
        ({"solver": "dp-sgd"}, 600, "dp-sgd", 60, 0.21),
    ],
)
def test_public_numbers_choose_the_solver(given, examples, solver, steps, rate):
    recipe = dataclasses.replace(AUTO, **given)
    found = heads.resolved(recipe, examples, 1280)
    assert (found.solver, found.steps) == (solver, steps)
    assert found.learning_rate == pytest.approx(rate, abs=0.01)
    assert found.batch_size == examples


@pytest.mark.parametrize(
    "given",
    [
        {"batch_size": 64},
        {"clip_norm": 0.5},
        {"optimizer": "adamw"},
        {"noise_multiplier": 9.0, "solve_for": "steps"},
    ],
)
def test_what_is_given_stands_where_class_means_would_suit(given):
    found = heads.resolved(dataclasses.replace(AUTO, **given), 600, 1280)
    assert found.solver == "dp-sgd"
    assert {name: getattr(found, name) for name in given} == given
    mechanism = solve_budget(found, 600).mechanism
    assert (mechanism.steps == 60) != ("noise_multiplier" in given)
    assert mechanism.noise_multiplier == given.get(
        "noise_multiplier", mechanism.noise_multiplier
    )


OPEN = "digits --fine-tune last-layer --head-input root --solver auto --epsilon 1 "
OPEN += "--batch-size 0 --learning-rate 0 --steps None"


@pytest.mark.parametrize(
    ("words", "solver"),
    [
        ("", "class-means"),
        ("--ema-decay 0", "class-means"),
        ("--ema-decay 0.95", "dp-sgd"),
        ("--optimizer-options momentum 0.9", "dp-sgd"),
    ],
)
def test_what_is_typed_stands_though_it_is_usual(words, solver):
    _, recipe, _ = flags.parse("train", [*OPEN.split(), *words.split()], Options)
    assert heads.resolved(recipe, 600, 1280).solver == solver


def test_a_solver_that_was_typed_or_begun_with_is_not_changed(tmp_path):
    words = [*OPEN.split(), "--ema-decay", "0.95"]
    with pytest.raises(ValueError, match="does not apply to solver class-means"):
        flags.parse("train", [*words, "--solver", "class-means"], Options)
    (tmp_path / "1").mkdir()
    (tmp_path / "1/config.json").touch()
    given = [*words, "--learning-rate", "1"]  # which class means have not
    assert flags.parse("train", given, Options)[1].solver == "auto"
    words += ["--out", str(tmp_path)]
    assert flags.parse("train", words, Options)[1].solver == "auto"


def test_noise_that_is_given_is_kept():
    given = dataclasses.replace(AUTO, noise_multiplier=500.0)
    found = heads.resolved(given, 600, 1280)
    budget = solve_budget(found, 600)
    assert budget.mechanism.noise_multiplier == 500
    assert budget.epsilon < 0.05
    little = dataclasses.replace(given, noise_multiplier=0.1, solve_for="nothing")
    with pytest.raises(ValueError, match="is less than these settings spend"):
        solve_budget(heads.resolved(little, 600, 1280), 600)


MEANS = {"solver": "class-means", "steps": 1, "learning_rate": 1}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"head_input": "features"}, "is for a last layer on features of norm 1"),
        (MEANS | {"head_input": "features"}, "is for a last layer on features of norm"),
        (MEANS | {"fine_tune": "all", "weights": "x"}, "is for a last layer on feat"),
        ({"head_input": "features", "solver": "dp-sgd"}, "if settings are left open"),
        (
            {"epsilon": None, "noise_multiplier": 9.0, "steps": 3},
            "must be given for so",
        ),
        (
            {"solver": "class-means", "solve_for": "steps", "noise_multiplier": 9.0},
            r"noise_multiplier .*left out beside epsilon for class-means, of 1 step",
        ),
    ],
)
def test_what_the_map_does_not_know_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        heads.resolved(dataclasses.replace(AUTO, **given), 600, 1280)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "must be dp-sgd in a search.*--batch-size, --steps, --learning-rate and"),
        (
            {"solver": "dp-sgd", "steps": 9, "learning_rate": 1, "clip_norm": 1},
            "batch_size .*at least 1",
        ),
    ],
)
def test_a_search_needs_batches_and_steps(given, message):
    with pytest.raises(ValueError, match=message):
        plan_simulation("x", dataclasses.replace(AUTO, **given), 600)


def test_without_privacy_a_last_layer_needs_steps_and_a_learning_rate():
    with pytest.raises(ValueError, match=r"steps .*give --steps and --learning-rate"):
        dataclasses.replace(AUTO, epsilon=None, non_private=True)
    given = dataclasses.replace(AUTO, epsilon=None, non_private=True, steps=9)
    with pytest.raises(ValueError, match=r"learning_rate .*give --learning-rate"):
        heads.resolved(given, 600, 1280)


def test_a_crop_is_resized_to_the_size_that_is_given():
    dataset = load("digits")
    recipe = dataclasses.replace(AUTO, crop_size=8, image_size=12, flip=True)
    assert tasks.seen_shape(recipe, dataset) == (12, 12, 1)
    recipe = dataclasses.replace(recipe, image_size=None)
    assert tasks.seen_shape(recipe, dataset) == (8, 8, 1)


@pytest.mark.parametrize("changes", [{"crop_size": 8, "flip": True}, {}])
def test_a_crop_fraction_is_kept_wherever_the_size_comes_from(changes):
    recipe = dataclasses.replace(AUTO, crop_fraction=0.75, **changes)
    assert tasks.preprocessing(recipe, load("digits")).crop == 0.75
    folder = dataclasses.replace(load("digits"), name="folder")
    recipe = dataclasses.replace(recipe, dataset="folder", image_size=8)
    assert tasks.preprocessing(recipe, folder).crop == 0.75


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    """Weights at random: their features tell digits apart well enough."""
    out = tmp_path_factory.mktemp("random") / "model.safetensors"
    shape, key = (8, 8, 1), jax.random.key(1)
    random = models.create("small-cnn", classes=10, image_shape=shape, key=key)
    models.save_weights(random, out)
    return out


@pytest.mark.parametrize(
    ("epsilon", "solver"),
    [("0.3", "class-means"), pytest.param("9", "dp-sgd", marks=pytest.mark.full)],
)
def test_a_run_spends_what_it_says_and_its_export_predicts(
    pretrained, tmp_path, capsys, epsilon, solver
):
    out = tmp_path / "run"
    words = ["train", "digits", "--weights", str(pretrained), "--head", "zero"]
    words += ["--preprocessing", "data"]
    words += ["--features", str(pretrained.with_name("features"))]  # of both runs
    words += ["--fine-tune", "last-layer", "--head-input", "root", "--solver", "auto"]
    words += ["--batch-size", "0", "--learning-rate", "0", "--steps", "None"]
    words += ["--epsilon", epsilon, "--seed", "1", "--out", str(out)]
    assert main(words) == 0
    config = json.loads((out / "config.json").read_text())
    result = json.loads((out / "result.json").read_text())
    assert config["recipe"]["solver"] == solver
    assert result["sample_rate"] == 1.0
    assert float(epsilon) * 0.99 < result["epsilon"] <= float(epsilon)
    gaussian = tanager.Mechanism(1.0, result["noise_multiplier"], result["steps"])
    assert result["epsilon"] == pytest.approx(tanager.epsilon(gaussian, 1e-4), rel=1e-3)
    assert result["test_accuracy"] > (0.5 if solver == "dp-sgd" else 0.2)
    trained = models.load_pretrained(tanager.export(out, tmp_path / "model"))
    logits = trained(np.zeros((8, 8, 1), np.uint8))
    assert logits.shape == (10,) and np.isfinite(logits).all()
    capsys.readouterr()
    assert main(["evaluate", str(out), "--json"]) == 0
    measured = json.loads(capsys.readouterr().out)["accuracy"]["value"]
    assert measured == pytest.approx(result["test_accuracy_ema"])


def test_the_time_before_the_first_image_is_not_expected_for_each(monkeypatch, capsys):
    now = iter([0.0, 66.0, 76.0])
    monkeypatch.setattr(tasks, "time", SimpleNamespace(monotonic=lambda: next(now)))
    with tasks.progress_bar("reading images", True) as report:
        report(256, 60000)
        report(33536, 60000)
    assert capsys.readouterr().err.splitlines() == [
        "reading images: 256 of 60000",
        "reading images: 33536 of 60000; about 8 seconds left",
    ]


def test_a_pipe_gets_lines_ten_seconds_apart(monkeypatch, capsys):
    now = iter([0.0, 4.0, 11.0, 15.0, 22.0])
    monkeypatch.setattr(tasks, "time", SimpleNamespace(monotonic=lambda: next(now)))
    with tasks.progress_bar("features", True) as report:
        for done in (4, 11, 15, 22):
            report(done, 100)
    assert capsys.readouterr().err.splitlines() == [
        "features: 11 of 100; about 89 seconds left",
        "features: 22 of 100; about 78 seconds left",
    ]
