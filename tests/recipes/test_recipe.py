import contextlib
import dataclasses
import inspect
import io
import json
import math
import re
from typing import Any, Literal, get_args, get_origin, get_type_hints

import numpy as np
import pytest

from tanager import recipes
from tanager.cli import main
from tanager.recipes import runner
from tanager.recipes.fields import _AT_LEAST
from tanager.recipes.recipe import Recipe


MINIMAL: dict = {
    "dataset": "digits",
    "model": "small-cnn",
    "epsilon": 3.0,
    "batch_size": 256,
    "steps": 200,
    "learning_rate": 2.0,
}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dataset": ""}, "dataset (='') must be a name"),
        (
            {"normalisation_order": "post-activaton"},
            "normalisation_order (='post-activaton') is unknown: did you mean "
            "post-activation? It must be one of pre-activation, post-activation",
        ),
        ({"epsilon": 0.0}, "epsilon (=0.0) must be positive and finite"),
        ({"delta": 0.0}, "delta (=0.0) must be strictly between 0 and 1"),
        ({"noise_multiplier": -1.0}, "noise_multiplier (=-1.0) must be finite and not"),
        ({"steps": 1.5}, "steps (=1.5) must be a whole number"),
        (
            {"steps": None},
            "two of epsilon, noise_multiplier and steps must be given beside "
            "solve_for=None; found epsilon=3.0, noise_multiplier=None, steps=None",
        ),
        (
            {"solve_for": "epsilon"},
            "two of epsilon, noise_multiplier and steps must be given beside "
            "solve_for=epsilon; found epsilon=3.0, noise_multiplier=None, steps=200",
        ),
        ({"solve_for": "nothing"}, "all of epsilon, noise_multiplier and steps must"),
        (
            {"clip_norm": -1.0},
            "clip_norm (=-1.0) must be positive and finite: the papers",
        ),
        (
            {"clipping": "adaptive", "non_private": True, "epsilon": None},
            "clipping (='adaptive') must be left out for class means, and without",
        ),
        ({"learning_rate": -2.0}, "learning_rate (=-2.0) must be positive and finite"),
        (
            {"optimizer_options": {"momentum": "high"}},
            "optimizer_options (='high') must be a finite number for momentum",
        ),
        (
            {"optimizer_options": {"momentum": math.nan}},
            "optimizer_options (=nan) must be a finite number for momentum",
        ),
        ({"ema_decay": -0.1}, "ema_decay (=-0.1) must be finite and not negative"),
        ({"ema_decay": 1.0}, "ema_decay (=1.0) must be below 1: the papers use 0.9999"),
        (
            {"augmentation": "none", "augmentation_multiplicity": 4, "flip": True},
            "augmentation_multiplicity (=4) must be 0 without augmentation: "
            "its views would all be the same: give crop_padding or flip, or another",
        ),
        ({"physical_batch_size": 0}, "physical_batch_size (=0) must be at least 1"),
        (
            {"physical_batch_size": "all"},
            "physical_batch_size (='all') must be a whole number or auto",
        ),
        ({"test_views": 4}, "test_views (=4) must be 0 without augmentation"),
        ({"checkpoint_seconds": -1.0}, "checkpoint_seconds (=-1.0) must be finite"),
        (
            {"fine_tune": "last-layer", "weights": "w.npz", "unreadable": "skip"},
            "unreadable (='skip') must be 'error' when features are cached",
        ),
    ],
)
def test_a_field_out_of_range_is_refused_by_name(fields, message):
    Recipe(**MINIMAL)
    with pytest.raises(ValueError, match=re.escape(message)):
        Recipe(**MINIMAL | fields)


