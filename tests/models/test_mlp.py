import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tanager import models
from tanager.models.mlp import MLP


def _count(name, shape, classes):
    return models.count_parameters(
        jax.eval_shape(
            lambda key: jax.tree.leaves(
                models.create(name, classes=classes, image_shape=shape, key=key)
            ),
            jax.random.key(0),
        )
    )


def test_the_logits_are_the_matrix_products_written_out():
    model = MLP(3, (2, 3, 2), hidden=(7, 4), key=jax.random.key(0))
    image = np.random.default_rng(0).standard_normal((2, 3, 2))
    values = image.reshape(-1)
    for linear in model.hidden:
        values = np.maximum(values @ np.float64(linear.weight), 0)
    expected = values @ np.float64(model.head.weight)
    assert len(model.hidden) == 2
    np.testing.assert_allclose(
        model(jnp.asarray(image, jnp.float32)), expected, rtol=1e-5, atol=1e-6
    )


def test_the_named_sizes():
    hidden = 784 * 1024 + 1024 + 1024 * 1024 + 1024
    assert _count("mlp", (28, 28, 1), 10) == hidden + 1024 * 10 + 10
    assert _count("linear", (2048,), 1000) == 2048 * 1000 + 1000
    assert _count("linear", (4, 5, 3), 10) == 60 * 10 + 10


def test_feature_vectors_are_taken_and_other_shapes_refused():
    model = MLP(3, (5,), hidden=(), key=jax.random.key(0))
    assert model(jnp.ones(5, jnp.float32)).shape == (3,)
    message = "input shape (=(2, 5)) must be (5,): a model takes ONE example"
    with pytest.raises(ValueError, match=re.escape(message)):
        model(jnp.ones((2, 5), jnp.float32))
    with pytest.raises(ValueError, match="must be floating point"):
        model(jnp.ones(5, jnp.int32))
    with pytest.raises(ValueError, match=re.escape("image_size (=0) must be at least")):
        MLP(3, (5, 0), key=jax.random.key(0))
