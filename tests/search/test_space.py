"""What a search may vary: read, chosen, and put into a recipe."""

import dataclasses

import numpy as np
import optuna
import pytest

from tanager import recipes
from tanager.recipes.optimizers import optimizer
from tanager.search.space import FIELDS, Between, Choices, Space


RECIPE = recipes.get("cifar10-wrn-16-4").recipe


def test_the_grids_are_the_papers():
    assert FIELDS["learning_rate"].grid == (1, 2, 4, 8, 12, 16)
    assert FIELDS["augmentation_multiplicity"].grid == (1, 2, 4, 8, 16)
    # Figure 5 compares two orders; a network without norms is not among them.
    orders = FIELDS["normalisation_order"].grid
    assert orders == ("pre-activation", "post-activation")
    assert FIELDS["augmentation"].grid == ("rrc", "tan", "simclr")
    assert FIELDS["momentum"].grid == (0, 0.1, 0.5, 0.9, 1)
    assert FIELDS["dampening"].grid == (0, 0.1, 0.5, 0.9, 1)
    assert {0.9, 0.99, 0.9999, 0.99999} < set(FIELDS["ema_decay"].grid)


def test_words_are_read():
    space = Space.parse(
        ["learning-rate=0.5..8", "augmentation_multiplicity=1,4", "momentum"]
    )
    assert space.values == {
        "learning_rate": Between(0.5, 8.0),
        "augmentation_multiplicity": Choices((1, 4)),
        "momentum": Choices((0.0, 0.1, 0.5, 0.9, 1.0)),
    }
    assert Space.from_json(space.to_json()) == space


def test_the_order_of_words_changes_no_draw():
    words = ["clip-norm", "learning-rate", "optimizer=sgd,adam"]
    drawn = [
        list(Space.parse(each).draw(np.random.default_rng(3), RECIPE).items())
        for each in (words, words[::-1])
    ]
    assert drawn[0] == drawn[1]


def test_a_space_has_no_other_names():
    with pytest.raises(ValueError, match="did you mean learning_rate"):
        Space({"learningrate": Choices((1.0,))})


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["learning"], "vary .*did you mean learning-rate.*must be one of"),
        (["learning-rate=a"], "cannot be read: give learning-rate=A,B,C"),
        (["learning-rate=8..1"], "where LOW is above 0 and below HIGH"),
        (["augmentation-multiplicity=1..4"], "cannot be read"),
        (["momentum", "momentum=0"], "varies momentum a second time"),
        (["model"], "vary .*='model'.* has no values: give some: model=A,B,C"),
    ],
)
def test_what_cannot_be_read_is_refused(words, message):
    with pytest.raises(ValueError, match=message):
        Space.parse(words)


def test_choices_are_put_into_the_recipe():
    space = Space.parse(
        ["learning-rate", "momentum", "dampening", "normalisation-order"]
    )
    chosen = {
        "learning_rate": 8.0,
        "momentum": 0.9,
        "dampening": 0.5,
        "normalisation_order": "pre-activation",
    }
    recipe = space.recipe(RECIPE, chosen)
    assert recipe.learning_rate == 8
    assert recipe.optimizer_options == {"momentum": 0.9, "dampening": 0.5}
    assert recipe.normalisation_order == "pre-activation"
    same = dataclasses.replace(
        recipe,
        learning_rate=RECIPE.learning_rate,
        optimizer_options={},
        normalisation_order=RECIPE.normalisation_order,
    )
    assert same == RECIPE


def test_points_are_the_combinations_that_differ():
    """Momentum is for SGD alone, and a learning rate for one kind of optimizer."""
    words = ["momentum=0,0.9", "optimizer=sgd,adam", "adam-learning-rate=0.1,0.2"]
    points = Space.parse(words).points(RECIPE)
    assert points == [
        {"optimizer": "sgd", "momentum": 0.0},
        {"optimizer": "sgd", "momentum": 0.9},
        {"optimizer": "adam", "adam_learning_rate": 0.1},
        {"optimizer": "adam", "adam_learning_rate": 0.2},
    ]
    with pytest.raises(ValueError, match="must be values, not a range"):
        Space.parse(["momentum", "learning-rate=1..2"]).points(RECIPE)


def test_a_model_without_the_implementation_of_the_recipe_is_ours():
    """Appendix B compares NF-ResNet with ViT, which the paper's code has not."""
    tan = recipes.get("imagenet-nf-resnet-50-tan-72k").recipe
    space = Space.parse(["model=nf-resnet-50,nf-resnet-101,vit-small-16"])
    made = [space.recipe(tan, point) for point in space.points(tan)]
    assert [recipe.implementation for recipe in made] == ["tan", "tan", None]


def test_a_learning_rate_alone_is_that_of_any_optimizer():
    adam = dataclasses.replace(RECIPE, optimizer="adam", optimizer_options={})
    space = Space.parse(["learning-rate=0.01,0.1"])
    rates = [space.recipe(adam, each).learning_rate for each in space.points(adam)]
    assert rates == [0.01, 0.1]


def test_an_optimizer_has_a_learning_rate_of_its_own_and_no_options_of_another():
    space = Space.parse(["optimizer", "learning-rate", "momentum"])
    assert "adam_learning_rate" in space.values
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    seen = set()
    for _ in range(40):
        chosen = space.suggest(study, RECIPE)
        recipe = space.recipe(RECIPE, chosen)
        seen.add(recipe.optimizer)
        optimizer(recipe, 100)
        if recipe.optimizer == "sgd":
            assert recipe.learning_rate == chosen["learning_rate"] >= 1
            assert set(recipe.optimizer_options) == {"momentum"}
        else:
            assert recipe.learning_rate == chosen["adam_learning_rate"] <= 0.01
            assert recipe.optimizer_options == {}
            assert "momentum" not in chosen
    assert seen == {"sgd", "adam", "adamw"}


def test_the_default_is_what_applies_to_the_recipe():
    names = set(Space.default(RECIPE).values)
    assert {"learning_rate", "momentum", "dampening", "ema_decay"} < names
    assert {"augmentation", "augmentation_multiplicity"} < names
    kinds = Space.default(RECIPE).values["augmentation"]
    assert isinstance(kinds, Choices) and RECIPE.augmentation in kinds.values
    plain = dataclasses.replace(RECIPE, augmentation_multiplicity=0, optimizer="adam")
    assert set(Space.default(plain).values) == {"adam_learning_rate", "ema_decay"}
