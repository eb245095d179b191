"""Models as the documentation of each framework writes them, only narrower."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import check, read

from tanager.clipping import clipped_grad


ROWS = 3
STRATEGIES = ("auto",)


@pytest.fixture(autouse=True)
def _promotion():
    """Pooling in Flax divides floats by integers, which our strict setting forbids."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def images(channels_first=False):
    draw = np.random.default_rng(0).standard_normal
    shape = (ROWS, 1, 8, 8) if channels_first else (ROWS, 8, 8, 1)
    return {
        "image": jnp.asarray(draw(shape), jnp.float32),
        "label": jnp.arange(ROWS, dtype=jnp.int32),
    }


def cross_entropy(logits, label):
    return jax.nn.logsumexp(logits) - logits[label]


def fast_taps(loss, params, batch):
    """Names of the rules of all groups that have a Gram norm."""
    return [group.rule.name for group in read(loss, params, batch)[1] if group.grams()]


def test_flax_nnx():
    # The convolutional network of the MNIST tutorial, without batch normalisation.
    nnx = pytest.importorskip("flax.nnx")

    class CNN(nnx.Module):
        def __init__(self, *, rngs):
            self.conv1 = nnx.Conv(1, 4, kernel_size=(3, 3), rngs=rngs)
            self.conv2 = nnx.Conv(4, 6, kernel_size=(3, 3), rngs=rngs)
            self.avg_pool = functools.partial(
                nnx.avg_pool, window_shape=(2, 2), strides=(2, 2)
            )
            self.linear1 = nnx.Linear(24, 16, rngs=rngs)
            self.linear2 = nnx.Linear(16, 10, rngs=rngs)

        def __call__(self, x):
            x = self.avg_pool(nnx.relu(self.conv1(x)))
            x = self.avg_pool(nnx.relu(self.conv2(x)))
            x = x.reshape(x.shape[0], -1)
            return self.linear2(nnx.relu(self.linear1(x)))

    graph, params = nnx.split(CNN(rngs=nnx.Rngs(0)), nnx.Param)

    def loss(params, example):
        logits = nnx.merge(graph, params)(example["image"][None])[0]
        return cross_entropy(logits, example["label"])

    taps = fast_taps(loss, params, images())
    assert (taps.count("convolution"), taps.count("dot")) == (2, 2)
    check(loss, params, images(), strategies=STRATEGIES, dtypes=("float32",))

    def stepped(params, batch):
        out = clipped_grad(loss, clip_norm=1.0, strategy="bk")(params, batch)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, out.sum)
        return nnx.merge(graph, params)(batch["image"])

    assert jax.eval_shape(stepped, params, images()).shape == (ROWS, 10)


def test_flax_linen():
    linen = pytest.importorskip("flax.linen")

    class CNN(linen.Module):
        """The README's convolutional network."""

        @linen.compact
        def __call__(self, x):
            x = linen.relu(linen.Conv(features=4, kernel_size=(3, 3))(x))
            x = linen.avg_pool(x, window_shape=(2, 2), strides=(2, 2))
            x = linen.relu(linen.Conv(features=6, kernel_size=(3, 3))(x))
            x = linen.avg_pool(x, window_shape=(2, 2), strides=(2, 2))
            x = x.reshape((x.shape[0], -1))
            x = linen.relu(linen.Dense(features=16)(x))
            return linen.LayerNorm()(linen.Dense(features=10)(x))

    model = CNN()
    variables = model.init(jax.random.key(0), images()["image"][:1])

    def loss(variables, example):
        logits = model.apply(variables, example["image"][None])[0]
        return cross_entropy(logits, example["label"])

    taps = fast_taps(loss, variables, images())
    assert (taps.count("convolution"), taps.count("dot")) == (2, 2)
    check(loss, variables, images(), strategies=STRATEGIES, dtypes=("float32",))


def test_haiku():
    # The README's perceptron.
    hk = pytest.importorskip("haiku")

    def loss_fn(image, label):
        mlp = hk.Sequential(
            [hk.Linear(30), jax.nn.relu, hk.Linear(20), jax.nn.relu, hk.Linear(10)]
        )
        return cross_entropy(mlp(image.reshape(1, -1))[0], label)

    transformed = hk.without_apply_rng(hk.transform(loss_fn))
    batch = images()
    params = transformed.init(jax.random.key(0), batch["image"][0], batch["label"][0])

    def loss(params, example):
        return transformed.apply(params, example["image"], example["label"])

    assert fast_taps(loss, params, batch).count("dot") == 3
    check(loss, params, batch, strategies=STRATEGIES, dtypes=("float32",))


class CNN(eqx.Module):
    """The network of Equinox's MNIST example."""

    layers: list

    def __init__(self, key):
        one, two, three, four = jax.random.split(key, 4)
        self.layers = [
            eqx.nn.Conv2d(1, 3, kernel_size=4, key=one),
            eqx.nn.MaxPool2d(kernel_size=2),
            jax.nn.relu,
            jnp.ravel,
            eqx.nn.Linear(48, 20, key=two),
            jax.nn.sigmoid,
            eqx.nn.Linear(20, 12, key=three),
            jax.nn.relu,
            eqx.nn.Linear(12, 10, key=four),
            jax.nn.log_softmax,
        ]

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def test_equinox():
    model = CNN(jax.random.key(0))
    batch = images(channels_first=True)

    def loss(model, example):
        return -model(example["image"])[example["label"]]

    arrays, static = eqx.partition(model, eqx.is_inexact_array)

    def loss_of_arrays(arrays, example):
        return loss(eqx.combine(arrays, static), example)

    taps = fast_taps(loss_of_arrays, arrays, batch)
    assert (taps.count("convolution"), taps.count("dot")) == (1, 3)
    check(loss_of_arrays, arrays, batch, strategies=STRATEGIES, dtypes=("float32",))

    def stepped(model, batch):
        out = clipped_grad(loss, clip_norm=1.0, strategy="bk")(model, batch)
        model = eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, out.sum))
        return model(batch["image"][0])

    assert eqx.filter_eval_shape(stepped, model, batch).shape == (10,)


