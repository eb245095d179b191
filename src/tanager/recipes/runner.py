"""Run a recipe: from its fields to a trained model in a folder."""

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tanager import _processor, data
from tanager import _validate as validate
from tanager._cache import expanded
from tanager._files import as_json
from tanager.adaptive import AdaptiveClipping
from tanager.data.datasets import labels_of
from tanager.data.streamed import UnreadableImages
from tanager.models.pretrained import find_weights
from tanager.parallel import hosts
from tanager.privacy.account import Account
from tanager.privacy.mechanism import LARGE_EPSILON
from tanager.privacy.shown import format_epsilon
from tanager.recipes import automatic, heads, own_weights, tasks
from tanager.recipes.budget import Budget, solve_budget
from tanager.recipes.fields import LAYOUT_FIELDS
from tanager.recipes.optimizers import optimizer
from tanager.recipes.recipe import Recipe
from tanager.training import charging, fingerprint, sizing
from tanager.training.class_weights import balanced
from tanager.training.estimate import Estimate
from tanager.training.evaluate import Classification, Evaluation
from tanager.training.loop import train
from tanager.training.precision import computing
from tanager.training.problem import DPSGD, Runtime
from tanager.training.result import TrainResult
from tanager.training.run_folder import (
    RunFolder,
    begun,
    numbered,
    removed_if_refused,
)


_RUNS = "runs"
"""Where runs are whose recipe names no folder."""


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A named recipe whose input was checked and whose budget is solved."""

    name: str
    recipe: Recipe
    dataset: data.Dataset
    budget: Budget
    reasons: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Why the fields that were chosen have their values, by name."""

    @property
    def public_size(self) -> int:
        """The number of examples, or of persons, that is published."""
        return self.recipe.public_size(tasks.size(self.recipe, self.dataset))


def load(
    recipe: Recipe,
    progress: Callable[[int, int], None] | None = None,
    shape: tuple[int, int, int] | None = None,
) -> data.Dataset:
    """Load the data that a recipe names.

    `progress` is called with (decoded, all) while images are decoded. `shape` is
    (H, W, C) to resize images to, where that can be chosen; None for the recipe's size.

    Raises:
        ValueError: a field or the data cannot be used.
    """
    recipe = automatic.resolved(recipe)
    path = recipe.data
    if path is not None and recipe.dataset not in ("digits", "features"):
        fields: dict[str, Any] = {name: getattr(recipe, name) for name in LAYOUT_FIELDS}
        if recipe.dataset == "folder" and recipe.features_from is None:
            fields["default_side"] = tasks.default_side(recipe)
        path = data.Layout(path, **fields)
    loaded = data.load(
        recipe.dataset,
        path,
        classes=recipe.classes,
        validation_examples=recipe.validation_examples,
        train_examples=recipe.train_examples,
        image_size=(shape or recipe.image_size)
        if recipe.dataset in data.RESIZED
        else None,
        # `_refuse_unused` refuses it of digits, unless an older version began the run.
        stream=None if recipe.dataset == "digits" else recipe.stream,
        groups=recipe.groups,
        features_from=recipe.features_from,
        progress=progress,
    )
    refuse_columns(loaded, vars(recipe))
    return loaded


def refuse_columns(dataset: data.Dataset, fields: Mapping[str, Any]) -> None:
    """Refuse fields that name columns, of data that have none."""
    layout = (dataset.record or {}).get("layout")
    if layout not in ("class folders", "npy files", "an npz file"):
        return
    for name in ("image_column", "label_column"):
        if (value := fields.get(name)) is not None:
            rule = f"names a column, and the data are read as {layout}"
            remedy = "name their table with labels (--labels FILE), or leave it out"
            validate.refuse(name, value, rule, remedy)


def sized(recipe: Recipe, dataset: data.Dataset) -> Recipe:
    """Return the recipe with the size that images of different sizes were read at."""
    if dataset.record is not None and dataset.record["size"] == "default":
        return dataclasses.replace(recipe, image_size=dataset.image_shape[0])
    return recipe


