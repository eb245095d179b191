"""Gaussian noise: the right law, the right scale, never the same twice."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from tanager.keys import derive_keys
from tanager.noise import GaussianNoise
from tanager.privacy.mechanism import Mechanism
from tanager.seed import Seed


SEED = Seed.from_int(0)
MECHANISM = Mechanism(sample_rate=0.1, noise_multiplier=1.5, steps=100)
FALSE_ALARM = 1e-6


def noise_of(tree, step=0, seed=SEED, **options):
    noise = GaussianNoise(MECHANISM, sensitivity=0.8, seed=seed, **options)
    return noise(tree, step)


def zeros(size=40_000):
    return {"a": jnp.zeros(size), "b": jnp.zeros((size // 10, 10))}


def check_standard_deviation(values, expected):
    """Chi-square test of the variance with known mean 0; false alarm 1e-6."""
    statistic = np.sum(np.square(values, dtype=np.float64)) / expected**2
    low, high = stats.chi2.ppf([FALSE_ALARM / 2, 1 - FALSE_ALARM / 2], values.size)
    assert low < statistic < high


@pytest.mark.statistical
@pytest.mark.parametrize("draws", [1, 4])
def test_standard_deviation_is_multiplier_times_sensitivity(draws):
    for leaf in noise_of(zeros(), draws=draws).values():
        check_standard_deviation(np.asarray(leaf), 1.5 * 0.8)


@pytest.mark.statistical
@pytest.mark.parametrize("wrong", [0.5, 1.5, 1 / 0.8, 1.1])
def test_a_wrong_scale_would_be_noticed(wrong):
    leaf = wrong * np.asarray(noise_of(zeros())["a"])
    with pytest.raises(AssertionError):
        check_standard_deviation(leaf, 1.5 * 0.8)


@pytest.mark.statistical
def test_noise_is_normal():
    """Kolmogorov-Smirnov and fourth moment; false alarm 1e-6 each."""
    values = np.asarray(noise_of(zeros())["a"], np.float64) / (1.5 * 0.8)
    assert stats.kstest(values, "norm").pvalue > FALSE_ALARM
    excess = np.mean(values**4) - 3
    bound = stats.norm.isf(FALSE_ALARM / 2) * np.sqrt(96 / values.size)
    assert abs(excess) < bound


@pytest.mark.statistical
@pytest.mark.parametrize("apart", [False, True])
def test_leaves_steps_and_seeds_are_independent(apart):
    """All pairwise correlations; false alarm 1e-6 after Bonferroni."""
    leaves = {name: jnp.zeros((100, 100)) for name in "abc"}
    streams = [
        np.ravel(leaf)
        for seed, step in [(SEED, 0), (SEED, 1), (Seed.from_int(1), 0)]
        for leaf in noise_of(leaves, step, seed, apart=apart).values()
    ]
    pairs = list(itertools.combinations(streams, 2))
    bound = stats.norm.isf(FALSE_ALARM / 2 / len(pairs)) / np.sqrt(10_000)
    for one, two in pairs:
        assert abs(np.corrcoef(one, two)[0, 1]) < bound


def test_several_draws_reach_beyond_what_one_float32_normal_can():
    """One draw stops at 5.42 standard deviations; the sum of four at 10.8."""
    single = jax.scipy.special.erfinv(jnp.float32(1 - 2**-24)) * np.sqrt(2)
    assert single < 5.5
    keys = GaussianNoise(MECHANISM, 0.8, SEED).keys(0)
    assert keys.shape == (4,)
    assert len({tuple(row) for row in np.asarray(jax.random.key_data(keys))}) == 4


def test_the_same_step_has_the_same_noise_and_it_is_added():
    tree = {"a": jnp.arange(5.0), "b": jnp.ones((2, 5))}
    first, again = noise_of(tree), noise_of(tree)
    nothing = noise_of(jax.tree.map(jnp.zeros_like, tree))
    for name, leaf in tree.items():
        np.testing.assert_array_equal(first[name], again[name])
        np.testing.assert_allclose(first[name], leaf + nothing[name], rtol=1e-6)


def test_jit_changes_nothing():
    noise = GaussianNoise(MECHANISM, 0.8, SEED)
    tree, keys = zeros(100), noise.keys(3)
    plain, compiled = noise.add(tree, keys), jax.jit(noise.add)(tree, keys)
    for one, two in zip(plain.values(), compiled.values(), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-6)


def test_every_device_gets_the_same_noise_when_parameters_are_sharded():
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.NamedSharding(mesh, jax.P("d"))
    noise = GaussianNoise(MECHANISM, 0.8, SEED)
    shares = GaussianNoise(MECHANISM, 0.8, SEED, apart=True)
    keys, leaves = noise.keys(0), [jnp.zeros(64), jnp.zeros((8, 3)), jnp.zeros(2**18)]
    whole = jax.jit(noise.add)(leaves, keys)
    for add in (noise.add, shares.add):
        sharded = jax.jit(add)(jax.device_put(leaves, sharding), keys)
        jax.tree.map(np.testing.assert_array_equal, sharded, whole)


@pytest.mark.parametrize("draws", [1, 4])
def test_the_noise_of_a_leaf_is_that_of_its_key_whatever_its_company(draws):
    """Leaves that share a generator, of other sizes, and one that does not."""
    shapes = [(7,), (300, 700), (2, 3), (), (300, 700), (800, 800), (5,), (0,)]
    noise = GaussianNoise(MECHANISM, 0.8, SEED, draws=draws)
    keys = noise.keys(0)
    found = noise.add([jnp.zeros(shape) for shape in shapes], keys)
    for number, (shape, leaf) in enumerate(zip(shapes, found, strict=True)):
        normals = [
            jax.random.normal(jax.random.fold_in(k, number), shape) for k in keys
        ]
        expected = 1.2 * np.sum(normals, axis=0) / np.sqrt(draws)
        np.testing.assert_allclose(leaf, expected, rtol=1e-4, atol=1e-5)


def test_leaves_of_other_dtypes_keep_theirs_and_the_order_is_kept():
    with jax.enable_x64(True):
        dtypes = [jnp.float32, jnp.float64, jnp.float64, jnp.float32]
        leaves = [jnp.full(5, 100.0 * n, dtype) for n, dtype in enumerate(dtypes)]
        found = noise_of(leaves)
    for number, (leaf, dtype) in enumerate(zip(found, dtypes, strict=True)):
        assert leaf.dtype == dtype
        assert np.abs(np.asarray(leaf) - 100 * number).max() < 20  # 16 σC


def test_float64_sums_get_float64_noise_and_none_stays_none():
    with jax.enable_x64(True):
        out = noise_of({"a": jnp.zeros(10, jnp.float64), "b": None})
        assert out["a"].dtype == jnp.float64
        assert out["b"] is None
        assert np.any(np.asarray(out["a"], np.float32) != np.asarray(out["a"]))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_noise_is_refused(dtype):
    with pytest.raises(ValueError, match="must be float32 or wider"):
        noise_of({"a": jnp.zeros(3, dtype)})


def test_noise_past_the_horizon_is_refused():
    noise = GaussianNoise(MECHANISM, 0.8, SEED)
    with pytest.raises(ValueError, match=re.escape("step (=100) must be below")):
        noise.keys(100)
    with pytest.raises(ValueError, match=re.escape("step (=-1)")):
        noise.keys(-1)


def test_a_useless_sensitivity_is_refused():
    with pytest.raises(ValueError, match=re.escape("sensitivity (=0.0)")):
        GaussianNoise(MECHANISM, 0.0, SEED)


def test_keys_use_all_64_bits_and_differ_by_purpose_position_and_seed():
    places = [("noise", 0), ("noise", 1), ("augmentation", 0)]
    keys = [derive_keys(SEED, *place, count=3) for place in places]
    keys.append(derive_keys(Seed.from_int(1), "noise", 0, count=3))
    words = np.concatenate([np.asarray(jax.random.key_data(key)) for key in keys])
    assert words.shape == (12, 2)
    assert len(set(words.ravel().tolist())) == 24
    assert np.all(words > 0xFFFF)
