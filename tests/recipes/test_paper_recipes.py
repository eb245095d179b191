"""Every recipe against its table: its numbers, a model that builds, a first step."""

import dataclasses
import functools
import json

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_recipes import CLASSES, alike, one_of_each, shrunk

from tanager import models, recipes
from tanager.cli import main
from tanager.data import gather
from tanager.keys import derive_keys
from tanager.models import pretrained
from tanager.privacy import accountant
from tanager.privacy.mechanism import Mechanism
from tanager.recipes import papers, runner, tasks
from tanager.recipes.budget import solve_budget
from tanager.sampling import PhysicalBatch
from tanager.seed import Seed
from tanager.training.problem import DPSGD
from tanager.training.step import Step


ENTRIES = list(recipes.RECIPES.values())
PRIVATE = [entry for entry in ENTRIES if not entry.recipe.non_private]
PUBLISHED = [entry for entry in ENTRIES if entry.published]


def name(entry):
    return entry.name


def test_every_published_row_has_a_recipe():
    rows = [row for entry in ENTRIES for row in entry.published]
    assert sorted(map(repr, rows)) == sorted(map(repr, papers.PUBLISHED))


@pytest.mark.parametrize("entry", PUBLISHED, ids=name)
def test_a_recipe_is_the_row_of_its_table_at_every_budget(entry):
    assert entry.source.endswith(f"Table {entry.published[0].table}")
    assert entry.recipe == entry.at_epsilon(entry.recipe.epsilon)
    for row in entry.published:
        recipe = entry.at_epsilon(row.epsilon)
        assert recipe.model == row.model
        assert recipe.steps == row.steps
        assert recipe.noise_multiplier == row.noise_multiplier
        assert recipe.batch_size == row.batch_size
        assert recipe.learning_rate == row.learning_rate
        assert recipe.clip_norm == row.clip_norm
        assert recipe.delta == row.delta
        assert recipe.augmentation_multiplicity == row.augmentation_multiplicity
        assert ("last layer" in row.task) == (recipe.fine_tune == "last-layer")
        assert ("→" in row.task) == bool(entry.pretrained_on)


@pytest.mark.parametrize("entry", PUBLISHED, ids=name)
def test_what_it_spends_is_the_published_budget_by_rdp_and_less_by_pld(entry):
    row = entry.published[-1]
    budget = solve_budget(entry.recipe, row.examples)
    assert budget.epsilon < row.epsilon
    rdp = accountant.epsilon(budget.mechanism, row.delta, "rdp")
    assert rdp == pytest.approx(row.epsilon, rel=0.02)


def test_the_efficiency_papers_budget_is_four_steps_at_half_the_data():
    entry = recipes.get("cifar100-vit-base-16")
    budget = solve_budget(entry.recipe, 50_000)
    assert budget.mechanism.sample_rate == 0.5
    assert budget.mechanism.steps == 4
    assert accountant.epsilon(budget.mechanism, 2.04e-5) == pytest.approx(8, rel=1e-3)


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    """A function that builds and traces a recipe, once for recipes alike."""

    @functools.cache
    def of(text):
        with pytest.MonkeyPatch.context() as patch:
            # Shapes alone: the largest models have hundreds of millions of weights.
            create = models.create
            patch.setattr(
                models,
                "create",
                lambda *a, **k: eqx.filter_eval_shape(create, *a, **k),
            )
            recipe = recipes.Recipe.from_json(json.loads(text))
            trace(recipe, tmp_path_factory.mktemp("traced"))

    return of


def trace(recipe, folder):
    recipe, dataset = shrunk(recipe)
    model = models.create(
        recipe.model,
        classes=CLASSES,
        image_shape=tasks.seen_shape(recipe, dataset),
        key=derive_keys(Seed.from_int(0), "initialisation")[0],
        **tasks.model_options(recipe),
    )
    if recipe.caches_features:
        seen = jax.ShapeDtypeStruct(tasks.seen_shape(recipe, dataset), jnp.float32)
        features = eqx.filter_eval_shape(
            lambda m, image: m.features(image), model, seen
        )
        assert features.shape == (model.head.weight.shape[0],)
        return
    recipe = dataclasses.replace(recipe, fine_tune="all")
    task = tasks.make(recipe, dataset, Seed.from_int(0), folder, False)
    algorithm = DPSGD(
        Mechanism(0.5, 0.0 if recipe.non_private else 1.0, 1),
        runner.optimizer(recipe, 1000),
        delta=1e-5,
        clip_norm=None if recipe.non_private else recipe.clip_norm,
        augmentation_multiplicity=recipe.augmentation_multiplicity,
    )
    step = Step(
        task.problem,
        algorithm,
        runner.runtime(recipe),
        Seed.from_int(0),
        examples=len(dataset.train),
    )
    trained = step.params
    batch = gather(dataset.train, np.arange(1))
    shapes = jax.eval_shape(
        step._accumulate,
        trained,
        step.frozen,
        jax.eval_shape(step.zero, trained),
        PhysicalBatch(batch, jnp.ones(1, bool), jnp.zeros(1, jnp.int32)),
        step.augmentation_key(0),
    )
    sums = shapes.sum if step.noise is None else shapes.sum.high
    assert jax.tree.structure(sums) == jax.tree.structure(trained)


@pytest.mark.parametrize("entry", one_of_each(ENTRIES))
def test_its_model_builds_and_its_first_step_traces(entry, traced):
    traced(json.dumps(alike(entry.recipe, 1).to_json()))


@pytest.mark.parametrize("entry", [e for e in ENTRIES if e.pretrained_on], ids=name)
def test_pretrained_recipes_do_not_start_from_random_weights(entry, capsys):
    if entry.recipe.weights is not None:
        assert pretrained.hub.is_hub_name(entry.recipe.weights)
        return
    assert main(["train", entry.name, "--data", "/nowhere"]) == 2
    assert "weights (=None) must be given" in capsys.readouterr().err


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


def test_a_recipe_of_some_classes_has_a_head_for_them_alone(capsys):
    assert main(["recipe", "cifar10-other-five", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert len(shown["recipe"]["classes"]) == 5
    assert shown["cost"]["parameters"] == 78_293
    assert shown["expected_accuracy"].startswith("76.6 %")


def test_a_last_layer_costs_its_own_products_only(capsys):
    assert main(["recipe", "imagenet-nfnet-f3-last-layer", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    head = 3072 * 1000 + 1000
    expected = 3 * 2 * head * 262_144 * 1000
    assert shown["cost"]["flops"] == pytest.approx(expected, rel=1e-6)
    assert shown["command"].endswith("--data PATH --weights FILE")
