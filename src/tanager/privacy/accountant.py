"""Accountants: what a mechanism spends, as (ε, δ).

Two of them are guarantees. PLD composes the privacy loss distribution numerically, in
both directions (an example added, an example removed), and is tight. RDP composes Rényi
divergences; it is 6 to 10 % higher, and is what the papers report. GDP-CLT and TAN are
closed-form approximations that can be below the true ε.

Beyond a million steps, or at a δ near rounding errors, PLD is no longer tight, and RDP
can be below it. There, the smaller of the two is what is called PLD here.

`dp_accounting` does the mathematics. This module decides which numbers are too small
for double precision.

References:
    Abadi et al. 2016, arXiv:1607.00133 (the mechanism); Doroshenko et al. 2022,
    arXiv:2207.04380 (PLD, connect the dots); Mironov et al. 2019, arXiv:1908.10530
    (RDP); Balle et al. 2020, arXiv:1905.09982 and Canonne et al. 2020,
    arXiv:2004.00010, proposition 12 (RDP to ε); Bu et al. 2020, arXiv:1911.11607
    (GDP-CLT); Sander et al. 2023, arXiv:2210.03403 (TAN); Ganesh 2024, arXiv:2401.10294
    (groups).
"""

import contextlib
import dataclasses
import enum
import functools
import logging
import math
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from tanager import _validate as validate
from tanager.privacy import _pld, _rdp, _tilted, tan
from tanager.privacy.mechanism import Adjacency, Mechanism, common_adjacency


if TYPE_CHECKING:
    from dp_accounting import DpEvent


class Accountant(enum.StrEnum):
    """How to compute ε.

    Attributes:
        PLD: privacy loss distribution, tight, for every adjacency; RDP where that is
            smaller. A guarantee.
        RDP: Rényi divergence, as published; not for replace-one. A guarantee.
        GDP_CLT: Gaussian DP by a central limit theorem. An approximation, 0.1 to 1.2 %
            below the tight value at the papers' settings.
        TAN: η² + 2η√log(1/δ). An approximation, good where σ ≥ 2.
    """

    PLD = "pld"
    RDP = "rdp"
    GDP_CLT = "gdp_clt"
    TAN = "tan"

    @property
    def is_guarantee(self) -> bool:
        """Whether its ε is an upper bound that may be claimed."""
        return self in (Accountant.PLD, Accountant.RDP)


def check_claim(accountant: str, adjacency: Adjacency) -> None:
    """Refuse an accountant whose ε may not be claimed, or is none for the adjacency.

    Raises:
        ValueError: it is no guarantee, or RDP under replace-one.
    """
    guarantees = [str(each) for each in Accountant if each.is_guarantee]
    validate.one_of(guarantees, accountant=accountant)
    if accountant == Accountant.RDP:
        _require_rdp(adjacency)


def _require_rdp(adjacency: Adjacency) -> None:
    if adjacency is Adjacency.REPLACE_ONE:
        rule = "has no RDP bound under Poisson sampling"
        remedy = "use accountant 'pld', or adjacency 'zero-out'"
        validate.refuse("adjacency", str(adjacency), rule, remedy)


# Every tenth to 11, every whole number to 64, then 3 % apart: at the best order ε is
# flat, so the gaps cost less than 0.02 %. If the last is best, larger ones are tried.
_SMALL_ORDERS = tuple(1 + tenth / 10 for tenth in range(1, 100))
_LARGE_ORDERS = (
    *range(11, 65),
    *sorted({min(512, round(64 * 1.03**power)) for power in range(1, 72)}),
)
RDP_ORDERS = _SMALL_ORDERS + _LARGE_ORDERS

# Of δ, what rounding may hide before the losses are tilted.
_SMALL_SHARE = 0.01


def dp_event(mechanism: Mechanism) -> "DpEvent":
    """Return a mechanism as an event of `dp_accounting`."""
    import dp_accounting

    gaussian = dp_accounting.GaussianDpEvent(mechanism.noise_multiplier)
    step = dp_accounting.PoissonSampledDpEvent(mechanism.sample_rate, gaussian)
    return dp_accounting.SelfComposedDpEvent(step, int(mechanism.steps))


