"""The model card says what was guaranteed, what was not, and nothing of the machine."""

import dataclasses
import re
from typing import Any

import numpy as np
import pytest
import yaml
from written import RESULT

from tanager.measures import measure
from tanager.privacy.accountant import epsilon
from tanager.privacy.mechanism import Mechanism
from tanager.report import guarantee
from tanager.report.card import model_card


CONFIG = {
    "model": "vit-tiny-16",
    "dataset": "pets: our's",
    "classes": ["cat", "d|og*", "emu"],
    "architecture": {"name": "vit-tiny-16", "image_shape": [32, 32, 3]},
    "preprocessing": {"mean": [0.5] * 3, "std": [0.25] * 3},
    "recipe": {
        "name": "folder",
        **dict.fromkeys(("account", "data", "features_from", "labels"), "alice"),
        "out": "alice-1",
        "seed": 17,
        "cache": "C:\\alice",
        "options": {"start": ["~/alice"]},
        "crop_padding": 4,
    },
    "weights": {
        "weights": "hf:timm/vit_tiny_patch16_224.augreg_in21k@main",
        "sha256": "ab12",
        "changes": ["head as created"],
    },
}
WAYS: dict[str, Any] = {"weights": "average", "format": "tanager", "licence": None}


def card(config=CONFIG, result=RESULT, **ways):
    return model_card(config, result, **(WAYS | ways))


def head_of(text):
    start, head, body = text.split("---\n", 2)
    assert start == ""
    return yaml.safe_load(head), body


def test_the_head_is_what_the_hub_reads():
    head, _ = head_of(card(licence="apache-2.0"))
    data = {"type": "pets: our's", "name": "pets: our's", "split": "test"}
    measured = {
        "task": {"type": "image-classification"},
        "dataset": data,
        "metrics": [{"type": "accuracy", "value": 0.75}],
    }
    assert head == {
        "license": "apache-2.0",
        "library_name": "tanager",
        "pipeline_tag": "image-classification",
        "tags": ["image-classification", "tanager", "differential-privacy", "dp-sgd"],
        "base_model": "timm/vit_tiny_patch16_224.augreg_in21k",
        "model-index": [{"name": "vit-tiny-16 on pets: our's", "results": [measured]}],
    }


def test_every_part_of_the_guarantee_is_there():
    text = card()
    for part in (
        "**This model is (ε = 3, δ = 1e-05)-differentially private for each image, "
        "under zero-out.** The guarantee is per image. A person with several images",
        "by RDP, as papers report it: 3.4",
        "| unit of privacy | one example, which is one image |",
        "| accountant | PLD |",
        "| noise multiplier σ | 1.5 |",
        "at most e^ε = 20.09 times the probability",
        "recognise at most 6.79 % of the members (without the model: 1 %)",
        "| members recognised at 0.1 % false alarms | 1.24 % | 0.1 % |",
        "| members recognised minus false alarms | 30 % | 0 % |",
        "| μ of Gaussian DP | 0.7701 (regret 0.012) |",
        "What it assumes, and what it does not protect:",
        "Nothing here protects the test images",
        "Other tries on the private data are not counted",
        "or this run is the best of several on it, more was spent than this ε",
        "ε was computed with PLD by dp_accounting 0.6.0.",
    ):
        assert part in text


def test_data_of_ones_own_are_not_named():
    text = card(config=CONFIG | {"dataset": "folder"})
    assert "\n# vit-tiny-16 on a folder of images\n" in text
    assert "| data set | a folder of images |" in text
    assert "pets" not in text


def test_a_run_that_is_not_private_says_so_and_is_not_tagged():
    text = card(result=RESULT | {"private": False})
    head, body = head_of(text)
    assert "differential-privacy" not in head["tags"]
    assert "## NOT PRIVATE" in body
    assert "The seed was fixed by a person" in body
    assert "-differentially private" not in body
    assert "This model must not claim it" in body
    silent = card(result=RESULT | {"private": False, "noise_multiplier": 0.0})
    assert "No noise was added" in silent
    assert "dp_accounting import" not in silent
    assert "added Gaussian noise" in text and "added Gaussian noise" not in silent


def test_a_large_epsilon_is_called_useless():
    assert "protects next to nothing" in card(result=RESULT | {"epsilon": 500.0})
    assert "protects next to nothing" not in card()


def test_a_delta_that_lets_one_example_out_is_called_useless():
    enough = {"examples": 1000, "delta": 1 / 1000}
    assert "A δ this large protects next" in card(result=RESULT | enough)
    assert "A δ this large" not in card(result=RESULT | enough | {"delta": 9e-4})


