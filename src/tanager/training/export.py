"""Export a finished run as a model: weights, description, model card."""

import dataclasses
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from tanager import _validate as validate
from tanager import models
from tanager._cache import expanded
from tanager._files import as_json, json_text, new_folder, write_text
from tanager._reading import reading
from tanager._record import Maybe, check_record, read_record
from tanager._version import __version__
from tanager.models import weights as files
from tanager.models.dino import DINO
from tanager.models.exported import RUN_WEIGHTS, template_of
from tanager.models.pretrained import table_of
from tanager.models.published import timm_architecture
from tanager.models.tensors import note_in, read_tensors
from tanager.models.vit import VisionTransformer
from tanager.privacy.ledger import Ledger
from tanager.privacy.mechanism import Mechanism
from tanager.privacy.risk import Risk
from tanager.report.card import model_card
from tanager.report.guarantee import unit
from tanager.report.run_files import read_config, read_result
from tanager.training import onnx
from tanager.training.result import PERSON_SIZES, cost, note
from tanager.training.run_folder import is_exported


FORMATS = ("tanager", "timm", "onnx")

_GUARANTEE = (
    *("private", "epsilon", "delta", "adjacency", "accountant"),
    *("sample_rate", "noise_multiplier", "clip_norm", "clip_gamma", "steps"),
    *("adaptive_clipping", "class_counts_noise", "examples_per_group"),
)
_OF_A_SEARCH = ("mean", "shape")
_COMPUTED = ("epsilon", "epsilon_rdp", "eta", "eta_step", "total_noise")
_COMPUTED += tuple(field.name for field in dataclasses.fields(Risk))
_COMPUTED += tuple(map(str, PERSON_SIZES))
_NESTED = ("risk", "epsilon_of_person")
_TOLERANCE = 1e-3  # of them, for another version of the accountant
_MECHANISM = Mechanism.__annotations__ | {"adjacency": str}
_CONFIG = {
    "mechanism": _MECHANISM,
    "class_counts": Maybe(_MECHANISM),
    "clip_norm": Maybe(float),
    "clip_gamma": Maybe(float),
    "adaptive_clipping": Maybe({"quantile": float}),
    "delta": float,
    "examples": int,
    "batch_size": float,
}
_TEXT, _NUMBER, _BOOL = Maybe(str), Maybe(int), Maybe(bool)
_READ = {"groups": _TEXT, "classes": Maybe([str]), "labels_from_name": _BOOL}
_READ |= {"validation_examples": _NUMBER, "train_examples": _NUMBER}
_READ |= dict.fromkeys(("image_column", "label_column", "uncertain"), _TEXT)
DATA = {"split": _TEXT, "labels": _BOOL, **_READ}
"""What an export records of how images were read and split."""
_REPEAT = "repeat the command that began it, with the run's folder as --out"


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
            `models.load_pretrained` loads both. Or ``"onnx"``: ``model.onnx``, from
            preprocessed images float32[n, h, w, c] to logits, checked on onnxruntime to
            1e-4 (``pip install 'tanager-dp[onnx]'``).
        licence: an identifier of the Hugging Face Hub, such as ``apache-2.0``; without
            one the model card says that it is unknown.

    Returns:
        The path of the folder.

    Raises:
        ValueError: the run is not finished or is one of a private search's, one of its
            files is damaged, its result differs from its ledger or configuration, its
            weights do not fit its description, the architecture cannot be written in
            this format, a package of the format is missing, or `to` is in use.
    """
    validate.one_of(RUN_WEIGHTS, weights=weights)
    validate.one_of(FORMATS, format=format)
    if format == "onnx":
        onnx.packages()
    if licence is not None and (not licence.strip() or not licence.isprintable()):
        validate.refuse("licence", licence, "must be an identifier", "or leave it out")
    run, to = expanded(run), expanded(to)
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        remedy = "name a folder that is not there, or empty"
        validate.refuse("to", str(to), "is in use", remedy)
    _require(run, "config.json")
    config = read_config(run)
    if config.get("private_search"):
        _refuse(
            run,
            "is one of the runs of a private search, which have no guarantee alone",
            "export the folder of the search, which holds the best of them",
        )
    _require(run, "result.json")
    result = read_result(run)
    source = run / RUN_WEIGHTS[weights]
    _require_agreement(run, config, result)
    _require_claim(run, config, result, source)
    model = _model(config, source, format)
    described = _description(config, result, weights, format)
    if format == "timm":
        described = _timm_description(config, model) | described
    timm = described.get("architecture")
    card = model_card(
        config, result, weights=weights, format=format, licence=licence, timm_name=timm
    )
    with new_folder(to, "to", 0o755) as folder:
        if format == "onnx":
            shape = tuple(config["architecture"]["image_shape"])
            name = config["architecture"]["name"]
            onnx.write(model, shape, folder / "model.onnx", name)
        else:
            file, said = folder / "model.safetensors", None
            if format == "tanager":  # others say which library reads them
                said = {"tanager": json.dumps(note(result, config))}
            models.save_weights(model, file, format=format, metadata=said)
        write_text(folder / "config.json", json_text(described, indent=2) + "\n")
        write_text(folder / "README.md", card)
    return to


def check_claims(run: Path) -> None:
    """Refuse a finished run whose result.json differs from its ledger and settings.

    Raises:
        ValueError: likewise, the run is not finished, or one of its files is damaged.
    """
    for name in ("config.json", "result.json"):
        _require(run, name)
    _require_agreement(run, read_config(run), read_result(run))


def _require(run: Path, name: str) -> None:
    if (run / name).is_file():
        return
    if (run / "config.json").is_file():
        if is_exported(run):
            remedy = "give the folder of the run that it was exported from"
            _refuse(run, "is an exported model, not a run", remedy)
        _refuse(run, "is not finished", _REPEAT)
    _refuse(run, "is not the folder of a run", f"it has no {name}")


def _refuse(run: Path, rule: str, remedy: str = _REPEAT) -> NoReturn:
    validate.refuse("run", str(run), rule, remedy)


def _require_agreement(
    run: Path, config: Mapping[str, Any], result: Mapping[str, Any]
) -> None:
    """Refuse a run whose result.json differs from its ledger and settings."""
    if result.get("search"):
        shape = {"epsilon": float, "delta": float}
        study = read_record(run / "study.json", shape, _REPEAT)
        _compare(run, "study.json", {name: study[name] for name in shape}, result)
    else:
        file, expected = "config.json and ledger.jsonl", as_json(_cost(run, config))
        parts = [(expected.pop(name), result[name]) for name in _NESTED]
        _compare(run, file, expected, result)
        for computed, found in parts:
            if found is not None:  # a run of an older version has none
                _compare(run, file, computed, found)


def _require_claim(
    run: Path, config: Mapping[str, Any], result: Mapping[str, Any], model: Path
) -> None:
    """Refuse weights in whose file another guarantee is claimed than in result.json."""
    with reading(model, "holds no tensors", _REPEAT):
        claims = as_json(note_in(model))
    charge = claims.pop("charge", None)
    _compare(run, model.name, claims, result)
    if charge is not None:
        _compare(run, model.name, {"charge": charge}, config)


def _cost(run: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    if not (run / "ledger.jsonl").is_file():
        _refuse(run, "has no ledger.jsonl", "put the run's own back")
    check_record(run / "config.json", config, _CONFIG, _REPEAT)
    with reading(run / "config.json", "holds no mechanism", _REPEAT):
        mechanism = Mechanism(**config["mechanism"])
    return cost(Ledger.read(run / "ledger.jsonl"), mechanism, config)


def _compare(
    run: Path, file: str, expected: Mapping[str, Any], result: Mapping[str, Any]
) -> None:
    for name, value in expected.items():
        found = result.get(name)
        same = value == found
        if name in _COMPUTED and value is not None and found is not None:
            same = math.isclose(value, found, rel_tol=_TOLERANCE, abs_tol=1e-6)
        if not same:
            claim = f"claims {name} = {found!r} in result.json"
            _refuse(run, f"{claim}, but its {file} give {value!r}")


def _model(config: Mapping[str, Any], source: Path, format: str) -> Any:
    """Return what is to be written."""
    remedy = "export it as tanager"
    architecture = config.get("architecture")
    if architecture is None:
        if format != "tanager":
            rule = "needs a named architecture, but the run's is its author's own code"
            validate.refuse("format", format, rule, remedy)
        return read_tensors(source)
    seen = config.get("preprocessing") or {}
    view = seen.get("view")
    cut = seen.get("view_by") == "crop" and view != (seen.get("read_shape") or [])[:2]
    if format == "timm" and view and cut:
        rule = "has no crop_size, which keeps the middle of an image"
        validate.refuse("format", format, rule, remedy)
    file = source.parent / "config.json"
    template = template_of(file, architecture, config.get("classes"))
    if format not in (*models.formats(template), "onnx"):
        validate.refuse("format", format, f"has no {architecture['name']}", remedy)
    return files.load(template, source)


def _description(
    config: Mapping[str, Any], result: Mapping[str, Any], weights: str, format: str
) -> dict[str, Any]:
    ours = {
        "version": __version__,
        "format": format,
        "model": config.get("architecture"),
        "classes": config.get("classes"),
        "preprocessing": config.get("preprocessing"),
        "precision": (config.get("recipe") or {}).get("precision"),
        "multi_label": bool(config.get("multi_label")),
        "weights": weights,
        "data": _data(config),
        "guarantee": {name: result.get(name) for name in _GUARANTEE},
    }
    ours["guarantee"]["unit"] = unit(result)
    ours["guarantee"]["charge"] = note(result, config).get("charge")
    if format == "onnx":
        shape = config["architecture"]["image_shape"]
        ours["input"] = {"name": onnx.INPUT, "dtype": "float32", "shape": ["n", *shape]}
        ours["output"] = {"name": onnx.OUTPUT, "shape": ["n", len(config["classes"])]}
    if search := result.get("search"):
        ours["guarantee"]["search"] = {name: search[name] for name in _OF_A_SEARCH}
    return {"tanager": ours}


def _data(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return how labels and the test part of the data were found; no path."""
    recipe = config.get("recipe")
    if recipe is None:
        return None
    split = (config.get("reading") or {}).get("split")
    found = {name: recipe.get(name) for name in _READ}
    return {"split": split, "labels": recipe.get("labels") is not None, **found}


