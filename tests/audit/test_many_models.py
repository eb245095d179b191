"""Many models in one program are the models that `tanager.train` makes, one by one."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from parts import parts, train
from tanager.audit.batching import over_models
from tanager.audit.many_models import ManyModels, with_rates
from tanager.models.layers import Conv, Linear
from tanager.privacy.mechanism import Mechanism
from tanager.seed import Seed


class Small(eqx.Module):
    conv: Conv
    head: Linear

    def __init__(self, key):
        keys = jax.random.split(key)
        self.conv = Conv(1, 4, 3, stride=2, bias=True, key=keys[0])
        self.head = Linear(64, 3, key=keys[1])

    def __call__(self, image):
        return self.head(jnp.tanh(self.conv(image)).reshape(-1))


def loss(model, example):
    image, label = example
    return optax.softmax_cross_entropy_with_integer_labels(model(image), label)


def linear_loss(params, example):
    image, label = example
    logits = image.reshape(-1) @ params
    return optax.softmax_cross_entropy_with_integer_labels(logits, label)


@pytest.fixture(scope="module")
def images():
    rng = np.random.default_rng(0)
    pixels = rng.normal(size=(24, 8, 8, 1)).astype(np.float32)
    return pixels, rng.integers(0, 3, 24).astype(np.int32)


@pytest.fixture(scope="module")
def small():
    return Small(jax.random.key(0))


def side_by_side(model, data, mechanism, **options):
    settings = {"loss": loss, "params": model, "data": data, "mechanism": mechanism}
    own = {"clip_norm": 0.5, "declared_examples": 24, "ema_decay": 0.0}
    rated = {"optimizer": with_rates(optax.sgd)}
    problem, algorithm, _, _ = parts(settings | own | rated | options)
    return ManyModels(problem, algorithm, strategy="bk")


def trained_alone(model, data, mechanism, seed, learning_rate, **options):
    result = train(
        params=model,
        data=data,
        mechanism=mechanism,
        clip_norm=0.5,
        optimizer=optax.sgd(learning_rate),
        ema_decay=0.0,
        physical_batch_size=8,
        strategy="per_example",
        seed=seed,
        **{"loss": loss} | options,
    )
    return result.params


def noisy(key, example):
    image, label = example
    return image + 0.1 * jax.random.normal(key, image.shape), label


@pytest.mark.parametrize(
    ("rate", "options", "number"),
    [
        (0.1, {"style": "automatic"}, 0),
        (
            0.7,
            {"augment": noisy, "augmentation_multiplicity": 2, "loss": linear_loss},
            1,
        ),
    ],
    ids=["gathered", "all rows"],
)
def test_each_is_the_model_that_train_makes(small, images, rate, options, number):
    """The first of two, or the second."""
    mechanism, of_example = Mechanism(rate, 0.5, 4), options.get("loss", loss)
    model = small if of_example is loss else jnp.zeros((64, 3))
    many = side_by_side(model, images, mechanism, **options)
    rates = np.array([0.5, 1.0])
    secrets = [Seed.from_int(number) for number in (1, 2)]
    told = []
    params = many.train(secrets, rates, np.zeros((2, 24), bool), told.append)
    assert told == [1, 2, 3]
    assert many._update._jitted._cache_size() == 1  # pyrefly: ignore[missing-attribute]
    some = jnp.asarray(images[0][:3]), images[1][:3]
    losses = many.losses(params, some)
    assert losses.shape == (2, 3)
    own = {"seed": number + 1, "learning_rate": rates[number]}
    alone = trained_alone(model, images, mechanism, **own, **options)
    leaves = jax.tree.leaves(eqx.filter(alone, eqx.is_inexact_array))
    for each, expected in zip(jax.tree.leaves(params), leaves, strict=True):
        np.testing.assert_allclose(each[number], expected, rtol=2e-4, atol=2e-5)
    own = jax.tree.map(lambda leaf: leaf[number], params)
    own = eqx.combine(own, eqx.partition(model, eqx.is_inexact_array)[1])
    expected = eqx.filter_jit(jax.vmap(of_example, (None, 0)))(own, some)
    np.testing.assert_allclose(losses[number], expected, rtol=1e-5)


def test_an_example_left_out_changes_nothing_but_its_own_part(images):
    """Sampling, noise and the divisor stay: without noise, the last example's alone."""
    options = {"loss": linear_loss, "declared_examples": 23}
    whole = Mechanism(1.0, 0.0, 1)
    many = side_by_side(np.zeros((64, 3), np.float32), images, whole, **options)
    left_out = np.zeros((2, 24), bool)
    left_out[1, -1] = True
    params = many.train([Seed.from_int(1)] * 2, np.ones(2), left_out)
    apart = [each[0] - each[1] for each in jax.tree.leaves(params)]
    norm = jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in apart))
    assert norm == pytest.approx(1 / 23, rel=1e-3)


def test_mapping_over_models_is_vmap():
    """Calls, loops, branches, convolutions of both, and what belongs to no model."""

    def function(kernel, image, number, key):
        smooth = jax.lax.conv(image[None], kernel, (1, 1), "SAME")[0]
        shared = jnp.tanh(image).sum()
        turned = jax.lax.scan(lambda s, row: (s + row.sum(), s), number, smooth)
        branch = jax.lax.cond(number > 0, jnp.sin, jnp.cos, number)
        noise = jax.jit(lambda key: jax.random.normal(key, (2,)))(key)
        again = jax.lax.conv(smooth[None], kernel, (1, 1), "SAME")
        return turned, branch, {"n": noise, "s": shared}, again

    rng = np.random.default_rng(0)
    kernel = jnp.asarray(rng.normal(size=(5, 2, 2, 3, 3)), jnp.float32)
    image = jnp.asarray(rng.normal(size=(2, 6, 6)), jnp.float32)
    arguments = (
        kernel,
        image,
        jnp.arange(-2.0, 3.0),
        jax.random.split(jax.random.key(0), 5),
    )
    axes = (0, None, 0, 0)
    expected = jax.vmap(function, axes)(*arguments)
    found = jax.jit(over_models(function, axes))(*arguments)
    for one, other in zip(
        jax.tree.leaves(found), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_bad_input_is_refused(small, images):
    mechanism = Mechanism(0.5, 1.0, 1)
    with pytest.raises(ValueError, match=r"examples \(=0\) must be at least 1"):
        side_by_side(small, images, mechanism, declared_examples=0)
    with pytest.raises(ValueError, match="clip_norm"):
        side_by_side(small, images, mechanism, clip_norm=-1.0)
    with pytest.raises(TypeError, match=r"\(36,\) and \(64,\)"):
        fewer = (images[0][:, :5, :5], images[1])
        side_by_side(small, fewer, mechanism)
