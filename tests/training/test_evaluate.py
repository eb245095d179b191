"""Accuracy and loss are those of all test examples, padding not among them."""

import jax.numpy as jnp
import numpy as np
import pytest

from tanager.training.evaluate import Classification


RANDOM = np.random.default_rng(0)
LOGITS = RANDOM.normal(size=(23, 4)).astype(np.float32)
LABELS = RANDOM.integers(0, 3, 23).astype(np.int32)


def predict(params, example):
    return params * example["x"]


@pytest.mark.parametrize("size", [1, 5, 23, 100])
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


def test_parameters_are_not_baked_in():
    data = {"x": LOGITS, "label": LABELS}
    evaluate = Classification(predict, data, ("a", "b", "c", "d"))
    assert evaluate(jnp.float32(1)).loss != evaluate(jnp.float32(2)).loss