def test_every_number_has_a_least_and_every_choice_its_names():
    for name, hint in get_type_hints(Recipe).items():
        (hint, *more) = get_args(hint) if type(None) in get_args(hint) else (hint,)
        if len(more) > 1:  # a number or a word
            continue
        if hint is int:
            least = _AT_LEAST[name]
            message = f"{name} (={least - 1}) must be at least {least}"
            with pytest.raises(ValueError, match=re.escape(message)):
                Recipe.from_json(MINIMAL | {name: least - 1})
        elif get_args(hint) and get_origin(hint) is Literal:
            with pytest.raises(ValueError, match=f"{name} .* must be one of"):
                Recipe.from_json(MINIMAL | {name: "another"})


@pytest.mark.parametrize(
    "fields",
    [
        {"noise_multiplier": 0.0},
        {"epsilon": None, "noise_multiplier": 1.0},
        {"ema_decay": 0.0},
        {"checkpoint_seconds": 0.0},
        {"augmentation_multiplicity": 0, "crop_padding": 4, "flip": True},
        {"augmentation_multiplicity": 1, "flip": True},
        {"augmentation_multiplicity": 2, "crop_size": 8},
        {"augmentation_multiplicity": 2, "augmentation": "rrc", "test_views": 2},
        {"augmentation": "none"},
        {"seed": 0},
    ],
)
def test_the_edges_of_the_ranges_are_allowed(fields):
    Recipe(**MINIMAL | fields)


@pytest.mark.parametrize("name", recipes.RECIPES)
def test_json_there_and_back(name):
    recipe = dataclasses.replace(
        recipes.get(name).recipe, optimizer_options={"momentum": 0.9}, seed=7
    )
    text = json.dumps(recipe.to_json(), allow_nan=False)
    assert Recipe.from_json(json.loads(text)) == recipe


def test_json_with_an_unknown_or_a_missing_field_is_refused():
    fields = Recipe(**MINIMAL).to_json()
    with pytest.raises(ValueError, match=r"did you mean epsilon\?"):
        Recipe.from_json(fields | {"epsilom": 1.0})
    del fields["model"], fields["dataset"]
    with pytest.raises(ValueError, match=r"recipe lacks dataset, model: give"):
        Recipe.from_json(fields)
    with pytest.raises(ValueError, match=r"steps \(=-1\) must be at least 1"):
        Recipe.from_json(Recipe(**MINIMAL).to_json() | {"steps": -1})


def test_every_field_is_a_flag_with_help():
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), pytest.raises(SystemExit):
        main(["train", "digits", "--help-all"])
    words = " ".join(re.sub(r"[│╭╮╰╯─]", " ", shown.getvalue()).split())
    assert Recipe.__doc__ is not None
    described = dict(
        re.findall(r"^    (\w+): (.*)$", inspect.cleandoc(Recipe.__doc__), re.MULTILINE)
    )
    assert "--solve-for" not in words  # It follows from the other flags.
    for field in dataclasses.fields(Recipe):
        if field.name == "solve_for":
            continue
        flag = field.name.replace("_", "-")
        opening = " ".join(described[field.name].split()[:4])
        # Between a flag and its help stand its type or choices only.
        between = r"(?:, --no-[\w-]+| [\[\]{}|\w,.…-]+)*?"
        pattern = rf"--{flag}{between} {re.escape(opening)}"
        assert re.search(pattern, words), field.name


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        ("auto", ("auto", "default")),
        ("auto:low", ("auto", "low")),
        ("bk_mixopt", ("bk_mixopt", "default")),
    ],
)
def test_a_strategy_may_name_its_memory(strategy, expected):
    recipe = dataclasses.replace(recipes.get("digits").recipe, strategy=strategy)
    runtime = runner.runtime(recipe)
    assert (runtime.strategy, runtime.memory) == expected