def epsilon(
    mechanism: Mechanism,
    delta: float,
    accountant: str = Accountant.PLD,
    steps: int | None = None,
    coarseness: float = 1.0,
    group: int = 1,
) -> float:
    """Return the ε that a mechanism spends at a given δ: infinite without noise.

    Args:
        mechanism: the mechanism; its adjacency says what ε protects.
        delta: δ, strictly between 0 and 1.
        accountant: one of `Accountant`; see `Accountant.is_guarantee`.
        steps: how many such steps, at least 0; the mechanism's own by default.
        coarseness: of PLD's grid. At 8, ε is still a guarantee, at most 0.05 % higher
            in the papers' settings, in a quarter of the time.
        group: how many examples neighbours differ in, such as all images of a person.
            Each of them is sampled independently. For more than one, by PLD only; where
            more than 100 are sampled on average, as if all of them were.

    Raises:
        ValueError: an argument is out of range, or the adjacency is replace-one and the
            accountant RDP or the group larger than 1.
    """
    remedy = "give the mechanisms of several runs to tanager.risk, or to a Ledger"
    validate.instance(Mechanism, remedy, mechanism=mechanism)
    validate.probability(delta=delta)
    validate.one_of([*Accountant], accountant=accountant)
    validate.positive(coarseness=coarseness)
    validate.whole(group=group, at_least=1)
    if group > 1:
        _check_group(group, accountant, mechanism.adjacency)
    if steps is not None:
        validate.whole(steps=steps, at_least=0)
        if steps == 0:
            return 0.0
        mechanism = dataclasses.replace(mechanism, steps=steps)
    if mechanism.noise_multiplier == 0:
        return math.inf
    parts = parts_of(mechanism, group=group)
    match Accountant(accountant):
        case Accountant.PLD:
            return _epsilon_pld(
                parts, float(delta), mechanism.adjacency, float(coarseness)
            )
        case Accountant.RDP:
            return _epsilon_rdp(parts, delta, mechanism.adjacency)
        case Accountant.GDP_CLT:
            return epsilon_gaussian(gdp_clt_mu(mechanism), delta)
        case Accountant.TAN:
            return tan.epsilon_tan(
                mechanism.adjacency.signals * tan.eta(mechanism), delta
            )


def delta(mechanism: Mechanism, epsilon: float) -> float:
    """Return the δ that a mechanism spends at a given ε, by PLD: a guarantee.

    Raises:
        ValueError: ε is negative or not finite.
    """
    validate.not_negative(epsilon=epsilon)
    if mechanism.noise_multiplier == 0:
        return 1.0
    parts = parts_of(mechanism)
    lost, spent = _pld.lost_to_rounding(parts), 1.0
    with np.errstate(all="ignore"), contextlib.suppress(ArithmeticError, ValueError):
        composed = _pld.compose(parts, mechanism.adjacency)
        # Each term without cancellation, unlike `_pld.deltas`.
        each = [float(pmf.get_delta_for_epsilon(float(epsilon))) for pmf in composed]
        found = max(float(np.max(each)), 0.0) + lost
        spent = min(1.0, found)  # not-a-number is not below 1
        if lost > spent * _SMALL_SHARE:
            spent = min(spent, _tilted.delta(parts, mechanism.adjacency, epsilon))
    if mechanism.adjacency is not Adjacency.REPLACE_ONE and (
        spent == 1 or _has_many_steps(parts)
    ):
        from dp_accounting.rdp.rdp_privacy_accountant import compute_delta

        spent = min(spent, _by_rdp(compute_delta, parts, mechanism.adjacency, epsilon))
    return spent


def composed_epsilon(
    mechanisms: Sequence[Mechanism],
    delta: float,
    accountant: str = Accountant.PLD,
    coarseness: float = 1.0,
    group: int = 1,
) -> float:
    """Return the ε of several mechanisms on the same data together.

    `accountant` is "pld" or "rdp"; `coarseness` and `group` are those of `epsilon`.

    Raises:
        ValueError: a number is out of range, the adjacencies differ, so that they have
            no common ε, or it has no bound by this accountant or for this group.
    """
    validate.probability(delta=delta)
    validate.positive(coarseness=coarseness)
    validate.whole(group=group, at_least=1)
    if not mechanisms:
        return 0.0
    adjacency = common_adjacency(mechanisms)
    check_claim(accountant, adjacency)
    if group > 1:
        _check_group(group, accountant, adjacency)
    if any(one.noise_multiplier == 0 for one in mechanisms):
        return math.inf
    parts = parts_of(*mechanisms, group=group)
    if accountant == Accountant.RDP:
        return _epsilon_rdp(parts, delta, adjacency)
    return _epsilon_pld(parts, float(delta), adjacency, float(coarseness))


