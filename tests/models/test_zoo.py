import functools
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from references import parity

from tanager import models
from tanager.models import bit, zoo


CLASSES = 7
SHAPE = (224, 224, 3)  # a multiple of every patch side
# Everything small enough to compile here; the published networks are the same code, and
# the tests of their own files check their shapes.
TINY = {
    "tiny bit": functools.partial(bit.BiT, bit.Variant((1, 1), 1)),
}
CASES = [
    ("small-cnn", (8, 8, 1), "pre-activation", True),
    ("small-cnn", (9, 17, 2), "post-activation", False),
    ("small-cnn", (28, 28, 1), "post-activation", True),
    ("small-cnn", (32, 32, 3), "pre-activation", False),
    ("wrn-10-1", (8, 12, 3), "post-activation", True),
    ("mlp", (8, 9, 2), "pre-activation", True),
    ("linear", (2, 3, 1), "post-activation", False),
    ("lenet", (16, 18, 1), "pre-activation", True),
    ("tiny bit", (16, 11, 3), "pre-activation", True),
]


def _images(count, shape):
    pixels = np.random.default_rng(0).standard_normal((count, *shape))
    return jnp.asarray(pixels.astype(np.float32))


@functools.cache
def _create(name, shape, order, standardised, seed=0):
    if name in TINY:
        return TINY[name](CLASSES, shape[2], key=jax.random.key(seed))
    return models.create(
        name,
        classes=CLASSES,
        image_shape=shape,
        key=jax.random.key(seed),
        normalisation_order=order,
        weight_standardisation=standardised,
    )


@pytest.mark.parametrize("case", CASES, ids=str)
class TestEveryModel:
    def test_logits_are_finite_and_alike_in_any_company(self, case):
        model, images = _create(*case), _images(3, case[1])
        run = eqx.filter_jit(eqx.filter_vmap(model))
        logits = run(images)
        assert logits.shape == (3, CLASSES)
        assert logits.dtype == jnp.float32
        assert np.isfinite(logits).all()
        # Other examples, even broken ones, leave an example's logits as they are.
        company = images.at[1].set(jnp.nan).at[2].multiply(1e3)
        changed = run(company)
        np.testing.assert_array_equal(changed[0], logits[0])
        # NaN, or zeros: XLA on CPU takes some ReLUs of NaN for 0.
        assert not np.array_equal(changed[1], logits[1])

    def test_gradient_is_finite_and_not_zero_on_every_leaf(self, case):
        model, image = _create(*case), _images(1, case[1])[0]

        @jax.jit
        def gradient(model):
            return jax.grad(lambda m: -jax.nn.log_softmax(m(image))[2])(model)

        for path, leaf in jax.tree_util.tree_leaves_with_path(gradient(model)):
            name = jax.tree_util.keystr(path)
            assert np.isfinite(leaf).all(), name
            assert np.abs(leaf).max() > 1e-6, name

    def test_the_same_key_gives_the_same_weights_and_another_does_not(self, case):
        first, again, other = (
            jax.tree.map(np.asarray, _create.__wrapped__(*case, seed=seed))
            for seed in (0, 0, 1)
        )
        assert eqx.tree_equal(first, again)
        for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(other), strict=True):
            assert a.ndim == 1 or not np.array_equal(a, b)
        weights = [w for w in jax.tree.leaves(first) if w.ndim > 1]
        firsts = {float(w.ravel()[0] * np.sqrt(w[..., 0].size)) for w in weights}
        assert len(firsts) == len(weights)  # no key drew two layers

    def test_bfloat16_images_run_the_model_in_bfloat16(self, case):
        model, image = _create(*case), _images(1, case[1])[0]
        exact = eqx.filter_jit(model)(image)
        narrow = eqx.filter_jit(model)(image.astype(jnp.bfloat16))
        assert narrow.dtype == jnp.bfloat16
        spread = float(jnp.max(jnp.abs(exact)))
        difference = np.abs(np.float32(narrow) - np.asarray(exact)).max()
        assert difference < 0.1 * spread
        all_narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), model)
        again = eqx.filter_eval_shape(all_narrow, image.astype(jnp.bfloat16))
        assert again.dtype == jnp.bfloat16

    def test_what_is_not_one_standardised_image_is_refused(self, case):
        model = eqx.filter_eval_shape(_create, *case)
        height, width, channels = case[1]
        batch = jnp.zeros((2, *case[1]), jnp.float32)
        with pytest.raises(ValueError, match=re.escape("use jax.vmap(model)")):
            model(batch)
        wrong = jnp.zeros((height, width, channels + 1), jnp.float32)
        message = f"must be (H, W, {channels})"
        with pytest.raises(ValueError, match=re.escape(message)):
            model(wrong)
        with pytest.raises(ValueError, match="must be floating point"):
            model(jnp.zeros(case[1], jnp.uint8))


@pytest.mark.parametrize("name", [*zoo.MODELS, "wrn-22-2"])
def test_every_name_builds_a_model_of_the_right_shape(name):
    model = eqx.filter_eval_shape(
        models.create, name, classes=10, image_shape=SHAPE, key=jax.random.key(0)
    )
    image = jax.ShapeDtypeStruct(SHAPE, jnp.float32)
    logits = eqx.filter_eval_shape(lambda m, x: m(x), model, image)
    assert logits.shape == (10,)
    assert logits.dtype == jnp.float32
    if name.startswith("wrn"):
        depth = int(name.split("-")[1])
        assert isinstance(model, models.WideResNet)
        assert len(model.blocks) == (depth - 4) // 2
        assert model.blocks[-1].conv2.weight.shape[-1] == 64 * int(name.split("-")[2])


