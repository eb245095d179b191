"""Figure of a plan: how far it is from the privacy wall.

The two panels are figures 2 and 3 of TAN Without a Burn, for this plan.
"""

import dataclasses
import math
import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tanager import _validate as validate
from tanager.privacy import accountant, tan
from tanager.privacy.accountant import Accountant
from tanager.privacy.frontier import Point
from tanager.privacy.mechanism import Adjacency, Mechanism
from tanager.privacy.plan import Plan
from tanager.privacy.shown import format_delta, format_epsilon
from tanager.report.figures import drawing, number_axis


if TYPE_CHECKING:
    from matplotlib.axes import Axes


_RATIO_NOISE_MULTIPLIERS = (0.5, 0.7, 1.0, 2.0, 4.0)
_ORDERS = tuple(range(2, 33))
_HIGHEST_RATIO = 30.0
_COLOURS = ("#1b9e77", "#7570b3", "#66a61e", "#a6761d", "#386cb0")
_PLAN_COLOUR = "#d62728"


def plot(plan: Plan, path: str | pathlib.Path) -> None:
    """Draw a plan as a PNG or SVG file.

    Left, figure 2 of the paper: ε by RDP against the noise multiplier at the plan's η,
    for a few numbers of steps; the plan is a point on its own curve. Right, figure 3:
    the Rényi divergence g_α(σ, q) of one step over its approximation α η_step², at the
    plan's η_step. A replace-one plan is drawn for zero-out, and the title says so.
    """
    validate.positive(
        noise_multiplier=plan.noise_multiplier,
        remedy="without noise there is nothing to draw",
    )
    mechanism = dataclasses.replace(plan.mechanism, adjacency=Adjacency.ZERO_OUT)
    about = (
        rf"$N$ = {plan.examples:,}, $B$ = {plan.batch_size:,}, $T$ = {plan.steps:,},"
        rf" $\sigma$ = {plan.noise_multiplier:.6g},"
        rf" $\delta$ = {format_delta(plan.delta)}"
    )
    if plan.adjacency is Adjacency.REPLACE_ONE:
        about += " (drawn for zero-out)"
    with drawing(path, columns=2, size=(11.5, 4.4)) as (figure, (left, right)):
        _draw_wall(left, mechanism, plan.delta)
        _draw_ratios(right, mechanism)
        figure.suptitle(about, fontsize=11)


def plot_frontier(
    plan: Plan, points: Sequence[Point], path: str | pathlib.Path
) -> None:
    """Draw ε against compute at the plan's η as a PNG or SVG file."""
    with drawing(path, size=(6.2, 4.2)) as (_, (axes,)):
        compute = [point.compute for point in points]
        axes.plot(compute, [p.epsilon for p in points], "o-", color=_COLOURS[0])
        for point in points:
            at = point.compute, point.epsilon
            axes.annotate(
                rf"$\sigma$ = {point.noise_multiplier:.3g}",
                at,
                (0, 8),
                textcoords="offset points",
                fontsize=8,
            )
            if point.compute == 1:
                axes.plot(*at, "o", color=_PLAN_COLOUR, markersize=9, label="the plan")
            if point.cheapest:
                label = f"cheapest: B = {point.batch_size:,}"
                ring: Any = {"markerfacecolor": "none", "markersize": 14}
                axes.plot(*at, "o", color="black", label=label, **ring)
        axes.set(xscale="log", yscale="log")
        number_axis(axes.xaxis, axes.yaxis)
        axes.margins(0.15, 0.1)  # room for the last label
        axes.set_xlabel("examples used, in proportion to the plan's")
        by = plan.accountant.upper()
        axes.set_ylabel(
            rf"$\varepsilon$ at $\delta$ = {format_delta(plan.delta)}, by {by}"
        )
        axes.set_title(rf"Compute for $\varepsilon$ at $T$ = {plan.steps:,}")
        axes.legend(loc="upper right")


