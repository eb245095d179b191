"""Recipes from end to end: the command, a folder of images, resuming."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from PIL import Image

import pages
from forks import Fork
from tanager import __main__ as program
from tanager import recipes
from tanager.cli import main
from tanager.data import gather
from tanager.privacy.account import Account
from tanager.recipes import runner, tasks
from tanager.training.run_folder import RunFolder


SHORT = ["--steps", "2", "--evaluate-every", "1", "--seed", "1"]
SHORT += ["--noise-multiplier", "2"]  # to solve for it takes a fifth of the time
SMALL = [*SHORT, "--model", "linear"]

AUDITS = ("white-box", "membership", "one-run", "replay")


def one_step(words):
    """Flags of a short run; what membership's attacker chooses is not one of them."""
    return ["--steps", "1", "--learning-rate", "1"] * ("membership" not in words)


def result_of(folder):
    return json.loads((folder / "result.json").read_text())


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """What `tanager train` alone printed, and the folder that it ran in."""
    folder = tmp_path_factory.mktemp("demo")
    fork = Fork.computing([program.__file__, "train", "--seed", "2"], folder)
    fork.wait()
    assert fork.code == 0, fork.errors
    return fork.out, folder


@pytest.mark.slow
def test_the_command_alone_trains_the_digits(demo):
    printed, folder = demo
    start = pages.blocks(pages.ROOT / "docs/start.md")
    (shown,) = (block.code for block in start if "step 150/150" in block.code)
    for seeded, secret in (
        ("runs/digits-1", "runs/demo"),
        ("NOT PRIVATE (see the report): ", ""),
    ):
        assert seeded in printed
        printed = printed.replace(seeded, secret)
    pages.compare(printed, shown, "docs/start.md")
    result = result_of(folder / "runs/digits-1")
    assert result["epsilon"] <= 3
    assert result["delta"] == 1e-4
    assert len(result["per_class"]) == 10
    assert sum(each["examples"] for each in result["per_class"]) == 360
    config = json.loads((folder / "runs/digits-1/config.json").read_text())
    assert config["recipe"]["name"] == "digits"
    assert config["optimizer"] == {"name": "sgd", "learning_rate": 0.5}
    assert result["steps"] == config["recipe"]["steps"]


def test_the_same_command_again_changes_nothing_and_another_is_refused(
    tmp_path, capsys
):
    out = tmp_path / "run"
    command = ["train", "digits", *SMALL, "--out", str(out), "--optimizer", "adamw"]
    command += ["--optimizer-options", "weight_decay", "0.1"]
    with jax.numpy_dtype_promotion("standard"):  # optax's own arithmetic needs it
        assert main(command) == 0
        assert result_of(out)["steps"] == 2
        optimizer = json.loads((out / "config.json").read_text())["optimizer"]
        assert (optimizer["name"], optimizer["weight_decay"]) == ("adamw", 0.1)
        model = (out / "model.safetensors").read_bytes()
        assert main(command) == 0
        assert (out / "model.safetensors").read_bytes() == model
        assert main([*command, "--learning-rate", "9"]) == 2
    assert "learning_rate was 0.5 and is 9.0" in capsys.readouterr().err


def test_images_that_differ_in_size_become_what_the_model_is_for(tmp_path, images):
    Image.new("RGB", (20, 12)).save(images / "train/dark/odd.png")
    recipe = dataclasses.replace(
        recipes.get("folder").recipe, data=str(images), batch_size=20, steps=5
    )
    for model, side in (("wrn-16-4", 32), ("vit-tiny-16", 224)):
        sized = dataclasses.replace(recipe, model=model)
        with pytest.warns(UserWarning, match=f"each is resized to {side} × {side} pix"):
            prepared = runner.prepare("folder", sized)
        assert prepared.dataset.image_shape == (side, side, 3)
        assert prepared.recipe.image_size == side
    resized = dataclasses.replace(recipe, image_size=8)
    assert runner.prepare("folder", resized).dataset.image_shape == (8, 8, 3)


