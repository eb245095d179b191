"""The numerical privacy loss distribution: its grid, and its rounding error.

The distributions are those of `dp_accounting`, made and composed in less time. Its
default grid of 1e-4 takes twenty seconds for small noise, and doubles ε for large
noise. So the grid is chosen here, from the distribution of the loss of one step.

References:
    Doroshenko et al. 2022, arXiv:2207.04380 (connect the dots).
    Lebeda et al. 2024, arXiv:2405.20769 (why both directions are composed).
    Ganesh 2024, arXiv:2401.10294 (a group of examples is a mixture of Gaussians).
"""

import functools
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from scipy import fft, special

from tanager.privacy.mechanism import Adjacency


if TYPE_CHECKING:
    from dp_accounting import NeighboringRelation
    from dp_accounting.pld.pld_pmf import DensePLDPmf
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

    Side = list[tuple[DensePLDPmf, int]]
    """One direction of each part: a step's distribution, and how many steps."""


ORDINARY_INTERVAL = 1e-4
_FEW_STEP_POINTS, _STEP_POINTS = 40_000, 70_000  # each takes 1 to 6 µs
_COMPOSED_POINTS = 300_000  # each takes 1 µs
_LARGEST_INTERVAL = 500.0  # beyond it, exp(interval) overflows
_CUT = 0.5 * math.exp(-50)  # of the noise's mass at each end, as in `dp_accounting`
_CUT_COMPOSED = 1e-15  # of the mass of all steps, at both ends, as in `dp_accounting`
_LARGEST_GROUP = 10**6  # it takes seconds
_MOST_SAMPLED = 100  # of a group, on average: it takes seconds, and half a gigabyte
LOST = 4 * sys.float_info.epsilon
"""Of the mass, what rounding hides in a step at most: 1.5 epsilons were measured."""


class Part(NamedTuple):
    """Some steps of one Poisson-subsampled Gaussian, as a group of examples sees them.

    In a step, Binomial(group, sample_rate) examples of the group are sampled. Each of
    them moves the sum by 1 at most.
    """

    sample_rate: float
    noise_multiplier: float
    steps: int
    group: int = 1

    def shifts(self) -> tuple[np.ndarray, np.ndarray]:
        """Return how far a step can move the sum, and the logarithms of how likely.

        Of a large group, numbers so high are left out that they are sampled with a
        probability of at most `_CUT` together.

        Raises:
            OverflowError: the numbers of a group are too many for memory.
        """
        if self.group > max(1, min(_LARGEST_GROUP, _MOST_SAMPLED / self.sample_rate)):
            raise OverflowError("the group is too large")
        q, number = self.sample_rate, np.arange(self.group + 1.0)
        without = self.group - number
        ways = special.gammaln(number + 1) + special.gammaln(without + 1)
        log_weights = special.xlogy(number, q) + special.xlog1py(without, -q)
        log_weights += math.lgamma(self.group + 1) - ways
        kept = log_weights > math.log(_CUT / (self.group + 1))
        kept |= number <= max(1.0, q * self.group)
        return number[kept], log_weights[kept]


