"""The report of an audit: one HTML page that stands alone, made of its audit.json."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tanager import _validate as validate
from tanager._files import write_text
from tanager._reading import reading
from tanager._record import Each, Maybe, read_record
from tanager.privacy.mechanism import Mechanism
from tanager.privacy.shown import lower, upper
from tanager.report import audit_figures, page
from tanager.report.guarantee import number, text
from tanager.report.page import escape


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
    "tried": Maybe([Each(object)]),
}


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
            f"{100 * bound / claimed:.0f} % of the {upper(claimed)} that is claimed."
        )
    other = found["trade_off_bound"]
    if other not in (bound, 0):
        shown += " If all but the amount of noise is as claimed, ε is at least "
        shown += f"{lower(other)}."
    return shown


def write_report(folder: Path) -> Path:
    """Write report.html and its pictures of a finished audit.

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
        parts = [
            "<header><p class=kind>tanager audit report</p>"
            f"<h1>{escape(found['recipe'])}: {escape(found['method'])}</h1></header>",
            _verdict(found),
            _tiles(found),
            _figures(folder, found),
            _claim(found),
            _tried(found),
            _limits(found),
        ]
    title = f"tanager audit report: {found['recipe']}"
    report = folder / "report.html"
    content = page.standalone(title, "\n".join(part for part in parts if part))
    write_text(report, content)
    return report


def _verdict(found: _Fields) -> str:
    said = f"<p class=claim>{escape(sentence(found))}</p>"
    if not found["violated"]:
        return (
            "<section class=guarantee><h2>Nothing here contradicts the claim</h2>"
            f"{said}</section>"
        )
    return (
        f"<section class=danger role=alert><h2>VIOLATED</h2>{said}"
        "<p>A bound is above the claim: training gives away more than it says; or this "
        "is one of the few audits that err, as its confidence says. Repeat it with "
        "another seed.</p></section>"
    )


def _tiles(found: _Fields) -> str:
    shown = {
        "claimed ε": upper(found["claimed_epsilon"]),
        "ε at least": lower(found["epsilon_lower_bound"]),
        "confidence": f"{100 * found['confidence']:g} %",
        "AUC of the attack": f"{found['auc']:.3f}",
        "advantage": f"{found['advantage']:.3f}",
    }
    tiles = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>"
        for name, value in shown.items()
    )
    return f"<dl class=tiles>{tiles}</dl>"


def _figures(folder: Path, found: _Fields) -> str:
    captions = {
        "epsilon": "What is claimed, by δ, and what was proven at the δ of the claim.",
        "roc": "The attack, and the limit that what is claimed sets to any.",
        "scores": "Scores of the attack; the more apart, the more is given away.",
    }
    mechanism = Mechanism(**found["mechanism"])
    shown = []
    for name, caption in captions.items():
        for ending in ("png", "svg"):
            audit_figures.plot(name, found, mechanism, folder / f"{name}.{ending}")
        svg = (folder / f"{name}.svg").read_text(encoding="utf-8")
        svg = svg[svg.index("<svg") :]
        shown.append(
            f"<figure class=white>{svg}<figcaption>{caption}</figcaption></figure>"
        )
    return "<section><h2>Pictures</h2>" + "".join(shown) + "</section>"


def _claim(found: _Fields) -> str:
    mechanism = found["mechanism"]
    claimed = upper(found["claimed_epsilon"])
    shown = {
        "claimed ε": f"{claimed} at δ = {number(found['delta'])}",
        "bound by the trade-off curve": lower(found["trade_off_bound"]),
        "bound for any mechanism": None
        if found["method"] == "white-box"
        else lower(found["epsilon_lower_bound"]),
        "highest bound of as many models": _short(found.get("highest_provable")),
        "highest advantage that the claim allows": f"{found['highest_advantage']:.3f}",
        "models": f"{found['models']:,}",
        "canaries": found.get("canaries"),
        "sample rate": _short(mechanism["sample_rate"]),
        "noise multiplier": _short(mechanism["noise_multiplier"]),
        "noise multiplier that is not refuted": _short(
            found.get("noise_multiplier_not_refuted")
        ),
        "steps": mechanism["steps"],
        "steps that were run": found.get("audited_steps"),
        "adjacency": mechanism.get("adjacency"),
    }
    for name, wrong in (found.get("errors") or found.get("guesses") or {}).items():
        shown[name.replace("_", " ")] = f"{wrong:,}"
    for name, value in (found.get("setting") or {}).items():
        shown[name.replace("_", " ") + ", chosen"] = value
    rows = "".join(
        f"<tr><th scope=row>{escape(name)}</th><td>{escape(text(value))}</td></tr>"
        for name, value in shown.items()
        if value is not None
    )
    return f"<section><h2>Figures</h2><table><tbody>{rows}</tbody></table></section>"


def _short(value: float | None) -> str | None:
    return None if value is None else f"{value:.4g}"


def _tried(found: _Fields) -> str:
    if not found.get("tried"):
        return ""
    names = ("canary", "learning_rate", "clip_norm", "steps", "models")
    heads = "".join(f"<th>{escape(n.replace('_', ' '))}</th>" for n in names)
    rows = "".join(
        "<tr>"
        + "".join(f"<td>{escape(text(each[name]))}</td>" for name in names)
        + f"<td>{each['total_variation']:.3f}</td></tr>"
        for each in found["tried"][:20]
    )
    return (
        "<section><h2>Settings tried</h2><p>The best twenty of "
        f"{len(found['tried'])}. Their models decide on the setting, and are not among "
        "those that the bound is made of.</p>"
        f"<table><thead><tr>{heads}<th>total variation</th></tr></thead>"
        f"<tbody>{rows}</tbody></table></section>"
    )


def _limits(found: _Fields) -> str:
    taken = (
        " That batches are Poisson samples was taken as claimed."
        if found.get("knows_sample")
        else ""
    )
    return (
        "<section><h2>What this does not say</h2><p>A bound below the claim means that "
        "this attack found nothing; it is no proof of privacy. The guarantee is the "
        f"claimed ε, and another attack may come nearer to it.{taken}</p></section>"
    )
