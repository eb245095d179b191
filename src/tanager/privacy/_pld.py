"""The numerical privacy loss distribution: its grid, and its rounding error.

`dp_accounting` does the composition. Its default grid of 1e-4 takes twenty seconds for
small noise, and doubles ε for large noise. So the grid is chosen here, from the
distribution of the loss of one step.

References:
    Doroshenko et al. 2022, arXiv:2207.04380 (connect the dots).
    Lebeda et al. 2024, arXiv:2405.20769 (why both directions are composed).
"""

import functools
import math
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tanager.privacy.mechanism import Adjacency


if TYPE_CHECKING:
    from dp_accounting import NeighboringRelation
    from dp_accounting.pld.pld_pmf import PLDPmf
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution


_ORDINARY_INTERVAL = 1e-4
_FEW_STEP_POINTS, _STEP_POINTS = 40_000, 70_000  # each takes 1 to 6 µs
_COMPOSED_POINTS = 300_000  # each takes 1 µs
_LARGEST_INTERVAL = 500.0  # beyond it, exp(interval) overflows


class Part(NamedTuple):
    """Some steps of one Poisson-subsampled Gaussian."""

    sample_rate: float
    noise_multiplier: float
    steps: int


def _losses(
    part: Part, adjacency: Adjacency
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield (losses, probabilities) of one step per direction, to choose a grid by.

    The noise is cut at ten standard deviations, as in `dp_accounting`.
    """
    q, sigma, _ = part
    noise = np.linspace(-10.0, 10.0, 1001)
    density = np.exp(-0.5 * noise**2)
    density /= density.sum()
    x = np.concatenate([sigma * noise, 1 + sigma * noise])
    mixture = np.concatenate([(1 - q) * density, q * density])
    without = np.log1p(-q) if q < 1 else -math.inf

    def ratio(x: np.ndarray) -> np.ndarray:
        return np.logaddexp(without, math.log(q) + (x - 0.5) / sigma**2)

    if adjacency is Adjacency.REPLACE_ONE:
        yield ratio(x) - ratio(-x), mixture
    else:
        yield ratio(x), mixture
        yield -ratio(x[:1001]), density


def _widest(parts: Sequence[Part], adjacency: Adjacency) -> float:
    """Return the widest range of the loss of one step."""
    return max(
        float(np.ptp(losses))
        for part in parts
        for losses, _ in _losses(part, adjacency)
    )


def _reach(losses: np.ndarray, probabilities: np.ndarray, count: int) -> float:
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
    reach, finest, noise = 0.0, math.inf, 0.0
    for part in parts:
        spans, spreads = [], []
        for losses, probabilities in _losses(part, adjacency):
            mean = float(probabilities @ losses)
            spreads.append(math.sqrt(float(probabilities @ (losses - mean) ** 2)))
            spans.append(_reach(losses, probabilities, part.steps))
            # The discretisation subtracts nearly equal numbers, and a step gains a
            # mass of about 7e-18 width / interval² (measured). Keep it below 1 %.
            noise += part.steps * float(np.ptp(losses))
        reach += max(spans)
        finest = min(finest, max(spreads) / 16)
    width = _widest(parts, adjacency)
    interval = max(
        min(_ORDINARY_INTERVAL, finest),
        min(width / _FEW_STEP_POINTS, max(finest, width / _STEP_POINTS)),
        reach / _COMPOSED_POINTS,
        3e-8 * math.sqrt(noise),
    )
    if not math.isfinite(interval):
        return math.inf
    quarters = round(4 * math.log2(interval / _ORDINARY_INTERVAL))
    return _ORDINARY_INTERVAL * 2.0 ** (quarters / 4)


@functools.lru_cache(maxsize=8)
def _step(
    q: float, sigma: float, interval: float, adjacency: Adjacency
) -> "PrivacyLossDistribution":
    from dp_accounting.pld import privacy_loss_distribution

    if q < 1 and adjacency is not Adjacency.REPLACE_ONE:
        removed, added = (
            _connected(q, sigma, interval, removes) for removes in (True, False)
        )
        return privacy_loss_distribution.PrivacyLossDistribution(removed, added)
    return privacy_loss_distribution.from_gaussian_mechanism(
        standard_deviation=sigma,
        value_discretization_interval=interval,
        sampling_prob=q,
        neighboring_relation=relation(adjacency),
    )


def _connected(q: float, sigma: float, interval: float, removes: bool) -> "PLDPmf":
    """Return one direction of a step as `from_gaussian_mechanism` makes it.

    It inverts the loss in a loop over the points; here it takes a fifth of the time.
    """
    from dp_accounting.pld import pld_pmf
    from dp_accounting.pld.privacy_loss_mechanism import (
        AdjacencyType,
        GaussianPrivacyLoss,
    )

    direction = AdjacencyType.REMOVE if removes else AdjacencyType.ADD
    loss = GaussianPrivacyLoss(sigma, sampling_prob=q, adjacency_type=direction)
    bounds = loss.connect_dots_bounds()
    assert bounds.epsilon_lower is not None and bounds.epsilon_upper is not None
    multiples = np.arange(
        math.floor(bounds.epsilon_lower / interval),
        math.ceil(bounds.epsilon_upper / interval) + 1,
    )
    epsilons = multiples * interval
    # To remove an example loses log(1 − q) at least, to add one −log(1 − q) at most.
    sign = 1 if removes else -1
    reached = sign * epsilons > math.log1p(-q)
    lost = sign * epsilons[reached]
    with np.errstate(divide="ignore"):
        plain = lost - math.log(q) + np.log1p(-np.exp(math.log1p(-q) - lost))
    cutoffs = sign * -(plain * sigma**2 + 0.5)
    deltas = -np.expm1(epsilons) if removes else np.zeros(len(epsilons))
    deltas[reached] = loss.mu_upper_cdf(cutoffs) - np.exp(
        epsilons[reached] + loss.mu_lower_log_cdf(cutoffs)
    )
    return pld_pmf.create_pmf_pessimistic_connect_dots(
        interval, multiples, np.clip(deltas, 0, 1)
    )


@functools.lru_cache(maxsize=4)
def compose(
    parts: tuple[Part, ...], adjacency: Adjacency, coarseness: float = 1.0
) -> "PrivacyLossDistribution":
    """Compose the privacy loss distributions, both directions of them.

    Raises:
        OverflowError: the privacy loss spans too wide a range for any grid.
    """
    from dp_accounting.pld import privacy_loss_distribution

    # Gaussians without sampling compose exactly, as one with less noise.
    parts = tuple(
        Part(1.0, part.noise_multiplier / math.sqrt(part.steps), 1)
        if part.sample_rate == 1
        else part
        for part in parts
    )
    interval = coarseness * value_discretisation_interval(parts, adjacency)
    if interval > _LARGEST_INTERVAL:
        raise OverflowError("the privacy loss spans too wide a range")
    total = privacy_loss_distribution.identity(interval)
    for q, sigma, count in parts:
        step = _step(q, sigma, interval, adjacency)
        # `dp_accounting` raises the number of points, up to 1000 of them, to the power
        # of the count as an exact integer. Sixteen steps at first are dense already.
        narrow = _widest([Part(q, sigma, count)], adjacency) < 1000 * interval
        if narrow and count > 10_000:
            sixteen = step.self_compose(16, tail_mass_truncation=0)
            total = total.compose(sixteen.self_compose(count // 16))
            count %= 16
        if count:
            total = total.compose(step.self_compose(count))
    return total


def deltas(composed: "PrivacyLossDistribution", epsilons: np.ndarray) -> np.ndarray:
    """Return δ at each ε ≥ 0: `get_delta_for_epsilon`, without its loop."""
    found = np.zeros(len(epsilons))
    # The distributions are read from private names: nothing public gives them.
    for pmf in (composed._pmf_remove, composed._pmf_add):
        pmf = pmf.to_dense_pmf()
        losses = (np.arange(pmf.size) + pmf._lower_loss) * pmf._discretization
        above = np.searchsorted(losses, epsilons, side="right")
        tails = [
            np.append(np.cumsum(weights[::-1])[::-1], 0.0)[above]
            for weights in (pmf._probs, pmf._probs * np.exp(-losses))
        ]
        # Σ p(l) (1 − exp(ε − l)) over the losses l > ε, and what is infinite.
        upper, lower = tails
        found = np.maximum(found, pmf._infinity_mass + upper - np.exp(epsilons) * lower)
    return found


def lost_to_rounding(parts: Sequence[Part]) -> float:
    """Return how much of δ the rounding of the Fourier transform can hide.

    At T = 10⁶ it was measured to be a twentieth of this.
    """
    return sys.float_info.epsilon * sum(part.steps for part in parts)


def relation(adjacency: Adjacency) -> "NeighboringRelation":
    from dp_accounting import NeighboringRelation

    if adjacency is Adjacency.REPLACE_ONE:
        return NeighboringRelation.REPLACE_ONE
    # An example that contributes zero moves the sum as one that is not there.
    return NeighboringRelation.ADD_OR_REMOVE_ONE
