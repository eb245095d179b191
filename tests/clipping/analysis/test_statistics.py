"""Batch norm in five frameworks: let through in inference, refused in training."""

import functools
import re
import sys
import threading
import types
from typing import Any

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from oracle import clip, curve, gradients

import tanager
from cases import in_full
from tanager.clipping.analysis import trainable
from tanager.clipping.analysis.statistics import RefusedLayer, watching
from tanager.training.beginning import check_optimizer


ROWS = 12
KEY = jax.random.key(0)


@pytest.fixture(autouse=True)
def _promotion():
    """Flax and Haiku mix dtypes and ranks, which our strict settings forbid."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def data():
    draw = np.random.default_rng(0).standard_normal
    return {
        "image": draw((ROWS, 4, 4, 1)).astype(np.float32),
        "label": (np.arange(ROWS) % 3).astype(np.int32),
    }


def of_batches(net):
    """Make the loss of one example from a network of batches."""

    def loss(params, example):
        logits = net(params, example["image"][None])[0]
        return jax.nn.logsumexp(logits) - logits[example["label"]]

    return loss


def moved(state):
    """Make running statistics those of a network that was trained."""
    return jax.tree.map(
        lambda x: x + (0.25 if jnp.issubdtype(x.dtype, jnp.floating) else 1000), state
    )


class InNNX(nnx.Module):
    def __init__(self, rngs):
        self.conv = nnx.Conv(1, 2, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(2, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.head = nnx.Linear(32, 3, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.norm(self.conv(x)))
        return self.head(self.drop(x.reshape(len(x), -1)))


class InLinen(linen.Module):
    train: bool

    @linen.compact
    def __call__(self, x):
        norm = linen.BatchNorm(use_running_average=not self.train)
        x = linen.relu(norm(linen.Conv(2, (3, 3))(x)))
        return linen.Dense(3)(x.reshape(len(x), -1))


@hk.without_apply_rng
@hk.transform_with_state
def in_haiku(x, is_training):
    norm = hk.BatchNorm(create_scale=True, create_offset=True, decay_rate=0.9)
    x = jax.nn.relu(norm(hk.Conv2D(2, 3)(x), is_training))
    return hk.Linear(3)(x.reshape(len(x), -1))


class InEquinox(eqx.Module):
    conv: eqx.nn.Conv2d
    norm: eqx.nn.BatchNorm
    head: eqx.nn.Linear

    def __init__(self, mode):
        self.conv = eqx.nn.Conv2d(1, 2, 3, padding=1, key=KEY)
        self.norm = eqx.nn.BatchNorm(2, axis_name="batch", mode=mode)
        self.head = eqx.nn.Linear(32, 3, key=KEY)

    def __call__(self, x, state):
        x, state = self.norm(self.conv(x), state)
        return self.head(jax.nn.relu(x).ravel()), state


def of_nnx(train):
    model = InNNX(nnx.Rngs(0))
    model = nnx.view(model, use_running_average=not train, deterministic=not train)
    nnx.update(model, moved(nnx.state(model, nnx.BatchStat)))
    return of_batches(lambda model, x: model(x)), model


def of_nnx_state(train):
    graph, state = nnx.split(of_nnx(train)[1])
    return of_batches(lambda state, x: nnx.merge(graph, state)(x)), state


def of_nnx_told(train):
    """Of the call: the layer itself is in the other mode."""

    def net(model, x):
        x = model.norm(model.conv(x), use_running_average=not train)
        return model.head(x.reshape(len(x), -1))

    return of_batches(net), of_nnx(not train)[1]


def of_linen(train, mutable: Any = False):
    variables = InLinen(train=False).init(KEY, data()["image"])
    variables = {**variables, "batch_stats": moved(variables["batch_stats"])}

    def net(variables, x):
        found = InLinen(train).apply(variables, x, mutable=mutable)
        return found[0] if mutable else found

    return of_batches(net), variables


def of_haiku(train):
    params, state = in_haiku.init(KEY, data()["image"], True)

    def net(both, x):
        return in_haiku.apply(*both, x, train)[0]

    return of_batches(net), (params, moved(state))


def of_equinox(train, mode="batch"):
    model, state = eqx.nn.make_with_state(InEquinox)(mode)
    model = eqx.nn.inference_mode(model, not train)

    def net(both, x):
        model, state = both
        # The axis has a name here, so that no collective is left to be refused.
        call = jax.vmap(
            lambda x: model(x, state), out_axes=(0, None), axis_name="batch"
        )
        return call(x.transpose(0, 3, 1, 2))[0]

    return of_batches(net), (model, moved(state))


MODELS = {
    "nnx": of_nnx,
    "nnx state": of_nnx_state,
    "linen": of_linen,
    "haiku": of_haiku,
    "equinox": of_equinox,
}
IS_STATE = re.compile(r"mean|\bvar\b|batch_stats|_ema|rngs|flat index")


def state_and_parameters(model):
    """Tell running statistics and other state from parameters, by their paths."""
    found = {}, {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(model):
        name = jax.tree_util.keystr(path)
        if eqx.is_array(leaf) and not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            found[not IS_STATE.search(name)][name] = np.asarray(leaf)
    return found


def put(model, arrays):
    """Return a model with other arrays in the places of these names."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: arrays.get(jax.tree_util.keystr(path), leaf), model
    )


