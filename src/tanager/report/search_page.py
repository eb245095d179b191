"""The report of a search: one HTML page that stands alone, with the scaling law.

It is made of the study's result.json. It says plainly that simulations protect nobody.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tanager import _validate as validate
from tanager._files import write_text
from tanager._reading import read_json_of, reading
from tanager._record import Each, Maybe, check_record, read_record
from tanager.privacy.shown import upper
from tanager.report import page, search_figures
from tanager.report.guarantee import number, percent, text
from tanager.report.page import escape


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
_RESULT = {
    "recipe": str,
    "target": {"epsilon": float, "delta": float, "steps": int},
    "best": {
        "trial": int,
        "values": Each(object),
        "accuracy": float,
        "batch_size": int,
    },
    "prediction": Maybe(_PREDICTION),
    "law": Maybe({"runs": [object]}),
    "bands": [object],
    "trials": [_TRIAL],
    "cost": {"trials_share": float, "winner_share": float, "seconds": float},
    "privacy": {
        "simulations_epsilon": Each(Maybe(float)),
        "held_out_examples": int,
    },
}
_OBTAINED = {"run": str, "batch_size": int, "accuracy": float, "on": str}


def write_report(study: Path) -> Path:
    """Write report.html, scaling.png and scaling.svg of a finished study.

    Args:
        study: its folder, with result.json; obtained.json, which a run that was started
            from the study leaves there, may be missing.

    Returns:
        Path of the page, which is replaced whole.

    Raises:
        ValueError: the study is not finished, or one of its files is damaged.
    """
    study = Path(study)
    path = study / "result.json"
    if not path.exists():
        validate.refuse(
            "study", str(study), "has no result.json", "let the search end first"
        )
    result = read_result(study)
    obtained = read_obtained(study)
    with reading(path, "is not what a search leaves"):
        parts = [
            "<header><p class=kind>tanager search report</p>"
            f"<h1>{escape(result['recipe'])}</h1></header>",
            _privacy(result),
            _prediction(study, result, obtained),
            _best(result),
            _trials(result),
            _cost(result),
        ]
    title = f"tanager search report: {result['recipe']}"
    report = study / "report.html"
    content = page.standalone(title, "\n".join(part for part in parts if part))
    write_text(report, content)
    return report


def read_result(study: Path) -> dict[str, Any]:
    """Return result.json of a finished study.

    Raises:
        UnreadableFile: it is damaged; the message names it.
    """
    return read_record(study / "result.json", _RESULT)


def read_obtained(study: Path) -> list[dict[str, Any]]:
    """Return what runs obtained that were started from a study; nothing without any.

    Raises:
        UnreadableFile: obtained.json is damaged; the message names it.
    """
    path = study / "obtained.json"
    if not path.exists():
        return []
    obtained = read_json_of(path, list)
    check_record(path, obtained, [_OBTAINED])
    return obtained


def _privacy(result: _Fields) -> str:
    target, spent = result["target"], result["privacy"]["simulations_epsilon"]
    rows = "".join(
        f"<tr><th scope=row>one simulation at batch size {escape(size)}</th>"
        f"<td>ε = {_large(epsilon)}</td></tr>"
        for size, epsilon in spent.items()
    )
    return (
        "<section class=danger role=note><h2>What this search protects</h2>"
        "<p class=claim>The simulations have <strong>no privacy guarantee</strong>, "
        "and what was chosen depends on them.</p>"
        "<p>Each keeps the noise of the target's update at a smaller batch, which "
        "costs almost all privacy:</p>"
        f"<table><tbody>{rows}<tr><th scope=row>the run it is for</th>"
        f"<td>ε = {upper(target['epsilon'])} at δ = {number(target['delta'])}</td></tr>"
        "</tbody></table>"
        "<p>The guarantee of the final run therefore holds only if the examples "
        "searched on are public, or if the choice is taken to tell nothing of them, "
        "which is common practice and not proven. "
        f"{result['privacy']['held_out_examples']:,} training "
        "examples were held out to compare trials; test examples were not read."
        "</p></section>"
    )


def _prediction(study: Path, result: _Fields, obtained: Sequence[_Fields]) -> str:
    prediction = result["prediction"]
    if prediction is None:
        return (
            "<section><h2>Prediction</h2><p>None: there was one simulation batch size, "
            "and a line needs two.</p></section>"
        )
    reached = [
        (each["batch_size"], each["accuracy"])
        for each in obtained
        if each["batch_size"] == prediction["reference_batch_size"]
    ]
    title = f"{result['recipe']}: {result['target']['steps']:,} steps"
    for ending in ("png", "svg"):
        search_figures.plot_law(
            result["law"],
            prediction,
            result["bands"],
            study / f"scaling.{ending}",
            title=title,
            obtained=reached,
        )
    svg = (study / "scaling.svg").read_text(encoding="utf-8")
    svg = svg[svg.index("<svg") :]
    doubts = "".join(f"<li>{escape(doubt)}</li>" for doubt in prediction["doubts"])
    caution = f"<p>Do not trust it:</p><ul>{doubts}</ul>" if doubts else ""
    runs = "".join(
        f"<tr><th scope=row>obtained by {escape(str(each['run']))}, "
        f"on its {escape(each['on'])}</th><td>{percent(each['accuracy'])}</td></tr>"
        for each in obtained
    )
    return (
        "<section><h2>Prediction</h2>"
        f"<p>At batch size {prediction['reference_batch_size']:,} one run is predicted "
        f"to reach <strong>{percent(prediction['accuracy'])}</strong>, between "
        f"{percent(prediction['low'])} and {percent(prediction['high'])} in "
        f"{100 * prediction['confidence']:g} of 100 such searches.</p>{caution}"
        f"<figure class=white>{svg}<figcaption>Accuracy against batch size at constant "
        "σ/B, steps and learning rate.</figcaption></figure>"
        f"<table><tbody>{runs}</tbody></table></section>"
    )


def _best(result: _Fields) -> str:
    best = result["best"]
    rows = "".join(
        f"<tr><th scope=row>{escape(name)}</th><td>{escape(text(value))}</td></tr>"
        for name, value in best["values"].items()
    )
    return (
        "<section><h2>The best choices</h2>"
        f"<p>{percent(best['accuracy'])} at batch size {best['batch_size']}, in trial "
        f"{best['trial']}.</p><table><tbody>{rows}</tbody></table></section>"
    )


def _trials(result: _Fields) -> str:
    names = list(dict.fromkeys(n for each in result["trials"] for n in each["values"]))
    heads = "".join(
        f"<th>{escape(name)}</th>" for name in ("trial", *names, "accuracy", "state")
    )
    rows = ""
    for each in sorted(result["trials"], key=lambda each: -each["accuracy"]):
        cells = [text(each["values"].get(name, "–")) for name in names]
        shown = [str(each["number"]), *cells, percent(each["accuracy"])]
        state = each["state"]
        if state != "complete":
            state += f" at step {each['steps']}"
        rows += (
            "<tr>"
            + "".join(f"<td>{escape(cell)}</td>" for cell in (*shown, state))
            + "</tr>"
        )
    return (
        "<section><h2>All trials</h2><p>Accuracy of the average of parameters on the "
        "held-out examples.</p>"
        f"<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></section>"
    )


def _cost(result: _Fields) -> str:
    cost = result["cost"]
    return (
        "<section><h2>Cost</h2>"
        f"<p>The trials took {100 * cost['trials_share']:.3g} % of the operations of "
        "the run they are for, and the "
        f"{len(result['law']['runs']) if result['law'] else 0} runs of the winner "
        f"{100 * cost['winner_share']:.3g} %, by shapes; "
        f"{cost['seconds'] / 60:.3g} minutes of all processes together.</p></section>"
    )


def _large(epsilon: float | None) -> str:
    if epsilon is None:
        return "infinite"
    shown = float(upper(epsilon))
    return f"{shown:,.0f}" if 1000 <= shown < 1e7 else f"{shown:.4g}"
