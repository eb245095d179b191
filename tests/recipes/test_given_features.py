"""A last layer on a file of features, from the command to the exported model."""

import dataclasses
import json
import re

import numpy as np
import pytest

from tanager import models, recipes
from tanager.cli import main


CLASSES, WIDTH = 3, 8


def made(count, seed):
    """Features that lie about one direction for each class, as text labels."""
    draw = np.random.default_rng(seed)
    labels = np.arange(count) % CLASSES
    features = 3 * np.eye(CLASSES, WIDTH)[labels] + draw.normal(size=(count, WIDTH))
    names = np.array(["cat", "dog", "emu"])[labels]
    return features.astype(np.float32), names


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("of-alice") / "made.npz"
    (train, labels), (test, test_labels) = made(600, 0), made(60, 1)
    np.savez(
        path,
        train_features=train,
        train_labels=labels,
        train_person=np.arange(600) // 2,
        test_features=test,
        test_labels=test_labels,
    )
    return path


def command(file, out, *words):
    start = ["train", "features", "--features-from", str(file), "--out", str(out)]
    return [*start, "--steps", "10", *words]


@pytest.fixture(scope="module")
def run(file, tmp_path_factory):
    out = tmp_path_factory.mktemp("run") / "run"
    assert main(command(file, out, "--epsilon", "8")) == 0
    return out


def test_a_head_is_trained_charged_and_reported(file, run):
    result = json.loads((run / "result.json").read_text())
    assert result["private"] and result["epsilon"] <= 8
    assert (result["examples"], result["sample_rate"]) == (600, 1.0)
    assert result["test_accuracy"] > 0.9
    assert file.with_name("made.npz.account.jsonl").exists()
    config = json.loads((run / "config.json").read_text())
    assert config["architecture"]["image_shape"] == [WIDTH]
    assert config["classes"] == ["cat", "dog", "emu"]
    assert (run / "report.html").exists()
    assert not (run / "private/features").exists()


def test_the_exported_head_takes_features(file, run, tmp_path, capsys):
    assert main(["export", str(run), "--to", str(tmp_path / "model")]) == 0
    trained = models.load_pretrained(tmp_path / "model")
    arrays = np.load(file)
    predicted = [
        trained.classes[int(np.argmax(trained(row)))]
        for row in arrays["test_features"][:6]
    ]
    assert predicted == arrays["test_labels"][:6].tolist()
    assert trained.preprocessing is None
    with pytest.raises(ValueError, match=re.escape("must be floating point of shape")):
        trained(np.ones(WIDTH + 1))
    card = (tmp_path / "model/README.md").read_text()
    for part in (
        f"found = model.predict(features)  # of one image, float32[{WIDTH}]",
        "tanager predict FOLDER features.npz",
        "Compute them with the same program",
        f"trained on {WIDTH} features of each image",
        "| features of an image | 8 |",
        "drawn at random; head set to zero",
    ):
        assert part in card, part
    assert "of-alice" not in card and "made.npz" not in card
    capsys.readouterr()
    words = ["export", str(run), "--to", str(tmp_path / "timm"), "--format", "timm"]
    assert main(words) == 2
    assert "format (='timm') has no linear" in capsys.readouterr().err


def test_persons_held_out_examples_and_solvers(file, tmp_path, capsys):
    persons = ["--unit", "group", "--groups", "person", "--validation-examples", "50"]
    persons += ["--solver", "class-means", "--train-examples", "200"]
    persons += ["--steps", "1", "--account", "none"]
    assert main(command(file, tmp_path / "run", *persons)) == 0
    assert "200 persons of features" in capsys.readouterr().out
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert (result["unit"], result["examples"], result["steps"]) == ("person", 200, 1)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "mlp"], "trains a last layer alone, without augmentation: start"),
        (["--fine-tune", "all"], "trains a last layer alone, without augmentation"),
        (
            ["--image-size", "8"],
            "--image-size (=8) must be left out with --features-from",
        ),
        (["--features", "f"], "features (='f') must be left out with --features-from"),
        (["--stream", "True"], "stream (=True) must be left out with --features-from"),
        (["--data", "d"], "--data (='d') does not apply to features"),
        (
            ["--solver", "class-means", "--batch-size", "9"],
            "--batch-size (=9) does not apply to solver class-means",
        ),
        (
            ["--solver=class-means", "--steps=1", "--ema-decay=0.5"],
            "--ema-decay (=0.5) does not apply to solver class-means",
        ),
    ],
)
def test_what_does_not_apply_to_features_is_refused(
    file, tmp_path, capsys, words, message
):
    assert main(command(file, tmp_path / "run", *words)) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_rows_of_norm_0_are_refused_before_work(tmp_path, capsys):
    features, labels = made(60, 0)
    features[7] = 0
    np.savez(tmp_path / "made.npz", train_features=features, train_labels=labels)
    words = command(tmp_path / "made.npz", tmp_path / "run", "--validation-examples=9")
    assert main(words) == 2
    assert "train_features has 1 rows of norm 0" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    assert main(["train", "features", "--out", str(tmp_path / "run")]) == 2
    assert "give a file of features and labels" in capsys.readouterr().err


def test_the_recipe_says_what_it_needs(capsys):
    assert main(["recipe", "features", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["command"] == "tanager train features --features-from FILE"
    assert shown["cost"] is None
    recipe = dataclasses.replace(recipes.get("features").recipe, features_from="f.npz")
    assert recipe.caches_features
