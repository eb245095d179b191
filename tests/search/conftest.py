import dataclasses

import pytest

from tanager import recipes
from tanager.search.settings import Settings
from tanager.search.simulation import plan_simulation
from tanager.search.space import Space


EXAMPLES = 1437


@pytest.fixture(scope="session")
def target():
    """A short run on the digits."""
    recipe = dataclasses.replace(
        recipes.get("digits").recipe,
        steps=12,
        noise_multiplier=4.0,
        epsilon=None,
        strategy="bk",
        evaluate_every=4,
        seed=1,
    )
    return plan_simulation("digits", recipe, EXAMPLES)


@pytest.fixture
def settings(target):
    """A study of a few learning rates."""
    return Settings(
        target,
        Space.parse(["learning-rate=0.25,0.4,0.6,1", "ema-decay=0.5,0.9,0.99"]),
        (16, 32, 64),
        validation_examples=140,
        repeats=1,
        pruner="none",
        seed=5,
    )
