"""`tanager evaluate`: how good a model is on labelled images."""

import dataclasses
import functools
import os
import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, get_args

import tyro
from tyro.conf import Positional

from tanager import _validate as validate
from tanager._reading import UnreadableFile
from tanager._record import check_record
from tanager._text import clean
from tanager.commands import flags, models_in_use
from tanager.commands.evaluation_tables import NOTE, print_classes, print_labels
from tanager.commands.tables import print_json
from tanager.data.layout import Uncertain


if TYPE_CHECKING:
    import numpy as np

    from tanager.data import Dataset
    from tanager.data.streamed import Progress
    from tanager.recipes.recipe import Recipe
    from tanager.use.model import Model


SPLITS = ("test", "train", "all")
_OF_DATA = ("labels", "image_column", "label_column", "uncertain", "groups")
_SPLIT_BY = {
    "given": "the training data had one",
    "by name": "training split images by the names of their files",
    "by path": "training split images by their paths in its folder",
    "by person": "training split by person (groups)",
    "by number": "training split images by their number in a file",
}


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Measure a model on labelled images: accuracy, AUROC, intervals, confusion matrix.

    If an image can have several labels: AUROC and average precision of each label.

    Images are read as training read them. Without --data, a run is measured on its own
    test examples.
    """

    model: Positional[Annotated[str, tyro.conf.arg(metavar="MODEL")]]
    """Folder of a finished run or of an exported model, or hf:OWNER/NAME."""

    data: str | None = None
    """Labelled images, in any layout that `tanager train folder --data` reads."""

    labels: str | None = None
    """CSV file with the labels of --data, as `tanager train folder --labels` reads."""

    image_column: str | None = None
    """Its column with the images. Default: as in training."""

    label_column: str | None = None
    """Its column with the labels. Default: as in training."""

    groups: str | None = None
    """Which person an image is of: folder, or a column. Default: as in training."""

    uncertain: Annotated[
        str | None, tyro.conf.arg(metavar="{refuse,absent,present}")
    ] = None
    """With several labels: what -1 (uncertain) counts as. Default: as in training."""

    split: Annotated[str, tyro.conf.arg(metavar="{test,train,all}")] = "test"
    """Which images: those that training holds out (test), the others, or all."""

    to: Path | None = None
    """Also write an HTML page, such as evaluation.html."""

    json: flags.Json = False

    batch_size: int = 64
    """Number of images computed at once."""

    weights: Annotated[str, tyro.conf.arg(metavar="{average,last}")] = "average"
    """For a run: the average of the parameters, or those after the last update."""

    code: str | None = None
    """MODULE:FUNCTION of your own model: returns (params, predict[, preprocessing])."""

    def __post_init__(self):
        validate.one_of(SPLITS, split=self.split)
        validate.whole(batch_size=self.batch_size, at_least=1)
        if self.uncertain:
            validate.one_of(get_args(Uncertain), uncertain=self.uncertain)
        for name in _OF_DATA:
            if (given := getattr(self, name)) and self.data is None:
                validate.refuse(name, given, "needs data", "give the images' --data")
        if (to := self.to) is not None:
            if to.is_dir() or not to.parent.is_dir():
                rule = "must be a file in a folder that exists"
                validate.refuse("to", str(to), rule, "such as evaluation.html")
            if not os.access(to.parent, os.W_OK):
                rule, remedy = "is in a folder that cannot be written", "name another"
                validate.refuse("to", str(to), rule, remedy)


def run(arguments: Sequence[str]) -> int:
    options = flags.read(Arguments, "evaluate", arguments)

    # JAX is imported from here on: the command line was fine.
    from tanager.measures import CONFIDENCE, RESAMPLES
    from tanager.report.evaluation_page import write_evaluation
    from tanager.training.targets import TARGETS

    model = models_in_use.load(options.model, options.weights, options.code)
    if options.uncertain and not model.multi_label:
        rule = "is for a model of any number of labels"
        validate.refuse("uncertain", options.uncertain, rule, "leave it out")
    dataset = _labelled(model, options)
    logits, labels = _logits(model, dataset, options)
    target, drawn = TARGETS[model.multi_label], "within each class"
    found = target.measure(target.probabilities(logits), labels, model.classes)
    combined = dict.fromkeys(
        ("balanced_accuracy", "macro_f1"),
        "Clopper and Pearson of each class, combined; at least that of one share",
    )
    if model.multi_label:
        drawn, combined = "weights of all examples", {}
    recorded = model.config.get("recipe") or {}
    own = recorded.get("data")
    of = options.data or own or dataset.name
    same = options.data is None or Path(of).resolve() == Path(own or "").resolve()
    both = "training and test " if same else ""
    which = {"all": both, "test": "test ", "train": "training "}[options.split]
    which += "examples"
    if options.to is not None:
        write_evaluation(options.to, found, options.model, of, which)
    if options.json:
        return print_json(
            {
                "model": options.model,
                "data": of,
                "split": options.split,
                **found,
                "intervals": {
                    "confidence": CONFIDENCE,
                    "accuracy": "Wilson",
                    **combined,
                    "others": f"deviation of {RESAMPLES} bootstrap samples, {drawn}; "
                    "of AUROC, at least Newcombe's",
                },
                "note": NOTE,
            }
        )
    show = print_labels if model.multi_label else print_classes
    rest = len(dataset.train) if options.data and options.split == "test" else 0
    more = f"; --split all measures all {len(labels) + rest}" if rest else ""
    show(f"{options.model} on {len(labels)} {which} of {of}{more}", found)
    if options.to is not None:
        print(f"page: {clean(options.to)}")
    return 0


def _labelled(model: "Model", options: Arguments) -> "Dataset":
    """Return the data at a path, or else those that a run held out."""
    from tanager import data
    from tanager.recipes import runner

    path = options.data
    with models_in_use.reading(options.split) as report:
        if path is None:
            if (recipe := _recipe(model)) is None:
                remedy = "give --data DIR"
                validate.refuse("data", None, "is not known of this model", remedy)
            dataset = runner.load(recipe, report)
            trained = (model.config.get("reading") or {}).get("split")
            found = (dataset.record or {}).get("split")
            renumbered = _is_renumbered(model, recipe, dataset, options.split)
            if options.split != "all" and (trained not in (None, found) or renumbered):
                _refuse_changed(options)
            return dataset
        if model.preprocessing is None:
            for name in _OF_DATA:
                if (given := getattr(options, name)) is not None:
                    rule = "must be left out: this model takes features, not images"
                    validate.refuse(name, given, rule)
            if options.code is not None and Path(path).is_dir():
                rule = "holds images, and the model takes arrays as they are"
                validate.refuse("data", path, rule, models_in_use.FOR_IMAGES)
            return data.load("features", features_from=path)
        recorded = _recorded(model, options.model)
        dataset = _read(path, model, recorded, options, report)
        runner.refuse_columns(dataset, vars(options))
        if options.split != "all":
            _require_split(dataset, path, recorded, options)
            recipe = _recipe(model)
            if recipe is None or recipe.validation_examples or recipe.train_examples:
                return dataset  # parted otherwise than it is read here
            if _is_renumbered(model, recipe, dataset, options.split):
                _refuse_changed(options)
        return dataset


def _is_renumbered(
    model: "Model", recipe: "Recipe", dataset: "Dataset", split: str
) -> bool:
    """Return whether images came or went, where their numbers decide the split.

    Then other images are held out, or left out of training, than in training.
    """
    from tanager.recipes import tasks

    by_number = (dataset.record or {}).get("split") == "by number"
    by_number |= bool(recipe.validation_examples)
    by_number |= bool(recipe.train_examples) and split == "train"
    if not by_number or recipe.declared_examples:
        return False
    trained, found = model.config.get("examples"), tasks.size(recipe, dataset)
    if recipe.train_examples:
        trained, found = model.config.get("chosen_from"), dataset.chosen_from
    return trained not in (None, found)


def _refuse_changed(options: Arguments) -> NoReturn:
    rule = "is not known: the files were changed, and are split otherwise"
    remedy = "put them back as they were in training"
    validate.refuse("split", options.split, rule, remedy)


def _recipe(model: "Model") -> "Recipe | None":
    """Return the recipe of a run; None for a run without one, and for an export."""
    from tanager.recipes.recipe import Recipe

    fields = dict(model.config.get("recipe") or {})
    fields.pop("name", None)
    return Recipe.from_json(fields) if fields else None


def _recorded(model: "Model", source: str) -> dict[str, Any]:
    """Return how training read and split its images, as far as the model records it."""
    from tanager.training.export import DATA

    if recipe := _recipe(model):
        reading = model.config.get("reading")
        found = {**recipe.to_json(), "split": dict(reading or {}).get("split")}
    else:
        found = (model.config.get("tanager") or {}).get("data") or {}
        check_record(f"{source}/config.json", found, DATA, "export it again")
    return {name: value for name, value in found.items() if value is not None}


def _read(
    path: str,
    model: "Model",
    recorded: Mapping[str, Any],
    options: Arguments,
    report: "Progress",
) -> "Dataset":
    """Return all data at a path, read as training read its own."""
    from tanager import data
    from tanager.recipes.fields import LAYOUT_FIELDS

    given = {name: getattr(options, name) for name in _OF_DATA}
    given = {name: value for name, value in given.items() if value is not None}
    fields: dict[str, Any] = {"uncertain": "refuse", **recorded}
    fields["multi_label"] = model.multi_label
    if options.labels is not None:
        fields["labels_from_name"] = False
    elif recorded.get("labels"):  # its columns are those of that file
        fields |= {"image_column": None, "label_column": None}
    fields |= {"labels": None, **given}
    layout = {name: fields[name] for name in LAYOUT_FIELDS if name in fields}
    kind, groups = fields.get("dataset", "folder"), fields.get("groups")
    kind = "folder" if kind == "digits" else kind
    seen = model.preprocessing.shape_read if model.preprocessing else None
    load = functools.partial(
        data.load,
        kind,
        data.Layout(path, **layout, hold_out=options.split != "all"),
        classes=fields.get("classes"),
        image_size=seen if kind in data.RESIZED else None,
        stream=fields.get("stream"),
        progress=report,
    )
    if options.split != "all":
        try:
            return load(groups=groups)
        except ValueError as error:
            if options.groups is None and str(error).startswith("groups (="):
                more = "or give --split all, which needs no persons"
                raise ValueError(f"{error}; {more}") from error
            raise
    try:  # All images are measured, whoever they are of.
        return load()
    except UnreadableFile:
        if groups != "folder":
            raise
        return load(groups=groups)  # folders of persons are in the class folders


def _require_split(
    dataset: "Dataset", path: str, recorded: Mapping[str, Any], options: Arguments
) -> None:
    """Refuse a part of the data that may not be that part of the training's data."""
    remedy = "for images that training did not see, give --split all"
    for name in ("validation_examples", "train_examples"):
        if options.split == "train" and (left := recorded.get(name)):
            rule = f"is not known: training left out images by number ({name}={left})"
            validate.refuse("split", options.split, rule, remedy)
    found, trained = (dataset.record or {}).get("split"), recorded.get("split")
    same = found == trained
    if found in ("by number", "by path"):
        own = recorded.get("data")
        same &= own is not None and Path(own).resolve() == Path(path).resolve()
    if found == "by person":
        same &= options.groups in (None, recorded.get("groups"))
    if same or (found == "given" and trained not in _SPLIT_BY):
        return
    why = _SPLIT_BY.get(str(trained), "it is not on record how training split images")
    part = "a test part" if found == "given" else "no test part"
    rule = f"is not known: {path} has {part} of its own, and {why}"
    validate.refuse("split", options.split, rule, remedy)


