"""Augmentations of a recipe: their names, what suits the images, views that vote."""

import dataclasses
import json
from typing import get_args

import pytest

from tanager import recipes
from tanager.cli import main
from tanager.data.augment import KINDS, CropFlip, RandomResizedCrop, Tan
from tanager.data.crops import PADDING_MODES
from tanager.recipes.fields import AugmentationName, PaddingMode
from tanager.recipes.tasks import augmentation


def result_of(folder):
    return json.loads((folder / "result.json").read_text())


def test_every_augmentation_of_a_recipe_exists():
    assert set(get_args(AugmentationName)) == KINDS.keys()
    assert get_args(PaddingMode) == PADDING_MODES


def test_views_of_a_part_of_the_image_train_and_vote(tmp_path, images):
    words = (
        "--model linear --strategy bk --batch-size 8 --steps 2 --flip "
        "--augmentation-multiplicity 2 --crop-size 12 --evaluate-every 1 --seed 1 "
        "--noise-multiplier 2"
    )
    data = ["--data", str(images), "--out", str(tmp_path / "run")]
    command = ["train", "folder", *words.split(), *data]
    assert main(command) == 0
    config = json.loads((tmp_path / "run/config.json").read_text())
    assert config["parameters"] == 12 * 12 * 3 * 2 + 2
    before = result_of(tmp_path / "run")
    assert before["test_accuracy_vote"] is None
    assert [each["class"] for each in before["per_class"]] == ["bright", "dark"]
    model = (tmp_path / "run/model.safetensors").read_bytes()

    # A vote may be asked for afterwards: it changes nothing else.
    assert main([*command, "--test-views", "3"]) == 0
    after = result_of(tmp_path / "run")
    assert 0 <= after["test_accuracy_vote"] <= 1
    assert 0 <= after["test_accuracy_vote_ema"] <= 1
    assert after["test_accuracy"] == before["test_accuracy"]
    assert (tmp_path / "run/model.safetensors").read_bytes() == model
    assert "vote of views" in (tmp_path / "run/report.html").read_text()


def test_a_vote_is_in_the_metrics(tmp_path):
    words = (
        "--model linear --strategy bk --crop-padding 1 --test-views 2 --steps 2 "
        "--evaluate-every 1 --seed 1 --noise-multiplier 2"
    )
    assert main(["train", *words.split(), "--out", str(tmp_path / "run")]) == 0
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    assert len(lines) == 2
    for line in lines:
        assert {"test_accuracy_vote", "test_accuracy_vote_ema"} <= {*json.loads(line)}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--augmentation tan --crop-padding 2 --augmentation-multiplicity 2",
            "augmentation (='tan') needs images of 3 channels; these have 1",
        ),
        (
            "--augmentation rrc --crop-padding 2",
            "--crop-padding (=2) does not apply to augmentation rrc: leave it out",
        ),
        (
            "--augmentation rrc --padding-mode symmetric",
            "--padding-mode (='symmetric') does not apply to augmentation rrc",
        ),
        (
            "--augmentation none --flip",
            "flip (=True) does not apply to augmentation none: leave it out",
        ),
        (
            "--flip",
            "--flip (=True) needs --augmentation-multiplicity, 1 or more: add it, or",
        ),
        ("--augmentation rrc", "--augmentation (='rrc') needs --augmentation-mult"),
        ("--crop-size 9", "--crop-size (=9) must be at most the image's 8 × 8"),
        (
            "--crop-padding 8 --augmentation-multiplicity 2",
            "--crop-padding (=8) must be smaller than the image, 8 × 8",
        ),
    ],
)
def test_augmentations_that_do_not_suit_the_images_are_refused(
    words, message, tmp_path, capsys
):
    out = tmp_path / "run"
    assert main(["train", "digits", *words.split(), "--out", str(out)]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not out.exists()


def test_what_a_recipe_says_for_another_augmentation_is_no_matter():
    recipe = recipes.get("cifar10-wrn-16-4").recipe
    shape = (32, 32, 3)
    symmetric = CropFlip(crop_padding=4, padding_mode="symmetric", flip=True)
    assert augmentation(recipe, shape) == symmetric
    other = dataclasses.replace(recipe, augmentation="rrc")
    assert augmentation(other, shape) == RandomResizedCrop(flip=True)
    recipe = recipes.get("cifar10-wrn-16-4-tan-16-views").recipe
    assert augmentation(recipe, shape) == CropFlip(crop_padding=4, flip=True)
    other = dataclasses.replace(recipe, augmentation="tan", crop_size=24)
    assert augmentation(other, shape) == Tan(crop_padding=4, crop_size=24)
