"""Accuracy and loss are those of all test examples, padding not among them."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tanager.data import as_source, subset
from tanager.sampling import PhysicalBatch
from tanager.training import evaluate as module
from tanager.training.evaluate import Classification


RANDOM = np.random.default_rng(0)
LOGITS = RANDOM.normal(size=(23, 4)).astype(np.float32)
LABELS = RANDOM.integers(0, 3, 23).astype(np.int32)
CLASSES = ("a", "b", "c", "d")


def predict(params, example):
    return params * example["x"]


@pytest.mark.parametrize("size", [5, 100])
def test_agrees_with_numpy(size):
    data = {"x": LOGITS, "label": LABELS}
    evaluate = Classification(predict, data, ("a", "b", "c", "d"), size)
    result = evaluate(jnp.float32(1))
    right = LOGITS.argmax(1) == LABELS
    assert result.accuracy == pytest.approx(right.mean())
    losses = np.log(np.exp(LOGITS).sum(1)) - LOGITS[np.arange(23), LABELS]
    assert result.loss == pytest.approx(losses.mean(), rel=1e-5)
    for label, one in enumerate(result.per_class):
        mine = np.equal(LABELS, label)
        assert one.examples == mine.sum()
        expected = right[mine].mean() if mine.any() else None
        assert one.accuracy == (expected and pytest.approx(expected))
    assert result.per_class[3].accuracy is None
    assert result.outputs is not None
    assert np.array_equal(result.outputs.logits, LOGITS)
    assert np.array_equal(result.outputs.labels, LABELS)


def test_so_many_logits_are_not_kept(monkeypatch):
    monkeypatch.setattr(module, "_MOST_KEPT", LOGITS.size - 1)
    evaluate = Classification(predict, {"x": LOGITS, "label": LABELS}, CLASSES, 5)
    result = evaluate(jnp.float32(1))
    assert result.outputs is None
    assert result.accuracy == np.mean(LOGITS.argmax(1) == LABELS)


def test_parameters_are_not_baked_in():
    data = {"x": LOGITS, "label": LABELS}
    evaluate = Classification(predict, data, ("a", "b", "c", "d"))
    assert evaluate(jnp.float32(1)).loss != evaluate(jnp.float32(2)).loss


@pytest.mark.parametrize("source", [as_source, lambda data: subset(data, range(23))])
@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (np.where(LABELS == 1, 7, LABELS), "(=7) must be from 0 to 3, to name one of"),
        (LABELS - 1, "(=-1) must be from 0 to 3, to name one of the 4 classes, a, b"),
        (LABELS - 1, "leave out examples without a label: tanager.data.subset"),
        (LABELS.astype(np.float32), "must be one whole number for each example"),
        (LABELS[:, None], "must be one whole number for each example"),
    ],
)
def test_labels_that_name_no_class_are_refused(source, labels, message):
    data = source(as_source({"x": LOGITS, "label": labels}))
    with pytest.raises(ValueError, match=re.escape(message)):
        Classification(predict, data, CLASSES, 5)(jnp.float32(1))


@pytest.mark.parametrize("data", [{"x": LOGITS, "y": LABELS}, (LOGITS, LABELS)])
def test_data_without_labels_by_that_name_are_refused(data):
    with pytest.raises(ValueError, match="must have a label in each example"):
        Classification(predict, data, CLASSES)


def test_labels_in_memory_are_looked_at_before_training():
    with pytest.raises(ValueError, match=re.escape("data['label'] (=2)")):
        Classification(predict, {"x": LOGITS, "label": LABELS}, ("a", "b"))


@pytest.mark.parametrize("classes", [CLASSES[:3], (*CLASSES, "e")])
def test_logits_that_are_not_one_for_each_class_are_refused(classes):
    evaluate = Classification(predict, {"x": LOGITS, "label": LABELS}, classes)
    with pytest.raises(ValueError, match=re.escape("must give one logit for each")):
        evaluate(jnp.float32(1))


### The vote


def shaken(key, example):
    return {**example, "x": example["x"] + jax.random.normal(key, (4,))}


def voted(size=23, views=7, augment=shaken, predict=predict, x=LOGITS):
    data = {"x": x, "label": LABELS}
    return Classification(predict, data, CLASSES, size, augment=augment, views=views)


@pytest.mark.parametrize("size", [5, 100])
def test_the_vote_is_by_majority_whatever_the_batches(size):
    result = voted(size)(jnp.float32(1))
    plain = voted(views=0, augment=None)(jnp.float32(1))
    right = 0
    for number, (logits, label) in enumerate(zip(LOGITS, LABELS, strict=True)):
        own = jax.random.fold_in(jax.random.key(module._VOTE_SEED), number)
        keys = [jax.random.fold_in(own, view) for view in range(7)]
        seen = [logits + np.asarray(jax.random.normal(key, (4,))) for key in keys]
        ballots = np.bincount(np.argmax(seen, axis=1), minlength=4)
        right += ballots.argmax() == label
    assert result.vote_accuracy == right / 23
    assert result.vote_accuracy != result.accuracy
    assert plain.vote_accuracy is None
    assert result.accuracy == plain.accuracy
    assert result.loss == pytest.approx(plain.loss, rel=1e-6)
    assert result.per_class == plain.per_class


def test_votes_count_and_not_how_sure_they_are():
    """Two small votes for class 2 against a large one for class 1."""

    def augment(key, example):
        return {**example, "key": jax.random.key_data(key)}

    seed = jax.random.key(module._VOTE_SEED)

    def loudest(params, example):
        keys = [jax.random.fold_in(jax.random.fold_in(seed, 0), k) for k in range(3)]
        first = jnp.all(example["key"] == jax.random.key_data(keys[0]))
        return jnp.where(first, 9 * jax.nn.one_hot(1, 3), jax.nn.one_hot(2, 3))

    data = {"key": np.zeros((1, 2), np.uint32), "label": np.array([2], np.int32)}
    evaluate = Classification(loudest, data, ("a", "b", "c"), augment=augment, views=3)
    assert evaluate(None).vote_accuracy == 1


def test_of_equally_many_votes_the_first_class_wins():
    """As NumPy's argmax of counts, which the TAN paper's code uses."""

    def augment(key, example):
        own = jax.random.fold_in(jax.random.key(module._VOTE_SEED), example["number"])
        first = jax.random.key_data(jax.random.fold_in(own, 0))
        odd = jnp.any(jax.random.key_data(key) != first).astype(jnp.int32)
        return {**example, "choice": 3 - 2 * odd}

    data = {
        "number": np.arange(4, dtype=np.int32),
        "choice": np.zeros(4, np.int32),
        "label": np.array([1, 3, 1, 0], np.int32),
    }
    evaluate = Classification(
        lambda params, example: jax.nn.one_hot(example["choice"], 4),
        data,
        CLASSES,
        augment=augment,
        views=2,
    )
    assert evaluate(None).vote_accuracy == 0.5


def test_the_memory_of_a_vote_does_not_grow_with_its_views():
    def temporary(views):
        def predict(params, example):
            return example["x"].reshape(4, -1).sum(1) * params

        def augment(key, example):
            return {**example, "x": jnp.sin(example["x"] + jax.random.normal(key))}

        evaluate = voted(8, views, augment, predict, np.zeros((23, 4000), np.float32))
        batch = {"x": jnp.zeros((8, 4000)), "label": jnp.zeros(8, jnp.int32)}
        mask, rows = jnp.ones(8, bool), jnp.arange(8, dtype=jnp.int32)
        count: Any = jax.jit(evaluate._count)
        physical = PhysicalBatch(batch, mask, rows)
        compiled = count.lower(jnp.float32(1), physical).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary(64) < temporary(2) + 10_000


@pytest.mark.parametrize("augment, views", [(shaken, 0), (None, 2)])
def test_views_without_augmentation_are_refused_and_the_other_way_round(augment, views):
    message = f"views (={views}) must be at least 1 with `augment` and 0 without"
    with pytest.raises(ValueError, match=re.escape(message)):
        voted(views=views, augment=augment)