@pytest.mark.parametrize("flag", ["--image-column", "--label-column"])
def test_columns_of_class_folders_are_refused(images, capsys, flag):
    words = ["train", "folder", "--data", str(images), "--model", "linear"]
    assert main([*words, "--epsilon", "4", flag, "dx"]) == 2
    errors = capsys.readouterr().err
    assert f"error: {flag} (='dx') names a column, and the data are read as" in errors
    assert main([*words, "--epsilon", "4", flag, "dx", "--labels-from-name"]) == 2
    assert f"error: {flag} (='dx') must be left out with" in capsys.readouterr().err


@pytest.mark.parametrize(
    "out", ["photos", "photos/cat", "photos/../photos/runs", "link"]
)
def test_no_run_writes_its_secrets_among_the_data(tmp_path, out):
    photos, inside = str(tmp_path / "photos"), str(tmp_path / out)
    (tmp_path / "link").symlink_to(photos)
    written: tuple[tuple[str, dict[str, Any]], ...] = (
        ("folder", {"data": photos, "out": inside}),
        ("folder", {"data": photos, "features": inside}),
        ("features", {"features_from": photos, "out": inside}),
    )
    for name, fields in written:
        recipe = dataclasses.replace(recipes.get(name).recipe, **fields)
        with pytest.raises(ValueError, match="is in the folder of the data"):
            runner.prepare(name, recipe)


def test_what_is_chosen_and_recorded_does_not_tell_a_private_number_of_examples():
    declared: dict[str, Any] = {"declared_examples": 1400, "epsilon": 4.0}
    declared["adjacency"] = "add-or-remove-one"
    recipe = dataclasses.replace(recipes.get("folder").recipe, **declared)
    every, made = runner.load(recipes.get("digits").recipe), []
    for count in (1437, 1300):
        dataset = every.only(np.arange(1437) < count)
        dataset = dataclasses.replace(dataset, chosen_from=count)
        prepared = runner.prepare("folder", recipe, dataset=dataset)
        algorithm = runner.algorithm(prepared, count)
        settings = algorithm.as_json(algorithm.public_size(count))
        made.append((prepared.recipe, prepared.budget, prepared.reasons, settings))
        made[-1] += (runner._description(prepared, None),)
    assert made[0] == made[1]
    assert "N = 1400" in str(made[0])


def test_an_epsilon_that_protects_next_to_nothing_is_warned_of():
    recipe = dataclasses.replace(recipes.get("digits").recipe, model="linear")
    loud = dataclasses.replace(recipe, noise_multiplier=0.3, solve_for="epsilon")
    with pytest.warns(UserWarning, match="protects next to nothing: right for a sim"):
        runner.prepare("digits", loud)


def test_what_is_written_in_a_home_folder_is_where_it_was_looked_for(
    tmp_path, monkeypatch
):
    """A shell leaves ~ in --out=~/run; a folder of that name held the secrets."""
    monkeypatch.setenv("HOME", str(tmp_path))
    written: dict[str, Any] = {
        name: f"~/{name}" for name in ("out", "features", "account")
    }
    start = recipes.get("folder").recipe
    recipe = dataclasses.replace(start, data=str(tmp_path / "photos"), **written)
    for name in written:
        assert getattr(recipe, name) == str(tmp_path / name)
    assert Account(Path("~/account")).path == tmp_path / "account"


@pytest.mark.parametrize(
    "words",
    [
        ["train"],
        ["train", "--features", "cached", "--fine-tune", "last-layer", "--out", "../x"],
        ["search", "--trials", "1"],
        ["search", "--private", "--trials", "1", "--validation-examples", "2"],
        ["search", "privacy"],
        *(["audit", "--method", method] for method in AUDITS),
    ],
    ids=" ".join,
)
def test_nor_where_no_folder_is_named(images, monkeypatch, capsys, words):
    monkeypatch.chdir(images)
    number = 1 + (words[1:2] == ["privacy"])
    words = [*words[:number], "folder", *words[number:], "--data", ".", "--model"]
    words += ["linear", "--account", "none", "--epsilon", "8", "--solver", "dp-sgd"]
    if "membership" not in words:
        words += [*one_step(words), "--batch-size", "4", "--clip-norm", "1"]
    assert main(words) == 2
    name = "--features" if "--features" in words else "--out"
    said = f"tanager: error: {name} (='"
    told = capsys.readouterr().err
    assert said in told and "is in the folder of the data, and a run writes " in told
    assert {path.name for path in images.iterdir()} == {"train", "test"}