def prepare(
    name: str,
    recipe: Recipe,
    progress: Callable[[int, int], None] | None = None,
    dataset: data.Dataset | None = None,
) -> Prepared:
    """Load the data and solve the budget; nothing is spent or written yet.

    `dataset` is what `load` returned for this recipe, if it was loaded before.

    Raises:
        ValueError: a field, the data or the budget cannot be used.
    """
    given, recipe = recipe, automatic.resolved(recipe)
    if recipe.weights is not None:
        find_weights(recipe.weights)  # what is unreachable ends the run at once
    require_apart(recipe)
    runtime(recipe)  # refuses what cannot be, before data are read
    if dataset is None:
        dataset = load(recipe, progress)
    recipe = sized(recipe, dataset)
    _refuse_unused(recipe, dataset)
    tasks.check_augmentation(recipe, dataset)
    seen = tasks.seen_shape(recipe, dataset)
    shapes = tasks.model_shapes(recipe, len(dataset.classes), seen)
    tasks.warn_of_preprocessing(recipe)
    fixed = recipe.model in heads.FIXED
    starts = recipe.weights or recipe.features_from or fixed
    if recipe.fine_tune != "all" and not starts:
        rule = "must be all without pretrained weights"
        remedy = "give weights to start from"
        validate.refuse("fine_tune", recipe.fine_tune, rule, remedy)
    size = tasks.size(recipe, dataset)
    width = shapes.head.weight.shape[0] if recipe.leaves_open else 0
    public = recipe.public_size(size)
    recipe = heads.resolved(recipe, public, width)
    budget = solve_budget(recipe, size, len(dataset.classes))
    optimizer(recipe, budget.mechanism.steps)
    if not recipe.non_private and budget.epsilon >= LARGE_EPSILON:
        warnings.warn(
            f"ε = {format_epsilon(budget.epsilon)} protects next to nothing: right for "
            "a simulation on public data, wrong for a model of private data",
            stacklevel=2,
        )
    reasons = automatic.reasons(given, recipe, public)
    return Prepared(name, recipe, dataset, budget, reasons)


@contextlib.contextmanager
def saying_how_to_skip(recipe: Recipe) -> Iterator[None]:
    """Say what `unreadable` skip needs, where all images are read and some cannot."""
    try:
        yield
    except UnreadableImages as error:
        if recipe.unreadable == "error":
            raise
        raise UnreadableImages(
            f"{error}. --unreadable skip is for images that are read as they are "
            "needed, never for test images: give --stream True and --image-size too, "
            "or remove these images"
        ) from error


def _refuse_unused(recipe: Recipe, dataset: data.Dataset) -> None:
    """Refuse fields of images that are read one by one, for images in memory.

    An older version may have begun the run with them.
    """
    if begun(recipe.out) or isinstance(dataset.train, data.StreamedSource):
        return
    for name in ("workers", "unreadable", "stream"):
        usual = name == "stream" and recipe.dataset != "digits"
        if (value := getattr(recipe, name)) not in (None, "error") and not usual:
            rule = "does not apply to data in memory"
            validate.refuse(name, value, rule, "leave it out")


def require_workers(prepared: Prepared) -> None:
    """Refuse workers where the images are read once, before training.

    A search may vary whether they are. An older version may have begun the run.
    """
    recipe = prepared.recipe
    if recipe.caches and recipe.workers is not None and not begun(recipe.out):
        rule = "does not apply where features are computed before training"
        validate.refuse("workers", recipe.workers, rule, "leave it out")


def require_layout(prepared: Prepared) -> None:
    """Refuse devices, or a physical batch for them, as training would."""
    recipe = prepared.recipe
    chosen = runtime(recipe)
    layout = chosen.layout()
    layout.check(sizing.least(chosen, layout), prepared.public_size)


def require_apart(recipe: Recipe, out: str | Path | None = None) -> None:
    """Refuse to write secrets among the data, where who has the data reads them.

    `out` is the folder of what is run, if it is not the recipe's.

    Raises:
        ValueError: it, or the folder of features, is in the folder of the data.
    """
    written = {"out": out or recipe.out or _RUNS, "features": recipe.features}
    for name, path in written.items():
        for place in (recipe.data, recipe.features_from):
            if path is None or place is None:
                continue
            inner, outer = (expanded(p).resolve() for p in (path, place))
            if inner.is_relative_to(outer):
                rule = "is in the folder of the data, and a run writes secrets"
                remedy = f"give a folder elsewhere (--{name})"
                validate.refuse(name, str(path), rule, remedy)


@contextlib.contextmanager
def in_folder(prepared: Prepared) -> Iterator[Prepared]:
    """Give a run without a folder the next one; remove a new one if it is refused."""
    out = prepared.recipe.out
    if new := out is None:
        out = hosts.from_chief(lambda: str(numbered(prepared.name, _RUNS)))
    recipe = dataclasses.replace(prepared.recipe, out=out)
    kept = contextlib.nullcontext()
    with removed_if_refused(out, new=new) if hosts.is_chief() else kept:
        yield dataclasses.replace(prepared, recipe=recipe)