@pytest.mark.parametrize("name", MODELS)
def test_in_inference_sums_are_those_of_the_parameters_alone(name):
    loss, model = MODELS[name](train=False)
    _, parameters = state_and_parameters(model)
    assert len(parameters) == 6
    batch, mask = data(), np.arange(ROWS) != 1

    def of_parameters(arrays, example):
        return loss(put(model, arrays), example)

    with jax.enable_x64(True):
        found, losses = gradients(of_parameters, parameters, batch)
        right, median = clip(found, losses, mask)
    grad_fn = tanager.clipped_grad(loss, clip_norm=median, strategy="bk")
    out = grad_fn(model, batch, jnp.asarray(mask))
    state, total = state_and_parameters(out.sum)
    assert not state
    assert total.keys() == parameters.keys()
    expected = dict(zip(sorted(parameters), right.sum, strict=True))
    for each, leaf in total.items():
        np.testing.assert_allclose(leaf, expected[each], atol=1e-4)
    np.testing.assert_allclose(out.norms, right.norms, rtol=1e-4)


def trained(loss, model, out=None):
    mechanism = tanager.Mechanism(sample_rate=0.5, noise_multiplier=1.0, steps=2)
    return tanager.train(
        tanager.Problem(loss, model, data()),
        tanager.DPSGD(mechanism, optax.sgd(0.1), delta=1e-3),
        tanager.Runtime(physical_batch_size=8, strategy="bk", progress=False),
        out=out,
        seed=0,
    )


def require_state_untouched(before, result):
    old, first = state_and_parameters(before)
    for model in (result.params, result.average):
        state, parameters = state_and_parameters(model)
        assert state.keys() == old.keys()
        for name, leaf in state.items():
            np.testing.assert_array_equal(leaf, old[name], err_msg=name)
        assert all(np.any(leaf != first[name]) for name, leaf in parameters.items())


# Sums of all of them are above: what has no sum is not moved.
@pytest.mark.parametrize(
    "name", in_full(("nnx", "linen", "haiku", "equinox"), "linen", "haiku", "equinox")
)
def test_training_leaves_running_statistics_as_they_are(name, tmp_path):
    loss, model = MODELS[name](train=False)
    out = tmp_path / "run" if name == "nnx" else None
    require_state_untouched(model, trained(loss, model, out))


def test_planted_statistics_that_are_trained(monkeypatch):
    nothing = functools.partial(jax.tree.map, lambda leaf: False)
    monkeypatch.setattr(trainable, "held_fixed", nothing)
    with pytest.raises(AssertionError, match="mean_ema"):
        test_in_inference_sums_are_those_of_the_parameters_alone("haiku")


