"""Load models that `tanager export` wrote, from a folder or from the Hub."""

import os
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike

from tanager import _validate as validate
from tanager._reading import read_json, reading, refuse_file
from tanager._record import Each, Maybe, check_record
from tanager.data.preprocessing import Preprocessing
from tanager.models import hub, zoo
from tanager.models.foreign.preprocessing import of_fields
from tanager.models.pretrained import load_weights


_ARCHITECTURE = {"name": str, "image_shape": [int], "options": Each(object)}
_DESCRIBED = {"architecture": _ARCHITECTURE, "classes": [str]}
_OURS = {
    "preprocessing": {
        "mean": [float],
        "std": [float],
        "size": Maybe([int]),
        "interpolation": Maybe(str),
        "crop": Maybe(float),
        "squash": Maybe(bool),
    }
}
_FIELDS = tuple(_OURS["preprocessing"])
_LARGEST_SIDE = 1 << 14


class Pretrained(NamedTuple):
    """An exported model with its preprocessing.

    Called with one image, uint8 `[H, W, C]` of any size, it returns float32 logits
    `[classes]`. A model that was trained on features of another program is called with
    the features of one image, `[d]`.

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

        Raises:
            ValueError: not one uint8 image, or one with other channels; or features of
                another number.
        """
        if self.preprocessing is None:
            return self.model(jnp.asarray(image, jnp.float32))
        return self.model(self.preprocessing(jnp.asarray(image)))


def load_pretrained(source: str | os.PathLike[str]) -> Pretrained:
    """Load a model that `tanager export` wrote, in either of its formats.

    Args:
        source: the folder, or a repository on the Hub, ``hf:OWNER/NAME[@REVISION]``.

    Raises:
        ValueError: there is no exported model, its architecture is not one of
            tanager's, or a file is damaged.
        OSError: a file on the Hub cannot be downloaded.
    """
    if hub.is_hub_name(source):
        path = hub.download(str(source), "config.json")
    else:
        path = Path(source).expanduser() / "config.json"
    remedy = "for weights of others create the model and use load_weights"
    if not path.is_file():
        rule = "has no config.json of `tanager export`"
        validate.refuse("source", os.fspath(source), rule, remedy)
    config = read_json(path, remedy, "source")
    with reading(path, "is not a config.json of `tanager export`", remedy, "source"):
        ours = config["tanager"]
        architecture = ours["model"]
    if architecture is None:
        rule = "holds a model that is not one of tanager's"
        remedy = "create that model and use tanager.models.weights.load(model, file)"
        validate.refuse("source", os.fspath(source), rule, remedy)
    template = template_of(path, architecture, ours.get("classes"), "source")
    on_features = len(architecture["image_shape"]) == 1
    if not on_features:
        check_record(path, ours, _OURS, "export it again", "source")
    model = load_weights(template, source).model
    if on_features:
        return Pretrained(model, tuple(ours["classes"]), None, config)
    with reading(path, "cannot be followed", "export it again", "source"):
        described = {key: ours["preprocessing"].get(key) for key in _FIELDS}
        described["size"] = described["size"] or architecture["image_shape"][:2]
        preprocessing = of_fields(
            {key: value for key, value in described.items() if value is not None}
        )
    if len(preprocessing.mean) != architecture["image_shape"][-1]:
        rule = f"has mean {preprocessing.mean}, not one number for each channel"
        refuse_file(path, rule, "export it again", "source")
    return Pretrained(model, tuple(ours["classes"]), preprocessing, config)


def template_of(
    file: Path, architecture: Any, classes: Any, argument: str = "path"
) -> Any:
    """Return the shapes of a named model, as a JSON file describes it.

    Raises:
        UnreadableFile: no model has that name; the message calls the file `argument`.
    """
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
