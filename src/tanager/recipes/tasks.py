"""Build what is trained: a model or parts of it on images, or its head on features."""

import contextlib
import dataclasses
import functools
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree
from rich.progress import Progress, TextColumn

from tanager import _validate as validate
from tanager import models
from tanager._terminal import new_console
from tanager.data import RESIZED, Dataset, Source
from tanager.data.augment import KINDS, Augmentation
from tanager.data.grouped import Grouped
from tanager.data.preprocessing import Preprocessing
from tanager.keys import derive_keys
from tanager.models.low_rank import merge
from tanager.models.pretrained import load_weights, preprocessing_of, read_preprocessing
from tanager.models.tuning import fine_tune, with_zero_head
from tanager.parallel import hosts
from tanager.recipes import heads
from tanager.recipes.recipe import Recipe
from tanager.seed import Seed
from tanager.training.estimate import duration
from tanager.training.features import cache_features
from tanager.training.precision import image_dtype
from tanager.training.problem import Problem
from tanager.training.targets import TARGETS


class Task(NamedTuple):
    """What a recipe trains, and what it is evaluated on.

    `predict(model, example)` returns logits; `augment_test(key, example)` a view of a
    test image for a vote, if there is one; `origin` is where pretrained weights come
    from, as JSON.
    """

    problem: Problem
    predict: Callable[[Any, Any], jax.Array]
    test: Source
    augment_test: Callable[[jax.Array, Any], Any] | None = None
    origin: dict[str, Any] | None = None


_ASSUMED = (
    "their preprocessing is unknown: images have the data set's mean and deviation"
)


def _cross_entropy(
    recipe: Recipe, dataset: Dataset, predict: Callable[[Any, Any], jax.Array]
) -> Callable:
    """Return the loss of one example: nats, times the weight of its class."""
    weights, given = None, recipe.class_weights
    if given and isinstance(given, dict):
        for name in given:
            validate.one_of(dataset.classes, class_weights=name)
        weights = np.array([given.get(name, 1.0) for name in dataset.classes], "f")

    def loss(model: PyTree, example: Any) -> jax.Array:
        label = example["label"].astype(jnp.int32)
        nats = TARGETS[recipe.multi_label].loss(predict(model, example), label)
        return nats if weights is None else nats * jnp.asarray(weights)[label]

    return loss


def make(
    recipe: Recipe, dataset: Dataset, secret: Seed, out: Path, progress: bool
) -> Task:
    """Create the model, load its weights, and choose what is trained on what.

    Initial weights are drawn from `secret`. Cached features go into the run's folder,
    `out`, by default.

    Raises:
        ValueError: the weights do not fit the model, the model cannot be fine-tuned so,
            or cached features are of another origin.
    """
    model = models.create(
        recipe.model,
        classes=len(dataset.classes),
        image_shape=seen_shape(recipe, dataset),
        key=derive_keys(secret, "initialisation")[0],
        **model_options(recipe),
    )
    origin = None
    assert isinstance(model, eqx.Module)
    if recipe.weights is not None:
        model, origin = load_weights(model, recipe.weights, head=recipe.head)
        if assumes_preprocessing(recipe):
            origin["changes"].append(_ASSUMED)
    elif recipe.head == "zero":
        model = with_zero_head(model)
    if recipe.features_from is not None:
        return _on_features(recipe, dataset, model)._replace(origin=origin)

    prepared = preprocessing(recipe, dataset)
    augmented = augmentation(recipe, dataset.image_shape)

    def pixels(example: Any) -> jax.Array:
        image = prepared(example["image"])
        return image.astype(image_dtype(recipe.precision))

    model, marks = fine_tune(
        model,
        recipe.fine_tune,
        key=derive_keys(secret, "low-rank")[0],
        rank=recipe.lora_rank,
    )
    trainable = None if recipe.fine_tune == "all" else marks
    if recipe.caches:
        part = "head_input" if recipe.caches_features else "fronts"
        dataset = _cached(
            recipe,
            dataset,
            lambda frozen, example: getattr(frozen, part)(pixels(example)),
            eqx.filter(model, marks, inverse=True),
            out,
            progress,
        )
        if recipe.caches_features:
            task = _on_features(recipe, dataset, model)
        else:
            task = _on_front(recipe, dataset, model, trainable)
        return task._replace(origin=origin)

    def augment(key: jax.Array, example: Any) -> Any:
        return {**example, "image": augmented(key, example["image"])}

    def predict(model: Any, example: Any) -> jax.Array:
        return model(pixels(example)).astype(jnp.float32)

    task = _task(
        recipe,
        dataset,
        predict,
        model,
        augment=augment if recipe.augmentation_multiplicity else None,
        trainable=trainable,
        finish=merge,
    )
    views = augment if recipe.test_views else None
    return task._replace(augment_test=views, origin=origin)