NAMES = {
    "nnx": ("flax.nnx.BatchNorm", "model.eval()"),
    "linen": ("flax.linen.BatchNorm", "use_running_average=True"),
    "haiku": ("haiku.BatchNorm", "is_training=False"),
    "equinox": ("equinox.nn.BatchNorm", "equinox.nn.inference_mode(model)"),
}
TRAINING = {
    "nnx": of_nnx,
    "nnx state": of_nnx_state,
    "nnx told": of_nnx_told,
    "linen": of_linen,
    "linen mutable": functools.partial(of_linen, mutable=["batch_stats"]),
    "haiku": of_haiku,
    "equinox": of_equinox,
    "equinox ema": functools.partial(of_equinox, mode="ema"),
}


@pytest.mark.parametrize("name", TRAINING)
def test_in_training_mode_the_layer_is_refused_by_name(name, tmp_path):
    loss, model = TRAINING[name](train=True)
    layer, mend = map(re.escape, NAMES[name.split()[0]])
    message = (
        f"loss calls {layer} in training mode, which mixes the examples of a batch "
        rf"\(test_statistics.py, line \d+: x.* = .*norm.*\): .*{mend}"
    )
    with pytest.raises(ValueError, match=message):
        tanager.clipped_grad(loss, clip_norm=1.0)(model, data())
    with pytest.raises(ValueError, match=message):
        trained(loss, model, tmp_path / "run")
    assert not (tmp_path / "run").exists()


class InSpectralNorm(eqx.Module):
    norm: eqx.nn.SpectralNorm

    def __init__(self):
        head = eqx.nn.Linear(16, 3, key=KEY)
        self.norm = eqx.nn.SpectralNorm(head, "weight", key=KEY)


def test_a_spectral_norm_is_refused_in_training_for_its_own_reason():
    model, state = eqx.nn.make_with_state(InSpectralNorm)()
    fixed = eqx.nn.inference_mode(model)
    message = (
        r"loss calls equinox\.nn\.SpectralNorm in training mode, which updates its "
        r"power iterations: a loss cannot return the new ones \(.*\): call "
        r"equinox\.nn\.inference_mode\(model\) first"
    )

    def norms(model, inference=None):
        def loss(both, example):
            model, state = both
            x = example["image"].ravel()
            return curve(model.norm(x, state, inference=inference)[0])

        return tanager.clipped_grad(loss, clip_norm=1.0)((model, state), data()).norms

    for call in ((model,), (fixed, False)):
        with pytest.raises(ValueError, match=message):
            norms(*call)
    np.testing.assert_allclose(norms(fixed), norms(model, True))
    assert np.all(norms(fixed) > 0)


class BatchNormalization:
    """As the layer of Keras, which is not among the packages of the tests."""

    trainable = True

    def __init__(self, mean):
        self.moving_mean = types.SimpleNamespace(value=mean)
        self.moving_variance = types.SimpleNamespace(value=np.ones(1))

    def call(self, inputs, training=None):
        return inputs - (inputs.mean() if training else self.moving_mean.value)


class Dropout:
    def __init__(self, seed=None):
        if seed is None:  # as Keras does where the rate is 0
            return
        self.seed_generator = types.SimpleNamespace(
            state=types.SimpleNamespace(value=seed)
        )

    def call(self, inputs, training=False):
        if not training or not hasattr(self, "seed_generator"):
            return inputs
        kept = jax.random.bernoulli(jax.random.wrap_key_data(self.seed), 0.5, (3,))
        return jnp.where(kept, inputs, 0)

    @property
    def seed(self):
        return self.seed_generator.state.value


