"""One update is equation (3) of the Unlocking paper, whatever the physical batches."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import stats

from parts import step as make_step
from tanager.data import ArraySource, gather
from tanager.keys import derive_keys
from tanager.parallel.layout import Layout
from tanager.privacy.mechanism import Mechanism
from tanager.seed import Seed
from tanager.training.state import update_average
from tanager.training.step import Step


EXAMPLES, FEATURES = 40, 5
MECHANISM = Mechanism(sample_rate=0.3, noise_multiplier=0.8, steps=30)
C, RATE = 0.5, 0.25


def loss(params, example):
    return (jnp.dot(params["w"], example["x"]) + params["b"] - example["y"]) ** 2


def source():
    draw = np.random.default_rng(0).normal
    size = np.geomspace(0.02, 2, EXAMPLES)
    return ArraySource(
        {
            "x": (size[:, None] * draw(size=(EXAMPLES, FEATURES))).astype(np.float32),
            "y": (size * draw(size=EXAMPLES)).astype(np.float32),
        }
    )


def params():
    return {"w": jnp.linspace(-1, 1, FEATURES), "b": jnp.float32(0.3)}


def step_of(kind=Step, loss=loss, mechanism=MECHANISM, augment=None, multiplicity=0):
    return make_step(
        kind,
        loss=loss,
        params=params(),
        optimizer=optax.sgd(RATE),
        mechanism=mechanism,
        examples=EXAMPLES,
        seed=Seed.from_int(1),
        clip_norm=C,
        strategy="per_example",
        augment=augment,
        augmentation_multiplicity=multiplicity,
        ema_decay=0.99,
    )


def accumulated(step, number, physical=8, state=None):
    state = step.start(params()) if state is None else state
    total, key = step.zero(), step.augmentation_key(number)
    for part in step.sampler.batches(number, physical):
        batch = part._replace(examples=gather(source(), part.indices))
        total = step.accumulate(state.params, total, batch, key)
    return total


def after(step, number, physical=8):
    state = step.start(params())
    total = accumulated(step, number, physical)
    return step.apply(state, total, step.draw(number), jnp.int32(number))[0]


def flat(tree):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])


def clipped_gradients(indices):
    """Every example's gradient over C, clipped to norm 1, in numpy float64."""
    data, start = source().gather(indices), params()
    x, y = np.asarray(data["x"], np.float64), np.asarray(data["y"], np.float64)
    slope = 2 * (x @ np.asarray(start["w"], np.float64) + float(start["b"]) - y)
    gradients = np.concatenate([slope[:, None], slope[:, None] * x], axis=1)
    norms = np.linalg.norm(gradients, axis=1)
    return gradients * np.minimum(1, C / norms)[:, None] / C, norms


def noise_of(step, number):
    assert step.noise is not None
    return flat(step.noise(step.noise.grid.zeros(params()), number))


def equation_3(step, number):
    """b and w after one update, from the definition."""
    gradients, _ = clipped_gradients(step.sampler.indices(number))
    noise = noise_of(step, number) / C
    mean = (gradients.sum(0) + noise) / (MECHANISM.sample_rate * EXAMPLES)
    return flat(params()) - RATE * mean


@pytest.fixture(scope="module")
def plain():
    return step_of()


def test_the_update_is_equation_3(plain):
    step = plain
    for number in range(5):
        expected = equation_3(step, number)
        np.testing.assert_allclose(
            flat(after(step, number).params), expected, rtol=1e-5, atol=1e-6
        )


@pytest.mark.parametrize("devices", [1, 2])
def test_sums_over_devices_stay_whole_numbers_of_32_bits(devices):
    """Else, where JAX has 64 bits, noise refuses them, after the step was charged."""
    layout, like = Layout(devices), {"w": jnp.zeros(3)}
    each = {"w": jnp.ones((devices, 3), jnp.int32)}
    with jax.enable_x64(True):
        assert layout.reduce(each, like)["w"].dtype == jnp.int32


class DividesByTheDrawnBatch(Step):
    def apply(self, state, accumulator, drawn, step):
        self.sampler.expected_batch_size = len(self.sampler.indices(2))
        return super().apply(state, accumulator, drawn, step)


class CountsPadding(Step):
    def accumulate(self, params, accumulator, batch, key, clip_norm=None):
        batch = batch._replace(mask=np.ones_like(batch.mask))
        return super().accumulate(params, accumulator, batch, key, clip_norm)


class ForgetsTheNoise(Step):
    def draw(self, step):
        return jax.tree.map(np.zeros_like, super().draw(step))


@pytest.mark.parametrize(
    "planted", [DividesByTheDrawnBatch, CountsPadding, ForgetsTheNoise]
)
def test_a_planted_bug_breaks_equation_3(plain, planted):
    step = step_of(planted)
    assert len(step.sampler.indices(2)) != step.sampler.expected_batch_size
    expected = equation_3(plain, 2)
    assert np.max(np.abs(flat(after(step, 2).params) - expected)) > 1e-3


