"""Noisy class counts: one release, from which the weights of classes follow.

How many examples a class has is private. So the counts are released once, before the
first step, with Gaussian noise that is composed with that of the steps. Whatever is
computed from them afterwards, such as the weights, spends nothing more.

A person with several examples counts once, divided among the classes of these. So the
counts of neighbours differ by a vector of norm 1 at most; by √2 under replace-one,
where one count can fall and another rise. As sums of gradients do, they lie on a grid,
and the noise is drawn from its exact law (`tanager.gaussian`).
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from tanager import _validate as validate
from tanager.gaussian import rounded_normals, scale_of
from tanager.privacy.mechanism import Adjacency, Mechanism
from tanager.seed import Seed


_PARTS = 2**10
"""Into how many parts an example, or a person, is divided at most."""
_TIMES_ALONE = 5.0
"""Noise of the counts is this times what they would need to spend all of ε alone."""
_SHARE_OF_CLASS = 0.01
"""Noise of the counts is never less than this share of a class of average size."""
_MOST = 10.0


def release_of(
    epsilon: float, delta: float, examples: int, classes: int, adjacency: str
) -> Mechanism:
    """Return the release of the class counts of a run that spends ε in all.

    Its noise follows from public numbers. It has five times the noise with which the
    counts alone would spend ε, so that the steps need at most 2.1 % more noise. If a
    hundredth of N/K is more than that, the counts need no better, and get that.

    Args:
        epsilon: of the whole run; infinite for counts without noise.
        delta: of that ε.
        examples: N, the public number of examples, or of persons.
        classes: K.
        adjacency: which data sets are neighbours.
    """
    from dp_accounting.gaussian_mechanism import get_sigma_gaussian

    one = Mechanism(1.0, 0.0, 1, Adjacency(adjacency))
    if math.isinf(epsilon):
        return one
    root = math.sqrt(one.adjacency.signals)
    alone = root * float(get_sigma_gaussian(epsilon, delta))
    deviation = max(_TIMES_ALONE * alone, _SHARE_OF_CLASS * examples / classes)
    return Mechanism(1.0, deviation * root, 1, one.adjacency)


def require_release(class_counts: Mechanism) -> None:
    """Refuse a mechanism that is not one release of the counts of all examples."""
    validate.instance(Mechanism, class_counts=class_counts)
    if (class_counts.sample_rate, class_counts.steps) != (1.0, 1):
        rule = "must have sample rate 1 and 1 step, because all examples count once"
        remedy = "take tanager.privacy.class_counts.release_of(…)"
        validate.refuse("class_counts", class_counts, rule, remedy)


def deviation_of(release: Mechanism) -> float:
    """Return the standard deviation of the noise of a count, in examples or persons.

    σ is relative to 1, of which neighbours' sums differ by `signals`; counts differ by
    its square root.
    """
    return release.noise_multiplier / math.sqrt(release.adjacency.signals)


def release_in(config: Mapping[str, Any]) -> Mechanism | None:
    """Return the release of class counts that a run's config.json records, if any."""
    found = config.get("class_counts")
    return None if found is None else Mechanism(**found)


def noisy_counts(
    release: Mechanism,
    labels: np.ndarray,
    classes: int,
    seed: Seed,
    owners: np.ndarray | None = None,
) -> list[float]:
    """Release the class counts: charge them first, and draw once from a seed.

    Args:
        release: says how much noise.
        labels: int[n], from 0 to K − 1. Private.
        classes: K.
        seed: the run's secret; the counts have a stream of their own.
        owners: int[n], the number of each example's person; None for examples.

    Returns:
        A number for each class. With noise it can be below 0.

    Raises:
        ValueError: `release` has another sample rate or more steps than 1, or the
            labels are not as above. The message names no label.
    """
    require_release(release)
    labels = checked_labels(labels, classes)
    owners = np.arange(len(labels)) if owners is None else owners
    if len(owners) != len(labels):
        rule = f"must be one for each of the {len(labels)} labels"
        validate.refuse("owners", len(owners), rule)
    pairs, found = np.unique(owners * classes + labels, return_counts=True)
    of, places = np.divmod(pairs, classes)
    counts = np.zeros(classes, np.int64)
    np.add.at(counts, places, found * _PARTS // np.bincount(owners)[of])  # rounded down

    def more(place: int, taken: int) -> int:
        at = place, taken
        return int.from_bytes(seed.derive("class counts bits", *at, size=8))

    if release.noise_multiplier:
        scale = scale_of(deviation_of(release), 1 / _PARTS)
        counts += rounded_normals(seed.words(classes, "class counts"), scale, more)
    return (counts / _PARTS).tolist()


def checked_labels(labels: np.ndarray, classes: int) -> np.ndarray:
    """Return labels as int64[n]; one outside its range would count for others."""
    labels = np.asarray(labels)
    if labels.ndim != 1 or labels.dtype.kind not in "biu":
        validate.refuse("labels", labels, "must be one row of whole numbers")
    if labels.size and not 0 <= labels.min() <= labels.max() < classes:
        raise ValueError(
            f"labels must be from 0 to {classes - 1}, and one is not: give all classes"
        )
    return labels.astype(np.int64)


def balancing_weights(
    counts: list[float], release: Mechanism, examples: int
) -> list[float]:
    """Return weights in inverse proportion to noisy counts, about 1 for an example.

    Counts below a tenth of N/K, or two standard deviations of their noise, count as
    that, and those above ten times N/K as ten times. The weights are divided by their
    mean over all examples, as far as the counts tell.
    """
    average = examples / len(counts)
    least = max(average / _MOST, 2 * deviation_of(release))
    sizes = np.clip(counts, least, max(least, average * _MOST))
    return (sizes.mean() / sizes).tolist()