def finer_grid(mechanism: Mechanism) -> float | None:
    """Return the grid of PLD if it is finer than the usual one of `dp_accounting`.

    On the usual one of 1e-4, ε comes out higher where a step loses very little.
    """
    if mechanism.noise_multiplier == 0 or mechanism.sample_rate == 1:
        return None
    with np.errstate(all="ignore"):
        parts = parts_of(mechanism)
        grid = _pld.value_discretisation_interval(parts, mechanism.adjacency)
    return grid if grid < _pld.ORDINARY_INTERVAL else None


def rdp(mechanism: Mechanism, orders: Sequence[float]) -> np.ndarray:
    """Return the Rényi divergence at each order, float64[len(orders)].

    It is infinite at an order at which the computation does not converge.

    Raises:
        ValueError: the adjacency is replace-one, which has no RDP bound here.
    """
    return _divergences(parts_of(mechanism), orders, mechanism.adjacency)


def rdp_of_event(event: "DpEvent", orders: Sequence[float]) -> np.ndarray:
    """Return `rdp` of an event of `dp_accounting`, for add-or-remove-one and zero-out.

    Raises:
        dp_accounting.UnsupportedEventError: `dp_accounting` has no RDP of the event.
    """
    from dp_accounting.rdp import RdpAccountant

    accountant = RdpAccountant(list(orders), _pld.relation(Adjacency.ADD_OR_REMOVE_ONE))
    # `dp_accounting` warns of orders that do not converge, and skips them.
    logger = logging.getLogger("absl")
    logger.addFilter(_errors_only)
    try:
        with np.errstate(all="ignore"):
            accountant.compose(event)
    finally:
        logger.removeFilter(_errors_only)
    return np.where(np.isnan(accountant.rdp), math.inf, accountant.rdp)


