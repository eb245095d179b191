"""A model's parts: front, last stage and head, and its mirrored form."""

import functools
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from references.parity import random
from tiny_models import KEY, TINY, few_filters, shapes

from cases import in_full
from tanager import models
from tanager.models import dead_leaves, tuning
from tanager.models.model import StagedModel


def image(shape):
    return np.random.default_rng(0).standard_normal(shape, np.float32)


STAGED = ["bit", "convnext", "dinov2", "dinov3", "efficientnet", "vit", "wrn"]


@pytest.mark.parametrize("name", in_full(STAGED, "dinov2"))
def test_the_last_stage_is_all_that_the_back_reads(name):
    model = jax.tree.map(jnp.asarray, random(TINY[name]))
    assert isinstance(model, StagedModel)
    same, marks = tuning.fine_tune(model, "last-stage", key=KEY)
    assert same is model
    last, frozen = eqx.partition(model, marks)
    broken = jax.tree.map(lambda leaf: np.full_like(leaf, np.nan), model)

    @eqx.filter_jit
    def run(model, without_last, without_rest, image):
        seen = without_last.front(image)
        return seen, without_rest.head(without_rest.back(seen)), model(image)

    parts = eqx.combine(frozen, broken), eqx.combine(last, broken)
    seen, logits, whole_logits = run(model, *parts, image((32, 32, 3)))
    assert np.isfinite(seen).all()
    np.testing.assert_allclose(logits, whole_logits, rtol=1e-5, atol=1e-6)
    shares = [leaf.size for leaf in jax.tree.leaves(eqx.filter(last, eqx.is_array))]
    whole = [leaf.size for leaf in jax.tree.leaves(eqx.filter(model, eqx.is_array))]
    assert sum(model.head.weight.shape) < sum(shares) < sum(whole)


@pytest.mark.parametrize(
    "name",
    in_full(
        ["wrn-10-1", "scattering-cnn", "dead-leaves-linear", "scattering-linear"],
        "scattering-linear",  # as dead leaves: a layer on fixed features
    ),
)
def test_a_mirrored_image_has_the_same_logits_where_it_should(name, monkeypatch):
    few = few_filters()
    monkeypatch.setattr(dead_leaves, "constants", lambda: few)
    shape = (9, 12, 3)

    @eqx.filter_jit
    def run(model, image):
        return model(image), model.head(model.head_input_of(model.fronts(image)))

    for mirror in (True, False):
        options = {"classes": 3, "image_shape": shape, "mirror": mirror}
        model = random(functools.partial(models.create, name, key=KEY, **options))
        assert isinstance(model, StagedModel)
        logits, found = run(model, image(shape))
        mirrored, _ = run(model, image(shape)[:, ::-1])
        assert np.allclose(logits, mirrored, rtol=1e-4, atol=1e-5) == mirror
        np.testing.assert_allclose(logits, found, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", sorted({*TINY} - {*STAGED}))
def test_a_model_of_one_stage_is_refused(name):
    model = shapes(name)
    kind = re.escape(type(model).__name__)
    match = rf"^fine_tune \(='last-stage'\) is not marked in {kind}: use all"
    with pytest.raises(ValueError, match=match):
        tuning.fine_tune(model, "last-stage", key=KEY)
