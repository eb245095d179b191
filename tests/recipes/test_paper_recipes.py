"""Every recipe against its table; `test_first_steps` runs them."""

import dataclasses
import json
import shlex

import numpy as np
import pytest

from tanager import data, recipes
from tanager.cli import main
from tanager.data import ArraySource, Dataset
from tanager.data.known import FILES
from tanager.data.preprocessing import Preprocessing
from tanager.models import packaged, pretrained
from tanager.privacy import accountant
from tanager.privacy.mechanism import Mechanism
from tanager.recipes import cost, papers, tasks
from tanager.recipes.budget import solve_budget


ENTRIES = list(recipes.RECIPES.values())
PUBLISHED = [entry for entry in ENTRIES if entry.published]


def name(entry):
    return entry.name


def test_every_published_row_has_a_recipe():
    rows = [row for entry in ENTRIES for row in entry.published]
    assert sorted(map(repr, rows)) == sorted(map(repr, papers.PUBLISHED))


@pytest.mark.parametrize("entry", PUBLISHED, ids=name)
def test_a_recipe_is_the_row_of_its_table_at_every_budget(entry):
    assert entry.source.endswith(f"Table {entry.published[0].table}")
    epsilons = [row.epsilon for row in entry.published]
    assert epsilons == sorted(set(epsilons))
    assert entry.recipe == entry.at_epsilon(epsilons[-1])
    for row in entry.published:
        recipe = entry.at_epsilon(row.epsilon)
        assert row.fields.items() <= vars(recipe).items()
        assert ("last layer" in row.task) == (recipe.fine_tune == "last-layer")
        assert ("→" in row.task) == bool(entry.pretrained_on)


PRIVATE = [
    pytest.param(entry, epsilon, id=f"{entry.name}-{epsilon}", marks=marks)
    for number, entry in enumerate(ENTRIES)
    if not entry.recipe.non_private and entry.recipe.dataset != "features"
    for turn, epsilon in enumerate((0.7, 2.3, 7.9))
    for marks in [[] if (number + turn) % 6 == 0 else [pytest.mark.full]]
]


@pytest.mark.parametrize(("entry", "epsilon"), PRIVATE)
def test_what_is_asked_for_is_spent(entry, epsilon, capsys, monkeypatch):
    if not entry.recipe.caches_front:  # what the others cost is looked at below
        monkeypatch.setattr("tanager.commands.recipe._cost", lambda entry: None)
    words = ["recipe", entry.name, "--epsilon", str(epsilon), "--json"]
    words += ["--examples", "1000"] if entry.name == "folder" else []
    assert main(words) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["epsilon"] == pytest.approx(epsilon, rel=1e-3)
    assert shown["epsilon"] <= epsilon
    command = shlex.split(shown["command"])
    assert float(command[command.index("--epsilon") + 1]) == epsilon
    rate = shown["batch_size"] / shown["examples"]
    mechanism = Mechanism(rate, shown["noise_multiplier"], shown["steps"])
    spent = accountant.epsilon(mechanism, shown["delta"])
    assert spent == pytest.approx(shown["epsilon"])


