"""Evaluation on data that is not trained on."""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, PyTree

from tanager import _validate as validate
from tanager.data import as_source, gather
from tanager.sampling import pack


class ClassResult(NamedTuple):
    """How one class fared.

    Attributes:
        name: of the class.
        examples: test examples of this class.
        accuracy: share of them classified right; None without any.
    """

    name: str
    examples: int
    accuracy: float | None


class Evaluation(NamedTuple):
    """What `Classification` measured.

    Attributes:
        accuracy: share of the test examples classified right, in [0, 1].
        loss: mean cross-entropy, in nats.
        per_class: one entry for each class.
    """

    accuracy: float
    loss: float
    per_class: tuple[ClassResult, ...]


class Classification:
    """Accuracy and cross-entropy of a classifier on test data.

    The results are exact functions of the parameters and the test data: releasing
    them costs the training examples no privacy, but says something of the test
    examples, which are taken to be public.

    Args:
        predict: ``predict(params, example) -> logits[classes]`` for one example.
        data: examples with an integer ``example["label"]``.
        classes: their names, in the order of the labels.
        physical_batch_size: examples evaluated at once.
    """

    def __init__(
        self,
        predict: Callable[[Any, Any], Array],
        data: Any,
        classes: tuple[str, ...],
        physical_batch_size: int = 256,
    ):
        validate.whole(physical_batch_size=physical_batch_size, at_least=1)
        self.data = as_source(data)
        self.classes = tuple(classes)
        self.physical_batch_size = min(physical_batch_size, len(self.data))

        def count(params: PyTree, batch: Any, mask: Bool[Array, " b"]):
            logits = jax.vmap(predict, (None, 0))(params, batch)
            logits = logits.astype(jnp.float32)
            labels = batch["label"].astype(jnp.int32)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            one_hot = jax.nn.one_hot(labels, len(self.classes), dtype=jnp.int32)
            one_hot = jnp.where(mask[:, None], one_hot, 0)
            right = (jnp.argmax(logits, axis=1) == labels)[:, None]
            return (
                jnp.sum(jnp.where(mask, losses, 0)),
                jnp.sum(one_hot, axis=0),
                jnp.sum(jnp.where(right, one_hot, 0), axis=0),
            )

        self._count = eqx.filter_jit(count)

    def __call__(self, params: PyTree) -> Evaluation:
        """Evaluate one set of parameters on all test examples."""
        loss, examples, right = 0.0, 0, 0
        everyone = np.arange(len(self.data))
        for indices, mask in pack(everyone, self.physical_batch_size):
            batch = gather(self.data, indices)
            counted = jax.device_get(self._count(params, batch, jnp.asarray(mask)))
            loss += float(counted[0])
            examples, right = examples + counted[1], right + counted[2]
        examples, right = np.asarray(examples), np.asarray(right)
        return Evaluation(
            accuracy=float(right.sum() / examples.sum()),
            loss=loss / len(self.data),
            per_class=tuple(
                ClassResult(name, int(n), float(r / n) if n else None)
                for name, n, r in zip(self.classes, examples, right, strict=True)
            ),
        )
