"""The report of a search: one HTML page with the scaling law, from its result.json.

It says plainly that simulations protect nobody.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tanager._reading import read_json, reading
from tanager._record import Each, Maybe, check_record, read_record
from tanager.report import search_figures
from tanager.report.figures import embed
from tanager.report.render import require, write_page


_Fields = Mapping[str, Any]
_PREDICTION = {
    "reference_batch_size": int,
    "accuracy": float,
    "low": float,
    "high": float,
    "confidence": float,
    "doubts": [str],
}
_TRIAL = {
    "number": int,
    "values": Each(object),
    "state": str,
    "steps": int,
    "accuracy": float,
}
_BEST = {"trial": int, "values": Each(object), "accuracy": float, "batch_size": int}
_RESULT = {
    "recipe": str,
    "target": {"epsilon": float, "delta": float, "steps": int},
    "best": _BEST,
    "prediction": Maybe(_PREDICTION),
    "law": Maybe({"runs": [object]}),
    "bands": [object],
    "trials": [_TRIAL],
    "cost": {"trials_share": float, "winner_share": float, "seconds": float},
    "privacy": {"simulations_epsilon": Each(Maybe(float)), "held_out_examples": int},
}
_CAPTION = "Accuracy against batch size at constant σ/B, steps and learning rate."
_OBTAINED = {"run": str, "batch_size": int, "accuracy": float, "on": str}


def write_report(study: Path) -> Path:
    """Write report.html, scaling.png and scaling.svg of a finished study.

    obtained.json, which a run that was started from the study leaves there, may be
    missing. It returns the path of the page.
    """
    study = Path(study)
    path = require(study, "study", "result.json", "let the search end first")
    result = read_result(study)
    predicted = result["prediction"] or {"reference_batch_size": None}
    obtained = [
        each
        for each in read_obtained(study)
        if each["batch_size"] == predicted["reference_batch_size"]
    ]
    with reading(path, "is not what a search leaves"):
        values = [name for each in result["trials"] for name in each["values"]]
        return write_page(
            study / "report.html",
            "search.html",
            kind="tanager search report",
            subject=result["recipe"],
            result=result,
            prediction=result["prediction"],
            obtained=obtained,
            law=_draw_law(study, result, obtained),
            law_caption=_CAPTION,
            law_runs=len(result["law"]["runs"]) if result["law"] else 0,
            names=list(dict.fromkeys(values)),
        )


def read_result(study: Path) -> dict[str, Any]:
    """Return result.json of a finished study, or refuse it if it is damaged."""
    return read_record(study / "result.json", _RESULT)


def read_obtained(study: Path) -> list[dict[str, Any]]:
    """Return what runs obtained that were started from a study; nothing without any."""
    path = study / "obtained.json"
    if not path.exists():
        return []
    obtained = read_json(path, kind=list)
    check_record(path, obtained, [_OBTAINED])
    return obtained


def _draw_law(study: Path, result: _Fields, obtained: Sequence[_Fields]) -> str:
    prediction = result["prediction"]
    if prediction is None:
        return ""
    size = prediction["reference_batch_size"]
    svg = study / "scaling.svg"
    search_figures.plot_law(
        result["law"],
        prediction,
        result["bands"],
        svg,
        study / "scaling.png",
        title=f"{result['recipe']}: {result['target']['steps']:,} steps",
        obtained=[(size, each["accuracy"]) for each in obtained],
    )
    return embed(svg.read_text(encoding="utf-8"), _CAPTION)
