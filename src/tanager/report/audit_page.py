"""The report of an audit: one HTML page."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tanager._files import as_json
from tanager.privacy.mechanism import Mechanism
from tanager.privacy.shown import format_bound, format_epsilon
from tanager.privacy.trade_off import TradeOff
from tanager.report import audit_figures
from tanager.report.figures import embed
from tanager.report.render import write_page


_Fields = Mapping[str, Any]
_NOT_OF_EVERY_METHOD = (
    *("setting", "errors", "guesses", "canaries", "knows_sample", "tried"),
    *("highest_provable", "noise_multiplier_not_refuted", "audited_steps"),
)
_CAPTIONS = {
    "epsilon": "The claimed ε by δ, and what was proven at the δ of the claim.",
    "roc": "The attack, and the limit that the claim sets for any attack. The attack "
    "was measured on {measured}: by chance, its curve may cross the limit.",
    "scores": "Scores of the attack. The further apart, the more is given away.",
}
_TRIED = ("canary", "learning_rate", "clip_norm", "steps", "models", "total_variation")


def sentence(found: _Fields) -> str:
    """Say in plain words what an audit found, from the content of audit.json."""
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
        shown = f"{attacker} proves, {confidence}, that ε is at least "
        if bound in (None, math.inf):
            shown += "∞: no amount of noise explains what it saw."
        else:
            part = math.floor(100 * bound / claimed)
            shown += f"{format_bound(bound)}: {part} % of the claimed "
            shown += f"{format_epsilon(claimed)}."
    other = found["trade_off_bound"]
    if found["method"] == "white-box" and bound:
        shown += " This holds if only the amount of noise can differ from the claim."
    elif other not in (bound, 0):
        shown += " If only the amount of noise can differ from the claim, ε is at least"
        shown += f" {format_bound(other)}."
    return shown


def advantages(found: _Fields) -> str:
    """Return the measured advantage and its limits, in sentences."""
    attacked, _ = audit_figures.attacked(found, Mechanism(**found["mechanism"]))
    most = TradeOff(attacked, coarseness=4.0).advantage
    whose = "this mechanism" if not found.get("knows_sample") else "one step"
    return (
        f"AUC {found['auc']:.3f}, advantage {found['advantage']:.3f}. No attack on "
        f"{whose} has an advantage above {most:.3f} on average; the claimed ε alone "
        f"allows {found['highest_advantage']:.3f}. AUC and advantage were measured on "
        f"{_measured(found)}, and have no interval: by chance, they can exceed these."
    )


def _measured(found: _Fields) -> str:
    count = sum(map(len, found["scores"].values()))
    kind = "models" if found["method"] == "membership" else "canaries"
    return f"{count:,} {kind}"


def write_report(folder: Path, content: _Fields) -> Path:
    """Write report.html and its figures of an audit; return the page's path.

    `content` is that of audit.json.
    """
    found = dict.fromkeys(_NOT_OF_EVERY_METHOD) | as_json(content)
    return write_page(
        folder / "report.html",
        "audit.html",
        kind="tanager audit report",
        subject=f"{found['recipe']}: {found['method']}",
        found=found,
        sentence=sentence(found),
        advantages=advantages(found),
        figures=_figures(folder, found),
        counts=_counts(found),
        tried_names=_TRIED,
    )


def _figures(folder: Path, found: _Fields) -> list[tuple[str, str]]:
    mechanism = Mechanism(**found["mechanism"])
    shown: list[tuple[str, str]] = []
    for name, caption in _CAPTIONS.items():
        caption = caption.format(measured=_measured(found))
        svg = folder / f"{name}.svg"
        audit_figures.plot(name, found, mechanism, svg, svg.with_suffix(".png"))
        shown.append((embed(svg.read_text(encoding="utf-8"), caption), caption))
    return shown


def _counts(found: _Fields) -> dict[str, Any]:
    shown = dict(found["errors"] or found["guesses"] or {})
    shown |= {f"{name}, chosen": v for name, v in (found["setting"] or {}).items()}
    return {name.replace("_", " "): value for name, value in shown.items()}
