"""`tanager predict`: the classes of new images, as CSV or JSON lines."""

import csv
import dataclasses
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from tyro.conf import Positional

from tanager import _validate as validate
from tanager._text import clean
from tanager.commands import flags, models_in_use
from tanager.commands.tables import print_json


if TYPE_CHECKING:
    from tanager.use.model import Model


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Predict the class of each image: CSV on standard output, one line an image.

    Its columns are file, class, probability, and the probability of each class. If
    an image can have several labels, class lists those of 0.5 or more, separated by |.
    A file that cannot be read is named on standard error; the others are predicted, and
    the exit status is 1.
    """

    model: Positional[Annotated[str, tyro.conf.arg(metavar="MODEL")]]
    """Folder of a finished run or of an exported model, or hf:OWNER/NAME."""

    files: Positional[Annotated[tuple[str, ...], tyro.conf.arg(metavar="FILE|DIR")]]
    """Images, and folders of images; for a model of features, one npz or npy file."""

    json: bool = False
    """Print one JSON object a line: file, class, probability, probabilities."""

    top: int | None = None
    """Number of classes to print, the most probable first. Default: all."""

    batch_size: int = 64
    """Number of images computed at once."""

    weights: Annotated[str, tyro.conf.arg(metavar="{average,last}")] = "average"
    """For a run: the average of the parameters, or those after the last update."""

    code: str | None = None
    """MODULE:FUNCTION of your own model: returns (params, predict[, preprocessing])."""


def run(arguments: Sequence[str]) -> int:
    options = flags.read(Arguments, "predict", arguments)
    if options.top is not None:
        validate.whole(top=options.top, at_least=1)
    validate.whole(batch_size=options.batch_size, at_least=1)
    if not options.files:
        raise ValueError("no files are given: name images, or folders of them")

    # JAX is imported from here on: the command line was fine.
    model = models_in_use.load(options.model, options.weights, options.code)
    if options.top is not None and model.multi_label and not options.json:
        rule = "is for a model of one class an image, or for --json"
        validate.refuse("top", options.top, rule, "leave it out")
    names, examples, others = _inputs(model, options.files, options.code)
    if others:
        counts = ", ".join(f"{ending} {count}" for ending, count in others.items())
        total = sum(others.values())
        are = "files are not images" if total > 1 else "file is not an image"
        _say(f"{total} {are}: {clean(counts)}")
    failed, out = 0, csv.writer(sys.stdout, lineterminator="\n")
    found = model.each(examples, options.batch_size)
    with models_in_use.progress(len(examples) > options.batch_size) as report:
        for done, (name, each) in enumerate(zip(names, found, strict=True), 1):
            report(done, len(names))
            if isinstance(each, ValueError):
                failed += 1
                _say(f"error: {each}")
                continue
            row = model.described(each, options.top)
            if options.json:
                print_json({"file": name, **row}, indent=None)
                continue
            if done - failed == 1:  # the first tells how many classes there are
                columns = _columns(model, options.top)
                out.writerow(["file", "class", "probability", *columns])
            out.writerow([name, *_cells(row, options.top)])
    if failed:
        _say(f"{failed} of {len(names)} files were not predicted")
    return int(failed > 0)


def _inputs(
    model: "Model", paths: Sequence[str], code: str | None
) -> tuple[Sequence[str], Any, Mapping[str, int]]:
    from tanager.use.inputs import list_images, read_feature_rows

    if model.preprocessing is not None:
        files, others = list_images(paths)
        return files, files, others
    if len(paths) > 1 or not paths[0].endswith((".npz", ".npy")):
        rule = "must be one .npz or .npy file: this model takes features, not images"
        remedy = "compute them with the program that made the training features"
        remedy = remedy if code is None else models_in_use.FOR_IMAGES
        validate.refuse("files", " ".join(paths), rule, remedy)
    rows = read_feature_rows(paths[0])
    return [f"{paths[0]}:{number}" for number in range(len(rows))], rows, {}


def _cells(found: Mapping[str, Any], top: int | None) -> list[str]:
    """Return the cells of a line: all classes in their order, or `top` by rank."""
    pairs = [*found["probabilities"].items()]
    more = [_shown(value) for _, value in pairs]
    if top is not None:
        more = [text for k, v in pairs[1:] for text in (k, _shown(v))]
    named = found["class"]
    named = named if isinstance(named, str) else "|".join(named)
    return [named, _shown(found["probability"]), *more]


def _columns(model: "Model", top: int | None) -> list[str]:
    if top is None:
        return list(model.classes)
    ranks = range(2, min(top, len(model.classes)) + 1)
    return [f"{name}_{rank}" for rank in ranks for name in ("class", "probability")]


def _shown(probability: float) -> str:
    return f"{probability:.6g}"


def _say(text: str) -> None:
    print(f"tanager: {clean(text)}", file=sys.stderr)