def _task(
    recipe: Recipe,
    dataset: Dataset,
    predict: Callable[[Any, Any], jax.Array],
    params: PyTree,
    **fields: Any,
) -> Task:
    """Return the task of fitting what `predict` returns, with `fields` of a problem."""
    data = dataset.train
    if recipe.unit == "group":
        data = Grouped(data, dataset.owners, recipe.examples_per_group)
    loss, unreadable = _cross_entropy(recipe, dataset, predict), recipe.unreadable
    problem = Problem(loss, params, data, unreadable=unreadable, **fields)
    return Task(problem, predict, dataset.test)


def size(recipe: Recipe, dataset: Dataset) -> int:
    """Return N, the number of training examples, or of persons."""
    return dataset.units()[1] if recipe.unit == "group" else len(dataset.train)


def model_options(recipe: Recipe) -> dict[str, Any]:
    """Return the options of `models.create` that a recipe has fields for."""
    return {
        "implementation": recipe.implementation,
        "normalisation_order": recipe.normalisation_order,
        "weight_standardisation": recipe.weight_standardisation,
        "head_input": recipe.head_input,
        "mirror": recipe.mirror,
    }


def cropped_shape(recipe: Recipe, dataset: Dataset) -> tuple[int, int, int]:
    """Return (height, width, channels) of what is taken of an image."""
    shape = dataset.image_shape
    return (*augmentation(recipe, shape).size(shape), shape[-1])


def model_shapes(recipe: Recipe, classes: int, image_shape: tuple[int, ...]) -> Any:
    """Return a recipe's model, with shapes in place of arrays.

    Raises:
        ValueError: no model has this name, or it cannot take images of this shape.
    """
    return _shapes(recipe.model, classes, tuple(image_shape), **model_options(recipe))


@functools.lru_cache(maxsize=8)
def _shapes(name: str, classes: int, image_shape: tuple[int, ...], **options: Any):
    return eqx.filter_eval_shape(
        models.create,
        name,
        classes=classes,
        image_shape=image_shape,
        key=jax.random.key(0),
        **options,
    )


def head_width(recipe: Recipe, shape: tuple[int, ...]) -> int:
    """Return the number of features that the last layer sees, of images of a shape."""
    return model_shapes(recipe, 2, shape).head.weight.shape[0]


def seen_shape(recipe: Recipe, dataset: Dataset) -> tuple[int, ...]:
    """Return (height, width, channels) of what the model sees, or (features,)."""
    if recipe.features_from is not None:
        return dataset.image_shape
    return preprocessing(recipe, dataset).seen(cropped_shape(recipe, dataset))


def preprocessing(recipe: Recipe, dataset: Dataset) -> Preprocessing:
    """Return how an image, or a view of it, becomes what the model sees.

    Its size is always given: that of the recipe, else of the weights, else the view's.

    Raises:
        ValueError: the recipe's file, or that beside the weights, cannot be followed.
    """
    view = cropped_shape(recipe, dataset)
    found = _given(recipe) or Preprocessing(mean=dataset.mean, std=dataset.std)
    side, size, crop = recipe.image_size, found.size or view[:2], found.crop
    if side and recipe.dataset not in RESIZED:
        size = (side, side)
    elif side or recipe.crop_size:
        size, crop = view[:2], 1.0
    return dataclasses.replace(
        found,
        size=size,
        crop=recipe.crop_fraction or crop,
        read_shape=dataset.image_shape,  # pyrefly: ignore[bad-argument-type]
        view=None if recipe.crop_size is None else view[:2],
        view_by=KINDS[recipe.augmentation].eval_by,
    )


def assumes_preprocessing(recipe: Recipe) -> bool:
    """Return whether pretrained weights do not say how images are standardised."""
    known = recipe.preprocessing is not None or recipe.features_from is not None
    return recipe.weights is not None and not known and _given(recipe) is None


def warn_of_preprocessing(recipe: Recipe) -> None:
    """Warn if the preprocessing of pretrained weights is assumed."""
    if assumes_preprocessing(recipe):
        warnings.warn(
            f"weights (={recipe.weights!r}) have no description of their preprocessing "
            "beside them, so images are standardised with the data set's mean and "
            "deviation: if they were trained with others, give --preprocessing FILE; "
            "if not, --preprocessing data",
            stacklevel=3,
        )


def default_side(recipe: Recipe) -> int:
    """Return the pixels per side of images that differ in size, from public knowledge.

    It is the size that the weights are evaluated on, else the usual one of the model.
    """
    found = _given(recipe)
    if found is not None and found.size is not None:
        return max(found.size)
    return models.find(recipe.model).image_side


