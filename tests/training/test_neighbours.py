"""Two data sets, one of which lacks an example: what of a run differs, and what not."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import stats

from parts import step, train
from tanager.data import ArraySource, gather
from tanager.privacy.mechanism import Adjacency, Mechanism
from tanager.seed import Seed


C, ROWS, FEATURES = 0.5, 8, 6
HIDDEN_SIZE = Mechanism(0.3, 1.1, 12, Adjacency.ADD_OR_REMOVE_ONE)


def loss(params, example):
    return (jnp.dot(params["w"], example["x"]) + params["b"] - example["y"]) ** 2


def params():
    return {"w": jnp.linspace(-1, 1, FEATURES), "b": jnp.float32(0.3)}


def examples(count):
    draw = np.random.default_rng(0)
    x = draw.normal(size=(41, FEATURES)).astype(np.float32)
    return ArraySource({"x": x[:count], "y": x[:count, 0] ** 2})


def step_of(count):
    return step(
        loss=loss,
        params=params(),
        mechanism=HIDDEN_SIZE,
        examples=count,
        seed=Seed.from_int(4),
        clip_norm=C,
        declared_examples=40,
    )


def total(step, source, number):
    state = step.start(params())
    sums, key = step.zero(), step.augmentation_key(number)
    for part in step.sampler.batches(number, ROWS):
        examples = gather(source, np.minimum(part.indices, len(source) - 1))
        batch = part._replace(examples=examples)
        sums = step.accumulate(state.params, sums, batch, key)
    return np.concatenate(
        [
            (np.asarray(high, np.int64) << 16).ravel() + np.asarray(low).ravel()
            for high, low in zip(
                jax.tree.leaves(sums.sum.high),
                jax.tree.leaves(sums.sum.low),
                strict=True,
            )
        ]
    )


def assert_equal(one, other):
    jax.tree.map(np.testing.assert_array_equal, one, other)


def test_a_run_and_its_neighbour_differ_in_the_example_alone():
    """Batches, divisor and noise agree to the bit; sums by at most the sensitivity."""
    one, other = step_of(40), step_of(41)
    noise, noise_of_other = one.noise, other.noise
    assert noise is not None and noise_of_other is not None
    assert noise.standard_deviation == noise_of_other.standard_deviation
    assert one.sampler.expected_batch_size == other.sampler.expected_batch_size == 12
    most = (one.grad_fn.sensitivity + noise.grid.rounding) / noise.grid.spacing
    met = 0
    for number in range(HIDDEN_SIZE.steps):
        drawn, drawn_of_other = (step.sampler.indices(number) for step in (one, other))
        np.testing.assert_array_equal(drawn_of_other[drawn_of_other < 40], drawn)
        assert_equal(one.draw(number), other.draw(number))
        moved = total(other, examples(41), number) - total(one, examples(40), number)
        if 40 in drawn_of_other:
            met += 1
            assert 0 < np.linalg.norm(moved.astype(np.float64)) <= most
        else:
            assert not moved.any()
    assert 0 < met < HIDDEN_SIZE.steps


### The number of examples, told by the scale of the noise


def nothing(params, example):
    return 0.0 * jnp.sum(params) + 0.0 * example


def scale_of_noise(examples, declared, seed, mechanism):
    """What a run on a loss without gradient publishes: 60,000 numbers of noise."""
    result = train(
        loss=nothing,
        params=jnp.zeros(60_000),
        data=np.zeros(examples, np.float32),
        mechanism=mechanism,
        declared_examples=declared,
        optimizer=optax.sgd(1.0),
        ema_decay=0.0,
        seed=seed,
    )
    return np.asarray(result.params, np.float64)


def likelihood(published, size, mechanism):
    """The log-likelihood of what is published, were updates divided by q·size."""
    deviation = mechanism.noise_multiplier * math.sqrt(mechanism.steps)
    deviation /= mechanism.sample_rate * size
    return float(stats.norm.logpdf(published, scale=deviation).sum())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:")
def test_planted_a_divisor_of_the_data_tells_their_number():
    """Divided by q·len(data), 20 examples are told from 21 every time."""
    mechanism = Mechanism(0.5, 1.0, 2)
    for seed, examples in enumerate((20, 21)):
        published = scale_of_noise(examples, None, seed, mechanism)
        told = [likelihood(published, size, mechanism) for size in (20, 21)]
        assert np.argmax(told) == examples - 20
        assert abs(told[0] - told[1]) > 30


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:")
def test_a_declared_size_tells_nothing_of_their_number():
    """The same bits are published with 20 examples and with 21."""
    mechanism = Mechanism(0.5, 1.0, 2, Adjacency.ADD_OR_REMOVE_ONE)
    one, other = (scale_of_noise(size, 20, 7, mechanism) for size in (20, 21))
    np.testing.assert_array_equal(one, other)


def test_a_private_size_must_be_declared():
    mechanism = Mechanism(0.5, 1.0, 2, Adjacency.ADD_OR_REMOVE_ONE)
    with pytest.raises(ValueError, match="protects the number of examples"):
        scale_of_noise(20, None, 0, mechanism)


def test_what_is_published_has_the_declared_size_alone(tmp_path):
    draw = np.random.default_rng(0)
    train(
        loss=lambda w, x: (w - x) ** 2,
        params=jnp.zeros(()),
        data=draw.normal(size=1237).astype(np.float32),
        mechanism=Mechanism(0.1, 1.0, 3, Adjacency.ADD_OR_REMOVE_ONE),
        delta=1e-5,
        declared_examples=1000,
        out=tmp_path / "run",
    )
    public = [
        path
        for path in (tmp_path / "run").rglob("*")
        if path.is_file() and "private" not in path.parts
    ]
    assert len(public) > 5
    for path in public:
        # A longer number, as a time in seconds, may have the same digits.
        assert not re.search(rb"(?<![\w.])1,?237(?!\w)", path.read_bytes()), path
