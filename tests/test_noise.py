"""Gaussian noise: the right scale, never the same twice, no word from its last bits."""

import functools
import itertools
import re
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import tanager
from tanager import gaussian
from tanager.grid import Grid
from tanager.keys import derive_keys
from tanager.noise import GaussianNoise
from tanager.privacy.mechanism import Mechanism
from tanager.seed import Seed


SEED = Seed.from_int(0)
MECHANISM = Mechanism(sample_rate=0.1, noise_multiplier=1.5, steps=100)
FALSE_ALARM = 1e-6


def zeros(size=40_000):
    return {"a": jnp.zeros(size), "b": jnp.zeros((size // 10, 10))}


def noise_of(tree, step=0, seed=SEED, mechanism=MECHANISM):
    noise = GaussianNoise(mechanism, 0.8, seed, tree)
    return noise(noise.grid.round(tree), step)


@functools.cache
def noise_alone():
    """The noise of a sum of zeros, drawn once for all tests."""
    return {name: np.asarray(leaf) for name, leaf in noise_of(zeros()).items()}


def check_standard_deviation(values, expected):
    """Chi-squared test of the variance with known mean 0; false alarm 1e-6."""
    statistic = np.sum(np.square(values, dtype=np.float64)) / expected**2
    low, high = stats.chi2.ppf([FALSE_ALARM / 2, 1 - FALSE_ALARM / 2], values.size)
    assert low < statistic < high


@pytest.mark.statistical
def test_standard_deviation_is_multiplier_times_sensitivity():
    for leaf in noise_alone().values():
        check_standard_deviation(leaf, 1.5 * 0.8)


@pytest.mark.statistical
@pytest.mark.parametrize("wrong", [0.5, 1.5, 1 / 0.8, 1.1])
def test_a_wrong_scale_would_be_noticed(wrong):
    with pytest.raises(AssertionError):
        check_standard_deviation(wrong * noise_alone()["a"], 1.5 * 0.8)


@pytest.mark.statistical
def test_noise_is_normal():
    """Kolmogorov-Smirnov and fourth moment; false alarm 1e-6 each."""
    values = np.float64(noise_alone()["a"]) / (1.5 * 0.8)
    assert stats.kstest(values, "norm").pvalue > FALSE_ALARM
    excess = np.mean(values**4) - 3
    bound = stats.norm.isf(FALSE_ALARM / 2) * np.sqrt(96 / values.size)
    assert abs(excess) < bound


@pytest.mark.parametrize("size", [1, 1000, 10**6])
def test_the_deviation_pays_for_the_rounding(size):
    noise = GaussianNoise(MECHANISM, 0.8, SEED, zeros(10 * size)["a"])
    expected = 1.5 * (0.8 + noise.grid.rounding)
    assert noise.standard_deviation == pytest.approx(expected, rel=1e-12)
    assert 1.5 * 0.8 < noise.standard_deviation < 1.5 * 0.8 * (1 + 2**-12)
    assert noise._scale * noise.grid.spacing >= noise.standard_deviation


def test_no_rounding_makes_the_noise_smaller():
    for sigma in np.random.default_rng(0).uniform(0.3, 30, 30).tolist():
        mechanism = Mechanism(0.1, sigma, 1)
        noise = GaussianNoise(mechanism, 0.8, SEED, {"a": jnp.zeros(7)})
        spacing = Fraction(noise.grid.spacing)
        paid = Fraction(noise._scale) * spacing / Fraction(sigma) - Fraction(0.8)
        assert paid > 0 and paid**2 >= 7 * spacing**2


@pytest.mark.statistical
def test_leaves_steps_and_seeds_are_independent():
    """All pairwise correlations; false alarm 1e-6 after Bonferroni."""
    leaves = {name: jnp.zeros((100, 100)) for name in "abc"}
    streams = [
        np.ravel(leaf)
        for seed, step in [(SEED, 0), (SEED, 1), (Seed.from_int(1), 0)]
        for leaf in noise_of(leaves, step, seed).values()
    ]
    pairs = list(itertools.combinations(streams, 2))
    bound = stats.norm.isf(FALSE_ALARM / 2 / len(pairs)) / np.sqrt(10_000)
    for one, two in pairs:
        assert abs(np.corrcoef(one, two)[0, 1]) < bound


def test_the_same_step_has_the_same_noise_and_it_is_added():
    tree = {"a": jnp.arange(5.0), "b": jnp.ones((2, 5))}
    first, again = noise_of(tree), noise_of(tree)
    nothing = noise_of(jax.tree.map(jnp.zeros_like, tree))
    for name, leaf in tree.items():
        np.testing.assert_array_equal(first[name], again[name])
        np.testing.assert_allclose(
            first[name], leaf + nothing[name], rtol=1e-6, atol=1e-3
        )


def test_noise_of_known_bits_is_known(monkeypatch):
    """A resumed run must see the noise it would have seen, whatever the version."""
    noise = GaussianNoise(MECHANISM, 0.8, SEED, {"a": jnp.zeros(3), "b": jnp.zeros(2)})
    words = SEED.words(5, "noise", 4)
    expected = gaussian.rounded_normals(words, noise._scale, lambda *_: 0)
    drawn = noise.draw(4)
    found = [
        (np.asarray(drawn.high[name], np.int64) << 16) + drawn.low[name]
        for name in "ab"
    ]
    np.testing.assert_array_equal(np.concatenate(found), expected)
    assert expected.tolist() == [44453, -10356, -6706, -28559, 9575]


def test_the_size_of_blocks_does_not_show(monkeypatch):
    noise = GaussianNoise(MECHANISM, 0.8, SEED, zeros(1000))
    expected = noise.draw(0)
    monkeypatch.setattr("tanager.noise._BLOCK", 64)
    jax.tree.map(np.testing.assert_array_equal, noise.draw(0), expected)


def test_further_bits_are_of_one_number_of_one_step(monkeypatch):
    asked = []

    def numbers(words, scale, more):
        for place, taken in itertools.product(range(len(words)), (1, 2)):
            more(place, taken)
        return np.zeros(len(words), np.int64)

    def derive(self, *name, size=32):
        asked.append(name)
        return bytes(size)

    noise = GaussianNoise(MECHANISM, 0.8, SEED, zeros(10))
    monkeypatch.setattr("tanager.noise._BLOCK", 8)
    monkeypatch.setattr("tanager.noise.rounded_normals", numbers)
    monkeypatch.setattr(Seed, "derive", derive)
    for step in range(2):
        noise.draw(step)
    bits = [name for name in asked if name[0] == "noise bits"]
    assert len(bits) == len({*bits}) == 2 * 20 * 2


def test_jit_changes_nothing():
    tree = zeros(100)
    noise = GaussianNoise(MECHANISM, 0.8, SEED, tree)
    total, drawn = noise.grid.round(tree), noise.draw(3)
    plain, compiled = noise.add(total, drawn), jax.jit(noise.add)(total, drawn)
    jax.tree.map(np.testing.assert_array_equal, plain, compiled)


@pytest.mark.cpu
def test_every_device_gets_the_same_noise_when_parameters_are_sharded():
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.NamedSharding(mesh, jax.P("d"))
    leaves = [jnp.zeros(64), jnp.zeros((8, 3)), jnp.zeros(2**18)]
    noise = GaussianNoise(MECHANISM, 0.8, SEED, leaves)
    total, drawn = noise.grid.round(leaves), noise.draw(0)
    whole = jax.jit(noise.add)(total, drawn)
    shares = jax.device_put((total, drawn), sharding)
    jax.tree.map(np.testing.assert_array_equal, jax.jit(noise.add)(*shares), whole)


def test_float64_parameters_get_float64_and_none_stays_none():
    with jax.enable_x64(True):
        out = noise_of({"a": jnp.zeros(10, jnp.float64), "b": None, "c": jnp.zeros(2)})
        assert out["a"].dtype == jnp.float64
        assert out["b"] is None
    out = noise_of({"a": jnp.zeros(10, jnp.bfloat16).astype(jnp.float32)})
    assert out["a"].dtype == jnp.float32


def test_sums_in_floats_are_refused():
    noise = GaussianNoise(MECHANISM, 0.8, SEED, zeros())
    with pytest.raises(ValueError, match="total must be a sum on the grid"):
        noise(zeros(), 0)  # pyrefly: ignore[bad-argument-type]


def test_noise_past_the_horizon_is_refused():
    noise = GaussianNoise(MECHANISM, 0.8, SEED, zeros())
    with pytest.raises(ValueError, match=re.escape("step (=100) must be below")):
        noise.draw(100)
    with pytest.raises(ValueError, match=re.escape("step (=-1)")):
        noise.draw(-1)


@pytest.mark.parametrize("trace", [jax.jit, jax.vmap])
def test_noise_that_a_program_would_repeat_is_refused(trace):
    noise = GaussianNoise(MECHANISM, 1.0, SEED, jnp.zeros(3))
    total = jax.tree.map(lambda leaf: jnp.stack([leaf] * 2), noise.zeros())
    with pytest.raises(ValueError, match=re.escape("noise.draw must be called outs")):
        trace(lambda total: noise.grid.plus(total, noise.draw(0)))(total)


def test_a_useless_sensitivity_and_noise_beyond_the_integers_are_refused():
    with pytest.raises(ValueError, match=re.escape("sensitivity (=0.0)")):
        GaussianNoise(MECHANISM, 0.0, SEED, zeros())
    loud = Mechanism(0.1, 1e12, 10)
    message = "noise_multiplier (=1000000000000.0) must be below 8.39e+06 with 44,000"
    with pytest.raises(ValueError, match=re.escape(message)):
        GaussianNoise(loud, 1.0, SEED, {"a": zeros()["a"], "b": zeros()["b"][:400]})


def test_keys_use_all_64_bits_and_differ_by_purpose_position_and_seed():
    places = [("noise", 0), ("noise", 1), ("augmentation", 0)]
    keys = [derive_keys(SEED, *place, count=3) for place in places]
    keys.append(derive_keys(Seed.from_int(1), "noise", 0, count=3))
    words = np.concatenate([np.asarray(jax.random.key_data(key)) for key in keys])
    assert words.shape == (12, 2)
    assert len(set(words.ravel().tolist())) == 24
    assert np.all(words > 0xFFFF)


### What a release tells by its last bits


def in_floats(total, deviation, key):
    """Plant the bug: the sum of four float32 normals, scaled and added in float32."""
    normals = sum(jax.random.normal(k, total.shape) for k in jax.random.split(key, 4))
    return total + jnp.float32(deviation / 2) * normals


def possible_in_floats(released, total, deviation):
    """Which coordinates some float32 sum of draws would give, near the quotient."""
    scale = np.float32(deviation / 2)
    exact = np.asarray(released, np.float64)
    guess = ((exact - total) / np.float64(scale)).astype(np.float32)
    found = np.zeros(total.shape, bool)
    for direction in (np.inf, -np.inf):
        draw = guess
        for _ in range(4):
            fused = total.astype(np.float64) + np.float64(scale) * draw.astype(
                np.float64
            )
            found |= fused.astype(np.float32) == released
            found |= total + scale * draw == released
            draw = np.nextafter(draw, np.float32(direction))
    return found


def neighbouring_sums(size=2000):
    draw = np.random.default_rng(5)
    without = draw.normal(size=size).astype(np.float32) * 3
    one = draw.normal(size=size)
    return without, (without + 0.8 * one / np.linalg.norm(one)).astype(np.float32)


def told_apart(release, possible):
    """In how many of 20 releases a world is ruled out and it is the wrong one."""
    sums, right = neighbouring_sums(), 0
    for trial in range(20):
        truth = trial % 2
        released = release(sums[truth], trial)
        ruled_out = [not np.all(possible(released, total)) for total in sums]
        right += ruled_out[1 - truth] and not ruled_out[truth]
    return right


def test_planted_noise_in_floats_tells_neighbours_apart():
    def release(total, trial):
        return np.asarray(in_floats(jnp.asarray(total), 20.0, jax.random.key(trial)))

    assert (
        told_apart(release, lambda out, total: possible_in_floats(out, total, 20)) == 20
    )


def test_releases_on_the_grid_rule_out_nothing():
    """Any released value can come of any sum: all lie on the one public grid."""
    mechanism = Mechanism(1.0, 25.0, 40)
    like = jnp.zeros(2000)
    noise = GaussianNoise(mechanism, 0.8, Seed.from_os(), like)

    def release(total, trial):
        return np.asarray(noise(noise.grid.round(jnp.asarray(total)), trial))

    def possible(released, total):
        """Whether the noise that this sum would take is one the generator can draw."""
        units = np.asarray(released, np.float64) / noise.grid.spacing
        numbers = units - np.rint(np.float64(total) / noise.grid.spacing)
        return (numbers == np.rint(numbers)) & (np.abs(numbers) < 9 * noise._scale)

    assert told_apart(release, possible) == 0
    attack = lambda out, total: possible_in_floats(out, total, 20)  # noqa: E731
    assert told_apart(release, attack) == 0


@pytest.mark.statistical
def test_last_bits_are_fair_whatever_the_sum():
    """The parity of what is released, for sums that are all odd; false alarm 1e-6."""
    like = jnp.zeros(100_000)
    noise = GaussianNoise(MECHANISM, 0.8, SEED, like)
    odd = noise.grid.round(jnp.full(100_000, 3 * noise.grid.spacing))
    units = np.asarray(noise(odd, 0), np.float64) / noise.grid.spacing
    last = int(np.sum(np.abs(np.rint(units)) % 2))
    assert stats.binomtest(last, units.size).pvalue > FALSE_ALARM


def test_an_accumulator_at_a_power_of_two_moves_by_one_example():
    """Physical batches that all round one way, and the other way with an example more.

    In float32 one example of norm 0.97 C moved such sums by 2 to 9 C.
    """
    ulp, one = 2.0**-8, 31 / 32
    parts = [2.0**16 - one / 2] + [1.49 * ulp, -0.99 * ulp] * 300
    grid = Grid.of(1.0, jnp.zeros(()))
    add = jax.jit(grid.add)
    drift = []
    for sums in (parts, [parts[0], one, *parts[1:]]):
        total, plain = grid.zeros(jnp.zeros(())), np.float32(0)
        for part in sums:
            total, plain = add(total, jnp.float32(part)), plain + np.float32(part)
        drift.append((float(grid.floats(total, jnp.zeros(()))), float(plain)))
    (exact, plain), (exact_more, plain_more) = drift
    assert abs(exact_more - exact) <= one + grid.rounding
    assert abs(plain_more - plain) > 3 * one  # what was planted is there


def test_a_published_first_step_tells_nothing(digits):
    """noise_lattice.py's level B: the parameters after one step of SGD."""
    data, params, loss = digits
    mechanism = Mechanism(1.0, 20.0, 1)
    problem = tanager.Problem(loss, params, data)
    result = tanager.train(problem, tanager.DPSGD(mechanism, tanager_sgd(), delta=1e-5))
    grid = Grid.of(tanager.clipped_grad(loss, clip_norm=1.0).sensitivity, params)
    lattice = np.asarray(result.params["w"], np.float64) * len(data["y"]) / grid.spacing
    # The float of a whole number over N: undone to its last bits, whole again.
    assert np.abs(lattice - np.rint(lattice)).max() < np.abs(lattice).max() * 2**-22


def tanager_sgd():
    import optax

    return optax.sgd(1.0)


@pytest.fixture
def digits():
    import optax
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    data = {
        "x": (images[:200] / 16).astype(np.float32),
        "y": labels[:200].astype(np.int32),
    }

    def loss(params, example):
        logits = example["x"] @ params["w"] + params["b"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, example["y"])

    return data, {"w": jnp.zeros((64, 10)), "b": jnp.zeros(10)}, loss
