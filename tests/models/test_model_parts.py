"""A model's parts: front, last stage and head, and its mirrored form."""

import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import KEY, TINY

from tanager import models
from tanager.models import tuning
from tanager.models.model import StagedModel


STAGED = ["bit", "convnext", "dinov2", "dinov3", "efficientnet", "vit", "wrn"]


@pytest.mark.parametrize("name", STAGED)
def test_the_last_stage_is_all_that_the_back_reads(name):
    model = TINY[name]()
    assert isinstance(model, StagedModel)
    same, marks = tuning.fine_tune(model, "last-stage", key=KEY)
    assert same is model
    last, frozen = eqx.partition(model, marks)
    broken = jax.tree.map(lambda leaf: jnp.full_like(leaf, jnp.nan), model)
    image = jax.random.normal(KEY, (32, 32, 3))
    front = eqx.filter_jit(lambda m: m.front(image))
    seen = front(eqx.combine(frozen, broken))
    assert np.isfinite(seen).all()
    logits = eqx.filter_jit(lambda m: m.head(m.back(seen)))(eqx.combine(last, broken))
    whole_logits = eqx.filter_jit(model)(image)
    np.testing.assert_allclose(logits, whole_logits, rtol=1e-5, atol=1e-6)
    shares = [leaf.size for leaf in jax.tree.leaves(eqx.filter(last, eqx.is_array))]
    whole = [leaf.size for leaf in jax.tree.leaves(eqx.filter(model, eqx.is_array))]
    assert sum(model.head.weight.shape) < sum(shares) < sum(whole)


@pytest.mark.parametrize(
    "name", ["wrn-10-1", "scattering-linear", "scattering-cnn", "dead-leaves-linear"]
)
def test_a_mirrored_image_has_the_same_logits_where_it_should(name):
    shape = (9, 12, 3)
    image = jax.random.normal(KEY, shape)
    for mirror in (True, False):
        model = models.create(
            name, classes=3, image_shape=shape, key=KEY, mirror=mirror
        )
        logits, mirrored = model(image), model(image[:, ::-1])
        assert np.allclose(logits, mirrored, rtol=1e-4, atol=1e-5) == mirror
        assert isinstance(model, StagedModel)
        found = model.head(model.head_input_of(model.fronts(image)))
        np.testing.assert_allclose(logits, found, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", sorted({*TINY} - {*STAGED}))
def test_a_model_of_one_stage_is_refused(name):
    model = eqx.filter_eval_shape(TINY[name])
    kind = re.escape(type(model).__name__)
    match = rf"^fine_tune \(='last-stage'\) is not marked in {kind}: use all"
    with pytest.raises(ValueError, match=match):
        tuning.fine_tune(model, "last-stage", key=KEY)
