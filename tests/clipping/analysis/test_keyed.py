"""Losses that take a key: one for each example, whatever batch it travels in."""

import dataclasses
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tanager
from tanager.clipping.analysis.keyed import Keyed, takes_key
from trees import distance


SEED = tanager.Seed.from_int(3)
ROWS = 12
DRAW = np.random.default_rng(0)
DATA = {
    "x": np.float32(DRAW.normal(size=(ROWS, 4))),
    "y": np.array([0, 1, 2] * 4, np.int32),
}
PARAMS = {"w": jnp.float32(DRAW.normal(size=(4, 5))), "v": jnp.ones((5, 3))}


def loss(params, example, key):
    hidden = jnp.tanh(example["x"] @ params["w"])
    kept = jax.random.bernoulli(key, 0.5, hidden.shape)
    logits = jnp.where(kept, 2 * hidden, 0) @ params["v"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, example["y"])


def test_a_third_argument_called_key_asks_for_one():
    assert takes_key(loss)
    assert takes_key(jax.jit(loss))
    assert takes_key(lambda params, example, key: 0)


def with_default(params, example, key=None, rate=0.5):
    return loss(params, example, key)


@functools.wraps(with_default)
def without(params, example):
    return with_default(params, example, jax.random.key(0))


def test_a_key_with_a_default_is_asked_for_unless_it_is_given_already():
    for function in (with_default, jax.jit(with_default), eqx.filter_jit(with_default)):
        assert takes_key(function)
    given = functools.partial(with_default, key=jax.random.key(0))
    given_jit = functools.partial(jax.jit(with_default), key=jax.random.key(0))
    for function in (lambda w, key: 0, without, given, given_jit, jax.jit(given)):
        assert not takes_key(function)
    problem = tanager.Problem(with_default, PARAMS, DATA)
    keys = tanager.example_keys(SEED, 0, np.arange(ROWS))
    views = Keyed(DATA, jax.random.key_data(keys))
    by_problem = jax.vmap(problem.loss, (None, 0))(PARAMS, views)
    np.testing.assert_allclose(by_problem, sums(np.arange(ROWS)).losses, rtol=1e-5)
    none = dataclasses.replace(ALGORITHM, augmentation_multiplicity=0)
    with pytest.raises(ValueError, match="or a loss that takes a key"):
        trained(4, problem, none)


@pytest.mark.parametrize(
    "other",
    [
        lambda params, example, *, key=None: 0,
        lambda params, example, *, key: 0,
        lambda params, example, rate=0.5, key=None: 0,
        functools.partial(lambda params, example, net, key=None: 0, net=None),
    ],
)
def test_a_key_in_another_place_is_refused(other):
    with pytest.raises(
        ValueError, match="takes key in another place, and must take it third"
    ):
        takes_key(other)


@functools.cache
def grad_of(strategy="bk", memory="default"):
    options = {"clip_norm": 0.5, "strategy": strategy, "memory": memory}
    return tanager.clipped_grad(loss, **options)


def sums(indices, step=0, mask=None, **options):
    rows = jax.tree.map(lambda leaf: leaf[indices], DATA)
    keys = tanager.example_keys(SEED, step, indices)
    return grad_of(**options)(PARAMS, rows, mask, keys=keys)


@pytest.mark.parametrize(
    ("strategy", "memory"), [("bk", "low"), ("per_example", "default")]
)
def test_every_strategy_gives_an_example_the_same_key(strategy, memory):
    everyone = np.arange(ROWS)
    whole = sums(everyone)
    other = sums(everyone, strategy=strategy, memory=memory)
    assert distance(whole, other) < 1e-5
    keys = tanager.example_keys(SEED, 0, everyone)
    by_hand = jax.jit(jax.vmap(loss, (None, 0, 0)))(PARAMS, DATA, keys)
    np.testing.assert_allclose(whole.losses, by_hand, rtol=1e-5)
    assert distance(whole.sum, sums(everyone, step=1).sum) > 0.1


def test_neither_order_nor_batch_nor_padding_changes_a_key():
    whole = sums(np.arange(ROWS))
    order = np.random.default_rng(1).permutation(ROWS)
    np.testing.assert_allclose(sums(order).losses, whole.losses[order], rtol=1e-5)
    parts = [sums(part).sum for part in np.split(order, 3)]
    total = jax.tree.map(lambda *each: sum(each), *parts)
    assert distance(total, whole.sum) < 1e-5
    padded = np.concatenate([order, [0, 0]])
    out = sums(padded, mask=np.arange(ROWS + 2) < ROWS)
    assert distance(out.sum, whole.sum) < 1e-5


