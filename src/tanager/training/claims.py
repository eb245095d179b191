"""Check that a finished run's result is what its configuration and ledger cost."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from safetensors import safe_open

from tanager import _validate as validate
from tanager.privacy import accountant
from tanager.privacy.ledger import Ledger
from tanager.privacy.mechanism import Mechanism


_SETTINGS = ("clip_norm", "delta", "examples", "batch_size")
_TOLERANCE = 1e-3  # of ε, for another version of the accountant


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
        study = json.loads((run / "study.json").read_text(encoding="utf-8"))
        expected = {name: study[name] for name in ("epsilon", "delta")}
        _compare(run, "study.json", expected, result)
    else:
        _compare(run, "config.json and ledger.jsonl", _cost(run, config), result)
    with safe_open(model, "numpy") as file:
        claimed = (file.metadata() or {}).get("tanager")
    if claimed is not None:
        _compare(run, model.name, json.loads(claimed), result)


def _cost(run: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what result.json must hold."""
    path = run / "ledger.jsonl"
    if not path.is_file():
        _differ(run, "has no ledger.jsonl")
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
        if not _same(name, value, result[name]):
            _differ(
                run,
                f"claims {name} = {result[name]!r} in result.json, but its {file} "
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