def test_the_accuracy_is_that_of_the_exported_weights():
    assert "On the test set: **75.0 %**" in card()
    assert "| cat | 10 | 25.0 % |" in card()
    assert "| emu | 0 | not measured |" in card()
    assert "lowest accuracy is that of cat: 25.0 %" in card()
    alike = [{**each, "accuracy_ema": 1.0} for each in RESULT["per_class"]]
    assert "lowest accuracy" not in card(result=RESULT | {"per_class": alike})
    last = card(weights="last")
    assert "On the test set: **70.0 %**" in last
    assert "| cat | 10 | 50.0 % |" in last
    last_alone = "the parameters after the last update"
    assert last_alone in last and last_alone not in card()
    assert last_alone in card(CONFIG | {"ema_decay": 0})
    search = {"noisy_accuracy": 0.61, "score_noise": 2.0, "held_out_examples": 9}
    search |= {"mean": 3.0, "shape": 1.0, "values": {}}
    chosen = card(result=RESULT | {"search": search})
    assert "**61.0 %**. The accuracy is on 9 held-out" in chosen
    assert "On the test set" not in chosen
    nothing = {**RESULT, "test_accuracy_ema": None, "per_class": None}
    assert "It was not measured" in card(result=nothing)
    same_source = "accuracy was measured only on images from the same source"
    assert same_source in card() and same_source not in card(result=nothing)
    held = card(CONFIG | {"recipe": {"validation_examples": 3}})
    assert "On the held-out training set: **75.0 %**" in held
    assert '"split": "validation"' in held and "the test set" not in held
    assert "model-index" not in card(result=nothing)


def test_the_accuracy_has_an_interval_and_a_base_line():
    answers = np.array([[0.9, 0.1, 0], [0.2, 0.8, 0], [0.7, 0.3, 0], [0.1, 0.9, 0]])
    measured = measure(answers, np.array([0, 1, 1, 1]), CONFIG["classes"])
    fewer = measure(answers[:3], np.array([0, 1, 1]), CONFIG["classes"])
    both = {"measures": {"average": measured, "parameters": fewer}}
    assert "On the test set of 3 images" in card(result=RESULT | both, weights="last")
    text = card(result=RESULT | both)
    assert (
        "On the test set of 4 images: **75.0 %** (95 % interval 30.1 to 95.4 %; too"
    ) in text
    assert r"the largest class, d\|og\*, would be right for 75.0 %." in text


def test_names_cannot_be_markdown():
    assert r"| d\|og\* | 20 | 100.0 % |" in card()


def test_hostile_names_stay_on_their_line_and_in_their_cell():
    evil = "x\n## Guarantee\r\n---\x1b[2J<script>alert(1)</script>|`[a](b)\u202e"
    classes = [
        {"class": evil, "examples": 1, "accuracy": 0.0, "accuracy_ema": 0.0},
    ]
    text = card(
        {**CONFIG, "model": evil, "dataset": evil, "recipe": {evil: evil}},
        {**RESULT, "per_class": classes, "versions": {evil: evil}},
        licence=evil,
    )
    head, body = head_of(text)
    assert head["library_name"] == "tanager"
    assert [line for line in body.splitlines() if line == "## Guarantee"] == [
        "## Guarantee"
    ]
    assert "\x1b" not in text and "\u202e" not in text
    assert "<script" not in body.replace("\\<script", "")
    assert not re.search(r"(?<!\\)`\\\[a", body)


def test_where_it_started_is_said_if_known():
    scratch = {key: CONFIG[key] for key in CONFIG if key != "weights"}
    assert "| initial weights | drawn at random |" in card(scratch)
    assert "initial weights" not in card({"dataset": "mine"})
    assert "32 × 32 × 3 (height, width, channels)" in card()


def test_an_unknown_licence_is_said_plainly():
    head, body = head_of(card())
    assert head["license"] == "unknown"
    assert "**Unknown**: nobody stated one." in body
    assert "the licence of that model holds too" in body
    assert "mit, as stated by the person who exported it." in card(licence="mit")


def test_the_machine_and_the_seed_stay_out():
    text = card()
    for word in ("alice", "| recipe: seed", "| 17 |"):
        assert word not in text
    assert "| recipe: crop_padding | 4 |" in text
    assert "| recipe: cache | a path, left out |" in text
    assert "(sha256 ab12); head as created" in text


@pytest.mark.parametrize("format", ["tanager", "timm"])
def test_it_says_how_to_use_it(format):
    text = card(format=format, timm_name="vit_tiny_patch16_224")
    assert 'tanager.load("FOLDER")' in text
    assert 'model.predict("photo.jpg")' in text
    assert "tanager predict FOLDER photo.jpg" in text
    assert ('timm.create_model("local-dir:FOLDER"' in text) == (format == "timm")


def test_the_way_to_verify_gives_the_epsilon_it_claims(capsys):
    program = re.findall(r"```python\n(from dp_acc.*?)```", card(), flags=re.S)[0]
    exec(program, {})
    spent = epsilon(Mechanism(0.02, 1.5, steps=20), 1e-5)
    assert float(capsys.readouterr().out) == pytest.approx(spent, rel=1e-3)


def test_where_a_step_loses_little_the_way_to_verify_has_a_finer_grid(capsys):
    """On the usual grid of dp_accounting, it would print 0.126 for 0.1164."""
    run = Mechanism(0.001, 10.0, steps=100_000)
    result = dataclasses.asdict(run) | {"delta": 1e-6, "accountant": "pld"}
    exec(guarantee.recomputation(result), {})
    spent = epsilon(run, 1e-6)
    assert float(capsys.readouterr().out) == pytest.approx(spent, rel=1e-3)