@pytest.mark.parametrize(
    "words",
    [
        ["train", "digits", "--repeats", "2"],
        # All that is not held out in each batch: ε is computed in a tenth of the time.
        [
            *("search", "digits", "--private", "--trials", "1"),
            *("--validation-examples", "137", "--batch-size", "1300"),
        ],
        *(["audit", "digits", "--method", method] for method in AUDITS),
    ],
    ids=" ".join,
)
def test_no_command_writes_among_files_of_others(tmp_path, capsys, words):
    (tmp_path / "patients.csv").write_text("Anna")
    words = [*words, "--model", "linear", "--epsilon", "8", *one_step(words)]
    words += ["--account", "none", "--out", str(tmp_path)]
    assert main(words) == 2
    told = capsys.readouterr().err
    assert "or hold a run, but it holds patients.csv: move" in told
    assert [path.name for path in tmp_path.iterdir()] == ["patients.csv"]


@pytest.mark.parametrize(
    "words",
    [
        ["train", "digits"],
        ["search", "digits", "--trials", "1"],
        ["search", "privacy", "digits"],
        *(["audit", "digits", "--method", method] for method in AUDITS),
    ],
    ids=" ".join,
)
def test_a_default_folder_that_cannot_be_made_is_named(
    tmp_path, monkeypatch, capsys, words
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").write_text("")  # also root is refused to make a folder in it
    words = [*words, "--model", "linear", "--epsilon", "8", *one_step(words)]
    assert main([*words, "--account", "none"]) == 2
    assert "error: --out (='runs/digits-" in (told := capsys.readouterr().err)
    assert "cannot be written: " in told and "Not a directory" in told


def test_clipping_and_the_accountant_reach_the_algorithm():
    styles = ("clip", "clip"), ("automatic", "automatic"), ("adaptive", "clip")
    for clipping, style in styles:
        changes: dict[str, Any] = {"clipping": clipping, "accountant": "rdp"}
        recipe = dataclasses.replace(recipes.get("digits").recipe, **changes)
        made = runner.algorithm(runner.prepare("digits", recipe), 1437)
        assert (made.clipping_style.name, made.accountant) == (style, "rdp")
        assert (made.adaptive is not None) == (clipping == "adaptive")


@pytest.mark.usefixtures("stops_when_charged")
def test_a_run_records_what_was_not_read(tmp_path, images, capsys):
    """On standard error, and in config.json; more of it later is no other run."""
    out = tmp_path / "run"
    command = ["train", "folder", "--data", str(images), "--model", "linear"]
    command += ["--steps", "1", "--epsilon", "4", "--batch-size", "8"]
    for number in range(2):
        (images / "train/dark" / f"notes{number}.txt").write_text("x")
        assert main([*command, "--out", str(out)]) == 130
    told = capsys.readouterr().err
    assert "tanager: warning: 1 file is not an image, and not read: .txt 1\n" in told
    assert "tanager: warning: 40 examples of 2 classes are few for this" in told
    assert "tanager: warning: 2 files are not images, and not read: .txt 2\n" in told
    assert json.loads((out / "config.json").read_text())["reading"] == {
        "layout": "class folders",
        "conversion": "upright-8-bit",
        "size": "as they are",
        "split": "given",
        "not_read": {".txt": 2},
    }


@pytest.mark.parametrize(
    "flag", [("--physical-batch-size", "9999999999"), ("--devices", "999")]
)
def test_what_devices_cannot_hold_is_refused_before_a_run_is_named(
    tmp_path, capsys, flag
):
    assert main(["train", *SMALL, *flag, "--out", str(tmp_path / "run")]) == 2
    told = capsys.readouterr()
    assert f"error: {flag[0]} (={flag[1]}) must be at most" in told.err
    assert "run:" not in told.out


def test_how_unreadable_images_are_skipped_is_said(
    images, tmp_path, capsys, monkeypatch
):
    asked = []

    def train(problem, *_, **__):
        asked.append(problem.unreadable)
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "train", train)
    (images / "train/dark/empty.png").write_bytes(b"")
    command = ["train", "folder", "--data", str(images), "--unreadable", "skip"]
    command += ["--out", str(tmp_path / "run"), "--steps", "1", "--batch-size", "8"]
    assert main(command) == 2
    assert "or train a network (--model wrn-16-4)" in capsys.readouterr().err
    command += ["--model", "linear"]
    assert main(command) == 2
    told = capsys.readouterr().err
    assert "empty.png" in told and "give --stream True and --image-size too" in told
    assert main([*command, "--stream", "True", "--image-size", "16"]) == 130
    assert asked == ["skip"]
    command = [each for each in command if each not in ("--unreadable", "skip")]
    assert main(command) == 2
    assert "--unreadable" not in capsys.readouterr().err