def _draw_wall(axes: "Axes", mechanism: Mechanism, delta: float) -> None:
    """ε against σ at constant η: flat above the wall, steep below it."""
    looks: dict[float, dict[str, Any]] = {
        1 / 16: {"color": _COLOURS[0]},
        1: {"color": _PLAN_COLOUR, "linewidth": 2.5},
        16: {"color": _COLOURS[1]},
    }
    own = accountant.epsilon(mechanism, delta, Accountant.RDP)
    flat = tan.epsilon_tan(tan.eta(mechanism), delta)
    lowest, highest = 0.6 * (min(flat, own) or flat), max(30 * flat, 3 * own)
    for factor, look in looks.items():
        count = max(1, round(mechanism.steps * factor))
        curve = _at_constant_eta(mechanism, count)
        sigmas = [point.noise_multiplier for point in curve]
        epsilons = [accountant.epsilon(point, delta, Accountant.RDP) for point in curve]
        label = f"$T$ = {count:,}" + (" (plan)" if factor == 1 else "")
        if any(lowest <= epsilon <= highest for epsilon in epsilons):
            axes.plot(sigmas, epsilons, label=label, **look)
    label = rf"the plan: $\varepsilon$ = {format_epsilon(own)} by RDP"
    dot: Any = {"color": _PLAN_COLOUR, "markersize": 9, "markeredgecolor": "white"}
    if own > 0:  # an axis of logarithms has no 0
        axes.plot(mechanism.noise_multiplier, own, "o", zorder=5, label=label, **dot)
    label = rf"$\varepsilon_\mathrm{{TAN}}$ = {flat:.3g}"
    axes.axhline(flat, color="black", linestyle="--", linewidth=1, label=label)
    axes.set(xscale="log", yscale="log")
    axes.set_ylim(lowest, highest)
    left = axes.get_xlim()[0]
    if left < tan.PRIVACY_WALL:
        axes.axvspan(left, tan.PRIVACY_WALL, color="0.93", zorder=0)
        axes.set_xlim(left=left)
        axes.text(
            tan.PRIVACY_WALL * 0.96,
            0.03,
            r"privacy wall: $\sigma$ < 2",
            transform=axes.get_xaxis_transform(),
            horizontalalignment="right",
            color="0.35",
            fontsize=9,
        )
    number_axis(axes.xaxis, axes.yaxis)
    axes.set_xlabel(r"noise multiplier $\sigma$")
    axes.set_ylabel(rf"$\varepsilon$ at $\delta$ = {format_delta(delta)}, by RDP")
    axes.set_title(rf"The budget at constant $\eta$ = {tan.eta(mechanism):.3g}")
    axes.legend(loc="upper right")


def _draw_ratios(axes: "Axes", mechanism: Mechanism) -> None:
    """g_α / (α η_step²) against α: near 1 where TAN holds."""
    own = mechanism.noise_multiplier
    per_step = tan.eta_step(mechanism)
    others = [
        sigma
        for sigma in _RATIO_NOISE_MULTIPLIERS
        if abs(math.log(sigma / own)) > 0.05 and math.sqrt(2) * sigma * per_step <= 1
    ]
    colours = dict(zip(others, _COLOURS, strict=False))
    for sigma in sorted([*others, own]):
        step = Mechanism(min(1.0, math.sqrt(2) * sigma * per_step), sigma, 1)
        ratios = accountant.rdp(step, _ORDERS) / (np.array(_ORDERS) * per_step**2)
        look: dict[str, Any] = {"color": colours.get(sigma)}
        label = rf"$\sigma$ = {sigma:.3g}"
        if sigma == own:
            look = {"color": _PLAN_COLOUR, "linewidth": 2.5, "zorder": 4}
            label += " (plan)"
        if np.min(ratios) <= _HIGHEST_RATIO:
            axes.plot(_ORDERS, ratios, label=label, **look)
    axes.axhline(1, color="black", linestyle="--", linewidth=1, label="TAN")
    axes.set(yscale="log", xlim=(_ORDERS[0], _ORDERS[-1]), ylim=(0.7, _HIGHEST_RATIO))
    number_axis(axes.yaxis)
    axes.set_xlabel(r"Rényi order $\alpha$")
    axes.set_ylabel(r"$g_\alpha(\sigma, q) \; / \; (\alpha\,\eta_\mathrm{step}^2)$")
    axes.set_title(rf"One step at constant $\eta_\mathrm{{step}}$ = {per_step:.3g}")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _at_constant_eta(mechanism: Mechanism, steps: int) -> list[Mechanism]:
    """The mechanisms of one curve, as far as q = η σ √(2/T) stays at most 1."""
    eta = tan.eta(mechanism)
    own = mechanism.noise_multiplier
    sigmas = np.append(np.geomspace(min(0.35, own / 2), max(12, 2 * own), 23), own)
    largest = math.sqrt(steps / 2) / eta
    return [
        Mechanism(min(1.0, eta * sigma * math.sqrt(2 / steps)), float(sigma), steps)
        for sigma in np.unique(sigmas[sigmas <= largest * (1 + 1e-12)])
    ]