def test_layers_of_keras_are_watched(monkeypatch):
    layers = types.ModuleType("keras.layers")
    noises = [
        type(name, (Dropout,), {})
        for name in (
            *("AlphaDropout", "Dropout", "GaussianDropout", "GaussianNoise"),
            *(f"SpatialDropout{axes}D" for axes in (1, 2, 3)),
        )
    ]
    vars(layers).update({noise.__name__: noise for noise in noises})
    vars(layers).update(BatchNormalization=BatchNormalization)
    monkeypatch.setitem(sys.modules, "keras.layers", layers)
    seeds = jax.random.key_data(jax.random.split(KEY, 4))
    constant = seeds[0]
    batch = {"x": jnp.ones((4, 3)), "seed": seeds}

    def clipped(layer, **call):
        def loss(w, e):
            return jnp.sum(w["w"] * layer(w, e).call(e["x"], **call))

        own = {"w": jnp.ones(3), "mean": jnp.ones(1), "seed": constant}
        # As in training: what is not trained is traced too.
        return jax.jit(tanager.clipped_grad(loss, clip_norm=9.0))(own, batch)

    def norm(w, e):
        return BatchNormalization(jnp.ones(1))

    def trained_norm(w, e):
        return BatchNormalization(w["mean"])

    for layer, message in (
        (norm, "keras.layers.BatchNormalization in training mode, which mixes"),
        *(
            (
                lambda w, e, noise=noise: noise(constant),
                f"keras.layers.{noise.__name__} with a seed that never",
            )
            for noise in noises
        ),
        (lambda w, e: noises[0](w["seed"]), "with a seed that never"),
    ):
        with pytest.raises(ValueError, match=message):
            clipped(layer, training=True)
        jax.eval_shape(functools.partial(clipped, layer, training=False))
    with pytest.raises(ValueError, match="running statistics that would be trained"):
        clipped(trained_norm)
    for noise in noises:
        seeded = functools.partial(clipped, lambda w, e, noise=noise: noise(e["seed"]))
        if noise is noises[0]:
            assert len(set(seeded(training=True).norms.tolist())) > 1
        for layer in (seeded, functools.partial(clipped, lambda w, e, n=noise: n())):
            jax.eval_shape(functools.partial(layer, training=True))
    monkeypatch.setattr(BatchNormalization, "trainable", False)
    clipped(norm, training=True)


def test_what_jax_traced_before_is_refused_too():
    loss, model = of_haiku(train=True)
    loss = jax.jit(loss)
    loss(model, jax.tree.map(lambda leaf: leaf[0], data()))
    with pytest.raises(ValueError, match=r"haiku\.BatchNorm in training mode"):
        tanager.clipped_grad(loss, clip_norm=1.0)(model, data())


def test_statistics_of_the_input_are_refused_in_evaluation_too():
    def norm(x):
        return hk.BatchNorm(True, True, 0.9)(x, False, test_local_stats=True)

    net = hk.without_apply_rng(hk.transform_with_state(norm))
    both = net.init(KEY, data()["image"])
    loss = of_batches(lambda both, x: net.apply(*both, x)[0].reshape(1, -1))
    with pytest.raises(ValueError, match=r"haiku\.BatchNorm in training mode"):
        tanager.clipped_grad(loss, clip_norm=1.0)(both, data())


def test_statistics_under_other_names_are_refused_unless_trainable_names_them():
    loss, variables = of_linen(train=False)
    pair = variables["params"], variables["batch_stats"]

    def renamed(pair, example):
        return loss({"params": pair[0], "batch_stats": pair[1]}, example)

    message = r"flax\.linen\.BatchNorm with running statistics that would be trained"
    with pytest.raises(ValueError, match=message):
        tanager.clipped_grad(renamed, clip_norm=1.0)(pair, data())
    named = tanager.clipped_grad(renamed, clip_norm=1.0, trainable=(True, False))
    assert not jax.tree.leaves(named(pair, data()).sum[1])

    graph, state = nnx.split(of_nnx(train=False)[1])
    numbers, keys = eqx.partition(nnx.to_pure_dict(state), eqx.is_inexact_array)
    untyped = of_batches(lambda own, x: nnx.merge(graph, eqx.combine(own, keys))(x))
    message = r"flax\.nnx\.BatchNorm with running statistics that would be trained"
    with pytest.raises(ValueError, match=message):
        tanager.clipped_grad(untyped, clip_norm=1.0)(numbers, data())


