import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tanager.bench.workload import Workload


def test_the_same_examples_every_time_with_an_axis_of_views_when_there_are_several():
    one = Workload("linear", (3, 3, 2), classes=4)
    batch, again = one.batch(5), one.batch(5)
    assert batch["image"].shape == (5, 3, 3, 2)
    np.testing.assert_array_equal(batch["image"], again["image"])
    assert set(np.asarray(one.batch(200)["label"])) == {0, 1, 2, 3}
    several = Workload("linear", (3, 3, 2), classes=4, views=7)
    assert several.batch(5)["image"].shape == (5, 7, 3, 3, 2)
    assert several.batch(5)["label"].shape == (5, 7)


@pytest.mark.parametrize("views", [1, 3])
def test_shapes_tell_of_the_arrays(views):
    workload = Workload("mlp", (2, 2, 1), views=views, precision="bfloat16")
    for shapes, arrays in [
        (workload.batch_shapes(4), workload.batch(4)),
        (workload.param_shapes, workload.params()),
    ]:
        found = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), arrays)
        assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), shapes) == found


def test_the_loss_is_the_mean_cross_entropy_of_the_views():
    workload = Workload("linear", (5,), classes=4, views=3)
    params, batch = workload.params(), workload.batch(2)
    example = jax.tree.map(lambda leaf: leaf[1], batch)
    weight, bias = (
        np.asarray(leaf, np.float64) for leaf in (params.head.weight, params.head.bias)
    )
    logits = np.asarray(example["image"], np.float64) @ weight + bias
    shifted = np.log(np.exp(logits).sum(axis=1))
    expected = np.mean(shifted - logits[np.arange(3), np.asarray(example["label"])])
    found = float(jax.jit(workload.loss)(params, example))
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("precision", "dtype", "asked"),
    [
        ("float32", "float32", "[HIGHEST,"),
        ("tf32", "float32", "[HIGH,"),
        ("bfloat16", "bfloat16", "bf16"),
    ],
)
def test_precision_reaches_the_products(precision, dtype, asked):
    workload = Workload("linear", (5,), precision=precision)
    batch = workload.batch(2)
    assert batch["image"].dtype == jnp.dtype(dtype)
    with workload.computing():
        lowered = jax.jit(jax.vmap(workload.loss, (None, 0))).lower(
            workload.params(), batch
        )
    (product,) = [line for line in lowered.as_text().splitlines() if "dot_g" in line]
    assert asked in product


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"precision": "fp32"}, "precision (='fp32') is unknown: did you mean"),
        ({"views": 0}, "views (=0) must be at least 1"),
        ({"model": "wrn-16-5x"}, "did you mean wrn-16-4?"),
        ({"model": "vit-tiny-16"}, "image_height (=8) must be a multiple of"),
    ],
)
def test_what_cannot_be_measured_is_refused(change, message):
    options = {"model": "linear", "image_shape": (8, 8, 3)} | change
    with pytest.raises(ValueError, match=re.escape(message)):
        Workload(**options)
