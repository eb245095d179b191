"""Figures of an audit: bounds below the claim, the ROC of the attack, its scores."""

import dataclasses
import math
import pathlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from tanager.privacy import accountant
from tanager.privacy.mechanism import Mechanism
from tanager.privacy.shown import format_bound
from tanager.privacy.trade_off import TradeOff
from tanager.report.figures import drawing


if TYPE_CHECKING:
    from matplotlib.axes import Axes


_CLAIM, _INSIDE, _OUTSIDE, _BOUND = "#7570b3", "#d62728", "#386cb0", "#1b9e77"
_SMALLEST = 1e-3
_POINTS = 17


def plot(
    name: str, found: Mapping[str, Any], mechanism: Mechanism, *paths: pathlib.Path
) -> None:
    """Draw "epsilon", "roc" or "scores" of an audit as PNG or SVG files.

    `found` is the content of audit.json, `mechanism` what is claimed.
    """
    draw = {"epsilon": _epsilon, "roc": _roc, "scores": _scores}[name]
    with drawing(*paths) as (_, (axes,)):
        draw(axes, found, mechanism)
        axes.legend()


def _epsilon(axes: "Axes", found: Mapping[str, Any], mechanism: Mechanism) -> None:
    delta, claimed = found["delta"], found["claimed_epsilon"]
    deltas = np.geomspace(min(1e-8, delta / 100), min(0.5, 100 * delta), _POINTS)
    deltas = sorted([*deltas.tolist(), delta])
    claims = [accountant.epsilon(mechanism, each, coarseness=4.0) for each in deltas]
    axes.plot(deltas, claims, color=_CLAIM, linewidth=2, label="claimed ε")
    axes.plot([delta], [claimed], "o", color=_CLAIM)
    confidence = f"{100 * found['confidence']:g} %"
    shown = [("epsilon_lower_bound", "^", f"proven, with {confidence}")]
    if found["trade_off_bound"] != found["epsilon_lower_bound"]:
        shown.append(("trade_off_bound", "D", "proven, if only the noise can differ"))
    for key, marker, label in shown:
        bound = found[key]
        axes.plot([delta, delta], [0, bound], color=_BOUND, linewidth=1)
        label = f"{label}: {format_bound(bound)}"
        axes.plot([delta], [bound], marker, color=_BOUND, markersize=8, label=label)
    axes.set(xscale="log", ylim=(0, None), xlabel="δ", ylabel="ε")


def _roc(axes: "Axes", found: Mapping[str, Any], mechanism: Mechanism) -> None:
    inside, outside = (np.array(found["scores"][n]) for n in ("inside", "outside"))
    rates = np.concatenate([np.geomspace(_SMALLEST / 10, 1, 120), [1.0]])
    part, label = attacked(found, mechanism)
    limit = 1 - TradeOff(part, coarseness=4.0).false_negatives(rates)
    axes.plot(rates, limit, color=_CLAIM, linewidth=2, label=label)
    places = np.unique(np.concatenate([inside, outside]))[::-1]
    right = 1 - np.searchsorted(np.sort(inside), places) / len(inside)
    wrong = 1 - np.searchsorted(np.sort(outside), places) / len(outside)
    axes.plot(wrong, right, color=_INSIDE, linewidth=1.8, label="attack")
    axes.plot(rates, rates, color="#888888", linestyle=":", label="guessing")
    errors = found.get("errors")
    if errors:
        false = errors["false_positives"] / errors["outside"]
        true = 1 - errors["false_negatives"] / errors["inside"]
        axes.plot([false], [true], "o", color=_BOUND, label="threshold of the bound")
    axes.set(xlabel="false positive rate", ylabel="true positive rate")
    axes.set(xlim=(-0.01, 1), ylim=(0, 1.01))


def attacked(found: Mapping[str, Any], mechanism: Mechanism) -> tuple[Mechanism, str]:
    """Return the part of the claim that scores test: a whole run, or one known step."""
    if found.get("knows_sample"):
        step = Mechanism(1.0, mechanism.noise_multiplier, 1, mechanism.adjacency)
        return step, "limit of one step of the claim"
    steps = min(found.get("audited_steps") or mechanism.steps, mechanism.steps)
    part = dataclasses.replace(mechanism, steps=steps)
    return part, "limit of the claim" if part == mechanism else "limit of the steps run"


def _scores(axes: "Axes", found: Mapping[str, Any], mechanism: Mechanism) -> None:
    del mechanism
    inside, outside = (np.array(found["scores"][n]) for n in ("inside", "outside"))
    both = np.concatenate([inside, outside])
    low, high = np.quantile(both, [0.002, 0.998])
    if not low < high:
        low, high = low - 0.5, high + 0.5
    fewer = min(inside.size, outside.size)
    edges: Any = np.linspace(low, high, max(8, min(40, math.isqrt(fewer))) + 1)
    where = "sampled in the step" if found.get("knows_sample") else "in the data"
    for scores, colour, label in (
        (outside, _OUTSIDE, f"canary not {where}"),
        (inside, _INSIDE, f"canary {where}"),
    ):
        shown = np.clip(scores, low, high)
        axes.hist(shown, edges, density=True, color=colour, alpha=0.5, label=label)
    threshold = found.get("threshold")
    if threshold is not None and low <= threshold <= high:
        axes.axvline(threshold, color="#333333", linestyle="--", label="threshold")
    axes.set(xlabel="score", ylabel="density")