@pytest.mark.parametrize("row", papers.PUBLISHED[::6], ids=lambda row: row.recipe)
def test_a_published_epsilon_and_size_are_the_published_run(row, capsys, monkeypatch):
    # What it costs to compute follows from neither.
    monkeypatch.setattr("tanager.commands.recipe._cost", lambda entry: None)
    words = f"recipe {row.recipe} --epsilon {row.epsilon} --examples {row.examples}"
    assert main([*words.split(), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    for name in ("steps", "noise_multiplier", "batch_size", "learning_rate", "delta"):
        assert shown[name] == getattr(row, name)
    assert shown["epsilon"] == accountant.epsilon(row.mechanism, row.delta)
    smaller = ["--examples", str(row.examples // 2)]
    assert main([*words.split(), *smaller, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["steps"] == row.steps
    assert shown["noise_multiplier"] > row.noise_multiplier
    assert shown["epsilon"] == pytest.approx(row.epsilon, rel=1e-3)


def test_the_efficiency_papers_budget_is_four_steps_at_half_the_data():
    entry = recipes.get("cifar100-vit-base-16")
    budget = solve_budget(entry.recipe, 50_000)
    assert budget.mechanism.sample_rate == 0.5
    assert budget.mechanism.steps == 4
    assert accountant.epsilon(budget.mechanism, 2.04e-5) == pytest.approx(8, rel=1e-3)


def test_the_efficiency_papers_settings_are_those_of_its_table_a2():
    vit = recipes.get("cifar100-vit-base-16").recipe
    bit = recipes.get("cifar100-bit-50x1").recipe
    for recipe, learning_rate, clip_norm in ((vit, 0.0003, 4.63), (bit, 0.00098, 6.53)):
        assert (recipe.epsilon, recipe.delta) == (8, 2.04e-5)
        assert (recipe.learning_rate, recipe.clip_norm) == (learning_rate, clip_norm)


@pytest.mark.parametrize("entry", ENTRIES, ids=name)
def test_weights_tuned_on_imagenet_1k_are_called_so(entry):
    if "_ft_in1k" in (entry.recipe.weights or ""):
        assert "ImageNet-1k" in entry.pretrained_on


@pytest.mark.parametrize("entry", [e for e in ENTRIES if e.pretrained_on], ids=name)
def test_pretrained_recipes_do_not_start_from_random_weights(entry, capsys):
    if entry.recipe.weights is not None:
        weights = entry.recipe.weights
        assert pretrained.hub.is_hub_name(weights) or weights in packaged.PACKAGED
        return
    assert main(["train", entry.name, "--data", "/nowhere"]) == 2
    assert "weights (=None) must be given" in capsys.readouterr().err


@pytest.mark.parametrize("entry", ENTRIES, ids=name)
def test_edges_are_mirrored_as_by_the_code_of_each_paper(entry):
    # jax_privacy's padding_input repeats the pixel at the edge; torchvision does not.
    recipe, ours = entry.recipe, entry.source.startswith("Unlocking")
    expected = "symmetric" if ours and recipe.crop_padding else "reflect"
    assert recipe.padding_mode == expected


@pytest.mark.parametrize("last", ["all-layers", "last-layer"])
@pytest.mark.parametrize("dataset", ["cifar10", "cifar100"])
def test_cifar_is_standardised_by_itself_when_fine_tuned(dataset, last, monkeypatch):
    pretraining = Preprocessing(mean=(0.5,) * 3, std=(0.5,) * 3)
    monkeypatch.setattr(tasks, "preprocessing_of", lambda weights: pretraining)
    recipe = recipes.get(f"{dataset}-wrn-28-10-{last}").recipe
    recipe = dataclasses.replace(recipe, weights="runs/open")
    _, mean, std = FILES[dataset]
    source = ArraySource({"image": np.zeros((1, 32, 32, 3), np.uint8)})
    images = Dataset(dataset, source, source, ("one",), (32, 32, 3), mean, std)
    assert tasks.preprocessing(recipe, images).mean == mean == (0.4914, 0.4822, 0.4465)
    assert not tasks.assumes_preprocessing(recipe)


@pytest.mark.parametrize("name", ["cifar100-vit-base-16", "cifar100-bit-50x1"])
def test_the_efficiency_papers_images_are_resized_whole(name, monkeypatch):
    timm = Preprocessing(mean=(0.5,) * 3, std=(0.5,) * 3, size=(448, 448), crop=0.9)
    monkeypatch.setattr(tasks, "preprocessing_of", lambda weights: timm)
    source = ArraySource({"image": np.zeros((1, 32, 32, 3), np.uint8)})
    files = FILES["cifar100"]
    images = Dataset("cifar100", source, source, ("one",), (32, 32, 3), *files[1:])
    found = tasks.preprocessing(recipes.get(name).recipe, images)
    assert (found.size, found.crop, found.mean) == ((224, 224), 1, timm.mean)


def test_the_command_shows_all_that_is_known(capsys):
    assert main(["recipe", "cifar10-wrn-16-4", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["source"] == "Unlocking, Table 13"
    assert shown["command"] == "tanager train cifar10-wrn-16-4 --data PATH"
    last = shown["published"][-1]
    assert (last["epsilon"], last["accuracy"]) == (8.0, 79.5)
    assert last["epsilon_rdp"] == pytest.approx(8.0, rel=0.02)
    assert last["epsilon_pld"] < last["epsilon_rdp"]
    # 3 passes · 16 views · 4096 images · 2468 updates of a 0.9 GFLOP network.
    assert shown["cost"]["flops"] == pytest.approx(4.3e17, rel=0.2)
    assert main(["recipe", "cifar10-wrn-16-4"]) == 0
    text = capsys.readouterr().out
    assert "79.5 ± 0.7" in text and "(an assumption)" in text
    assert "operations, 2.6 hours on one" in " ".join(text.split())
    assert "noise multiplier 2.56087, expected" in " ".join(text.split())
    rows = [line.split() for line in text.splitlines() if "1e-05 " in line]
    sizes = [words[4] for words in rows if words[0] in ("6", "8")]
    assert sizes == ["50,000", "45,000"]
    assert main(["recipe", "digits"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "operations, less than a second on one" in text


@pytest.mark.parametrize(
    ("name", "examples", "noise"),
    [
        ("cifar10-wrn-16-4", 45_000, 3.0),
        ("imagenet-nf-resnet-50", 1_271_167, 2.5),
        ("cifar10-wrn-40-4", None, 9.4),
    ],
)
def test_the_command_says_how_to_train_on_as_many_as_published(
    name, examples, noise, capsys, monkeypatch
):
    monkeypatch.setattr("tanager.commands.recipe._cost", lambda entry: None)
    assert main(["recipe", name]) == 0
    text = " ".join(capsys.readouterr().out.split())
    said = f"--train-examples {examples} gives its noise multiplier, {noise:g}"
    assert (said in text) == ("--train-examples" in text) == (examples is not None)
    recipe = dataclasses.replace(recipes.get(name).recipe, train_examples=examples)
    mechanism = solve_budget(recipe, examples or 50_000).mechanism
    assert mechanism.noise_multiplier == noise


def test_a_recipe_of_some_classes_has_a_head_for_them_alone(capsys):
    assert main(["recipe", "cifar10-other-five", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert len(shown["recipe"]["classes"]) == 5
    assert shown["cost"]["parameters"] == 78_293
    assert shown["examples"] == 25_000
    assert shown["expected_accuracy"].startswith("76.6 %")


def test_the_number_of_digits_is_what_is_loaded(capsys):
    assert main(["recipe", "digits", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["examples"] == len(data.load("digits").train)


def test_a_last_layer_costs_its_own_products_only():
    entry = recipes.get("cifar10-wrn-28-10-last-layer")
    recipe = dataclasses.replace(
        entry.recipe, model="wrn-10-1", augmentation_multiplicity=0
    )
    found = cost.estimate(recipe, 1000, 10, (32, 32, 3))
    head = 64 * 10 + 10
    assert found.flops == pytest.approx(3 * 2 * head * 16_384 * 1000, rel=1e-6)
