"""From pretraining without privacy to each way of private fine-tuning."""

import json
import re

import numpy as np
import pytest
from safetensors.numpy import load_file

from tanager import recipes
from tanager.cli import main
from tanager.recipes.recipe import Recipe


COMMON = ["--steps", "6", "--batch-size", "200", "--evaluate-every", "3", "--seed", "1"]


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    """The digits, trained on in the open."""
    out = tmp_path_factory.mktemp("open") / "run"
    assert main(openly(out)) == 0
    return out


def openly(out):
    words = ["train", "digits", "--non-private", "--out", str(out), *COMMON]
    return [*words, "--learning-rate-schedule", "cosine", "--weight-decay", "1e-4"]


def fine_tune(pretrained, out, *words):
    weights = str(pretrained / "model.safetensors")
    return main(
        ["train", "digits", "--weights", weights, "--out", str(out), *COMMON, *words]
    )


def test_a_run_without_privacy_says_so_wherever_it_is_seen(pretrained, capsys):
    result = json.loads((pretrained / "result.json").read_text())
    assert result["private"] is False
    assert result["clip_norm"] is None
    assert "NOT PRIVATE" in (pretrained / "report.html").read_text()
    assert main(openly(pretrained)) == 0
    shown = capsys.readouterr()
    assert "this run is NOT PRIVATE" in shown.err
    assert "NOT PRIVATE: no clipping, no noise" in shown.out


@pytest.mark.parametrize("what", ["all", "last-layer", "biases-and-norms", "film"])
def test_what_is_not_trained_stays_as_it_was_pretrained(pretrained, tmp_path, what):
    assert fine_tune(pretrained, tmp_path / "run", "--fine-tune", what) == 0
    before = load_file(pretrained / "model.safetensors")
    after = load_file(tmp_path / "run/model.safetensors")
    assert set(after) == set(before)
    moved = {name for name in before if not np.array_equal(before[name], after[name])}
    head = {"head.weight", "head.bias"}
    norms = {name for name in before if ".norm." in name}
    expected = {
        "all": set(before),
        "last-layer": head,
        "biases-and-norms": head | norms,
        "film": head | norms,
    }
    assert moved == expected[what]
    config = json.loads((tmp_path / "run/config.json").read_text())
    assert config["parameters"] == sum(before[name].size for name in moved)
    assert config["weights"]["head"] == "fresh"


def test_features_are_computed_once_and_shared(pretrained, tmp_path):
    folder = tmp_path / "features"
    words = ["--fine-tune", "last-layer", "--features", str(folder)]
    assert fine_tune(pretrained, tmp_path / "one", *words) == 0
    first = (folder / "training/features.npy").stat()
    assert fine_tune(pretrained, tmp_path / "two", *words, "--learning-rate", "1") == 0
    assert (folder / "training/features.npy").stat().st_mtime_ns == first.st_mtime_ns
    one = load_file(tmp_path / "one/model.safetensors")
    two = load_file(tmp_path / "two/model.safetensors")
    assert not np.array_equal(one["head.weight"], two["head.weight"])


def test_the_head_can_be_kept_or_start_at_nothing(pretrained, tmp_path):
    steps = ["--learning-rate", "1e-30"]
    before = load_file(pretrained / "model.safetensors")
    for head, expected in (
        ("load", before["head.weight"]),
        ("zero", 0 * before["head.weight"]),
    ):
        out = tmp_path / head
        assert fine_tune(pretrained, out, "--head", head, *steps) == 0
        found = load_file(out / "model.safetensors")["head.weight"]
        np.testing.assert_allclose(found, expected, atol=1e-20)


def test_low_rank_products_become_part_of_the_convolutions(tmp_path):
    model = ["--model", "wrn-10-1", "--steps", "2", "--batch-size", "40"]
    assert main([*openly(tmp_path / "open"), *model]) == 0
    words = ["--fine-tune", "lora", "--lora-rank", "2", *model]
    assert fine_tune(tmp_path / "open", tmp_path / "run", *words) == 0
    before = load_file(tmp_path / "open/model.safetensors")
    after = load_file(tmp_path / "run/model.safetensors")
    assert {name: x.shape for name, x in after.items()} == {
        name: x.shape for name, x in before.items()
    }
    moved = {name for name in before if not np.array_equal(before[name], after[name])}
    convolved = {
        name
        for name in before
        if name.startswith("blocks.") and name.endswith((".weight", ".gain"))
    }
    assert moved == convolved | {"head.weight", "head.bias"}


def test_low_rank_products_need_gains_to_become_part_of(pretrained, tmp_path, capsys):
    assert fine_tune(pretrained, tmp_path / "run", "--fine-tune", "lora") == 2
    assert "needs a gain on every standardised convolution" in capsys.readouterr().err
    assert not (tmp_path / "run/ledger.jsonl").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weights": "w", "features": "f"}, "features (='f') must be left out unless"),
        ({"non_private": True}, "epsilon (=3.0) must be left out of a run that is not"),
        (
            {"non_private": True, "epsilon": None, "steps": None},
            "steps (=None) must be",
        ),
        ({"lora_rank": 0}, "lora_rank (=0) must be at least 1"),
        ({"weight_decay": -1.0}, "weight_decay (=-1.0) must be finite"),
        ({"head": "new"}, "head (='new') must be one of load, fresh, zero"),
    ],
)
def test_impossible_recipes_are_refused(changes, message):
    fields = recipes.get("digits").recipe.to_json() | changes
    with pytest.raises(ValueError, match=re.escape(message)):
        Recipe(**fields)


def test_a_typed_budget_is_not_dropped_silently(tmp_path, capsys):
    words = ["train", "digits", "--non-private", "--epsilon", "3"]
    assert main([*words, "--out", str(tmp_path / "run")]) == 2
    assert "epsilon (=3.0) must be left out" in capsys.readouterr().err


def test_parts_of_a_random_model_are_not_fine_tuned(tmp_path, capsys):
    words = [
        "train",
        "digits",
        "--fine-tune",
        "last-layer",
        "--out",
        str(tmp_path / "r"),
    ]
    assert main(words) == 2
    told = "fine_tune (='last-layer') must be all without pretrained weights"
    assert told in capsys.readouterr().err
    assert not (tmp_path / "r").exists()
