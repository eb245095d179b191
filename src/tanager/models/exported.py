"""Load the model of a run, or one that `tanager export` wrote, from folder or Hub."""

import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, ArrayLike

from tanager import _validate as validate
from tanager._cache import expanded
from tanager._reading import read_json, reading, refuse_file
from tanager._record import Each, Maybe, check_record
from tanager.data.preprocessing import Preprocessing
from tanager.models import hub, zoo
from tanager.models.foreign.preprocessing import of_fields
from tanager.models.pretrained import load_weights
from tanager.models.tensors import file_in


_ARCHITECTURE = {"name": str, "image_shape": [int], "options": Each(object)}
_DESCRIBED = {"architecture": _ARCHITECTURE, "classes": [str]}
_PREPROCESSING = {
    "mean": [float],
    "std": [float],
    "size": Maybe([int]),
    "interpolation": Maybe(str),
    "crop": Maybe(float),
    "squash": Maybe(bool),
    "read_shape": Maybe([int]),
    "view": Maybe([int]),
    "view_by": Maybe(str),
}
_AGAIN = "export it again"
_LARGEST_SIDE = 1 << 14


RUN_WEIGHTS = {"average": "model-ema.safetensors", "last": "model.safetensors"}
"""Which weights a run has, and the file that holds them."""


class Pretrained(NamedTuple):
    """A model of a run or an export, with its preprocessing.

    Called with one image, uint8 `[H, W, C]` of any size, it returns float32 logits
    `[classes]`. A model that was trained on features of another program is called with
    the features of one image, `[d]`. `tanager.load` adds files, batches and
    probabilities.

    Attributes:
        model: from one preprocessed image `[H, W, C]`, or features `[d]`, to logits.
        classes: their names, in the order of the logits.
        preprocessing: from an image to what the model takes; None for features.
        config: all of its config.json.
    """

    model: Any
    classes: tuple[str, ...]
    preprocessing: Preprocessing | None
    config: dict[str, Any]

    def __call__(self, image: ArrayLike) -> Array:
        """Return the logits of one image, as the run's evaluation computed them.

        Inside `jax.jit` the image must be of the size that training read.

        Raises:
            ValueError: not one uint8 image; or features of another number.
        """
        if self.preprocessing is None:
            return self.model(jnp.asarray(image, jnp.float32))
        if not isinstance(image, Tracer):
            image = self.preprocessing.read(image)
        return self.model(self.preprocessing(jnp.asarray(image)))


def load_pretrained(
    source: str | os.PathLike[str], *, weights: str = "average"
) -> Pretrained:
    """Load the model of a finished run, or one that `tanager export` wrote.

    Args:
        source: the folder of a run or of an export in either of its formats, or a
            repository on the Hub, ``hf:OWNER/NAME[@REVISION]``.
        weights: of a run: the ``"average"`` of the parameters, or the ``"last"`` ones.
            An export has one of them.

    Raises:
        ValueError: there is no such model, the run is not finished, its architecture is
            not one of tanager's, or a file is damaged.
        OSError: a file on the Hub cannot be downloaded.
    """
    path, config, ours = describe(source)
    if ours["model"] is None:
        rule = "holds a model that is not one of tanager's"
        remedy = "give its code: tanager.load(source, code=(params, predict)), or "
        remedy += "--code MODULE:FUNCTION"
        validate.refuse("source", os.fspath(source), rule, remedy)
    architecture = ours["model"]
    template = template_of(path, architecture, ours.get("classes"), "source")
    on_features = len(architecture["image_shape"]) == 1
    if not on_features:
        check_record(path, ours, {"preprocessing": _PREPROCESSING}, _AGAIN, "source")
    model = load_weights(template, weights_of(source, config, weights)).model
    classes = tuple(ours["classes"])
    if on_features:
        return Pretrained(model, classes, None, config)
    preprocessing = preprocessing_in(path, ours["preprocessing"], architecture)
    return Pretrained(model, classes, preprocessing, config)