@pytest.mark.parametrize("strategy", ["auto:hi", "foo"])
def test_an_unknown_strategy_is_refused_before_data_are_read(strategy, capsys):
    words = ["train", "cifar10-wrn-16-4", "--strategy", strategy]
    assert main([*words, "--data", "/nowhere"]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(f"tanager: error: --strategy (={strategy!r}) must be")
    assert not printed.out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--lora-rank 8", "--lora-rank (=8) needs --fine-tune lora: add it, or leave"),
        ("--head load", "--head (='load') needs --weights: add it, or leave this out"),
        (
            "--non-private --clip-norm 3",
            "--clip-norm (=3.0) does not apply without privacy: leave it out",
        ),
        ("--timeout 9", "--timeout (=9.0) needs --distributed: add it, or leave this"),
        (
            "--model linear --normalisation-order none",
            "--normalisation-order (='none') does not apply to model linear: leave it",
        ),
        (
            "--model linear --no-weight-standardisation",
            "--weight-standardisation (=False) does not apply to model linear: leave",
        ),
    ],
)
def test_flags_that_do_nothing_alone_are_refused(words, message, capsys):
    words = ["train", "cifar10-wrn-16-4", *words.split()]
    assert main([*words, "--data", "/nowhere"]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", ["--workers 2", "--unreadable skip", "--stream False"]
)
def test_flags_of_images_that_are_read_one_by_one_are_refused_in_memory(words, capsys):
    assert main(["train", "digits", *words.split()]) == 2
    assert "does not apply to data in memory: leave it out" in capsys.readouterr().err


def test_what_is_shared_by_the_runs_on_cifar10():
    for name in ("cifar10-wrn-16-4", "cifar10-wrn-40-4"):
        recipe = recipes.get(name).recipe
        assert recipe.model == name.removeprefix("cifar10-")
        assert (recipe.crop_padding, recipe.flip, recipe.ema_decay) == (4, True, 0.9999)
        assert (recipe.optimizer, recipe.optimizer_options) == ("sgd", {})


@pytest.mark.parametrize(
    ("epsilon", "steps", "rate"),
    # 875 at ε = 1 and 1125 at 2; 1687 at 4 and 1843 at 6; 2468 at 8, the largest.
    [(0.5, 438, 2), (2**0.5, 992, 2), (24**0.5, 1763, 8**0.5), (16, 4936, 4)],
)
def test_between_published_epsilons_so_are_steps_and_learning_rate(
    epsilon, steps, rate
):
    recipe = recipes.get("cifar10-wrn-16-4").at_epsilon(epsilon)
    assert (recipe.epsilon, recipe.noise_multiplier) == (epsilon, None)
    assert (recipe.steps, recipe.batch_size) == (steps, 4096)
    assert recipe.learning_rate == pytest.approx(rate)
    assert recipe.augmentation_multiplicity == 16


def test_where_published_steps_are_as_epsilon_those_between_are():
    entry = recipes.get("cifar10-wrn-28-10-all-layers")
    for epsilon in np.geomspace(0.1, 50, 40):
        assert entry.at_epsilon(epsilon).steps == pytest.approx(250 * epsilon, abs=0.5)


@pytest.mark.parametrize(
    "entry",
    [entry for entry in recipes.RECIPES.values() if entry.published],
    ids=lambda entry: entry.name,
)
def test_a_little_more_epsilon_is_a_little_more_of_everything(entry):
    """No number jumps, and each goes from that of one row to that of the next."""
    names = "steps", "batch_size", "learning_rate"
    epsilons = np.geomspace(entry.published[0].epsilon / 4, 40, 2000)
    found = [vars(entry.at_epsilon(epsilon)) for epsilon in epsilons]
    for name in names:
        values = np.array([each[name] for each in found], float)
        # From 0.5 to 1, published learning rates rise to the eighth: ε³.
        most = (epsilons[1] / epsilons[0]) ** 4
        rounding = 1.0 if name != "learning_rate" else 0.0
        assert np.all(values[1:] <= most * values[:-1] + rounding)
        assert np.all(values[:-1] <= most * values[1:] + rounding)
        rows = np.array([getattr(row, name) for row in entry.published])
        own = np.interp(
            np.log(epsilons),
            np.log([row.epsilon for row in entry.published]),
            np.arange(len(rows)),
        )
        low, high = rows[np.floor(own).astype(int)], rows[np.ceil(own).astype(int)]
        inside = (own > 0) & (own < len(rows) - 1)
        assert np.all((values >= np.minimum(low, high) - 0.5)[inside])
        assert np.all((values <= np.maximum(low, high) + 0.5)[inside])


