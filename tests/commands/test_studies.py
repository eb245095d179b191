"""What a run from a finished search keeps of it."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from tanager import recipes
from tanager.commands import flags, studies, train
from tanager.recipes.budget import solve_budget


PREDICTED = {"reference_batch_size": 512, "accuracy": 0.9, "low": 0.8, "high": 1.0}
STUDY = {
    "recipe": "digits",
    "target": {"epsilon": 3.5, "delta": 1e-4, "steps": 150},
    "prediction": PREDICTED | {"confidence": 0.95, "doubts": []},
    "law": None,
    "bands": [],
    "trials": [],
    "cost": {"trials_share": 0.0, "winner_share": 0.0, "seconds": 0.0},
    "privacy": {"simulations_epsilon": {}, "held_out_examples": 100},
}


@pytest.fixture
def read(tmp_path):
    """What the words of `tanager train --from-study` make of a search: it, a recipe."""
    recipe = recipes.get("digits").recipe.to_json()
    recipe |= {"epsilon": None, "noise_multiplier": 5.0}
    best = {"trial": 1, "values": {}, "accuracy": 0.9, "batch_size": 32}
    best["recipe"] = recipe
    (tmp_path / "result.json").write_text(json.dumps(STUDY | {"best": best}))

    def parse(*words):
        words = ["--from-study", str(tmp_path), *words]
        found = studies.named(words)
        assert found is not None
        _, run, _ = flags.parse("train", words, train.Options, found.entry)
        return found.of(run), run

    return parse


@pytest.mark.parametrize(
    ("words", "predicted"),
    [
        (["--seed", "3", "--out", "elsewhere", "--physical-batch-size", "64"], True),
        (["--batch-size", "1024"], False),
        (["--steps", "20"], False),
        (["--learning-rate", "9"], False),
    ],
)
def test_only_a_run_of_the_same_settings_was_predicted(read, words, predicted):
    found, _ = read(*words)
    assert (found.links()["study"]["prediction"] is not None) == predicted


def test_a_run_at_another_batch_size_keeps_the_budget_of_the_search(read):
    _, run = read("--batch-size", "1024")
    assert solve_budget(run, 1437).epsilon <= 3.5
    _, run = read()
    assert solve_budget(run, 1437).mechanism.noise_multiplier == 5


def test_what_is_predicted_of_other_images_than_what_is_obtained_is_said(read):
    found, _ = read()
    result: Any = SimpleNamespace(evaluation_ema=SimpleNamespace(accuracy=0.75))
    said = "predicted 90.0 % (80.0 to 100.0 %) on held-out examples, obtained 75.0 % "
    assert found.sentence(result) == said + "on test examples"
