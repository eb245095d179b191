"""The report of an audit: one HTML page, made of its audit.json."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tanager import _validate as validate
from tanager._files import write_text
from tanager._reading import reading
from tanager._record import Each, Maybe, read_record
from tanager.privacy.mechanism import Mechanism
from tanager.privacy.shown import lower, upper
from tanager.report import audit_figures
from tanager.report.figures import embed
from tanager.report.guarantee import number
from tanager.report.render import render


_Fields = Mapping[str, Any]
_FOUND = {
    "recipe": str,
    "method": str,
    "violated": bool,
    "claimed_epsilon": Maybe(float),
    "delta": float,
    "epsilon_lower_bound": Maybe(float),
    "trade_off_bound": Maybe(float),
    "confidence": float,
    "models": int,
    "auc": float,
    "advantage": float,
    "highest_advantage": float,
    "mechanism": {"sample_rate": float, "noise_multiplier": float, "steps": int},
    "setting": Maybe(Each(object)),
    "errors": Maybe(Each(int)),
    "guesses": Maybe(Each(int)),
    "canaries": Maybe(int),
    "knows_sample": Maybe(bool),
    "tried": Maybe([Each(object)]),
}
_CAPTIONS = {
    "epsilon": "The claimed ε by δ, and what was proven at the δ of the claim.",
    "roc": "The attack, and the limit that the claim sets for any attack.",
    "scores": "Scores of the attack. The further apart, the more is given away.",
}
_TRIED = ("canary", "learning_rate", "clip_norm", "steps", "models", "total_variation")


def sentence(found: _Fields) -> str:
    """Say in plain words what an audit found.

    Args:
        found: content of audit.json.
    """
    bound, claimed = found["epsilon_lower_bound"], found["claimed_epsilon"]
    attacker = {
        "white-box": "An attacker who sees every update",
        "membership": "An attacker who trains "
        f"{found['models']:,} models, half of them with one more example,",
        "one-run": "A stranger who has the trained model alone",
    }[found["method"]]
    confidence = f"with confidence {found['confidence']:g}"
    if bound == 0:
        shown = f"{attacker} proves nothing about ε, {confidence}."
    else:
        shown = (
            f"{attacker} proves, {confidence}, that ε is at least {lower(bound)}: "
            f"{100 * bound / claimed:.0f} % of the claimed {upper(claimed)}."
        )
    other = found["trade_off_bound"]
    if other not in (bound, 0):
        shown += " If only the amount of noise can differ from the claim, ε is at least"
        shown += f" {lower(other)}."
    return shown


def write_report(folder: Path) -> Path:
    """Write report.html and its figures of a finished audit.

    Args:
        folder: with audit.json.

    Returns:
        Path of the page, which is replaced whole.

    Raises:
        ValueError: there is no audit.json, or it is damaged.
    """
    folder = Path(folder)
    path = folder / "audit.json"
    if not path.exists():
        validate.refuse(
            "audit", str(folder), "has no audit.json", "let the audit end first"
        )
    found = read_record(path, _FOUND)
    with reading(path, "is not what an audit leaves"):
        content = render(
            "audit.html",
            kind="tanager audit report",
            subject=f"{found['recipe']}: {found['method']}",
            found=found,
            sentence=sentence(found),
            tiles={
                "claimed ε": upper(found["claimed_epsilon"]),
                "ε at least": lower(found["epsilon_lower_bound"]),
                "confidence": f"{100 * found['confidence']:g} %",
                "AUC of the attack": f"{found['auc']:.3f}",
                "advantage": f"{found['advantage']:.3f}",
            },
            figures=_figures(folder, found),
            numbers=_numbers(found),
            tried_names=_TRIED,
        )
    report = folder / "report.html"
    write_text(report, content)
    return report


def _figures(folder: Path, found: _Fields) -> list[tuple[str, str]]:
    mechanism = Mechanism(**found["mechanism"])
    shown = []
    for name, caption in _CAPTIONS.items():
        for ending in ("png", "svg"):
            audit_figures.plot(name, found, mechanism, folder / f"{name}.{ending}")
        svg = (folder / f"{name}.svg").read_text(encoding="utf-8")
        shown.append((embed(svg, caption), caption))
    return shown


def _numbers(found: _Fields) -> dict[str, Any]:
    mechanism = found["mechanism"]
    claimed = upper(found["claimed_epsilon"])
    shown = {
        "claimed ε": f"{claimed} at δ = {number(found['delta'])}",
        "bound by the trade-off curve": lower(found["trade_off_bound"]),
        "bound for any mechanism": None
        if found["method"] == "white-box"
        else lower(found["epsilon_lower_bound"]),
        "highest bound that this many models can prove": _short(
            found.get("highest_provable")
        ),
        "highest advantage that the claim allows": f"{found['highest_advantage']:.3f}",
        "models": found["models"],
        "canaries": found["canaries"],
        "sample rate": _short(mechanism["sample_rate"]),
        "noise multiplier": _short(mechanism["noise_multiplier"]),
        "largest noise multiplier that is not refuted": _short(
            found.get("noise_multiplier_not_refuted")
        ),
        "steps": mechanism["steps"],
        "steps that were run": found.get("audited_steps"),
        "adjacency": mechanism.get("adjacency"),
    }
    for name, count in (found["errors"] or found["guesses"] or {}).items():
        shown[name.replace("_", " ")] = count
    for name, value in (found["setting"] or {}).items():
        shown[name.replace("_", " ") + ", chosen"] = value
    return {name: value for name, value in shown.items() if value is not None}


def _short(value: float | None) -> str | None:
    return None if value is None else f"{value:.4g}"
