"""A finished run as a model to hand on: weights, description, model card."""

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import equinox as eqx
import jax

from tanager import _validate as validate
from tanager import models
from tanager._files import json_text, sync_folder, write_text
from tanager._version import __version__
from tanager.models import weights as files
from tanager.models.pretrained import table_of
from tanager.models.published import timm_architecture
from tanager.models.tensors import read_tensors
from tanager.models.vit import VisionTransformer
from tanager.report.card import model_card
from tanager.training.claims import require_agreement


WEIGHTS = {"average": "model-ema.safetensors", "last": "model.safetensors"}
"""Which of a run's weights are exported, and the run's file that holds them."""

FORMATS = ("tanager", "timm")

_GUARANTEE = (
    *("private", "epsilon", "delta", "adjacency", "accountant"),
    *("sample_rate", "noise_multiplier", "clip_norm", "steps"),
)
_OF_A_SEARCH = ("mean", "shape")


def export(
    run: str | os.PathLike[str],
    to: str | os.PathLike[str],
    *,
    weights: str = "average",
    format: str = "tanager",
    licence: str | None = None,
) -> Path:
    """Write a finished run's model into a folder that can be handed on.

    The folder holds ``model.safetensors``, ``config.json`` (architecture, classes,
    preprocessing, guarantee) and ``README.md``, a model card. They are made of the
    run's public files alone: nothing of its ``private/``, no seed, no path.

    Args:
        run: folder of a finished run.
        to: the folder to make; it appears whole or not at all.
        weights: the ``"average"`` of the parameters, or the ``"last"`` ones.
        format: ``"tanager"``, or ``"timm"``: the same weights under the names and in
            the layouts of timm, whose ``create_model("local-dir:FOLDER")`` takes them;
            `models.load_pretrained` loads both.
        licence: an identifier of the Hugging Face Hub, such as ``apache-2.0``; without
            one the model card says that it is unknown.

    Returns:
        The path of the folder.

    Raises:
        ValueError: the run is not finished or is one of a private search's, its result
            differs from its ledger or configuration, its weights do not fit its
            description, the architecture cannot be written in this format, or `to` is
            in use.
    """
    validate.one_of(WEIGHTS, weights=weights)
    validate.one_of(FORMATS, format=format)
    if licence is not None and (not licence.strip() or not licence.isprintable()):
        validate.refuse("licence", licence, "must be an identifier", "or leave it out")
    run, to = Path(run).expanduser(), Path(to).expanduser()
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        validate.refuse(
            "to", str(to), "is in use", "name a folder that is not there, or empty"
        )
    config = _read(run, "config.json")
    if config.get("private_search"):
        validate.refuse(
            "run",
            str(run),
            "is one of the runs of a private search, which have no guarantee alone",
            "export the folder of the search, which holds the best of them",
        )
    result = _read(run, "result.json")
    source = run / WEIGHTS[weights]
    require_agreement(run, config, result, source)
    model, timm_name = _model(config, source, format)
    card = model_card(
        config,
        result,
        weights=weights,
        format=format,
        licence=licence,
        timm_name=timm_name,
    )
    described = _description(config, result, model, weights, format, timm_name)
    with _folder(to) as folder:
        models.save_weights(model, folder / "model.safetensors", format=format)
        write_text(folder / "config.json", json_text(described, indent=2) + "\n")
        write_text(folder / "README.md", card)
    return to


def _read(run: Path, name: str) -> Mapping[str, Any]:
    path = run / name
    if not path.is_file():
        unfinished = (run / "config.json").is_file()
        validate.refuse(
            "run",
            str(run),
            "is not finished" if unfinished else "is not the folder of a run",
            "repeat the command that began it" if unfinished else f"it has no {name}",
        )
    return json.loads(path.read_text(encoding="utf-8"))


def _model(
    config: Mapping[str, Any], source: Path, format: str
) -> tuple[Any, str | None]:
    """Return what is to be written, and the name of the architecture in timm."""
    architecture = config.get("architecture")
    if architecture is None:
        if format != "tanager":
            validate.refuse(
                "format",
                format,
                "needs a named architecture, but the run's is its author's own code",
                "export it as tanager",
            )
        return read_tensors(source), None
    template = eqx.filter_eval_shape(
        models.create,
        architecture["name"],
        classes=len(config["classes"]),
        image_shape=tuple(architecture["image_shape"]),
        key=jax.random.key(0),
        **architecture["options"],
    )
    if format not in models.formats(template):
        validate.refuse(
            "format",
            format,
            f"has no {architecture['name']}",
            "export it as tanager",
        )
    name = None
    if format == "timm":
        name = timm_architecture(architecture["name"])
        if name is None:
            validate.refuse(
                "format",
                format,
                f"has no model that is named {architecture['name']} here",
                "export it as tanager; models.save_weights writes its tensors as timm",
            )
    return files.load(template, source), name


def _description(
    config: Mapping[str, Any],
    result: Mapping[str, Any],
    model: Any,
    weights: str,
    format: str,
    timm_name: str | None,
) -> dict[str, Any]:
    scale = config.get("preprocessing") or {}
    ours = {
        "version": __version__,
        "format": format,
        "model": config.get("architecture"),
        "classes": config.get("classes"),
        "mean": scale.get("mean"),
        "std": scale.get("std"),
        "resized_from": config.get("resized_from"),
        "weights": weights,
        "guarantee": {name: result[name] for name in _GUARANTEE},
    }
    if search := result.get("search"):
        ours["guarantee"]["search"] = {name: search[name] for name in _OF_A_SEARCH}
    if timm_name is None:
        return {"tanager": ours}
    return _timm_description(config, model, timm_name) | {"tanager": ours}


def _timm_description(
    config: Mapping[str, Any], model: Any, timm_name: str
) -> dict[str, Any]:
    """Return what timm builds the model from, and replaces its ends by."""
    height, width, channels = config["architecture"]["image_shape"]
    one_size = isinstance(model, VisionTransformer)
    table = table_of(model, "timm")
    kernels = (
        table[name].names[0]
        for name, leaf in files.named_tensors(model).items()
        if name.endswith("weight") and leaf.ndim == 4
    )
    return {
        "architecture": timm_name,
        "num_classes": len(config["classes"]),
        "label_names": list(config["classes"]),
        "model_args": {
            **({"img_size": [height, width]} if one_size else {}),
            "in_chans": channels,
        },
        "pretrained_cfg": {
            "input_size": [channels, height, width],
            "fixed_input_size": one_size,
            "interpolation": "bicubic",
            "crop_pct": 1.0,
            "num_classes": len(config["classes"]),
            "first_conv": next(kernels).removesuffix(".weight"),
            "classifier": table["head.weight"].names[0].removesuffix(".weight"),
            **config["preprocessing"],
        },
    }


@contextlib.contextmanager
def _folder(to: Path) -> Iterator[Path]:
    """Give a folder to write in, and rename it when it is whole."""
    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        parts = Path(tempfile.mkdtemp(dir=to.parent, prefix=f".{to.name}."))
    except OSError as error:
        validate.refuse("to", str(to), "cannot be written", str(error))
    try:
        yield parts
        parts.chmod(0o755)
        os.replace(parts, to)
    except BaseException:
        shutil.rmtree(parts, ignore_errors=True)
        raise
    sync_folder(to.parent)