class Dropping(nnx.Module):
    def __init__(self):
        self.drop = nnx.Dropout(0.5, rngs=nnx.Rngs(dropout=0))
        self.head = nnx.Linear(16, 3, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.head(self.drop(x.reshape(len(x), -1)))


def test_dropout_by_a_key_that_never_changes_is_refused():
    model = Dropping()
    loss = of_batches(lambda model, x: model(x))
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    split = of_batches(lambda params, x: nnx.merge(graph, params, rest)(x))
    message = r"nnx\.Dropout with a key that never.*reseed\(model, dropout=key\)"
    for of_module, own in ((loss, model), (split, params)):
        with pytest.raises(ValueError, match=message):
            tanager.clipped_grad(of_module, clip_norm=1.0)(own, data())
    with pytest.raises(ValueError, match=message):
        trained(loss, model)


def test_dropout_by_a_key_of_the_example_is_not():
    def loss(model, example):
        model = nnx.clone(model)
        nnx.reseed(model, dropout=jax.random.wrap_key_data(example["key"]))
        return of_batches(lambda model, x: model(x))(model, example)

    keys = jax.random.key_data(jax.random.split(KEY, ROWS))
    alike = {name: np.stack([leaf[0]] * ROWS) for name, leaf in data().items()}
    grad_fn = tanager.clipped_grad(loss, clip_norm=1.0, strategy="bk")
    out = grad_fn(Dropping(), alike | {"key": keys})
    assert len(set(np.asarray(out.losses).tolist())) == ROWS  # as many masks


def test_other_threads_and_later_calls_are_not_watched():
    falsy: Any = np.False_
    norm, calls = nnx.BatchNorm(2, use_running_average=falsy, rngs=nnx.Rngs(0)), []
    image, method = jnp.ones((4, 2)), nnx.BatchNorm.__call__
    with watching({}, {}):
        with pytest.raises(RefusedLayer):
            norm(image)
        thread = threading.Thread(target=lambda: calls.append(norm(image)))
        thread.start()
        thread.join()
    assert len(calls) == 1
    assert nnx.BatchNorm.__call__ is method


def test_an_nnx_state_without_parameters_is_refused():
    state = nnx.state(of_nnx(train=False)[1], nnx.BatchStat)
    with pytest.raises(ValueError, match=r"of an NNX module, nnx\.Param is trained"):
        tanager.clipped_grad(lambda state, x: jnp.sum(x), clip_norm=1.0)(
            state, data()["image"]
        )


def test_an_optimizer_of_nnx_is_refused_by_name():
    model = of_nnx(train=False)[1]
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    with pytest.raises(ValueError, match=r"type Optimizer\) must be.*give its `tx`"):
        check_optimizer(optimizer, model)


def test_scales_of_8_bits_in_linen_are_not_trained():
    """Flax returns as their gradients what they should be next."""
    model = linen.Dense(3, dot_general_cls=linen.Fp8DirectDotGeneralOp)
    x = np.random.default_rng(0).normal(size=(4, 1, 5)).astype(np.float32)
    variables = model.init(jax.random.key(0), x[0])

    def loss(variables, x):
        y: Any = model.apply(variables, x)
        return jnp.sum(y**2)

    grad_fn = tanager.clipped_grad(loss, clip_norm=1.0, strategy="per_example")
    found = grad_fn(variables, x)
    assert not jax.tree.leaves(found.sum["_overwrite_with_gradient"])
    own = jax.jit(jax.vmap(jax.grad(loss), (None, 0)))(variables, x)["params"]
    squares = [np.sum(np.square(leaf).reshape(4, -1), 1) for leaf in own.values()]
    np.testing.assert_allclose(found.norms, np.sqrt(sum(squares)), rtol=1e-4)
