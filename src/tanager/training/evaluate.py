"""Evaluation on data that is not trained on."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Int, PyTree

from tanager import _validate as validate
from tanager.compiling import filter_jit
from tanager.data import ArraySource, as_source, gather
from tanager.parallel.layout import AXIS, Layout
from tanager.sampling import PhysicalBatch, pack
from tanager.training.targets import TARGETS


_VOTE_SEED = 0
_SHOWN = 10  # classes that a message names
_MOST_KEPT = 1 << 24  # logits, 64 MiB


class ClassResult(NamedTuple):
    """The result of one class, or label.

    Attributes:
        name: of the class.
        examples: test examples of this class.
        accuracy: share of them in which the model finds it; None without any.
    """

    name: str
    examples: int
    accuracy: float | None


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Outputs:
    """What a model made of each test example.

    Attributes:
        logits: float32[n, classes].
        labels: int32[n], the true classes; or int32[n, classes] of 0 and 1.
    """

    logits: np.ndarray
    labels: np.ndarray


class Evaluation(NamedTuple):
    """What `Classification` measured.

    Attributes:
        accuracy: share of the test examples classified right, in [0, 1]; of labels, the
            share of all labels of all examples decided right at a probability of 0.5.
        loss: mean cross-entropy, in nats; of labels, of their sum.
        per_class: one entry for each class.
        vote_accuracy: share classified right by the vote of augmented views; None
            without a vote. The three above are computed without it.
        outputs: for what else is to be measured, without the vote; None if there are
            more than 2²⁴ logits.
        scores: what to show and record by name, means over labels of ``auroc`` and
            ``average_precision`` (None without examples of both kinds); None stands for
            the accuracy.
    """

    accuracy: float
    loss: float
    per_class: tuple[ClassResult, ...]
    vote_accuracy: float | None = None
    outputs: Outputs | None = None
    scores: Mapping[str, float | None] | None = None


class Classification:
    """Accuracy and cross-entropy of a classifier on test data; AUROC for labels.

    The results are exact functions of the parameters and the test data: releasing
    them costs the training examples no privacy, but says something of the test
    examples, which are taken to be public.

    Args:
        predict: ``predict(params, example) -> logits[classes]`` for one example.
        data: examples with an integer ``example["label"]``, from 0 to the number of
            classes − 1; with `multi_label`, 0 or 1 for each class.
        classes: their names, in the order of the labels.
        physical_batch_size: examples, or views of different examples, evaluated at
            once.
        augment: ``augment(key, example) -> example``, for a vote; None without.
        views: how many views of each example vote on its class: each for the class of
            its largest logit, and the class with most votes wins, of several the
            first. 0 exactly when `augment` is None. The views of an example are the
            same at every evaluation, whatever the batches; test data are public, so
            no secret is needed.
        multi_label: an example has any number of the classes, here called labels. The
            loss is that of a sigmoid each, and there is no vote.

    Raises:
        ValueError: a number is out of range, or a label of data in memory; the call
            checks other labels, and the logits.

    References:
        TAN Without a Burn, section 4.2, "Testing with augmentations" (AugTest): the
        authors keep the vote apart from the accuracy they compare with others'.
    """

    def __init__(
        self,
        predict: Callable[[Any, Any], Array],
        data: Any,
        classes: tuple[str, ...],
        physical_batch_size: int = 256,
        *,
        augment: Callable[[Any, Any], Any] | None = None,
        views: int = 0,
        multi_label: bool = False,
    ):
        validate.whole(physical_batch_size=physical_batch_size, at_least=1)
        validate.whole(views=views, at_least=0)
        if (augment is None) != (views == 0):
            rule = "must be at least 1 with `augment` and 0 without"
            validate.refuse("views", views, rule)
        if views and multi_label:
            validate.refuse("views", views, "must be 0 with multi_label")
        if isinstance(classes, str) or not isinstance(classes, Iterable):
            rule = "must be the names of the classes, in the order of the labels"
            remedy = "give a tuple: tuple(map(str, range(10))) for ten without names"
            validate.refuse("classes", classes, rule, remedy)
        self.data = as_source(data)
        self.classes = tuple(classes)
        self.physical_batch_size = min(physical_batch_size, len(self.data))
        self._counting: dict[Mesh, Callable] = {}
        self.views = views
        self._several = multi_label
        self._target = target = TARGETS[multi_label]
        predict_all = jax.vmap(predict, (None, 0))

        def count(
            params: PyTree, batch: PhysicalBatch
        ) -> tuple[Array, Array, Array, Array]:
            mask = batch.mask
            logits = predict_all(params, batch.examples).astype(jnp.float32)
            self._require_width(logits.shape[1:])
            labels = batch.examples["label"].astype(jnp.int32)
            losses = jax.vmap(target.loss)(logits, labels)
            voted = jnp.int32(0)
            if augment is not None:
                tally = self._tally(predict_all, augment, params, batch)
                voted = jnp.sum(mask & (jnp.argmax(tally, axis=1) == labels))
            return jnp.sum(jnp.where(mask, losses, 0)), voted, logits, labels

        self._count = count
        if isinstance(self.data, ArraySource):
            self._require_labels(self.data.tree)

    def __call__(self, params: PyTree) -> Evaluation:
        """Evaluate one set of parameters on all test examples.

        If the parameters are on several devices, each evaluates a part of every batch;
        on several hosts, each reads a part.

        Raises:
            ValueError: a label is not that of a class, or there are not as many logits
                as classes.
        """
        layout = Layout.of(params)
        count = self._counting.setdefault(layout.mesh, self._on_every_device(layout))
        size = -(-self.physical_batch_size // layout.count) * layout.count
        here = layout.rows_here(size)
        kept = self._several or len(self.data) * len(self.classes) <= _MOST_KEPT
        loss, voted, logits, labels, predicted = 0.0, 0, [], [], []
        everyone = np.arange(len(self.data))
        for _, mask, indices in pack(everyone, size):
            examples = gather(self.data, indices[here])
            self._require_labels(examples)
            batch = PhysicalBatch(examples, mask[here], indices[here])
            counted = jax.device_get(count(params, layout.rows(batch)))
            loss, voted = loss + float(counted[0]), voted + int(counted[1])
            of_batch = counted[2][mask]
            labels.append(counted[3][mask])
            predicted.append(self._target.decide(of_batch))
            if kept:
                logits.append(of_batch)
        labels, predicted = np.concatenate(labels), np.concatenate(predicted)
        scores, width = self._target.scores, len(self.classes)
        found, right, accuracy = self._target.tally(predicted, labels, width)
        outputs = Outputs(np.concatenate(logits), labels) if kept else None
        return Evaluation(
            accuracy=accuracy,
            loss=loss / len(self.data),
            per_class=tuple(
                ClassResult(name, int(n), float(r / n) if n else None)
                for name, n, r in zip(self.classes, found, right, strict=True)
            ),
            vote_accuracy=voted / len(self.data) if self.views else None,
            outputs=outputs,
            scores=scores(outputs.logits, labels) if scores and outputs else None,
        )

    def _on_every_device(self, layout: Layout) -> Callable:
        """Compile the count for a layout: sums over all devices, and all rows."""
        each = PartitionSpec(AXIS)

        @filter_jit
        def count(params: PyTree, batch: PhysicalBatch) -> PyTree:
            arrays, static = eqx.partition(params, eqx.is_array)

            def here(arrays: PyTree, batch: PhysicalBatch) -> PyTree:
                loss, voted, *rows = self._count(eqx.combine(arrays, static), batch)
                sums = lax.psum((loss, voted), AXIS)
                return *sums, *lax.all_gather(rows, AXIS, tiled=True)

            return jax.shard_map(
                here,
                mesh=layout.mesh,
                in_specs=(PartitionSpec(), each),
                out_specs=PartitionSpec(),
                check_vma=False,
            )(arrays, batch)

        return count

    def _require_labels(self, examples: Any) -> None:
        try:
            labels = examples["label"]
        except (KeyError, IndexError, TypeError):
            rule = "must have a label in each example"
            remedy = 'give {"image": images, "label": labels}, say'
            validate.refuse_type("data", examples, rule, remedy)
        found, count = np.asarray(labels), len(self.classes)
        shape = (len(found), count) if self._several else (len(found),)
        if found.dtype.kind not in "iu" or found.shape != shape:
            shown = f"{found.dtype.name}{list(found.shape)}"
            rule, remedy = self._target.rule, "cast or squeeze it"
            if self._several:
                remedy = f"one column for each of {self._all_classes()}"
            validate.refuse("data['label']", shown, rule, remedy)
        outside = found[(found < 0) | (found >= (2 if self._several else count))]
        if outside.size and self._several:
            validate.refuse("data['label']", int(outside[0]), self._target.rule)
        if outside.size:
            rule = (
                f"must be from 0 to {count - 1}, to name one of {self._all_classes()}"
            )
            remedy = "give all classes, in the order of the labels"
            if outside[0] < 0:
                remedy = "leave out examples without a label: tanager.data.subset"
            validate.refuse("data['label']", int(outside[0]), rule, remedy)

    def _require_width(self, shape: tuple[int, ...]) -> None:
        if shape != (len(self.classes),):
            rule = f"must give one logit for each of {self._all_classes()}"
            validate.refuse("predict", f"logits of shape {list(shape)}", rule)

    def _all_classes(self) -> str:
        shown = ", ".join(map(str, self.classes[:_SHOWN]))
        more = ", …" if len(self.classes) > _SHOWN else ""
        return f"the {len(self.classes)} classes, {shown}{more}"

    def _tally(
        self,
        predict_all: Callable[[Any, Any], Array],
        augment: Callable[[Any, Any], Any],
        params: PyTree,
        batch: PhysicalBatch,
    ) -> Int[Array, "b classes"]:
        """Count the votes of each example's views."""
        fold_in, width = jax.random.fold_in, len(self.classes)
        own = jax.vmap(fold_in, (None, 0))(jax.random.key(_VOTE_SEED), batch.indices)

        def vote(tally: Array, view: Array) -> tuple[Array, None]:
            keys = jax.vmap(fold_in, (0, None))(own, view)
            logits = predict_all(params, jax.vmap(augment)(keys, batch.examples))
            choice = jnp.argmax(logits, axis=1)
            return tally + jax.nn.one_hot(choice, width, dtype=jnp.int32), None

        # One view after another: memory does not grow with their number.
        no_votes = jnp.zeros((len(batch.indices), width), jnp.int32)
        return lax.scan(vote, no_votes, jnp.arange(self.views, dtype=jnp.int32))[0]