def _timm_description(config: Mapping[str, Any], model: Any) -> dict[str, Any]:
    """Return what timm builds the model from, and replaces its ends by."""
    height, width, channels = config["architecture"]["image_shape"]
    seen = config["preprocessing"]
    one_size = isinstance(model, VisionTransformer | DINO)
    table = table_of(model, "timm")
    kernels = (
        table[name].names[0]
        for name, leaf in files.named_tensors(model).items()
        if name.endswith("weight") and leaf.ndim == 4
    )
    return {
        "architecture": timm_architecture(config["architecture"]["name"]),
        "num_classes": len(config["classes"]),
        "label_names": list(config["classes"]),
        "model_args": {
            **({"img_size": [height, width]} if one_size else {}),
            "in_chans": channels,
        },
        "pretrained_cfg": {
            "input_size": [channels, height, width],
            "fixed_input_size": one_size,
            "interpolation": seen.get("interpolation", "bicubic"),
            "crop_pct": seen.get("crop", 1.0),
            "crop_mode": "squash" if seen.get("squash") else "center",
            "mean": seen["mean"],
            "std": seen["std"],
            "num_classes": len(config["classes"]),
            "first_conv": next(kernels).removesuffix(".weight"),
            "classifier": table["head.weight"].names[0].removesuffix(".weight"),
        },
    }
