"""What a model predicts of an example: its one class, or which labels it has.

`TARGETS` is the one table of what differs. Training, evaluation and prediction use it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tanager import measures


class Target(NamedTuple):
    """What follows from the kind of labels.

    Attributes:
        loss: of one example, ``(logits[K], label) -> nats``.
        rule: what the labels of n examples must be, in words.
        decide: what logits[n, K] say: the class of each example, int[n], or whether it
            has each label, bool[n, K].
        tally: of (what was decided, labels, K): how many examples have each class, in
            how many of them it is named, and the share of decisions that are right.
        scores: of (logits[n, K], labels): further numbers to show while training.
        probabilities: of logits[..., K].
        answer: of (probabilities[K], names): what is named.
        measure: of (probabilities[n, K], labels, names, bootstrap): all measures.
    """

    loss: Callable[[jax.Array, jax.Array], jax.Array]
    rule: str
    decide: Callable[[np.ndarray], np.ndarray]
    tally: Callable[[np.ndarray, np.ndarray, int], tuple[np.ndarray, np.ndarray, float]]
    scores: Callable[[np.ndarray, np.ndarray], Mapping[str, float | None]] | None
    probabilities: Callable[[np.ndarray], np.ndarray]
    answer: Callable[[np.ndarray, Sequence[str]], Any]
    measure: Callable[..., dict[str, Any]]


def _tally_classes(
    decided: np.ndarray, labels: np.ndarray, width: int
) -> tuple[np.ndarray, np.ndarray, float]:
    found = np.bincount(labels, minlength=width)
    right = np.bincount(labels[labels == decided], minlength=width)
    return found, right, float(right.sum() / found.sum())


def _sum_of_sigmoids(logits: jax.Array, label: jax.Array) -> jax.Array:
    return jnp.sum(optax.sigmoid_binary_cross_entropy(logits, label))


def _tally_labels(
    decided: np.ndarray, labels: np.ndarray, width: int
) -> tuple[np.ndarray, np.ndarray, float]:
    has = labels.astype(bool)
    right = (decided & has).sum(axis=0)
    return has.sum(axis=0), right, float(np.mean(decided == has))


def _rank(logits: np.ndarray, labels: np.ndarray) -> dict[str, float | None]:
    if not np.isfinite(logits).all():
        return dict.fromkeys(("auroc", "average_precision"))
    found = measures.ranking(logits, labels.astype(bool))
    return {
        name: float(np.mean([*each.values()])) if each else None
        for name, each in found.items()
    }


TARGETS = {
    False: Target(
        loss=optax.softmax_cross_entropy_with_integer_labels,
        rule="must be one whole number for each example",
        decide=lambda logits: logits.argmax(axis=1),
        tally=_tally_classes,
        scores=None,
        probabilities=measures.probabilities,
        answer=lambda values, names: names[int(np.argmax(values))],
        measure=measures.measure,
    ),
    True: Target(
        loss=_sum_of_sigmoids,
        rule="must be 0 or 1 for each example and label",
        decide=lambda logits: measures.chances(logits) >= measures.THRESHOLD,
        tally=_tally_labels,
        scores=_rank,
        probabilities=measures.chances,
        answer=lambda values, names: [
            names[int(k)] for k in np.flatnonzero(values >= measures.THRESHOLD)
        ],
        measure=measures.measure_labels,
    ),
}
"""By whether an example has any number of labels.

The loss of labels is their sum, not their mean: its gradient is clipped as a whole, and
a mean over many labels would be small beside the noise.
"""