def test_the_physical_batch_size_changes_nothing():
    def augment(key, example):
        return {**example, "x": example["x"] + jax.random.normal(key, (FEATURES,))}

    step = step_of(augment=augment, multiplicity=3)
    one_by_one, whole = (flat(after(step, 2, size).params) for size in (1, 64))
    # Each physical batch is rounded to the grid.
    np.testing.assert_allclose(one_by_one, whole, rtol=1e-5, atol=5e-6)


def test_another_secret_moves_batches_noise_and_views(plain):
    secret = Seed.from_int(2)
    step = plain.with_seed(secret)
    assert step.sampler.indices(0).tolist() != plain.sampler.indices(0).tolist()
    assert not np.array_equal(noise_of(step, 0), noise_of(plain, 0))
    key = derive_keys(secret, "augmentation", 3)[0]
    assert step.augmentation_key(3) == key != plain.augmentation_key(3)


def test_a_batch_that_could_not_be_added_up_is_refused():
    huge, whole = jax.ShapeDtypeStruct((10**9,), jnp.float32), Mechanism(1.0, 1.0, 1)
    with pytest.raises(ValueError, match=r"^batch_size .* in 48 bits"):
        make_step(loss=loss, params=huge, mechanism=whole, examples=2**18)


def test_an_empty_batch_is_a_noise_only_step():
    rare = Mechanism(sample_rate=1e-6, noise_multiplier=0.8, steps=30)
    step = step_of(mechanism=rare)
    assert len(step.sampler.indices(0)) == 0
    moved = flat(after(step, 0).params) - flat(params())
    noise = noise_of(step, 0)
    np.testing.assert_allclose(moved, -RATE * noise / (C * 1e-6 * EXAMPLES), rtol=1e-4)


def test_the_accumulator_counts_examples_and_clipping_without_padding(plain):
    step = plain
    _, norms = clipped_gradients(step.sampler.indices(0))
    counts = accumulated(step, 0).counts
    assert len(norms) % 8
    assert int(counts.examples[0]) == len(norms)
    assert int(counts.clipped[0]) == np.sum(norms > C)
    assert int(counts.dropped[0]) == 0
    slopes = norms / np.sqrt(
        1 + np.sum(source().gather(step.sampler.indices(0))["x"] ** 2, axis=1)
    )
    np.testing.assert_allclose(counts.losses[0], np.sum(slopes**2) / 4, rtol=1e-4)


def test_an_example_that_is_not_finite_is_dropped_and_counted():
    def spoilt(params, example):
        return loss(params, example) * jnp.where(example["y"] > 0, 1.0, jnp.nan)

    step = step_of(loss=spoilt)
    total = accumulated(step, 0)
    negative = np.sum(source().gather(step.sampler.indices(0))["y"] <= 0)
    assert negative > 0
    assert int(total.counts.dropped[0]) == negative
    assert np.all(np.isfinite(flat(total.sum)))
    assert np.isfinite(float(total.counts.losses[0]))


def test_one_program_serves_every_batch_size():
    traces = []

    def counted(params, example):
        traces.append(1)
        return loss(params, example)

    step = step_of(loss=counted)
    sizes = {len(step.sampler.indices(number)) for number in range(15)}
    assert len(sizes) > 5
    after(step, 0)
    first = len(traces)
    for number in range(1, 15):
        after(step, number)
    assert len(traces) == first


@pytest.mark.statistical
def test_the_noise_of_an_update_has_the_promised_scale():
    """Chi-square test of the variance; false alarm 1e-6.

    With a loss without gradient an update moves by -η·σ·ξ/(qN) alone.
    """
    step = step_of(loss=lambda params, example: 0 * jnp.sum(params["w"]))
    moves = [flat(after(step, number).params) - flat(params()) for number in range(30)]
    values = np.ravel(moves) / (RATE * 0.8 / (0.3 * EXAMPLES))
    statistic = np.sum(np.square(values, dtype=np.float64))
    low, high = stats.chi2.ppf([5e-7, 1 - 5e-7], values.size)
    assert low < statistic < high


def test_the_average_warms_up_as_in_the_paper():
    path = [jnp.float32(value) for value in (1.0, 5.0, -2.0, 7.0)]
    average, expected = path[0], 1.0
    for t, new in enumerate(path[1:]):
        average = update_average(average, new, jnp.int32(t), 0.3)
        decay = min(0.3, (1 + t) / (10 + t))
        expected = decay * expected + (1 - decay) * float(new)
    np.testing.assert_allclose(average, expected, rtol=1e-6)
    late = update_average(jnp.float32(0), jnp.float32(1), jnp.int32(10**6), 0.9999)
    assert float(late) == pytest.approx(1e-4, rel=1e-2)