def run(
    prepared: Prepared,
    progress: bool = True,
    on_metrics: Callable[[Mapping[str, Any]], None] | None = None,
    links: Mapping[str, Any] | None = None,
    account: Account | None = None,
    on_estimate: Callable[[Estimate], None] | None = None,
    fast: bool = False,
    on_training: Callable[[Evaluation], None] | None = None,
) -> TrainResult:
    """Train what was prepared, in the recipe's folder, or else in the next one.

    `on_metrics` and `on_estimate` are those of `tanager.train`. `links` go on record in
    config.json, too. `fast` does not measure how to clip. `on_training` is given the
    evaluation of the parameter average on the training examples; no ε covers it, so it
    is for public data only.

    Raises:
        ValueError: see `tanager.train`.
    """
    progress = progress and hosts.is_chief()
    with computing(prepared.recipe.precision), in_folder(prepared) as placed:
        recipe, dataset = placed.recipe, placed.dataset
        out = str(recipe.out)
        spent, delta = prepared.budget.mechanisms(), prepared.budget.delta
        charging.require_room(account, spent, delta, out, recipe.seed)
        folder = hosts.chief_first(lambda: RunFolder(out))
        make = hosts.is_chief()
        secret = hosts.chief_first(lambda: folder.seed(recipe.seed, make=make))
        task = tasks.make(recipe, dataset, secret, Path(out), progress)
        if task.origin is not None:
            task.origin["changes"] += own_weights.remarks(recipe.weights, account)
        if prepared.budget.class_counts is not None:
            task = _balanced(task, dataset)
        result = train(
            dataclasses.replace(task.problem, account=account),
            algorithm(prepared, task.problem.size()),
            dataclasses.replace(
                runtime(recipe),
                workers=_workers(recipe, task.problem.source()),
                progress=progress,
                measure_share=0.0 if fast else Runtime.measure_share,
            ),
            out=out,
            seed=recipe.seed,
            evaluate=Classification(
                task.predict,
                task.test,
                dataset.classes,
                augment=task.augment_test,
                views=recipe.test_views,
                multi_label=recipe.multi_label,
            ),
            evaluate_every=recipe.evaluate_every,
            on_metrics=on_metrics,
            on_estimate=on_estimate,
            description={**_description(placed, links), "weights": task.origin},
        )
        if on_training is not None:
            source = task.problem.source()
            given = source, dataset.classes
            of = Classification(task.predict, *given, multi_label=recipe.multi_label)
            on_training(of(result.average))
        return result


def require_resumable(
    prepared: Prepared, links: Mapping[str, Any] | None = None
) -> None:
    """Refuse a folder that does not hold this run, before anything is computed.

    `links` are those of `run`.
    """
    recipe, out = prepared.recipe, Path(str(prepared.recipe.out))

    def check() -> None:
        if not out.exists() or (out.is_dir() and not any(out.iterdir())):
            return
        folder = RunFolder(out)
        if folder.config.exists():
            folder.seed(recipe.seed)
            examples = tasks.size(recipe, prepared.dataset)
            made = algorithm(prepared, examples)
            settings = made.as_json(made.public_size(examples))
            settings |= _description(prepared, links)
            fingerprint.require_settings(folder, as_json(settings))

    hosts.chief_first(check)


def _description(prepared: Prepared, links: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return what config.json says of a run, beside the origin of its weights."""
    recipe, dataset = prepared.recipe, prepared.dataset
    prepares = None
    if not recipe.features_from:
        prepares = tasks.preprocessing(recipe, dataset).to_json()
    return {
        "recipe": {"name": prepared.name, **recipe.to_json()},
        "model": recipe.model,
        "architecture": {
            "name": recipe.model,
            "image_shape": list(tasks.seen_shape(recipe, dataset)),
            "options": tasks.model_options(recipe),
        },
        "preprocessing": prepares,
        "dataset": dataset.name,
        "reading": dataset.record,
        "chosen_from": None if recipe.declared_examples else dataset.chosen_from,
        "classes": list(dataset.classes),
        "multi_label": recipe.multi_label,
        "optimizer": {
            "name": recipe.optimizer,
            "learning_rate": recipe.learning_rate,
            **recipe.optimizer_options,
        },
        "automatic": dict(prepared.reasons),
        **(links or {}),
    }


def _balanced(task: tasks.Task, dataset: data.Dataset) -> tasks.Task:
    labels = functools.partial(labels_of, dataset.train)
    return task._replace(
        problem=balanced(task.problem, labels, len(dataset.classes)),
        predict=lambda params, example: task.predict(params.model, example),
    )


def algorithm(prepared: Prepared, examples: int) -> DPSGD:
    """Return how a recipe trains on a number of examples."""
    recipe, budget = prepared.recipe, prepared.budget
    return DPSGD(
        budget.mechanism,
        optimizer(recipe, budget.mechanism.steps),
        delta=budget.delta,
        clip_norm=None if recipe.non_private else recipe.clip_norm,
        style=recipe.style,
        adaptive=AdaptiveClipping() if recipe.clipping == "adaptive" else None,
        augmentation_multiplicity=recipe.augmentation_multiplicity,
        ema_decay=recipe.ema_decay,
        declared_examples=recipe.public_size(examples),
        accountant=recipe.accountant,
        class_counts=budget.class_counts,
    )


def runtime(recipe: Recipe) -> Runtime:
    """Return the fields of a recipe that only change how fast it trains."""
    strategy, memory = recipe.strategy_and_memory
    return Runtime(
        physical_batch_size=recipe.physical_rows,
        strategy=strategy,
        memory=memory,
        devices=recipe.devices,
        shard_parameters=recipe.shard_parameters,
        checkpoint_seconds=recipe.checkpoint_seconds,
    )


def _workers(recipe: Recipe, source: data.Source) -> int:
    if not isinstance(source, data.StreamedSource):
        return 0
    return _processor.cores() if recipe.workers is None else recipe.workers