def describe(
    source: str | os.PathLike[str],
) -> tuple[Path, dict[str, Any], dict[str, Any]]:
    """Return the config.json of a run or an export: its path, all of it, the model's.

    The last has ``model`` (None if it is not one of tanager's), ``classes``,
    ``preprocessing``, ``precision`` and ``multi_label``.
    """
    if hub.is_hub_name(source):
        hub.parse(str(source), argument="source")
        path = hub.download(str(source), "config.json")
    else:
        path = expanded(source) / "config.json"
    remedy = "for weights of others create the model and use load_weights"
    if not path.parent.exists():
        rule, remedy = "does not exist", "give the folder of a run, or hf:OWNER/NAME"
        validate.refuse("source", os.fspath(source), rule, remedy)
    if not path.is_file():
        rule = "has no config.json of a run or of `tanager export`"
        runs = sorted(each.parent for each in path.parent.glob("*/config.json"))
        if runs:
            remedy = f"name one of the folders in it, such as {runs[-1]}"
        validate.refuse("source", os.fspath(source), rule, remedy)
    config = read_json(path, remedy, "source")
    if config.get("private_search") and "tanager" not in config:
        rule = "is one of the runs of a private search, which have no guarantee alone"
        remedy = "name the folder of the search, which holds the best of them"
        validate.refuse("source", os.fspath(source), rule, remedy)
    ours = config.get("tanager")
    if ours is None and "mechanism" in config:  # a run
        names = ("classes", "preprocessing", "multi_label")
        ours = {name: config.get(name) for name in names}
        ours["model"] = config.get("architecture")
        ours["precision"] = (config.get("recipe") or {}).get("precision")
    if not isinstance(ours, dict) or "model" not in ours:
        rule = "is not a config.json of a run or of `tanager export`"
        refuse_file(path, rule, remedy, "source")
    return path, config, ours


def weights_of(
    source: str | os.PathLike[str], config: Mapping[str, Any], weights: str
) -> Path:
    """Return the file with the weights of a run or an export that `config` is of."""
    validate.one_of(RUN_WEIGHTS, weights=weights)
    if "tanager" in config:
        if config["tanager"].get("format") == "onnx":
            remedy = "load it with onnxruntime, or export the run as tanager, too"
            validate.refuse("source", os.fspath(source), "holds ONNX", remedy)
        if weights == "last" and config["tanager"].get("weights") == "average":
            rule = "is not in this export, which holds the average"
            remedy = "export the run again with weights='last' (--weights last)"
            validate.refuse("weights", weights, rule, remedy)
        if hub.is_hub_name(source):
            return hub.download_weights(str(source))
        return file_in(expanded(source))
    file = expanded(source) / RUN_WEIGHTS[weights]
    if not file.is_file():
        out = shlex.quote(str(Path(source)))
        remedy = f"repeat the command that began it, with --out {out}"
        validate.refuse("source", os.fspath(source), "is not finished", remedy)
    return file


def preprocessing_in(
    path: Path, fields: Mapping[str, Any], architecture: Mapping[str, Any] | None
) -> Preprocessing:
    """Return what a config.json says of preprocessing; refuse what cannot be."""
    with reading(path, "cannot be followed", _AGAIN, "source"):
        described = {key: fields.get(key) for key in _PREPROCESSING}
        if architecture is not None and not described["size"]:
            described["size"] = architecture["image_shape"][:2]
        preprocessing = of_fields(
            {key: value for key, value in described.items() if value is not None}
        )
    if architecture is not None:
        channels = architecture["image_shape"][-1]
        if len(preprocessing.mean) != channels:
            rule = f"has mean {preprocessing.mean}, not one number for each channel"
            refuse_file(path, rule, _AGAIN, "source")
    return preprocessing


def template_of(
    file: Path, architecture: Any, classes: Any, argument: str = "path"
) -> Any:
    """Return the shapes of a named model, as a JSON file describes it."""
    described = {"architecture": architecture, "classes": classes}
    check_record(file, described, _DESCRIBED, argument=argument)
    shape = tuple(architecture["image_shape"])
    if not all(1 <= size <= _LARGEST_SIDE for size in shape):
        rule = f"has image_shape {shape}, which must be from 1 to {_LARGEST_SIDE}"
        refuse_file(file, rule, argument=argument)
    with reading(file, "does not describe a model", argument=argument):
        return eqx.filter_eval_shape(
            zoo.create,
            architecture["name"],
            classes=len(classes),
            image_shape=shape,
            key=jax.random.key(0),
            **architecture["options"],
        )
