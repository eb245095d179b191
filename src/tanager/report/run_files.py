"""The public files of a finished run, read and checked before anything is made of them.

A page, a model card or an export takes them as they are read here.
"""

import datetime
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tanager import _validate as validate
from tanager._reading import read_json_lines, reading
from tanager._record import Each, Maybe, check_record, read_record
from tanager.measures import HEADLINES
from tanager.privacy.mechanism import Mechanism


_NUMBER = Maybe(float)
_ORIGIN = {"weights": str, "sha256": str, "changes": [str]}
_PREDICTION = {"accuracy": float, "low": float, "high": float, "confidence": float}
_READING = {"layout": str, "conversion": str, "size": str, "not_read": Each(int)}
_CONFIG = {
    "began": Maybe(str),
    "classes": Maybe([str]),
    "multi_label": Maybe(bool),
    "architecture": Maybe({"name": str, "image_shape": [int], "options": Each(object)}),
    "preprocessing": Maybe(
        {"mean": [float], "std": [float], "read_shape": Maybe([int])}
    ),
    "reading": Maybe(_READING),
    "parameters": Maybe(int),
    "physical_batch_size": Maybe(int),
    "weights": Maybe(_ORIGIN),
    "recipe": Maybe(Each(object)),
    "delta": _NUMBER,
    "automatic": Maybe(Each(str)),
    "noisy_counts": Maybe({"counts": [float], "weights": [float]}),
    "private_search": Maybe(bool),
    "study": Maybe(
        {"path": str, "trial": Maybe(int), "prediction": Maybe(_PREDICTION)}
    ),
}
_ACCOUNT = {"epsilon": _NUMBER, "delta": float, "adjacency": str, "accountant": str}
_CLASS = {"class": str, "examples": int, "accuracy": _NUMBER, "accuracy_ema": _NUMBER}
_INTERVAL = {"value": _NUMBER, "low": _NUMBER, "high": _NUMBER}
_MEASURES = {
    "examples": int,
    **dict.fromkeys(("accuracy", "balanced_accuracy", "macro_f1", "auroc"), _INTERVAL),
    "top_5_accuracy": Maybe(_INTERVAL),
    "majority_share": float,
    "majority_class": str,
    "confusion_matrix": Maybe([[int]]),
    "per_class": Maybe([{"class": str, "accuracy": _INTERVAL, "auroc": _NUMBER}]),
}
_BOTH = {"auroc": _INTERVAL, "average_precision": _INTERVAL}
_LABEL = {"class": str, "examples": int, "sensitivity": _INTERVAL}
_LABEL |= {"specificity": _INTERVAL, **_BOTH}
_OF_LABELS = {"examples": int, **_BOTH, "per_class": Maybe([_LABEL])}
"""Measures of a model of any number of labels."""
_SEARCH = {
    "mean": float,
    "shape": _NUMBER,
    "noisy_accuracy": float,
    "score_noise": float,
    "held_out_examples": int,
    "values": Maybe(Each(object)),
}
_RISK = {"tpr_at_0_1_percent": float, "tpr_at_1_percent": float, "advantage": float}
_RISK |= {"mu": _NUMBER, "regret": float}
_SCORES = {f"test_{name}{k}": _NUMBER for name in HEADLINES for k in ("", "_ema")}
_RESULT = {
    "private": bool,
    "private_search": Maybe(bool),
    "epsilon": _NUMBER,
    "epsilon_rdp": _NUMBER,
    "epsilon_of_person": Maybe(Each(_NUMBER)),
    "delta": float,
    "adjacency": str,
    "accountant": str,
    "sample_rate": float,
    "noise_multiplier": float,
    "class_counts_noise": _NUMBER,
    "clip_norm": _NUMBER,
    "clip_gamma": _NUMBER,
    "adaptive_clipping": Maybe({"quantile": float}),
    "steps": int,
    "examples": int,
    "unit": Maybe(str),
    "examples_per_group": Maybe(int),
    "batch_size": float,
    "unreadable": Maybe(str),
    **_SCORES,
    "test_accuracy_vote_ema": _NUMBER,
    "per_class": Maybe([_CLASS]),
    "measures": Maybe({"parameters": {}, "average": {}}),
    "date": Maybe(str),
    "versions": Maybe(Each(str)),
    "seconds": _NUMBER,
    "examples_per_second": _NUMBER,
    "eta": _NUMBER,
    "eta_step": _NUMBER,
    "total_noise": _NUMBER,
    "risk": Maybe(_RISK),
    "search": Maybe(_SEARCH),
    "account": Maybe(_ACCOUNT),
}
_LINE = {**_SCORES, "epsilon": _NUMBER}
_REMEDY = "restore it from a copy of the run's folder"


def read_config(run: Path) -> dict[str, Any]:
    """Return config.json of a run, or refuse it if it is damaged."""
    return read_record(run / "config.json", _CONFIG, _REMEDY)


def check_description(description: Mapping[str, Any]) -> None:
    """Refuse a description for config.json that no page could show."""
    remedy = "give it another name, or the kind that the report shows"
    check_record("config.json", {**description}, _CONFIG, remedy, "description")


def read_result(run: Path) -> dict[str, Any]:
    """Return result.json of a finished run; refuse it if it claims what cannot be."""
    file = run / "result.json"
    result = read_record(file, _RESULT, _REMEDY)
    for name, each in (result["measures"] or {}).items():
        shape = _MEASURES if "majority_share" in each else _OF_LABELS
        check_record(file, {name: each}, {name: shape}, _REMEDY)
    with reading(file, "claims what cannot be", _REMEDY):
        Mechanism(
            result["sample_rate"],
            result["noise_multiplier"],
            result["steps"],
            result["adjacency"],
        )
        validate.probability(delta=result["delta"])
        validate.one_of(("pld", "rdp"), accountant=result["accountant"])
        validate.one_of(("example", "person"), unit=result["unit"] or "example")
        if result["private"]:
            validate.positive(noise_multiplier=result["noise_multiplier"])
            validate.not_negative(epsilon=result["epsilon"])
            validate.clipping_norm(result["clip_norm"])
        if result["date"] is not None:
            datetime.date.fromisoformat(result["date"])
        _check_classes(result)
    return result


def _check_classes(result: Mapping[str, Any]) -> None:
    """Refuse measures that are not of the classes in `per_class`."""
    measured = (result["measures"] or {}).get("average") or {}
    count = len(result["per_class"] or ())
    for name in ("confusion_matrix", "per_class"):
        rows = measured.get(name)
        widths = map(len, rows or ()) if name == "confusion_matrix" else ()
        if rows is not None and {len(rows), *widths} != {count}:
            rule = f"must have a row for each of {count} classes"
            validate.refuse(name, f"{len(rows)} rows", rule)


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl of a run; none where there is no file."""
    file = run / "metrics.jsonl"
    lines = read_json_lines(file, ("step",))
    for line in lines:
        check_record(file, line, _LINE, f"delete the line of step {line['step']}")
    return lines
