"""Every parameter meets data where clipping has a fast rule."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest

import tanager
from tanager import models


def _loss(model, example):
    logits = model(example["image"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, example["label"])


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("lenet", (28, 28, 1)),
        ("bit-50x1", (32, 32, 3)),
    ],
)
def test_no_tap_is_left_to_a_slow_rule(name, shape):
    """By `explain`, under a trace: nothing is allocated."""
    model = eqx.filter_eval_shape(
        models.create, name, classes=10, image_shape=shape, key=jax.random.key(0)
    )
    batch = {
        "image": jax.ShapeDtypeStruct((2, *shape), jnp.float32),
        "label": jax.ShapeDtypeStruct((2,), jnp.int32),
    }
    tables = []

    def trace(model, batch):
        grad_fn = tanager.clipped_grad(_loss, clip_norm=1.0, strategy="bk")
        tables.append(grad_fn.explain(model, batch))

    eqx.filter_eval_shape(trace, model, batch)
    (table,) = tables
    leaves = jax.tree.leaves(model)
    assert sorted(row.leaves for row in table.taps) == [
        (number,) for number in range(len(leaves))
    ]
    for row in table.taps:
        if leaves[row.leaves[0]].ndim > 1:
            assert row.norm.endswith("gram")
            assert row.total != "retained"
        else:
            assert row.why == "elementwise: the gradient is small"
