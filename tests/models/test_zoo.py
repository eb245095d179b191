import functools
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from references import parity
from tiny_models import few_filters

from cases import in_full
from tanager import models
from tanager.models import bit, convnext, dead_leaves, dino, vit


CLASSES = 7


def _awake(model):
    """Branches as they are after training: at first their factors are nearly 0."""

    def one(path, leaf):
        return jnp.ones_like(leaf) if path[-1].name == "gain" else leaf

    return jax.tree_util.tree_map_with_path(one, model)


# Everything small enough to compile here; the published networks are the same code, and
# the tests of their own files check their shapes.
TINY = {
    "tiny bit": lambda shape, **options: bit.BiT(
        bit.Variant((1,), 1), channels_in=shape[2], **options
    ),
    "tiny vit": lambda shape, **options: vit.VisionTransformer(
        vit.Variant(12, 1, 3), 4, image_shape=shape, **options
    ),
    "tiny convnext": lambda shape, **options: _awake(
        convnext.ConvNeXt(
            convnext.Variant((1, 1), (8, 12)), channels_in=shape[2], **options
        )
    ),
    "tiny dinov2": lambda shape, **options: _awake(
        dino.DINO(
            dino.Variant(vit.Variant(12, 1, 3), 4, 16, registers=1),
            image_shape=shape,
            **options,
        )
    ),
    "tiny dinov3": lambda shape, **options: _awake(
        dino.DINO(
            dino.Variant(vit.Variant(12, 2, 3), 4, 16, True, 1, rotary=True),
            image_shape=shape,
            **options,
        )
    ),
}
CASES = [
    ("small-cnn", (8, 8, 1), {"weight_standardisation": False}),
    ("small-cnn", (9, 17, 2), {"normalisation_order": "post-activation"}),
    ("wrn-10-1", (8, 12, 3), {}),
    ("mlp", (8, 9, 2), {}),
    ("lenet", (16, 18, 1), {}),
    ("scattering-linear", (9, 12, 2), {}),
    ("scattering-cnn", (9, 17, 2), {}),
    ("dead-leaves-linear", (8, 11, 1), {}),
    ("tiny bit", (16, 11, 3), {}),
    ("tiny vit", (8, 12, 3), {}),
    ("tiny convnext", (9, 13, 3), {}),
    ("tiny dinov2", (8, 12, 3), {}),
    ("tiny dinov3", (8, 12, 3), {}),
]


def _images(count, shape):
    return np.random.default_rng(0).standard_normal((count, *shape), np.float32)


def _make(name, shape, options, key):
    if name in TINY:
        return TINY[name](shape, classes=CLASSES, key=key)
    return models.create(name, classes=CLASSES, image_shape=shape, key=key, **options)


@functools.cache
def _made(number):
    """Return a model, and another by the same program."""
    make = eqx.filter_jit(functools.partial(_make, *CASES[number]))
    return make(jax.random.key(0)), make(jax.random.key(1))


@functools.cache
def _logits(number):
    """Return a program, its logits of three images, and the first one's gradient."""

    @jax.jit
    def run(model, images):
        def loss(model):
            logits = jax.vmap(model)(images)
            return -jax.nn.log_softmax(logits[0])[2], logits

        gradient, logits = jax.grad(loss, has_aux=True)(model)
        return logits, gradient

    return run, *run(_made(number)[0], _images(3, CASES[number][1]))


@pytest.fixture(autouse=True, scope="module")
def _few_filters():
    with pytest.MonkeyPatch.context() as patch:
        few = few_filters()
        patch.setattr(dead_leaves, "constants", lambda: few)
        yield


# Their layers are those of wrn-10-1 (two), of small-cnn, and of two transformers.
REPEATED = [
    ("tiny bit", (16, 11, 3), {}),
    ("small-cnn", (9, 17, 2), {"normalisation_order": "post-activation"}),
    ("scattering-cnn", (9, 17, 2), {}),
    ("tiny dinov2", (8, 12, 3), {}),
]
NUMBERS = in_full(range(len(CASES)), *map(CASES.index, REPEATED))


