"""Models that `tanager export` wrote, back from their folder or from the hub."""

import json
import os
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike

from tanager import _validate as validate
from tanager.data.augment import standardise
from tanager.models import hub, zoo
from tanager.models.pretrained import load_weights


class Pretrained(NamedTuple):
    """An exported model, with what is needed to use it.

    Called with one image, uint8 `[H, W, C]`, it returns float32 logits `[classes]`. The
    image is of the size the model was trained on, or of the size that training resized.

    Attributes:
        model: from one standardised image `[H, W, C]` to logits.
        classes: their names, in the order of the logits.
        mean: per channel, on the 0..1 scale, for `tanager.data.augment.standardise`.
        std: likewise.
        config: all of its config.json.
    """

    model: Any
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    config: dict[str, Any]

    def __call__(self, image: ArrayLike) -> Array:
        """Return the logits of one image, as the run's evaluation computed them.

        Raises:
            ValueError: an image of another size.
        """
        pixels = jnp.asarray(image)
        ours = self.config["tanager"]
        seen, before = tuple(ours["model"]["image_shape"]), ours.get("resized_from")
        if pixels.shape not in (seen, tuple(before or seen)):
            validate.refuse(
                "image shape",
                pixels.shape,
                f"must be {seen}",
                "crop or resize it as the training images were; or call .model",
            )
        pixels = standardise(pixels, self.mean, self.std)
        if pixels.shape != seen:
            pixels = jax.image.resize(pixels, seen, "cubic")
        return self.model(pixels)


def load_pretrained(source: str | os.PathLike[str]) -> Pretrained:
    """Load a model that `tanager export` wrote, in either of its formats.

    Args:
        source: the folder, or a repository on the hub, ``hf:OWNER/NAME[@REVISION]``.

    Raises:
        ValueError: there is no exported model, or one of its author's own code; or a
            file is damaged.
        OSError: a file on the hub is out of reach.
    """
    config = _config(source)
    ours = config["tanager"]
    architecture = ours["model"]
    if architecture is None:
        _refuse(
            source,
            "holds a model of its author's own code",
            "make that model and load with tanager.models.weights.load(model, file)",
        )
    try:
        template = eqx.filter_eval_shape(
            zoo.create,
            architecture["name"],
            classes=len(ours["classes"]),
            image_shape=tuple(architecture["image_shape"]),
            key=jax.random.key(0),
            **architecture["options"],
        )
        classes, mean, std = (tuple(ours[key]) for key in ("classes", "mean", "std"))
    except (KeyError, TypeError) as error:
        _refuse(source, f"has a damaged config.json ({error!r})", "export it again")
    model = load_weights(template, source).model
    return Pretrained(model, classes, mean, std, config)


def _config(source: str | os.PathLike[str]) -> dict[str, Any]:
    if hub.is_hub_name(source):
        path = hub.download(str(source), "config.json")
    else:
        path = Path(source).expanduser() / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        _ = config["tanager"]["model"]
    except (OSError, ValueError, KeyError, TypeError):
        _refuse(
            source,
            "has no config.json of `tanager export`",
            "for weights of others create the model and use load_weights",
        )
    return config


def _refuse(source: str | os.PathLike[str], rule: str, remedy: str) -> NoReturn:
    validate.refuse("source", os.fspath(source), rule, remedy)