def test_an_optimizer_in_params_is_refused_by_name():
    nnx = pytest.importorskip("flax.nnx")
    train_state = pytest.importorskip("flax.training.train_state")
    import optax

    model, adam = nnx.Linear(2, 3, rngs=nnx.Rngs(0)), optax.adam(0.1)
    params = {"w": jnp.ones(2)}
    state = train_state.TrainState.create(apply_fn=None, params=params, tx=adam)
    optimizers = [nnx.Optimizer(model, adam, wrt=nnx.Param)]
    optimizers += [nnx.ModelAndOptimizer(model, adam, wrt=nnx.Param), state]
    for given in (*optimizers, adam.init(params)):
        grad_fn = clipped_grad(lambda _, x: jnp.sum(x), clip_norm=1.0)
        with pytest.raises(ValueError, match=r"params .* must not hold an optimizer"):
            grad_fn(given, jnp.ones((3, 2)))


def test_a_module_that_is_changed_from_outside_is_told_of_copies():
    nnx = pytest.importorskip("flax.nnx")

    class Counting(nnx.Module):
        def __init__(self):
            self.weight, self.calls = (
                nnx.Param(jnp.ones(2)),
                nnx.Variable(jnp.zeros(())),
            )

        def __call__(self, x):
            self.calls[...] += 1
            return jnp.sum(self.weight[...] * x)

    graph, params, rest = nnx.split(Counting(), nnx.Param, ...)

    def merged(copy):
        return lambda params, x: nnx.merge(graph, params, rest, copy=copy)(x)

    with pytest.raises(ValueError, match="copy=True"):
        clipped_grad(merged(False), clip_norm=1.0)(params, jnp.ones((3, 2)))
    out = clipped_grad(merged(True), clip_norm=1.0)(params, jnp.ones((3, 2)))
    np.testing.assert_allclose(out.norms, 2**0.5, rtol=1e-5)


def test_a_linen_layer_that_changes_its_state_is_told_of_mutable():
    linen = pytest.importorskip("flax.linen")

    class Net(linen.Module):
        @linen.compact
        def __call__(self, x):
            return linen.SpectralNorm(linen.Dense(2))(x, update_stats=True)

    batch = jnp.float32(np.arange(3 * ROWS).reshape(ROWS, 3)) / 9
    variables = Net().init(jax.random.key(0), batch[:1])

    def loss(variables, x):
        return jnp.sum(Net().apply(variables, x[None]) ** 2)

    with pytest.raises(ValueError, match=r"SpectralNorm_0.*mutable=\["):
        clipped_grad(loss, clip_norm=1.0)(variables, batch)

    def returned(variables, x):
        y, _ = Net().apply(variables, x[None], mutable=["batch_stats"])
        return jnp.sum(y**2)

    assert np.all(clipped_grad(returned, clip_norm=1.0)(variables, batch).norms > 0)


@pytest.mark.parametrize("transform", ["jit", "remat"])
def test_a_constant_module_in_a_transform_of_nnx_is_told_of_clones(transform):
    nnx = pytest.importorskip("flax.nnx")
    forward = getattr(nnx, transform)(lambda module, x: nnx.relu(module(x)) + 1)
    batch = jnp.float32(np.arange(3 * ROWS).reshape(ROWS, 3)) / 9

    def clipped(module, prepare):
        return clipped_grad(
            lambda w, x: jnp.sum((forward(prepare(module), x) * w) ** 2), clip_norm=1.0
        )(jnp.ones(2), batch)

    def made():
        return nnx.Linear(3, 2, rngs=nnx.Rngs(0))

    with pytest.raises(ValueError, match=r"nnx\.jit or the like.*nnx\.clone\(module\)"):
        clipped(made(), lambda module: module)
    assert np.all(clipped(made(), nnx.clone).norms[1:] > 0)


def test_a_variable_in_two_places_is_refused_and_its_state_is_clipped_as_one():
    nnx = pytest.importorskip("flax.nnx")

    class Tied(nnx.Module):
        def __init__(self):
            self.a, self.b = (nnx.Linear(3, 3, rngs=nnx.Rngs(0)) for _ in range(2))
            self.b.kernel = self.a.kernel

        def __call__(self, x):
            return jnp.sum(self.b(jnp.tanh(self.a(x))) ** 2)

    module, batch = Tied(), jnp.float32(np.arange(3 * ROWS).reshape(ROWS, 3)) / 9
    with pytest.raises(ValueError, match=r"a.*kernel and params\S*b\S*kernel are one"):
        clipped_grad(Tied.__call__, clip_norm=1.0)(module, batch)
    graph, state = nnx.split(module)
    assert len(jax.tree.leaves(state)) == 3
    check(
        lambda state, x: nnx.merge(graph, state, copy=True)(x),
        state,
        batch,
        strategies=STRATEGIES,
        dtypes=("float32",),
    )


def test_nothing_is_transferred_without_a_word():
    grad_fn = clipped_grad(lambda w, x: jnp.sum((w * x) ** 2), clip_norm=1.0)
    w, x = jnp.ones(2), jnp.ones((3, 2))
    with jax.transfer_guard("disallow"):
        grad_fn(w, x)
        grad_fn(w, x, clip_norm=0.5)