@pytest.mark.parametrize("number", NUMBERS, ids=lambda n: str(CASES[n]))
class TestEveryModel:
    def test_logits_are_finite_and_alike_in_any_company_and_bfloat16(self, number):
        model, images = _made(number)[0], _images(3, CASES[number][1])
        run, logits, _ = _logits(number)
        assert logits.shape == (3, CLASSES)
        assert logits.dtype == jnp.float32
        assert np.isfinite(logits).all()
        # Other examples, even broken ones, leave an example's logits as they are.
        company = np.array([images[0], images[1] * np.nan, images[2] * 1e3], np.float32)
        changed, _ = run(model, company)
        np.testing.assert_array_equal(changed[0], logits[0])
        # NaN, or zeros: XLA on CPU takes some ReLUs of NaN for 0.
        assert not np.array_equal(changed[1], logits[1])
        image = images[0].astype(jnp.bfloat16)
        narrow = jax.jit(lambda model, image: model(image))(model, image)
        assert narrow.dtype == jnp.bfloat16
        difference = np.abs(np.float32(narrow) - np.asarray(logits[0])).max()
        assert difference < 0.1 * np.abs(logits[0]).max()

        def all_narrow(model, image):
            return jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), model)(image)

        assert jax.eval_shape(all_narrow, model, image).dtype == jnp.bfloat16

    def test_gradient_is_finite_and_not_zero_on_every_leaf(self, number):
        *_, gradient = _logits(number)
        for path, leaf in jax.tree_util.tree_leaves_with_path(gradient):
            name = jax.tree_util.keystr(path)
            assert np.isfinite(leaf).all(), name
            assert np.abs(leaf).max() > 1e-6, name

    def test_another_key_gives_other_weights_and_no_key_draws_two_layers(self, number):
        first, other = jax.tree.map(np.asarray, _made(number))
        for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(other), strict=True):
            assert a.ndim == 1 or not np.array_equal(a, b)
        weights = [w for w in jax.tree.leaves(first) if w.ndim > 1]
        firsts = {float(w.ravel()[0] * np.sqrt(w[..., 0].size)) for w in weights}
        assert len(firsts) == len(weights)

    def test_what_is_not_one_standardised_image_is_refused(self, number):
        (model, _), shape = _made(number), CASES[number][1]
        height, width, channels = shape
        images = [
            ((2, *shape), jnp.float32, "use jax.vmap(model)"),
            ((height, width, channels + 1), jnp.float32, f"must be (H, W, {channels})"),
            (shape, jnp.uint8, "must be floating point"),
        ]
        if hasattr(model, "image_shape"):
            other = (height + 1, width, channels)
            message = f"image shape (={other}) must be {shape}"
            images.append((other, jnp.float32, message))
        for wrong, dtype, message in images:
            with pytest.raises(ValueError, match=re.escape(message)):
                eqx.filter_eval_shape(model, jax.ShapeDtypeStruct(wrong, dtype))


def test_every_name_says_what_it_is():
    for name, entry in models.ENTRIES.items():
        assert models.find(name) is entry
        assert entry.name == name and entry.source
        assert entry.family in ("convolutional", "transformer", "flat")
    for paper, known in (("Oquab", "dinov2-giant-reg4"), ("Siméoni", "dinov3-base")):
        assert models.find(known).source.startswith(paper)


@pytest.mark.parametrize("name", ["small-cnn", "wrn-16-4", "wrn-22-2", "linear"])
def test_a_name_builds_its_model(name):
    """The larger ones are built by test_counts and test_normaliser_free."""
    entry = models.find(name)
    assert entry.name == name
    model = parity.named(name, entry.image_shape)
    assert model.head.weight.shape[-1] == 10
    if name.startswith("wrn"):
        assert isinstance(model, models.WideResNet)
        depth, width = map(int, name.split("-")[1:])
        assert len(model.blocks) == (depth - 4) // 2
        assert model.blocks[-1].conv2.weight.shape[-1] == 64 * width


@pytest.mark.parametrize("name", ["small-cnn", "wrn-10-1"])
def test_options_reach_the_model(name):
    def inspect(**options):
        key = jax.random.key(0)
        model = eqx.filter_eval_shape(_make, name, (8, 8, 1), options, key)
        if isinstance(model, models.SmallCNN):
            return model.stages[0].order, type(model.stages[0].conv)
        return model.blocks[0].order, type(model.blocks[0].conv1)

    pre, post = "pre-activation", "post-activation"
    assert inspect(normalisation_order=pre, weight_standardisation=True) == (
        pre,
        models.StandardisedConv,
    )
    assert inspect(normalisation_order=post, weight_standardisation=False) == (
        post,
        models.Conv,
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "wrn-16-44x"}, "did you mean wrn-16-4?"),
        (
            {"name": "smal-cnn"},
            "model (='smal-cnn') is unknown: did you mean small",
        ),
        ({"name": "transformer"}, "or any wrn-DEPTH-WIDTH with a depth of 6n + 4"),
        ({"normalisation_order": "preactivation"}, "did you mean pre-activation?"),
        ({"implementation": "tan"}, "must be left out for small-cnn: give None"),
        ({"name": "wrn-16-4", "implementation": "tam"}, "did you mean tan?"),
        ({"image_shape": (32, 32)}, "image_shape (=(32, 32)) must be (height, width,"),
        ({"image_shape": (2, 8, 8, 1)}, "(height, width, channels): no batch axis"),
        ({"image_shape": (7, 8, 1)}, "image_height (=7) must be at least 8"),
        (
            {"name": "bit-50x1", "image_shape": (8, 7, 1)},
            "image_width (=7) must be at least 8: enlarge the images",
        ),
        ({"image_shape": (8, 8, 0)}, "image_channels (=0) must be at least 1"),
        ({"classes": 1}, "classes (=1) must be at least 2"),
    ],
)
def test_create_refuses_with_a_remedy(change, message):
    options = {"name": "small-cnn", "classes": 10, "image_shape": (8, 8, 1)} | change
    with pytest.raises(ValueError, match=re.escape(message)):
        models.create(options.pop("name"), **options, key=jax.random.key(0))


@pytest.mark.parametrize("file", ["bit", "vit", "convnext", "dino", "efficientnet"])
def test_weights_are_offered_under_names_that_timm_has(file):
    for name, reference in parity.read(file).items():
        prefix = "hf:timm/"
        known = [entry.weights for entry in models.PUBLISHED.get(name, ())]
        assert all(weights.startswith(prefix) for weights in known)
        offered = reference["weights"]
        assert {weights.removeprefix(prefix) for weights in known} <= set(offered)
        assert bool(known) == bool(offered)