def test_the_small_cnn_has_the_stated_layers():
    def parts(shape):
        model = eqx.filter_eval_shape(models.SmallCNN, 10, shape, key=jax.random.key(0))
        count = models.count_parameters(model)
        return len(model.stages), model.head.weight.shape[0], count

    def expected(stages, side, channels):
        convolutions = 9 * 32 * (channels + 32 * (stages - 1)) + 64 * stages
        features = 32 * side * side
        return stages, features, convolutions + features * 10 + 10

    assert parts((8, 8, 1)) == expected(2, 4, 1)
    assert parts((28, 28, 1)) == expected(3, 7, 1)
    assert parts((32, 32, 3)) == expected(3, 8, 3)


def test_the_small_cnn_refuses_another_image_size():
    model = models.create(
        "small-cnn", classes=10, image_shape=(8, 8, 1), key=jax.random.key(0)
    )
    message = "image shape (=(9, 8, 1)) must be (8, 8, 1)"
    with pytest.raises(ValueError, match=re.escape(message)):
        model(jnp.zeros((9, 8, 1), jnp.float32))


@pytest.mark.parametrize("name", ["small-cnn", "wrn-10-1"])
def test_options_reach_the_model(name):
    def inspect(order, standardised):
        model = _create(name, (8, 8, 1), order, standardised)
        if isinstance(model, models.SmallCNN):
            return model.stages[0].order, type(model.stages[0].conv)
        assert isinstance(model, models.WideResNet)
        return model.blocks[0].order, type(model.blocks[0].conv1)

    assert inspect("pre-activation", True) == (
        "pre-activation",
        models.StandardisedConv,
    )
    assert inspect("post-activation", False) == ("post-activation", models.Conv)


def test_the_small_cnn_normalises_in_the_order_asked_for():
    """After the last ReLU features are never negative; after the last norm, some."""
    image = _images(1, (8, 8, 1))[0]
    for order, negative in [("pre-activation", False), ("post-activation", True)]:
        features = image
        model = models.SmallCNN(
            CLASSES, (8, 8, 1), normalisation_order=order, key=jax.random.key(0)
        )
        for stage in model.stages:
            features = stage(features)
        assert bool((features < 0).any()) == negative


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "wrn-16-44x"}, "did you mean wrn-16-4?"),
        (
            {"name": "smal-cnn"},
            "model (='smal-cnn') must be one of small-cnn, wrn-16-4",
        ),
        ({"name": "smal-cnn"}, "did you mean small-cnn?"),
        ({"name": "transformer"}, "or any wrn-DEPTH-WIDTH with a depth of 6n + 4"),
        ({"name": "wrn-17-4"}, "depth (=17) must be 6n + 4: the nearest are 16, 22"),
        ({"normalisation": "batch"}, "mixes the examples of a batch"),
        ({"normalisation": "batch"}, ": use group"),
        ({"normalisation": "grop"}, "normalisation (='grop') must be one of group"),
        ({"normalisation_order": "preactivation"}, "did you mean pre-activation?"),
        ({"image_shape": (32, 32)}, "image_shape (=(32, 32)) must be (height, width,"),
        ({"image_shape": (2, 8, 8, 1)}, "(height, width, channels): no batch axis"),
        ({"name": "vit-tiny"}, "did you mean vit-tiny-16?"),
        (
            {"name": "vit-huge-14", "image_shape": (32, 32, 3)},
            "image_height (=32) must be a multiple of the patch side 14: use 28 or 42",
        ),
        ({"name": "vit-tiny-16", "image_shape": (64,)}, "must be (height, width,"),
        (
            {"name": "mlp", "normalisation_order": "preactivation"},
            "did you mean pre-activation?",
        ),
        ({"image_shape": (7, 8, 1)}, "image_height (=7) must be at least 8"),
        ({"image_shape": (8, 7, 1)}, "image_width (=7) must be at least 8"),
        (
            {"name": "bit-50x1", "image_shape": (8, 7, 1)},
            "image_width (=7) must be at least 8: enlarge the images",
        ),
        ({"name": "bit-152x2"}, "did you mean bit-152x4?"),
        ({"image_shape": (8, 8, 0)}, "image_channels (=0) must be at least 1"),
        ({"classes": 1}, "classes (=1) must be at least 2"),
    ],
)
def test_create_refuses_with_a_remedy(change, message):
    options = {"name": "small-cnn", "classes": 10, "image_shape": (8, 8, 1)} | change
    for name in {options.pop("name")}:
        with pytest.raises(ValueError, match=re.escape(message)):
            models.create(name, **options, key=jax.random.key(0))


def test_every_name_says_what_it_is():
    for name, entry in models.ENTRIES.items():
        assert entry.name == name
        assert entry.source
        assert entry.family in ("convolutional", "transformer", "flat")
    assert list(models.ENTRIES) == list(zoo.MODELS)
    assert models.find("wrn-16-4") is models.ENTRIES["wrn-16-4"]
    other = models.find("wrn-22-2")
    assert (other.name, other.image_shape) == ("wrn-22-2", (32, 32, 3))


@pytest.mark.parametrize("file", ["bit", "vit"])
def test_weights_are_offered_under_names_that_timm_has(file):
    for name, reference in parity.read(file).items():
        prefix = "hf:timm/"
        known = [entry.weights for entry in models.PUBLISHED.get(name, ())]
        assert all(weights.startswith(prefix) for weights in known)
        offered = reference["weights"]
        assert {weights.removeprefix(prefix) for weights in known} <= set(offered)
        assert bool(known) == bool(offered)