def _logits(
    model: "Model", dataset: "Dataset", options: Arguments
) -> tuple["np.ndarray", "np.ndarray"]:
    """Return the logits of a split, and its labels, numbers of the model's classes."""
    import numpy as np

    from tanager.data import gather

    own = _numbers(model, dataset.classes)
    wanted = {"test": [dataset.test], "train": [dataset.train]}
    sources = wanted.get(options.split, [dataset.train, dataset.test])
    if dataset.test is dataset.train:
        del sources[1:]
    total, size = sum(map(len, sources)), options.batch_size
    logits, labels = [], []
    with models_in_use.progress(total > size) as report:
        for source in sources:
            for start in range(0, len(source), size):
                part = np.arange(start, min(start + size, len(source)))
                batch = gather(source, part)
                examples = batch["image" if "image" in batch else "features"]
                logits.append(model.logits(examples, size))
                labels.append(_of_model(model, own, batch["label"]))
                report(sum(map(len, labels)), total)
    return np.concatenate(logits), np.concatenate(labels)


def _numbers(model: "Model", names: Sequence[str]) -> Any:
    """Return the model's number of each class of the data, by name.

    Data without names of classes have numbers as names. They are taken by position if
    the model's classes have other names, and there are as many. Letters with accents
    may be encoded in two ways.
    """
    import numpy as np

    plain = {unicodedata.normalize("NFC", name): name for name in model.classes}
    names = [
        name
        if name in model.classes
        else plain.get(unicodedata.normalize("NFC", name), name)
        for name in names
    ]
    unnamed = list(names) == [str(k) for k in range(len(names))]
    strange = [name for name in names if name not in model.classes]
    alike = unnamed and len(strange) == len(names) == len(model.classes)
    if not model.classes or alike:
        return np.arange(len(names))
    if strange:
        rule = f"is not one of the model's: {', '.join(model.classes)}"
        validate.refuse("class", strange[0], rule, "rename it, or leave it out")
    return np.array([model.classes.index(name) for name in names])


def _of_model(model: "Model", own: "np.ndarray", labels: "np.ndarray") -> Any:
    """Return labels of the data as the model's; it may have some that the data lack."""
    if not model.multi_label:
        return own[labels]
    import numpy as np

    found = np.zeros((len(labels), len(model.classes)), np.int32)
    found[:, own] = labels
    return found
