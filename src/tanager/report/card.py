"""The model card of a run: the README.md of an exported model.

It has the form that the Hugging Face Hub reads: a YAML head for machines, Markdown for
people. It is made of the run's public files only and contains no path of this machine.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from tanager._text import clean
from tanager.measures import HEADLINES
from tanager.report import guarantee
from tanager.report.render import render


UNKNOWN_LICENCE = "unknown"

_Fields = Mapping[str, Any]

_OF_THIS_MACHINE = {"account", "data", "features_from", "labels", "out", "seed"}
_OWN = {"folder": "a folder of images", "features": "a file of features"}
"""Data of a person's own, whose names the card leaves out as it does all paths."""
_WEIGHTS = {
    "average": "the exponential moving average of the parameters",
    "last": "the parameters after the last update",
}


def model_card(
    config: _Fields,
    result: _Fields,
    *,
    weights: str,
    format: str,
    licence: str | None,
    timm_name: str | None = None,
) -> str:
    """Return the model card of a finished run.

    `weights` says which weights of the run were exported, ``"average"`` or ``"last"``.
    `licence` is an identifier such as ``apache-2.0``; None says it is unknown.
    `timm_name` is that of the architecture, where timm has it.
    """
    dataset = config.get("dataset") or "data"
    dataset = _OWN.get(dataset, dataset)
    name = f"{config.get('model') or 'a model'} on {dataset}"
    suffix, measured_by = "", "parameters"
    if weights == "average":
        suffix, measured_by = "_ema", "average"
    key = f"accuracy{suffix}"
    several = bool(config.get("multi_label"))
    scores = {
        name: value
        for name in HEADLINES
        if (value := result.get(f"test_{name}{suffix}")) is not None
    }
    classes = [] if several else result.get("per_class") or ()
    measures = (result.get("measures") or {}).get(measured_by)
    measured = [each for each in classes if each[key] is not None]
    of_classes = sorted(measured, key=lambda each: each[key])
    # Of classes that are all alike, none is the worst.
    unequal = of_classes and of_classes[0][key] < of_classes[-1][key]
    held_out = _held_out(config)
    architecture = config.get("architecture")
    image_shape = (architecture or {}).get("image_shape")
    return render(
        "card.md",
        head=_head(config, result, clean(name), dataset, licence, scores, format),
        name=name,
        dataset=dataset,
        config=config,
        result=result,
        guarantee=guarantee,
        weakness=guarantee.weakness(result),
        architecture=architecture,
        image_shape=image_shape,
        on_features=image_shape is not None and len(image_shape) == 1,
        format=format,
        timm_name=timm_name,
        search=result.get("search"),
        accuracy=scores.get("accuracy"),
        measured_on="the held-out training set" if held_out else "the test set",
        several=several,
        measures=measures,
        scores={HEADLINES[name]: value for name, value in scores.items()},
        classes=classes,
        key=key,
        worst=of_classes[0] if unequal else None,
        exported=_WEIGHTS[weights if config.get("ema_decay") != 0 else "last"],
        initial=_initial(config),
        recipe={
            f"recipe: {name}": "a path, left out" if _has_path(value) else value
            for name, value in (config.get("recipe") or {}).items()
            if name not in _OF_THIS_MACHINE
        },
        licence=licence,
        base=(config.get("weights") or {}).get("weights"),
    )


def _head(
    config: _Fields,
    result: _Fields,
    name: str,
    dataset: str,
    licence: str | None,
    scores: Mapping[str, float],
    format: str,
) -> dict[str, str]:
    from markupsafe import Markup

    private = ["differential-privacy", "dp-sgd"] if result["private"] else []
    fields: dict[str, Any] = {
        "license": clean(licence or UNKNOWN_LICENCE),
        "library_name": format,
        "pipeline_tag": "image-classification",
        "tags": ["image-classification", "tanager", *private],
    }
    base = (config.get("weights") or {}).get("weights", "")
    if base.startswith("hf:"):
        fields["base_model"] = clean(re.split("[@:]", base.removeprefix("hf:"))[0])
    if scores:
        kind = clean(config.get("dataset") or "data")
        data = {"type": kind, "name": clean(dataset)}
        data["split"] = "validation" if _held_out(config) else "test"
        fields["model-index"] = [
            {
                "name": name,
                "results": [
                    {
                        "task": {"type": "image-classification"},
                        "dataset": data,
                        "metrics": [{"type": k, "value": v} for k, v in scores.items()],
                    }
                ],
            }
        ]
    # JSON is YAML, and needs no quoting rules of its own.
    return {
        key: Markup(json.dumps(value, ensure_ascii=False))
        for key, value in fields.items()
    }


def _held_out(config: _Fields) -> bool:
    """Return whether scores are on images held out of those for training."""
    return bool((config.get("recipe") or {}).get("validation_examples"))


def _initial(config: _Fields) -> str | None:
    origin = config.get("weights")
    if not origin:
        zero = (config.get("recipe") or {}).get("head") == "zero"
        drawn = "drawn at random; head set to zero" if zero else "drawn at random"
        return drawn if config.get("architecture") else None
    text = f"{origin['weights']} (sha256 {origin['sha256']})"
    return "; ".join([text, *origin["changes"]])


def _has_path(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_has_path, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_has_path, value))
    is_text = isinstance(value, str) and not value.startswith(("hf:", "timm/"))
    return is_text and re.search(r"[/\\~]", value) is not None