def _losses(
    part: Part, adjacency: Adjacency
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield (losses, probabilities) of one step per direction, to choose a grid by.

    The noise is cut at ten standard deviations, as in `dp_accounting`.
    """
    _, sigma, *_ = part
    noise = np.linspace(-10.0, 10.0, 1001)
    density = np.exp(-0.5 * noise**2)
    density /= density.sum()
    shifts, log_weights = part.shifts()
    x = shifts[:, None] + sigma * np.minimum(noise, _reach_of_noise(part)[:, None])
    mixture = np.exp(log_weights)[:, None] * density
    x, mixture = x.ravel(), mixture.ravel()
    if adjacency is Adjacency.REPLACE_ONE:
        yield _loss(part, x) - _loss(part, -x), mixture
    else:
        yield _loss(part, x), mixture
        yield -_loss(part, sigma * noise), density


def _loss(part: Part, x: np.ndarray) -> np.ndarray:
    """Return the log of the likelihood ratio at each sum x, with group and without."""
    shifts, log_weights = part.shifts()
    moved = shifts[:, None] * (x - shifts[:, None] / 2) / part.noise_multiplier**2
    return np.logaddexp.reduce(log_weights[:, None] + moved, 0)


def _reach_of_noise(part: Part) -> np.ndarray:
    """Return, for each shift, how many standard deviations of noise above it matter."""
    _, log_weights = part.shifts()
    share = _CUT / (part.group + 1) * np.exp(-log_weights)
    return -special.ndtri(np.clip(share, _CUT, 0.5))


def reach(losses: np.ndarray, probabilities: np.ndarray, count: int) -> float:
    """Return the width of the composed loss, as `compute_self_convolve_bounds` does."""
    width = float(np.ptp(losses))
    above = (losses - losses.min()) / width
    orders = np.arange(1, 21)[:, None]
    tail = math.log(2e15)
    up = np.log(np.exp(orders * above) @ probabilities[:, None])
    down = np.log(np.exp(-orders * above) @ probabilities[:, None])
    upper = min(float(((count * up + tail) / orders).min()), float(count))
    lower = max(float((-(count * down + tail) / orders).max()), 0.0)
    return width * max(upper - lower, 1.0)


def value_discretisation_interval(parts: Sequence[Part], adjacency: Adjacency) -> float:
    """Choose the grid of the privacy loss: 1e-4 times a power of the fourth root of 2.

    1e-4 for ordinary settings. Finer where one step loses so little that rounding it
    up would dominate (at q = 1e-3, σ = 50 it more than doubles ε). Coarser where the
    loss would span too many points: pessimistic, but ε is then in the tens or hundreds.
    """
    span, finest, noise, widest = 0.0, math.inf, 0.0, 0.0
    for part in parts:
        spans, spreads = [], []
        for losses, probabilities in _losses(part, adjacency):
            mean = float(probabilities @ losses)
            spreads.append(math.sqrt(float(probabilities @ (losses - mean) ** 2)))
            spans.append(reach(losses, probabilities, part.steps))
            # The discretisation subtracts nearly equal numbers, and a step gains a
            # mass of about 7e-18 width / interval² (measured). Keep it below 1 %.
            width = float(np.ptp(losses))
            noise += part.steps * width
            widest = max(widest, width)
        span += max(spans)
        finest = min(finest, max(spreads) / 16)
    interval = max(
        min(ORDINARY_INTERVAL, finest),
        min(widest / _FEW_STEP_POINTS, max(finest, widest / _STEP_POINTS)),
        span / _COMPOSED_POINTS,
        3e-8 * math.sqrt(noise),
    )
    if not math.isfinite(interval):
        return math.inf
    quarters = round(4 * math.log2(interval / ORDINARY_INTERVAL))
    return ORDINARY_INTERVAL * 2.0 ** (quarters / 4)


@functools.lru_cache(maxsize=8)
def _step(
    part: Part, interval: float, adjacency: Adjacency
) -> "PrivacyLossDistribution":
    """Return the distribution of one step; `part` has one step."""
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

    if adjacency is Adjacency.REPLACE_ONE:
        return PrivacyLossDistribution(_replaced(part, interval))
    removed = _connected(part, interval, removes=True)
    if part.sample_rate == 1:  # then to add loses the same
        return PrivacyLossDistribution(removed)
    return PrivacyLossDistribution(removed, _connected(part, interval, removes=False))


def _connected(part: Part, interval: float, removes: bool) -> "DensePLDPmf":
    """Return one direction of a step: its losses on the grid, dots connected.

    `dp_accounting` inverts the loss in a loop over the points; here it takes a
    twentieth of the time, and less than a hundredth for groups.
    """
    sigma, (shifts, log_weights) = part.noise_multiplier, part.shifts()
    sign = 1 if removes else -1
    reach = -special.ndtri(_CUT)
    top = np.max(shifts + sigma * _reach_of_noise(part)) if removes else sigma * reach
    ends = np.sort(sign * _loss(part, np.array([-sigma * reach, top])))
    epsilons = _grid(ends, interval)
    # To remove examples loses at least log P[none is sampled], to add them at most
    # minus that.
    reached = sign * epsilons > log_weights[0]
    x = _inverse_loss(part, sign * epsilons[reached])
    without = special.log_ndtr(-sign * x / sigma)
    tails = special.log_ndtr(sign * (shifts[:, None] - x) / sigma)
    with_group = np.logaddexp.reduce(log_weights[:, None] + tails, 0)
    upper, lower = (with_group, without) if removes else (without, with_group)
    below = np.minimum(epsilons, 0.0)
    deltas = -np.expm1(below) if removes else np.zeros(len(epsilons))
    deltas[reached] = np.exp(upper) - np.exp(epsilons[reached] + lower)
    if removes and len(shifts) <= part.group:
        deltas[reached] += _CUT  # of the numbers left out; to add loses less by them
    return _dots(epsilons, deltas, interval)


def _replaced(part: Part, interval: float) -> "DensePLDPmf":
    """Return a step in which one example replaces another: each way loses the same.

    With u = x/σ² − ε/2, the loss ε at the sum x is that of
    sinh(u) = sinh(ε/2) exp(1 / 2σ²) (1 − q)/q.
    """
    sigma, (shifts, log_weights) = part.noise_multiplier, part.shifts()
    ends = np.array([sigma * special.ndtri(_CUT), 0.0])
    ends[1] = np.max(shifts + sigma * _reach_of_noise(part))
    epsilons = _grid(_loss(part, ends) - _loss(part, -ends), interval)
    half, sign = np.abs(epsilons) / 2, np.sign(epsilons)
    with np.errstate(divide="ignore"):
        log_sinh = half + np.log(-np.expm1(-2 * half) / 2)
    log_sinh += 0.5 / sigma**2 + log_weights[0] - log_weights[1]
    # From exp(20) on, arsinh is the logarithm of twice the number.
    arsinh = np.arcsinh(np.exp(np.minimum(log_sinh, 20)))
    arsinh += np.maximum(log_sinh - 20, 0)
    x = sigma**2 * sign * (arsinh + half)
    upper, lower = (
        np.logaddexp.reduce(
            log_weights[:, None] + special.log_ndtr((each[:, None] - x) / sigma), 0
        )
        for each in (shifts, -shifts)
    )
    return _dots(epsilons, np.exp(upper) - np.exp(epsilons + lower), interval)


def _grid(ends: np.ndarray, interval: float) -> np.ndarray:
    """Return the multiples of the interval from one end to the other."""
    first, last = math.floor(ends[0] / interval), math.ceil(ends[1] / interval)
    return np.arange(first, last + 1) * interval


def _dots(epsilons: np.ndarray, deltas: np.ndarray, interval: float) -> "DensePLDPmf":
    """Return the losses on a grid that have these δ at its points.

    Algorithm 1 of Doroshenko et al., without a dictionary in between. Where rounding
    makes δ rise, the values before it are raised to it.
    """
    from dp_accounting.pld.pld_pmf import DensePLDPmf

    deltas = np.maximum.accumulate(np.clip(deltas, 0, 1)[::-1])[::-1]
    masses = np.append(1 - deltas[0], np.diff(deltas) / math.expm1(-interval))
    masses[:-1] += np.diff(deltas) / math.expm1(interval)
    masses = np.maximum(masses, 0)
    lowest = round(epsilons[0] / interval)
    return DensePLDPmf(interval, lowest, masses, deltas[-1], True)


def _inverse_loss(part: Part, losses: np.ndarray) -> np.ndarray:
    """Return the sum x at which each loss, above log P[none is sampled], is reached.

    Raises:
        ArithmeticError: Newton's method does not converge.
    """
    shifts, log_weights = part.shifts()
    none, log_weights, shifts = log_weights[0], log_weights[1:, None], shifts[1:, None]
    variance = part.noise_multiplier**2
    with np.errstate(divide="ignore"):
        wanted = losses + np.log1p(-np.exp(none - losses))
    # The loss is convex in x, and at least what a single shift gives. So this is too
    # far right, except for one example, and Newton's method goes left from there.
    x = np.min(variance * (wanted - log_weights) / shifts + shifts / 2, 0)
    for _ in range(100):
        terms = log_weights + shifts * (x - shifts / 2) / variance
        found = np.logaddexp.reduce(terms, 0)
        slope = np.sum(shifts * np.exp(terms - found), 0) / variance
        step = np.where(np.isinf(wanted), 0.0, (found - wanted) / slope)
        x = x - step
        if np.all(np.abs(step) <= 1e-9 * part.noise_multiplier):
            return x
    raise ArithmeticError("the privacy loss could not be inverted")


def sides(
    parts: Sequence[Part], adjacency: Adjacency, coarseness: float = 1.0
) -> "Iterator[Side]":
    """Yield, for each direction, a step of each part, all of them on one grid.

    Raises:
        OverflowError: the privacy loss spans too wide a range for any grid.
    """
    # Gaussians without sampling compose exactly, as one with less noise.
    parts = [
        Part(1.0, part.noise_multiplier / part.group / math.sqrt(part.steps), 1)
        if part.sample_rate == 1
        else part
        for part in parts
    ]
    interval = coarseness * value_discretisation_interval(parts, adjacency)
    if interval > _LARGEST_INTERVAL:
        raise OverflowError("the privacy loss spans too wide a range")
    steps = [_step(part._replace(steps=1), interval, adjacency) for part in parts]
    counts = [part.steps for part in parts]
    names = ("_pmf_remove",) if _symmetric(steps) else ("_pmf_remove", "_pmf_add")
    for name in names:
        pmfs = [getattr(step, name).to_dense_pmf() for step in steps]
        yield list(zip(pmfs, counts, strict=True))


def _symmetric(steps: "Iterable[PrivacyLossDistribution]") -> bool:
    return all(step._pmf_remove is step._pmf_add for step in steps)


@functools.lru_cache(maxsize=4)
def compose(
    parts: tuple[Part, ...], adjacency: Adjacency, coarseness: float = 1.0
) -> "tuple[DensePLDPmf, ...]":
    """Compose the privacy loss distributions of all steps, in each direction.

    Raises:
        OverflowError: the privacy loss spans too wide a range for any grid.
        FloatingPointError: a mass is not a number.
    """
    from dp_accounting.pld.pld_pmf import DensePLDPmf

    composed = tuple(
        functools.reduce(DensePLDPmf.compose, [repeat(*each) for each in side])
        for side in sides(parts, adjacency, coarseness)
    )
    if not all(np.isfinite(pmf._probs).all() for pmf in composed):
        raise FloatingPointError("a mass of the privacy loss is not a number")
    return composed


def repeat(pmf: "DensePLDPmf", count: int) -> "DensePLDPmf":
    """Compose one direction of a step with itself, count times.

    What `self_compose` of `dp_accounting` gives, in an eighth of its time: the
    transform of real numbers takes half of that of complex ones, and the ends are
    found by one exponential in place of forty.
    """
    if count == 1:
        return pmf
    first, last = _ends(pmf._probs, count)
    size = last - first + 1
    points = fft.next_fast_len(max(size, pmf.size), real=True)
    transformed = _power(np.asarray(fft.rfft(pmf._probs, points)), count)
    masses = np.roll(np.asarray(fft.irfft(transformed, points)), -first)[:size]
    infinite = _CUT_COMPOSED - math.expm1(count * math.log1p(-pmf._infinity_mass))
    lowest = pmf._lower_loss * count + first
    return type(pmf)(pmf._discretization, lowest, masses, infinite, True)


def _ends(masses: np.ndarray, count: int) -> tuple[int, int]:
    """Return the first and last point of the composed masses.

    At most `_CUT_COMPOSED` lies outside, by Chernoff's bounds, as in
    `compute_self_convolve_bounds` of `dp_accounting`.
    """
    size, tail = len(masses), math.log(2 / _CUT_COMPOSED)
    above = np.arange(size) / size
    falling, from_above, from_below = np.exp(-above), masses[::-1], masses
    first, last = 0, (size - 1) * count
    for order in range(1, 21):
        from_above, from_below = from_above * falling, from_below * falling
        below, beyond = (
            (count * math.log(each.sum()) + tail) * size / order
            for each in (from_above, from_below)
        )
        last = min(last, (size - 1) * count + math.ceil(below))
        first = max(first, math.floor(-beyond))
    return first, last


def _power(values: np.ndarray, exponent: int) -> np.ndarray:
    """Return the values to a power of at least 1, by squaring."""
    found = values if exponent % 2 else np.ones_like(values)
    while exponent := exponent // 2:
        values = values * values
        if exponent % 2:
            found = found * values
    return found


def deltas(composed: "Iterable[DensePLDPmf]", epsilons: np.ndarray) -> np.ndarray:
    """Return δ at each ε ≥ 0: `get_delta_for_epsilon`, without its loop."""
    found = np.zeros(len(epsilons))
    for losses, weights, infinite in _masses(composed):
        above = np.searchsorted(losses, epsilons, side="right")
        tails = [
            np.append(np.cumsum(masses[::-1])[::-1], 0.0)[above]
            for masses in (weights, weights * np.exp(-losses))
        ]
        # Σ p(l) (1 − exp(ε − l)) over the losses l > ε, and what is infinite.
        upper, lower = tails
        found = np.maximum(found, infinite + upper - np.exp(epsilons) * lower)
    return found


def epsilon(composed: "Iterable[DensePLDPmf]", delta: float) -> float:
    """Return the least ε ≥ 0 for δ: `get_epsilon_for_delta`, without its loop."""
    spent = 0.0
    for losses, weights, infinite in _masses(composed):
        if infinite > delta:
            return math.inf
        losses, weights = losses[losses > 0][::-1], weights[losses > 0][::-1]
        upper = infinite + np.cumsum(weights)
        lower = np.cumsum(weights * np.exp(-losses))
        # δ = upper − exp(ε)·lower down to the next loss. Where `lower` underflows, ε is
        # the loss itself.
        with np.errstate(all="ignore"):
            found = np.where(lower > 0, np.log((upper - delta) / lower), losses)
        found = np.where(upper > delta, found, -math.inf)
        reached = np.flatnonzero(found >= np.append(losses[1:], 0.0))
        spent = max([spent, *found[reached[:1]].tolist()])
    return spent


def _masses(
    composed: "Iterable[DensePLDPmf]",
) -> Iterator[tuple[np.ndarray, np.ndarray, float]]:
    """Yield the losses of each direction, ascending, their masses, and the infinite's.

    They are read from private names: nothing public gives them.
    """
    for pmf in composed:
        yield losses_of(pmf), pmf._probs, pmf._infinity_mass


def losses_of(pmf: "DensePLDPmf") -> np.ndarray:
    """Return the losses that a distribution has masses of, ascending."""
    return (np.arange(pmf.size) + pmf._lower_loss) * pmf._discretization


def lost_to_rounding(parts: Sequence[Part]) -> float:
    """Return how much of δ the rounding of the Fourier transform can hide.

    `tests/privacy/test_pld.py` compares it with 80-bit numbers.
    """
    return LOST * sum(part.steps for part in parts)


def relation(adjacency: Adjacency) -> "NeighboringRelation":
    from dp_accounting import NeighboringRelation

    if adjacency is Adjacency.REPLACE_ONE:
        return NeighboringRelation.REPLACE_ONE
    # An example that contributes zero moves the sum as one that is not there.
    return NeighboringRelation.ADD_OR_REMOVE_ONE
