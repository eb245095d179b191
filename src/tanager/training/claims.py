"""Check that a finished run's result is what its configuration and ledger cost."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from safetensors import safe_open

from tanager import _validate as validate
from tanager._reading import reading
from tanager._record import Maybe, check_record, read_record
from tanager.privacy import accountant
from tanager.privacy.ledger import Ledger
from tanager.privacy.mechanism import Mechanism


_SETTINGS = ("clip_norm", "delta", "examples", "batch_size")
_TOLERANCE = 1e-3  # of ε, for another version of the accountant
_CONFIG = {
    "mechanism": {
        "sample_rate": float,
        "noise_multiplier": float,
        "steps": int,
        "adjacency": str,
    },
    "clip_norm": Maybe(float),
    "delta": float,
    "examples": int,
    "batch_size": float,
}
_REMEDY = "repeat the command that began the run, which writes it again"


def require_agreement(
    run: Path, config: Mapping[str, Any], result: Mapping[str, Any], model: Path
) -> None:
    """Refuse a run whose result.json differs from its other files.

    Args:
        run: folder of a finished run, or of a private search.
        config: what its config.json holds.
        result: what its result.json holds.
        model: the file of its weights; the claim in it must be the one of result.json.

    Raises:
        ValueError: two files differ, or the ledger is missing or another run's.
    """
    if result.get("search"):
        shape = {"epsilon": float, "delta": float}
        study = read_record(run / "study.json", shape, _REMEDY)
        expected = {name: study[name] for name in shape}
        _compare(run, "study.json", expected, result)
    else:
        _compare(run, "config.json and ledger.jsonl", _cost(run, config), result)
    with reading(model, "holds no tensors", _REMEDY):
        with safe_open(model, "numpy") as file:
            claimed = (file.metadata() or {}).get("tanager")
        claims = {} if claimed is None else {**json.loads(claimed)}
    _compare(run, model.name, claims, result)


def _cost(run: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what result.json must hold."""
    path = run / "ledger.jsonl"
    if not path.is_file():
        _differ(run, "has no ledger.jsonl")
    check_record(run / "config.json", config, _CONFIG, _REMEDY)
    with reading(run / "config.json", "holds no mechanism", _REMEDY):
        mechanism = Mechanism(**config["mechanism"])
    ledger = Ledger.read(path)
    ledger.require(mechanism, mechanism.steps)
    steps = max(mechanism.steps, ledger.steps())
    return {name: config[name] for name in _SETTINGS} | {
        "sample_rate": mechanism.sample_rate,
        "noise_multiplier": mechanism.noise_multiplier,
        "adjacency": str(mechanism.adjacency),
        "steps": steps,
        "epsilon": accountant.epsilon(mechanism, config["delta"], steps=steps),
    }


def _compare(
    run: Path, file: str, expected: Mapping[str, Any], result: Mapping[str, Any]
) -> None:
    for name, value in expected.items():
        if not _same(name, value, result.get(name)):
            _differ(
                run,
                f"claims {name} = {result.get(name)!r} in result.json, but its {file} "
                f"give {value!r}",
            )


def _same(name: str, one: Any, other: Any) -> bool:
    if name == "epsilon":
        # JSON has no infinity: null stands for it.
        one, other = (math.inf if each is None else each for each in (one, other))
        return math.isclose(one, other, rel_tol=_TOLERANCE)
    return one == other


def _differ(run: Path, what: str) -> NoReturn:
    validate.refuse(
        "run",
        str(run),
        what,
        "repeat the command that began it, which writes result.json again",
    )