def test_keys_are_given_where_they_are_taken_and_only_there():
    batch = jax.tree.map(jnp.asarray, DATA)
    grad_fn = grad_of()
    keys = tanager.example_keys(SEED, 0, np.arange(ROWS))
    with pytest.raises(ValueError, match=r"keys=tanager\.example_keys"):
        grad_fn(PARAMS, batch)
    with pytest.raises(ValueError, match=r"keys \(=uint32\[11,2\]|one threefry key"):
        grad_fn(PARAMS, batch, keys=keys[1:])
    with pytest.raises(ValueError, match="one threefry key"):
        grad_fn(PARAMS, batch, keys=jax.random.split(jax.random.key(0, impl="rbg"), 12))
    plain = tanager.clipped_grad(lambda params, example: jnp.sum(params), clip_norm=1.0)
    with pytest.raises(ValueError, match="and only then"):
        plain(jnp.ones(2), jnp.ones(3), keys=keys[:3])
    assert grad_fn.explain(PARAMS, batch).taps  # asks for no keys


MECHANISM = tanager.Mechanism(sample_rate=0.6, noise_multiplier=1.0, steps=4)
ALGORITHM = tanager.DPSGD(
    MECHANISM, optax.sgd(0.5), delta=1e-2, augmentation_multiplicity=1
)
PROBLEM = tanager.Problem(loss, PARAMS, DATA)


def trained(physical, problem=PROBLEM, algorithm=ALGORITHM, **options):
    runtime = tanager.Runtime(physical, progress=False, strategy="bk")
    found = tanager.train(problem, algorithm, runtime, seed=7, **options)
    return found.params


@functools.cache
def trained_by_four():
    return trained(4)


def test_a_run_with_another_physical_batch_is_the_same():
    one, other = trained_by_four(), trained(6)
    assert distance(one, other) < 1e-3  # sums are rounded to the same grid
    assert distance(one, PARAMS) > 0.1


def test_a_run_that_died_is_resumed_bit_identically(tmp_path):
    calls = []

    def evaluate(params):
        calls.append(params)
        if len(calls) == 3:
            raise RuntimeError("dies")
        return tanager.Evaluation(0.5, 1.0, ())

    def once(out):
        runtime = tanager.Runtime(
            4, progress=False, strategy="bk", checkpoint_seconds=0
        )
        options = {"out": out, "seed": 7, "evaluate": evaluate, "evaluate_every": 1}
        return tanager.train(PROBLEM, ALGORITHM, runtime, **options).params

    with pytest.raises(RuntimeError, match="dies"):
        once(tmp_path / "run")
    assert distance(once(tmp_path / "run"), trained_by_four()) == 0


@pytest.mark.filterwarnings("ignore:noise_multiplier is 0")
def test_the_trainer_gives_the_keys_of_example_keys():
    """Noise is 0 and every example is drawn: one step by hand."""
    exact = tanager.Mechanism(sample_rate=1.0, noise_multiplier=0.0, steps=1)
    algorithm = dataclasses.replace(ALGORITHM, mechanism=exact, clip_norm=0.5)
    algorithm = dataclasses.replace(algorithm, augmentation_multiplicity=2)
    found = trained(ROWS, algorithm=algorithm)
    seed, everyone = tanager.Seed.from_int(7), np.arange(ROWS)

    def two_views(params, example):
        keys = jax.random.wrap_key_data(example["keys"])
        return (loss(params, example, keys[0]) + loss(params, example, keys[1])) / 2

    keys = [
        jax.random.key_data(tanager.example_keys(seed, 0, everyone, view))
        for view in (0, 1)
    ]
    batch = {**DATA, "keys": jnp.stack(keys, axis=1)}
    total = tanager.clipped_grad(two_views, clip_norm=0.5)(PARAMS, batch).sum
    expected = jax.tree.map(lambda w, g: w - 0.5 * g / (0.5 * ROWS), PARAMS, total)
    assert distance(found, expected) < 1e-3


def test_an_augmentation_does_not_share_the_key_of_the_loss():
    def augment(key, example):
        return {**example, "seen": jax.random.key_data(key)}

    problem = tanager.Problem(loss, PARAMS, DATA, augment=augment)
    assert problem.augment is not None
    one = jax.tree.map(lambda leaf: leaf[0], DATA)
    view = problem.augment(jax.random.key(5), one)
    assert not np.array_equal(view.example["seen"], view.words)
    again = dataclasses.replace(problem, params=PARAMS)
    assert again.augment is problem.augment  # and is wrapped once
    assert np.isfinite(problem.loss(PARAMS, one))  # a score without a key
    with pytest.raises(ValueError, match="or a loss that takes a key"):
        trained(
            4, algorithm=dataclasses.replace(ALGORITHM, augmentation_multiplicity=0)
        )