def _given(recipe: Recipe) -> Preprocessing | None:
    """Return the preprocessing of the recipe's file, else that beside its weights."""
    if recipe.preprocessing not in (None, "data"):
        found = read_preprocessing(recipe.preprocessing)
        if found is None:
            rule = "describes no preprocessing"
            remedy = "give timm's config.json or transformers' preprocessor_config.json"
            validate.refuse("preprocessing", recipe.preprocessing, rule, remedy)
        return found
    if recipe.preprocessing is None and recipe.weights is not None:
        return preprocessing_of(recipe.weights)
    return None


def check_augmentation(recipe: Recipe, dataset: Dataset) -> None:
    """Refuse an augmentation that the images of a data set are too small for."""
    if recipe.features_from is None:
        augmentation(recipe, dataset.image_shape)


def augmentation(recipe: Recipe, image_shape: tuple[int, ...]) -> Augmentation:
    """Return the augmentation a recipe names; refuse images it cannot be used on."""
    kind = KINDS[recipe.augmentation]
    fields = {field.name for field in dataclasses.fields(kind)}
    own = fields & {"crop_size", "crop_padding", "padding_mode", "flip"}
    made = kind(**{name: getattr(recipe, name) for name in own})
    made.check(image_shape)
    return made


def _cached(
    recipe: Recipe,
    dataset: Dataset,
    function: Callable[[Any, Any], jax.Array],
    parameters: Any,
    out: Path,
    progress: bool,
) -> Dataset:
    """Return the data set with features in place of images."""
    folder = Path(recipe.features or out / "private" / "features")

    def cached(name: str, source: Source) -> Source:
        with progress_bar(f"features of the {name} images", progress) as report:
            where = folder / name
            return cache_features(function, parameters, source, where, progress=report)

    train = hosts.chief_first(lambda: cached("training", dataset.train))
    test = hosts.chief_first(lambda: cached("test", dataset.test))
    return dataclasses.replace(dataset, train=train, test=test)


def _on_features(recipe: Recipe, dataset: Dataset, model: Any) -> Task:
    """Train the last layer on its inputs, rounded as in the whole model."""
    dtype = jnp.float32 if recipe.features_from else image_dtype(recipe.precision)

    def predict(head: Any, example: Any) -> jax.Array:
        return head(example["features"].astype(dtype)).astype(jnp.float32)

    def finish(head: Any) -> Any:
        return eqx.tree_at(lambda model: model.head, model, head)

    return _solved(recipe, _task(recipe, dataset, predict, model.head, finish=finish))


def _on_front(recipe: Recipe, dataset: Dataset, model: Any, trainable: PyTree) -> Task:
    """Train the last stage on what the front, which stays as it is, makes of images."""

    def predict(model: Any, example: Any) -> jax.Array:
        seen = example["features"].astype(image_dtype(recipe.precision))
        return model.head(model.head_input_of(seen)).astype(jnp.float32)

    return _task(recipe, dataset, predict, model, trainable=trainable)


def _solved(recipe: Recipe, task: Task) -> Task:
    """Return the task in which the recipe's solver computes the head."""
    if recipe.solver == "dp-sgd":
        return task
    finish, means = task.problem.finish, heads.class_means(task.problem.params)
    problem = dataclasses.replace(
        task.problem,
        loss=heads.loss,
        params=means,
        trainable=heads.trainable(means),
        finish=lambda means: finish(means.solve()),
    )
    return task._replace(
        problem=problem,
        predict=lambda means, example: task.predict(means.solve(), example),
    )


@contextlib.contextmanager
def progress_bar(title: str, shown: bool) -> Iterator[Callable[[int, int], None]]:
    """Show a bar, in a pipe a line now and then; call it with (done, all)."""
    screen = new_console(stderr=True)
    hidden = not (shown and screen.is_terminal)
    said, first = time.monotonic(), None
    columns = (*Progress.get_default_columns(), TextColumn("{task.fields[rate]}"))
    with Progress(*columns, console=screen, transient=True, disable=hidden) as bar:
        task = bar.add_task(title, total=None, rate="")

        def report(done: int, total: int) -> None:
            nonlocal said, first
            now = time.monotonic()
            # The time before the first call went on finding files, or compiling.
            if first is None:
                first = now, done
            since, before = first
            due = now - said >= max(10.0, (now - since) / 20)
            if shown and hidden and done and due:
                text = f"{title}: {done} of {total}"
                if done > before:
                    left = duration((total - done) * (now - since) / (done - before))
                    text += f"; about {left} left"
                screen.print(text)
                said = now
            rate = f"{done} of {total}, {bar.tasks[0].speed or 0:.0f} images/s"
            bar.update(task, completed=done, total=total, rate=rate)

        yield report