@pytest.mark.parametrize("command", ["train", "audit"])
def test_workers_are_refused_where_images_are_read_once(
    images, tmp_path, capsys, command
):
    words = [command, "folder", "--data", str(images), "--epsilon", "4", "--out"]
    words += [str(tmp_path / "out"), "--stream", "True", "--workers", "2"]
    assert main([*words, "--model", "dead-leaves-linear"]) == 2
    told = capsys.readouterr().err
    assert "--workers (=2) does not apply where features are computed before" in told


@pytest.mark.slow
def test_the_demo_reaches_what_a_linear_model_does(demo):
    """Without privacy a linear softmax model reaches 95 %; the demo's aim is 94 %."""
    assert result_of(demo[1] / "runs/digits-1")["test_accuracy_ema"] >= 0.94


def test_accuracy_on_training_examples_is_told_to_who_asks(tmp_path):
    recipe = recipes.get("digits").recipe
    fields: dict[str, Any] = {"model": "linear", "steps": 2, "evaluate_every": 2}
    fields |= {"noise_multiplier": 2.0, "solve_for": "epsilon", "seed": 1}
    fields |= {"out": str(tmp_path / "run")}
    prepared = runner.prepare("digits", dataclasses.replace(recipe, **fields))
    told = []
    result = runner.run(prepared, progress=False, on_training=told.append)
    examples = gather(prepared.dataset.train, np.arange(len(prepared.dataset.train)))
    preprocessed = tasks.preprocessing(prepared.recipe, prepared.dataset)
    logits = jax.vmap(result.average)(jax.vmap(preprocessed)(examples["image"]))
    right = np.mean(np.argmax(logits, 1) == examples["label"])
    assert [each.accuracy for each in told] == [pytest.approx(right)]
    assert right > 0.1
    assert "training" not in (tmp_path / "run/result.json").read_text()


def test_repeats_share_the_features_of_frozen_layers(tmp_path, capsys):
    out = tmp_path / "runs"
    words = ["train", "digits", "--model", "scattering-linear", *SHORT]
    words += ["--fine-tune", "last-layer", "--train-examples", "30"]
    words += ["--batch-size", "15"]
    repeats = [*words, "--repeats", "2", "--out", str(out)]
    assert main(repeats) == 0
    assert (out / "private/features/training/features.npy").exists()
    assert not [*out.glob("[12]/private/features")]
    # Where they are does not say which run it is.
    assert main([*words, "--out", str(out / "1")]) == 0
    assert main(repeats) == 0
    capsys.readouterr()


def test_a_command_that_is_stopped_leaves_the_folder_of_one_that_began_with_it(
    tmp_path,
):
    out = tmp_path / "run"
    recipe = dataclasses.replace(recipes.get("digits").recipe, out=str(out))
    unread: Any = None
    prepared = runner.Prepared("digits", recipe, unread, unread)
    with runner.in_folder(prepared):
        with pytest.raises(KeyboardInterrupt), runner.in_folder(prepared):
            RunFolder(out).seed(None)  # of the first, which has no ledger yet
            raise KeyboardInterrupt
        assert (out / "private/seed.json").exists()