def _errors_only(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


def gdp_clt_mu(mechanism: Mechanism) -> float:
    """Return μ of Gaussian DP by the central limit theorem.

    μ = q √(T (e^{1/σ²} − 1)) for add-or-remove-one and zero-out (Bu et al. 2020). The
    same limit for replace-one gives 2q √(T sinh(1/σ²)).
    """
    if mechanism.noise_multiplier == 0:
        return math.inf
    replace_one = mechanism.adjacency is Adjacency.REPLACE_ONE
    try:
        exponent = mechanism.noise_multiplier**-2.0
        root = math.sqrt(math.sinh(exponent) if replace_one else math.expm1(exponent))
    except OverflowError:
        return math.inf
    signals = mechanism.adjacency.signals
    return signals * mechanism.sample_rate * math.sqrt(mechanism.steps) * root


def parts_of(*mechanisms: Mechanism, group: int = 1) -> tuple[_pld.Part, ...]:
    """Return mechanisms as parts for PLD, those of the same settings as one.

    They are in one order, so that ε does not depend on that of the mechanisms.
    """
    steps: Counter[tuple[float, float]] = Counter()
    for one in mechanisms:
        steps[float(one.sample_rate), float(one.noise_multiplier)] += int(one.steps)
    ordered = sorted(steps.items())
    return tuple(_pld.Part(*key, count, int(group)) for key, count in ordered)


def _check_group(group: int, accountant: str, adjacency: Adjacency) -> None:
    rule = f"has no bound for a group of {group} examples"
    if accountant != Accountant.PLD:
        validate.refuse("accountant", str(accountant), rule, "use 'pld'")
    if adjacency is Adjacency.REPLACE_ONE:
        validate.refuse("adjacency", str(adjacency), rule, "use 'zero-out'")


### PLD


@functools.lru_cache(maxsize=256)
def _epsilon_pld(
    parts: tuple[_pld.Part, ...],
    delta: float,
    adjacency: Adjacency,
    coarseness: float = 1.0,
) -> float:
    lost, spent = _pld.lost_to_rounding(parts), math.inf
    with np.errstate(all="ignore"), contextlib.suppress(ArithmeticError, ValueError):
        if lost > delta * _SMALL_SHARE:
            found = _tilted.epsilon(parts, adjacency, delta, coarseness)
        else:
            composed = _pld.compose(parts, adjacency, coarseness)
            found = _pld.epsilon(composed, delta - lost)
        spent = min(math.inf, max(found, 0.0))  # not-a-number is not below infinity
    if spent == math.inf or _has_many_steps(parts):
        spent = min(spent, _epsilon_without_grid(parts, delta, adjacency))
    return spent


def _has_many_steps(parts: Sequence[_pld.Part]) -> bool:
    """Whether the grid can be so coarse that RDP is smaller than PLD.

    In 220 random settings, of at most 10⁶ steps, it never was.
    """
    return sum(part.steps for part in parts) > 10**6


def _epsilon_without_grid(
    parts: Sequence[_pld.Part], delta: float, adjacency: Adjacency
) -> float:
    """Bound ε where a loss is too wide, δ too small or a group too large for the grid.

    The smaller of RDP and of the exact ε of the Gaussian mechanism without subsampling,
    which dominates the subsampled one (the hockey-stick divergence is jointly convex).
    """
    with np.errstate(all="ignore"):
        squares = sum(
            part.steps * (part.group / np.float64(part.noise_multiplier)) ** 2
            for part in parts
        )
    spent = epsilon_gaussian(adjacency.signals * float(np.sqrt(squares)), delta)
    if adjacency is Adjacency.REPLACE_ONE or any(part.group > 1 for part in parts):
        return spent
    return min(spent, _epsilon_rdp(parts, delta, adjacency))


def epsilon_gaussian(mu: float, delta: float, *, up: bool = True) -> float:
    """Return the exact ε of μ-Gaussian DP; infinite where doubles overflow.

    It is the ε of one Gaussian of σ = 1/μ without sampling (Balle and Wang 2018,
    theorem 8), rounded up; or down, to be a lower bound.
    """
    from dp_accounting.gaussian_mechanism import get_epsilon_gaussian

    if not 0 < mu < 1e100:
        return math.inf if mu else 0.0
    if math.erf(mu / math.sqrt(8)) <= delta * (1 - 1e-15):  # δ at ε = 0
        return 0.0
    with np.errstate(all="ignore"):
        found = float(get_epsilon_gaussian(1 / mu, delta))
    # The tolerance of its search, and rounding: 3e-11 was measured, at a μ of 2.5e-12.
    away = found * 1e-14 + 5e-11
    return found + away if up else max(found - away, 0.0)


### RDP


def _divergences(
    parts: Sequence[_pld.Part], orders: Sequence[float], adjacency: Adjacency
) -> np.ndarray:
    _require_rdp(adjacency)
    with np.errstate(all="ignore"):
        divergences = sum(
            (part.steps * _rdp_of_a_step(*part[:2], tuple(orders)) for part in parts),
            start=np.zeros(len(orders)),
        )
    # Rounding can make a tiny divergence negative, which must not count as ε = 0.
    floor = sys.float_info.epsilon * sum(part.steps for part in parts)
    divergences = np.maximum(divergences, floor)
    return np.where(np.isnan(divergences), math.inf, divergences)


@functools.lru_cache(maxsize=256)
def _rdp_of_a_step(q: float, sigma: float, orders: tuple[float, ...]) -> np.ndarray:
    whole = np.array([order > 1 and order == int(order) for order in orders])
    found = np.full(len(orders), math.inf)
    with contextlib.suppress(ArithmeticError):  # σ² underflows
        found[whole] = [
            _rdp.divergence(q, sigma, int(order)) for order in np.array(orders)[whole]
        ]
        if not whole.all():
            event, broken = dp_event(Mechanism(q, sigma, 1)), np.array(orders)[~whole]
            theirs = rdp_of_event(event, broken.tolist())
            found[~whole] = _rdp.raised(theirs, q, sigma, broken)
    return found


def epsilon_from_rdp(
    orders: Sequence[float], divergences: np.ndarray, delta: float
) -> float:
    """Convert Rényi divergences to ε (Canonne et al. 2020, proposition 12)."""
    from dp_accounting.rdp import compute_epsilon

    with np.errstate(all="ignore"):
        return float(compute_epsilon(orders, divergences.tolist(), delta)[0])


def _epsilon_rdp(
    parts: Sequence[_pld.Part], delta: float, adjacency: Adjacency
) -> float:
    from dp_accounting.rdp import compute_epsilon

    return _by_rdp(compute_epsilon, parts, adjacency, delta)


def _by_rdp(
    convert: Callable[..., tuple[float, float]],
    parts: Sequence[_pld.Part],
    adjacency: Adjacency,
    argument: float,
) -> float:
    """Return the least that `convert` makes of the divergences, at any order.

    Small orders take most of the time, and are best only where ε is large, or 0.
    """

    def at(orders: Sequence[float]) -> tuple[float, float]:
        with np.errstate(all="ignore"):
            divergences = _divergences(parts, orders, adjacency).tolist()
            return convert(orders, divergences, argument)

    found, order = _rdp.least(at, (_SMALL_ORDERS[0], *_LARGE_ORDERS))
    if order <= _LARGE_ORDERS[0] or not math.isfinite(found):
        found = min(found, at(_SMALL_ORDERS)[0])
    return float(found)
