"""Run a recipe: from its fields to a trained model in a folder."""

import dataclasses
import inspect
import warnings
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
import optax

from tanager import _validate as validate
from tanager import data, models
from tanager.data.augment import KINDS, Augmentation, standardise
from tanager.keys import derive_keys
from tanager.privacy.mechanism import LARGE_EPSILON
from tanager.recipes.budget import Budget, settle
from tanager.recipes.recipe import Recipe
from tanager.training.evaluate import Classification
from tanager.training.loop import train
from tanager.training.result import TrainResult
from tanager.training.run_folder import RunFolder


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A recipe whose input was checked and whose budget is settled.

    Attributes:
        name: of the recipe.
        recipe: its fields.
        dataset: the examples.
        budget: what the run will spend.
    """

    name: str
    recipe: Recipe
    dataset: data.Dataset
    budget: Budget


def prepare(
    name: str,
    recipe: Recipe,
    typed: Collection[str] = (),
    progress: Callable[[int, int], None] | None = None,
) -> Prepared:
    """Load the data and settle the budget; nothing is spent or written yet.

    Args:
        name: of the recipe.
        recipe: with every typed field in place.
        typed: names of the fields a person set (see `tanager.recipes.budget`).
        progress: called with (decoded, all) while images are decoded.

    Raises:
        ValueError: a field, the data, or the budget is no good.
    """
    optimizer(recipe)
    dataset = data.load(
        recipe.dataset,
        recipe.data,
        validation_examples=recipe.validation_examples,
        image_size=recipe.image_size,
        progress=progress,
    )
    augmentation(recipe, dataset.image_shape, typed)
    budget = settle(recipe, typed, len(dataset.train))
    if budget.epsilon >= LARGE_EPSILON:
        warnings.warn(
            f"ε = {budget.epsilon:.4g} protects next to nothing: right for a "
            "simulation on public data, wrong for a model of private data",
            stacklevel=2,
        )
    return Prepared(name, recipe, dataset, budget)


def run(prepared: Prepared, progress: bool = True) -> TrainResult:
    """Train what was prepared, in the recipe's folder."""
    recipe, dataset = prepared.recipe, prepared.dataset
    out = recipe.out or f"runs/{prepared.name}"
    secret = RunFolder(out).seed(recipe.seed)
    augmented = augmentation(recipe, dataset.image_shape)
    model = models.create(
        recipe.model,
        classes=len(dataset.classes),
        image_shape=(*augmented.size(dataset.image_shape), dataset.image_shape[-1]),
        key=derive_keys(secret, "initialisation")[0],
        normalisation_order=recipe.normalisation_order,
        weight_standardisation=recipe.weight_standardisation,
    )

    def predict(model: Any, example: Any) -> jax.Array:
        image = augmented.plain(example["image"])
        return model(standardise(image, dataset.mean, dataset.std))

    def loss(model: Any, example: Any) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(
            predict(model, example), example["label"].astype(jnp.int32)
        )

    def augment(key: jax.Array, example: Any) -> Any:
        return {**example, "image": augmented(key, example["image"])}

    settings = recipe.to_json()
    return train(
        loss,
        model,
        dataset.train,
        prepared.budget.mechanism,
        delta=prepared.budget.delta,
        optimizer=optimizer(recipe),
        clip_norm=recipe.clip_norm,
        out=out,
        seed=recipe.seed,
        augment=augment if recipe.augmentation_multiplicity else None,
        augmentation_multiplicity=recipe.augmentation_multiplicity,
        ema_decay=recipe.ema_decay,
        physical_batch_size=recipe.physical_batch_size,
        strategy=recipe.strategy,
        evaluate=Classification(
            predict,
            dataset.test,
            dataset.classes,
            augment=augment if recipe.test_views else None,
            views=recipe.test_views,
        ),
        evaluate_every=recipe.evaluate_every,
        checkpoint_seconds=recipe.checkpoint_seconds,
        description={
            "recipe": {"name": prepared.name, **settings},
            "model": recipe.model,
            "dataset": dataset.name,
            "classes": list(dataset.classes),
            "optimizer": {
                "name": recipe.optimizer,
                "learning_rate": recipe.learning_rate,
                **recipe.optimizer_options,
            },
        },
        progress=progress,
    )


def augmentation(
    recipe: Recipe, image_shape: tuple[int, ...], typed: Collection[str] = ()
) -> Augmentation:
    """Return the augmentation a recipe names, for images of a shape [H, W, C].

    Args:
        recipe: with every typed field in place.
        image_shape: of the data set's images.
        typed: names of the fields a person set.

    Raises:
        ValueError: it cannot be used on such images, or a field was typed that is not
            one of this augmentation's.
    """
    kind = KINDS[recipe.augmentation]
    fields = {field.name for field in dataclasses.fields(kind)}
    options: dict[str, Any] = {"crop_padding": recipe.crop_padding, "flip": recipe.flip}
    for name in sorted(options.keys() - fields):
        value = options.pop(name)
        if value and name in typed:
            validate.refuse(
                name,
                value,
                f"does not apply to augmentation {recipe.augmentation}",
                "leave it out",
            )
    made = kind(crop_size=recipe.crop_size, **options)
    made.check(image_shape)
    return made


def optimizer(recipe: Recipe) -> optax.GradientTransformation:
    """Return the optax optimizer a recipe names, with its options.

    Raises:
        ValueError: optax has no such optimizer, or it has no such option.
    """
    names = [
        name
        for name, value in vars(optax).items()
        if inspect.isfunction(value)
        and not name.startswith(("_", "scale_by_"))
        and next(iter(inspect.signature(value).parameters), None) == "learning_rate"
    ]
    validate.one_of(sorted(names), optimizer=recipe.optimizer)
    make = getattr(optax, recipe.optimizer)
    options = list(inspect.signature(make).parameters)[1:]
    for name in recipe.optimizer_options:
        validate.one_of(options, optimizer_options=name)
    return make(recipe.learning_rate, **recipe.optimizer_options)
