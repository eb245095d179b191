"""Calibration: solve for the one parameter of a mechanism that a budget leaves open.

The central limit theorem finds the neighbourhood, a coarse grid of the privacy loss
comes closer; only then does Brent's method work with the accountant that was asked for.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from decimal import ROUND_CEILING, Context
from typing import Any, NamedTuple, NoReturn, cast

from scipy import special

from tanager import _validate as validate
from tanager.privacy import accountant as accountants
from tanager.privacy.accountant import Accountant
from tanager.privacy.mechanism import Adjacency, Mechanism
from tanager.privacy.trade_off import TradeOff


class _Unknown(NamedTuple):
    """A parameter, the range that is searched, its relative tolerance (None: whole)."""

    name: str
    most_private: float
    least_private: float
    tolerance: float | None


_UNKNOWNS = (
    _Unknown("sample_rate", 1e-12, 1.0, 2e-5),
    _Unknown("noise_multiplier", 1e8, 1e-3, 2e-4),
    _Unknown("steps", 1, 10**9, None),
)

_LogRatio = Callable[[float], float]
"""From a value of the unknown to log(spent / budget): nearly a line in its log."""


class _Target(NamedTuple):
    """What a mechanism may spend of ε, of an advantage or of a true-positive rate.

    Attributes:
        name: of the argument.
        budget: its value.
        spent: by a mechanism, on a grid of some coarseness.
        cheap: how large `spent` is about, by the central limit theorem.
        size: of what is spent, growing about like q, 1/σ and √T.
        other: the argument that the budget depends on, " at delta = 1e-05".
        mends: the arguments to change if no mechanism keeps the budget.
    """

    name: str
    budget: float
    spent: Callable[[Mechanism, float], float]
    cheap: Callable[[Mechanism], float]
    size: Callable[[float], float] = float
    other: str = ""
    mends: str = ""


def calibrate(
    *,
    epsilon: float | None = None,
    delta: float | None = None,
    advantage: float | None = None,
    tpr: float | None = None,
    fpr: float | None = None,
    sample_rate: float | None = None,
    noise_multiplier: float | None = None,
    steps: int | None = None,
    accountant: str = Accountant.PLD,
    adjacency: Adjacency | str = Adjacency.ZERO_OUT,
) -> Mechanism:
    """Complete a mechanism so that it spends at most a target.

    The target is ε at δ, or what an attack on one example can reach: an advantage, or a
    true-positive rate at a false-positive rate (see `tanager.Risk`).

    Exactly one of `sample_rate`, `noise_multiplier` and `steps` is left out and solved
    for: the largest sample rate (to a relative 1e-4; 1 if that fits), the smallest
    noise multiplier (to 1e-3, with at most six digits), the largest number of steps.

    Args:
        epsilon: the budget ε, above 0; give `delta` too.
        delta: the budget δ, strictly between 0 and 1.
        advantage: the largest advantage of any attack, strictly between 0 and 1.
        tpr: the largest true-positive rate of any attack, above `fpr` and below 1.
        fpr: the false-positive rate that `tpr` is for, strictly between 0 and 1.
        sample_rate: q.
        noise_multiplier: σ, above 0.
        steps: the number of steps.
        accountant: whose ε to keep within the budget: a guarantee only with "pld" and
            "rdp". The other targets need "pld".
        adjacency: which data sets are neighbours.

    Raises:
        ValueError: not exactly one target is given, not exactly one parameter is left
            out, one is out of range, or no value of the missing one keeps within the
            budget.
    """
    given: dict[str, Any] = {
        "epsilon": epsilon,
        "delta": delta,
        "advantage": advantage,
        "tpr": tpr,
        "fpr": fpr,
    }
    target = _target({k: v for k, v in given.items() if v is not None}, accountant)
    return _complete(
        target,
        accountant,
        adjacency,
        sample_rate=sample_rate,
        noise_multiplier=noise_multiplier,
        steps=steps,
    )


def calibrate_beside(
    others: Sequence[Mechanism],
    *,
    epsilon: float,
    delta: float,
    sample_rate: float | None = None,
    noise_multiplier: float | None = None,
    steps: int | None = None,
    accountant: str = Accountant.PLD,
    adjacency: Adjacency | str = Adjacency.ZERO_OUT,
) -> Mechanism:
    """Complete a mechanism so that it and others together spend at most ε at δ.

    The `others` are on the same data and of the same adjacency. Beside any, the
    accountant must be "pld" or "rdp". The rest is as in `calibrate`.

    Raises:
        ValueError: see `calibrate`.
    """
    target = _target({"epsilon": epsilon, "delta": delta}, accountant, others)
    return _complete(
        target,
        accountant,
        adjacency,
        sample_rate=sample_rate,
        noise_multiplier=noise_multiplier,
        steps=steps,
    )


def _complete(
    target: _Target, accountant: str, adjacency: Adjacency | str, **given: Any
) -> Mechanism:
    if (noise := given["noise_multiplier"]) is not None:
        validate.positive(noise_multiplier=noise, remedy="without noise ε is infinite")
    missing = [unknown for unknown in _UNKNOWNS if given[unknown.name] is None]
    if len(missing) != 1:
        names = ", ".join(unknown.name for unknown in missing) or "none of them"
        raise ValueError(
            "leave out exactly one of sample_rate, noise_multiplier and steps, to be"
            f" solved for; left out: {names}"
        )
    unknown = missing[0]
    given[unknown.name] = 1
    validate.one_of([*Adjacency], adjacency=adjacency)
    frame = Mechanism(**given, adjacency=Adjacency(adjacency))

    low, high = sorted((unknown.most_private, unknown.least_private))

    def mechanism(value: float) -> Mechanism:
        value = min(max(value, low), high)
        value = round(value) if unknown.tolerance is None else value
        changed: dict[str, Any] = {unknown.name: value}
        return dataclasses.replace(frame, **changed)

    def by(coarseness: float) -> _LogRatio:
        return functools.cache(
            lambda value: _log_ratio(target.spent(mechanism(value), coarseness), target)
        )

    def cheap(value: float) -> float:
        return _log_size(target.cheap(mechanism(value)), target)

    guess = _guess(unknown, cheap)
    if accountant == Accountant.PLD:
        log_ratio = by(8.0)
        coarse = unknown._replace(tolerance=1e-3)
        within, beyond = _bracket(coarse, guess, log_ratio)
        if within is not None and beyond is not None:
            guess = _root(coarse, within, beyond, log_ratio)
    log_ratio = by(1.0)
    within, beyond = _bracket(unknown, guess, log_ratio)
    if within is None:
        _refuse(unknown, target, "below", "raise")
    if beyond is None:
        if unknown.name == "sample_rate":
            return mechanism(1.0)
        _refuse(unknown, target, "above", "lower")
    root = _root(unknown, within, beyond, log_ratio)
    if unknown.name == "noise_multiplier":
        root = in_six_digits(root, lambda sigma: log_ratio(sigma) > 0)
    return mechanism(root)


def in_six_digits(sigma: float, overspends: Callable[[float], bool]) -> float:
    """Round σ up to six digits, which are all shown, and on until it keeps the budget.

    ε falls with σ, but not down to the last digits, so each σ is checked.
    """
    upwards = Context(prec=6, rounding=ROUND_CEILING)
    rounded = upwards.create_decimal(repr(sigma))
    while overspends(float(rounded)):
        rounded = rounded.next_plus(upwards)
    return float(rounded)


def _target(
    given: dict[str, float], accountant: str, others: Sequence[Mechanism] = ()
) -> _Target:
    validate.one_of([*Accountant], accountant=accountant)
    match sorted(given):
        case ["delta", "epsilon"]:
            epsilon, delta = given["epsilon"], given["delta"]
            validate.positive(epsilon=epsilon)
            validate.probability(delta=delta)
            return _Target(
                "epsilon",
                epsilon,
                lambda one, grid: (
                    accountants.composed_epsilon(
                        [one, *others], delta, accountant, coarseness=grid
                    )
                    if others
                    else accountants.epsilon(one, delta, accountant, coarseness=grid)
                ),
                lambda one: accountants.epsilon_gaussian(
                    math.hypot(*map(accountants.gdp_clt_mu, [one, *others])), delta
                ),
                other=f" at delta = {delta:g}",
                mends="epsilon or delta",
            )
        case ["advantage"] | ["fpr", "tpr"]:
            validate.probability(**given)
        case _:
            raise ValueError(
                "give one target: epsilon and delta, or advantage, or tpr and fpr; "
                f"found: {', '.join(given) or 'none of them'}"
            )
    if accountant != Accountant.PLD:
        rule = f"must be 'pld' if the target is {' and '.join(given)}"
        validate.refuse("accountant", str(accountant), rule)
    if "advantage" in given:
        return _Target(
            "advantage",
            given["advantage"],
            lambda one, grid: TradeOff(one, coarseness=grid).advantage,
            accountants.gdp_clt_mu,
            lambda spent: math.sqrt(8) * float(special.erfinv(spent)),
        )
    tpr, fpr = given["tpr"], given["fpr"]
    if tpr <= fpr:
        rule = f"must be above fpr ({fpr:g}), which guessing at random reaches"
        validate.refuse("tpr", tpr, rule)
    return _Target(
        "tpr",
        tpr,
        lambda one, grid: float(TradeOff(one, coarseness=grid).true_positives(fpr)),
        accountants.gdp_clt_mu,
        lambda spent: float(special.ndtri(spent) - special.ndtri(fpr)),
        f" at fpr = {fpr:g}",
    )


def _refuse(unknown: _Unknown, target: _Target, how: str, remedy: str) -> NoReturn:
    end = unknown.most_private if how == "below" else unknown.least_private
    others = " or the ".join(
        other.name.replace("_", " ") for other in _UNKNOWNS if other is not unknown
    )
    spends = "more" if how == "below" else "less"
    validate.refuse(
        target.name,
        target.budget,
        f"is {how} what any value of {unknown.name} spends: {unknown.name} = {end:g} "
        f"spends {spends}{target.other}",
        f"{remedy} {target.mends or target.name}, or change the {others}",
    )


def _log_ratio(spent: float, target: _Target) -> float:
    """Return log(spent / budget) of their sizes; above 0 only if it overspends."""
    ratio = _log_size(target.size(spent), target)
    return min(ratio, 0.0) if spent <= target.budget else max(ratio, 1e-12)


def _log_size(size: float, target: _Target) -> float:
    """Return log(size / the budget's), cut off at ±50."""
    if size <= 0:
        return -50.0
    budget = max(target.size(target.budget), 1e-300)
    return max(-50.0, min(50.0, math.log(size) - math.log(budget)))


def _guess(unknown: _Unknown, log_ratio: _LogRatio) -> float:
    """Find where the central limit meets the budget, to one per cent."""
    if log_ratio(unknown.least_private) <= 0:
        return unknown.least_private
    if log_ratio(unknown.most_private) > 0:
        return unknown.most_private
    coarse = unknown._replace(tolerance=0.01)
    return _root(coarse, unknown.most_private, unknown.least_private, log_ratio)


def _bracket(
    unknown: _Unknown, guess: float, log_ratio: _LogRatio
) -> tuple[float | None, float | None]:
    """Return a value within the budget and one beyond it; None where there is none."""
    whole = unknown.tolerance is None
    low, high = sorted((unknown.most_private, unknown.least_private))
    here = round(guess) if whole else guess
    fits = log_ratio(here) <= 0
    outwards = unknown.least_private > unknown.most_private
    sign = 1 if fits == outwards else -1
    # ε grows at least about like q, 1/σ and √T: this stride should cross the budget.
    stride = abs(log_ratio(here)) * (2.0 if whole else 1.0) + 1e-3
    while True:
        there = min(max(here * math.exp(sign * min(stride, 20.0)), low), high)
        if whole:
            there = min(max(round(there), low), high)
            if there == here:
                there = min(max(here + sign, low), high)
        if there == here:
            return (here, None) if fits else (None, here)
        if (log_ratio(there) <= 0) != fits:
            return (here, there) if fits else (there, here)
        here, stride = there, 2 * stride


def _root(
    unknown: _Unknown, within: float, beyond: float, log_ratio: _LogRatio
) -> float:
    """Find the last value that keeps the budget, in log space; whole ones exactly."""
    from scipy.optimize import brentq

    whole = unknown.tolerance is None
    start, end = (within, beyond) if whole else (math.log(within), math.log(beyond))

    # exp(log(x)) may miss x by a bit, and with it the budget.
    ends = {start: within, end: beyond}

    def value(coordinate: float) -> float:
        if whole:
            return round(coordinate)
        return ends[coordinate] if coordinate in ends else math.exp(coordinate)

    def spent(coordinate: float) -> float:
        return log_ratio(value(coordinate))

    tolerance = unknown.tolerance or 1.0
    root = cast(float, brentq(spent, start, end, xtol=tolerance, maxiter=1000))
    root = round(root) if whole else root
    inwards = math.copysign(tolerance, start - end)
    while spent(root) > 0:
        root += inwards
    while whole and spent(root - inwards) <= 0:
        root -= inwards
    return value(root)