@pytest.mark.parametrize("name", ["digits", "mnist-small-cnn"])
def test_without_published_rows_the_noise_is_left_to_solve_for(name):
    entry = recipes.get(name)
    recipe = entry.at_epsilon(1.25)
    assert entry.published == ()
    assert recipe == dataclasses.replace(
        entry.recipe, epsilon=1.25, noise_multiplier=None
    )
    assert recipe.steps is not None


def test_at_an_impossible_epsilon():
    with pytest.raises(ValueError, match=r"epsilon \(=-1\) must be positive"):
        recipes.get("digits").at_epsilon(-1)


def test_the_tan_reference():
    recipe = recipes.get("cifar10-wrn-16-4-tan").recipe
    assert (recipe.batch_size, recipe.noise_multiplier, recipe.steps) == (4096, 3, 2500)
    assert recipe.learning_rate == 4
    assert recipe.normalisation_order == "post-activation"
    assert recipe.augmentation_multiplicity == 0


def test_an_unknown_recipe_is_refused_with_the_nearest():
    with pytest.raises(ValueError, match=re.escape("did you mean cifar10-wrn-16-4?")):
        recipes.get("cifar10-wrn-16-5")
    remedy = f"`tanager train --list` prints all {len(recipes.RECIPES)}"
    with pytest.raises(
        ValueError, match=re.escape(f"recipe (='x') is unknown: {remedy}")
    ):
        recipes.get("x")


def test_listing_has_a_row_for_each_recipe():
    headings, rows = recipes.listing()
    assert {len(row) for row in rows} == {len(headings)}
    named = {row[0]: row for row in rows}
    assert list(named) == list(recipes.RECIPES)
    assert named["cifar10-wrn-40-4"] == (
        "cifar10-wrn-40-4",
        "cifar10",
        "wrn-40-4",
        "1, 2, 3, 4, 6, 8",
        "Unlocking, Table 14",
        "81.4 ± 0.2 % at ε = 8",
    )
    assert named["cifar10-wrn-16-4"][-1] == "79.5 ± 0.7 % at ε = 8"
    assert named["cifar10-wrn-16-4-tan"][-1] == "74.0 ± 0.5 % at ε = 7.1"
    for name in ("mnist-small-cnn", "folder"):
        assert named[name][-2:] == ("tanager", "not known")
    assert named["digits"][-1] == "94.4 to 96.4 %, five runs here"
    assert named["cifar10-wrn-16-4-tan-5k"][-1].startswith("59.9 ± 1 %, published; ")


def test_examples_chosen_by_rank_are_refused_where_their_number_is_private():
    """With one more, another is left out: two differ, and ε is of one."""
    recipe = Recipe(**MINIMAL)
    hidden: dict[str, Any] = {"adjacency": "add-or-remove-one"}
    with pytest.raises(ValueError, match=r"declared_examples .* must be given under"):
        dataclasses.replace(recipe, **hidden).public_size(1200)
    hidden["declared_examples"] = 1000
    assert dataclasses.replace(recipe, **hidden).public_size(1200) == 1000
    for name in ("train_examples", "validation_examples"):
        chosen = dataclasses.replace(recipe, **hidden | {name: 500})
        with pytest.raises(ValueError, match=rf"{name} \(=500\) must be left out"):
            chosen.public_size(500)
    assert dataclasses.replace(recipe, train_examples=500).public_size(500) == 500
