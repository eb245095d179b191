"""The sampler's law, tested by checks that planted bugs must fail.

Every statistical check turns an inclusion matrix (steps × examples) into a p-value, and
rejects below 1e-6: its false-alarm rate on a true Poisson sampler, were the seeds not
fixed. The same checks run on test doubles, each with one known bug.
"""

import re
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from tanager import sampling
from tanager.privacy.mechanism import Adjacency, Mechanism
from tanager.sampling import PoissonSampler, pack
from tanager.seed import Seed


FALSE_ALARM = 1e-6


def sampler(examples, rate, steps, seed=0):
    mechanism = Mechanism(sample_rate=rate, noise_multiplier=1.0, steps=steps)
    return PoissonSampler(mechanism, examples, Seed.from_int(seed))


def inclusion(draw, examples, steps):
    """bool[steps, examples]: who was drawn; refuses what is not a set of examples."""
    drawn = np.zeros((steps, examples), bool)
    for step in range(steps):
        indices = draw(step)
        assert np.all(np.diff(indices) > 0), "not sorted or not distinct"
        outside = indices[(indices < 0) | (indices >= examples)]
        assert outside.size == 0, f"not examples: {outside}"
        drawn[step, indices] = True
    return drawn


def chi_square_p(scores):
    """Two-sided p-value of independent standard normal scores, by their χ²."""
    law = stats.chi2(scores.size)
    value = np.sum(scores**2)
    return 2 * min(law.cdf(value), law.sf(value))


def frequency_p(drawn, rate):
    """Each example's count is Binomial(steps, q), and examples are independent."""
    steps = len(drawn)
    spread = np.sqrt(steps * rate * (1 - rate))
    return chi_square_p((drawn.sum(0) - steps * rate) / spread)


def pairs_p(drawn, rate):
    """Covariance of every pair, against 0: joint inclusion against q².

    The pairs fall into N − 1 rounds of N / 2 disjoint pairs (a round-robin), so that
    within a round the scores are independent; Bonferroni over the rounds.
    """
    steps, examples = drawn.shape
    centred = (drawn - rate) / np.sqrt(rate * (1 - rate))
    ring = np.arange(1, examples)
    smallest = 1.0
    for _ in range(examples - 1):
        order = np.concatenate([[0], ring])
        left, right = order[: examples // 2], order[: examples // 2 - 1 : -1]
        scores = np.sum(centred[:, left] * centred[:, right], axis=0) / np.sqrt(steps)
        smallest = min(smallest, chi_square_p(scores))
        ring = np.roll(ring, 1)
    return min(1.0, smallest * (examples - 1))


def across_steps_p(drawn, rate):
    """Covariance of each example with itself 1, 2 and 5 steps later, against 0."""
    centred = (drawn - rate) / np.sqrt(rate * (1 - rate))
    smallest = 1.0
    for lag in (1, 2, 5):
        products = centred[:-lag] * centred[lag:]
        scores = np.sum(products, axis=0) / np.sqrt(len(products))
        smallest = min(smallest, chi_square_p(scores))
    return min(1.0, 3 * smallest)


def batch_size_p(sizes, examples, rate):
    """χ² of the batch sizes against Binomial(N, q), bins of 20 expected or more."""
    law = stats.binom(examples, rate)
    bins = max(2, min(40, len(sizes) // 20))
    edges = np.unique(law.ppf(np.arange(1, bins) / bins))
    edges = edges[law.cdf(edges) * len(sizes) >= 20]
    edges = edges[law.sf(edges) * len(sizes) >= 20]
    expected = np.diff([0.0, *law.cdf(edges), 1.0]) * len(sizes)
    assert len(expected) >= 2
    assert expected.min() >= 10, "too few expected in a bin for χ²"
    observed = np.bincount(np.searchsorted(edges, sizes), minlength=len(expected))
    return stats.chisquare(observed, expected).pvalue


CHECKS = {
    "frequency": frequency_p,
    "pairs": pairs_p,
    "across steps": across_steps_p,
    "batch size": lambda drawn, rate: batch_size_p(drawn.sum(1), drawn.shape[1], rate),
}


@pytest.mark.statistical
@pytest.mark.parametrize(
    ("examples", "rate", "steps"),
    [(24, 0.1, 4000), (24, 0.5, 4000), (24, 0.9, 4000), (60, 0.02, 8000)],
)
def test_law(examples, rate, steps):
    draws = sampler(examples, rate, steps).indices
    drawn = inclusion(draws, examples, steps)
    for name, check in CHECKS.items():
        assert check(drawn, rate) > FALSE_ALARM, name


def fixed_size(rng, examples, rate, step):
    return np.sort(rng.choice(examples, round(examples * rate), replace=False))


def shuffled_epochs(rng, examples, rate, step):
    size = round(examples * rate)
    epoch, position = divmod(step, examples // size)
    order = np.random.default_rng(epoch).permutation(examples)
    return np.sort(order[position * size : (position + 1) * size])


def with_replacement(rng, examples, rate, step):
    return np.unique(rng.integers(0, examples, rng.binomial(examples, rate)))


def last_never_drawn(rng, examples, rate, step):
    return np.flatnonzero(rng.random(examples - 1) < rate)


def same_every_step(rng, examples, rate, step):
    return np.flatnonzero(np.random.default_rng(7).random(examples) < rate)


def whole_blocks(rng, examples, rate, step):
    return np.flatnonzero(np.repeat(rng.random(examples // 2) < rate, 2))


def wrong_rate(rng, examples, rate, step):
    return np.flatnonzero(rng.random(examples) < 1.1 * rate)


def no_empty_batch(rng, examples, rate, step):
    while True:
        indices = np.flatnonzero(rng.random(examples) < rate)
        if indices.size:
            return indices


def poisson(rng, examples, rate, step):
    return np.flatnonzero(rng.random(examples) < rate)


@pytest.mark.statistical
@pytest.mark.parametrize(
    ("bug", "rejecting"),
    [
        (fixed_size, {"pairs", "batch size"}),
        (shuffled_epochs, {"frequency", "pairs", "across steps", "batch size"}),
        (with_replacement, {"frequency", "batch size"}),
        (last_never_drawn, {"frequency"}),
        (same_every_step, {"frequency", "across steps"}),
        (whole_blocks, {"pairs", "batch size"}),
        (wrong_rate, {"frequency", "batch size"}),
        (no_empty_batch, {"batch size"}),
        (poisson, set()),
    ],
)
def test_checks_reject_planted_bugs(bug, rejecting):
    """Each bug is found by the checks named, and the true law by none."""
    examples, rate, steps = 24, 0.125, 10_000
    rng = np.random.default_rng(0)
    drawn = inclusion(lambda step: bug(rng, examples, rate, step), examples, steps)
    rejected = {
        name for name, check in CHECKS.items() if check(drawn, rate) < FALSE_ALARM
    }
    assert rejecting <= rejected
    assert rejecting or not rejected


@pytest.mark.parametrize(
    ("indices", "complaint"),
    [([0, 3, 3], "distinct"), ([2, 1], "sorted"), ([0, 24], "24"), ([-1, 0], "-1")],
)
def test_inclusion_refuses_what_is_no_set(indices, complaint):
    with pytest.raises(AssertionError, match=complaint):
        inclusion(lambda step: np.array(indices), 24, 1)


@pytest.mark.statistical
@pytest.mark.parametrize(
    ("examples", "rate"), [(20_000, 0.001), (500, 0.1), (300, 0.5), (300, 0.97)]
)
def test_batch_size_is_binomial(examples, rate):
    draws = sampler(examples, rate, 3000, seed=3)
    sizes = np.array([len(draws.indices(step)) for step in range(3000)])
    assert batch_size_p(sizes, examples, rate) > FALSE_ALARM


@pytest.mark.statistical
def test_sizes_of_a_large_data_set():
    """Several blocks of words: each block's count is Binomial, false alarm 1e-6."""
    examples, rate = 2 * sampling._BLOCK + 1000, 0.01
    draws = sampler(examples, rate, 20)
    edges = np.linspace(0, examples, 101).astype(int)
    counts = np.concatenate(
        [np.histogram(draws.indices(step), edges)[0] for step in range(20)]
    )
    sizes = np.tile(np.diff(edges), 20)
    spread = np.sqrt(sizes * rate * (1 - rate))
    assert chi_square_p((counts - sizes * rate) / spread) > FALSE_ALARM


def test_rate_one_draws_everyone():
    draws = sampler(1000, 1.0, 3)
    for step in range(3):
        np.testing.assert_array_equal(draws.indices(step), np.arange(1000))


@pytest.mark.parametrize("block", [8, 1000])
def test_block_length_does_not_show(monkeypatch, block):
    expected = sampler(500, 0.3, 2).indices(1)
    monkeypatch.setattr(sampling, "_BLOCK", block)
    np.testing.assert_array_equal(sampler(500, 0.3, 2).indices(1), expected)


@pytest.mark.parametrize("rate", [1e-9, 0.0128, 1 / 3, 0.5, 0.97, 1.0])
def test_threshold_is_the_rate(monkeypatch, rate):
    """Word w is drawn exactly when w < q·2⁶⁴, in exact arithmetic."""
    limit = Fraction(rate) * 2**64
    whole = limit.numerator // limit.denominator
    words = [w for w in (0, whole - 1, whole, whole + 1, 2**64 - 1) if 0 <= w < 2**64]
    given = np.array(words, np.uint64)
    monkeypatch.setattr(Seed, "words", lambda *_, **__: given)
    for further, joins in ((bytes(64), limit > whole), (b"\xff" * 64, False)):
        monkeypatch.setattr(Seed, "derive", lambda *_, bits=further, **__: bits)
        drawn = sampler(len(words), rate, 1).indices(0)
        expected = [
            i for i, w in enumerate(words) if w < whole or (w == whole and joins)
        ]
        assert list(drawn) == expected


def test_what_64_bits_do_not_hold_is_drawn_from_512_more(monkeypatch):
    """At q = 2⁻⁶⁶ a word of 0 joins with a chance of a fourth."""
    monkeypatch.setattr(Seed, "words", lambda *_, **__: np.zeros(1, np.uint64))
    for first, joins in ((0x3F, True), (0x40, False)):
        bits = bytes([first]) + b"\xff" * 63
        monkeypatch.setattr(Seed, "derive", lambda *_, bits=bits, **__: bits)
        assert len(sampler(1, 2.0**-66, 1).indices(0)) == joins


def test_further_bits_are_of_one_step_and_one_example(monkeypatch):
    """Were they of several, whether one joins would tell of another."""
    asked = []

    def derive(self, *name, size):
        asked.append(name)
        return b"\xff" * size

    def zeros(self, count, *_, **__):
        return np.zeros(count, np.uint64)

    monkeypatch.setattr("tanager.sampling._BLOCK", 8)
    monkeypatch.setattr(Seed, "words", zeros)
    monkeypatch.setattr(Seed, "derive", derive)
    draws = sampler(20, 2.0**-66, 2)
    assert [len(draws.indices(step)) for step in range(2)] == [0, 0]
    assert len(asked) == len({*asked}) == 40


def test_dtype_order_and_range():
    indices = sampler(1000, 0.2, 1).indices(0)
    assert indices.dtype == np.int64
    assert np.all(np.diff(indices) > 0)
    assert indices.min() >= 0
    assert indices.max() < 1000


def test_random_access_is_deterministic():
    first, second = sampler(300, 0.1, 20), sampler(300, 0.1, 20)
    forward = [first.indices(step) for step in range(20)]
    for step in reversed(range(20)):
        np.testing.assert_array_equal(second.indices(step), forward[step])
        np.testing.assert_array_equal(first.indices(step), forward[step])


@pytest.mark.parametrize(("examples", "rate", "step"), [(40, 0.2, 7), (401, 0.01, 0)])
def test_stream_is_the_one_documented(examples, rate, step):
    """A resumed run must see the batches it would have seen, whatever the version."""
    key = Seed.from_int(0).derive("sampling", step)
    cipher = Cipher(algorithms.AES(key), modes.ECB()).encryptor()  # block by block
    blocks = b"".join(
        cipher.update(number.to_bytes(16, "big")) for number in range(examples)
    )
    stream = [
        int.from_bytes(blocks[8 * n : 8 * n + 8], "little") for n in range(examples)
    ]
    limit = Fraction(rate) * 2**64
    expected = [i for i, word in enumerate(stream) if word < limit]
    assert list(sampler(examples, rate, 10).indices(step)) == expected


def test_another_secret_draws_its_own_batches():
    other = sampler(300, 0.1, 1, seed=1).with_seed(Seed.from_int(2)).indices(0)
    assert other.tolist() == sampler(300, 0.1, 1, seed=2).indices(0).tolist()


@pytest.mark.statistical
def test_seeds_are_independent():
    """Same step, other seed: no covariance; false alarm 1e-6."""
    rate, steps = 0.3, 2000
    one = inclusion(sampler(30, rate, steps, seed=1).indices, 30, steps)
    two = inclusion(sampler(30, rate, steps, seed=2).indices, 30, steps)
    products = (one - rate) * (two - rate) / (rate * (1 - rate))
    scores = np.sum(products, axis=0) / np.sqrt(steps)
    assert chi_square_p(scores) > FALSE_ALARM
    same = np.sum((one - rate) ** 2 / (rate * (1 - rate)), axis=0) / np.sqrt(steps)
    assert chi_square_p(same) < FALSE_ALARM


def test_each_step_has_its_own_key():
    asked = []

    class Recording(Seed):
        def derive(self, purpose, *position, size=32):
            asked.append((purpose, position, size))
            return super().derive(purpose, *position, size=size)

    mechanism = Mechanism(sample_rate=0.5, noise_multiplier=1.0, steps=3)
    draws = PoissonSampler(mechanism, 50, Recording(bytes(32)))
    batches = [tuple(draws.indices(step)) for step in range(3)]
    assert asked == [("sampling", (step,), 32) for step in range(3)]
    assert len(set(batches)) == 3


def test_neighbours_share_their_batches():
    """One more example changes a batch by at most that example."""
    smaller, larger = sampler(400, 0.3, 30), sampler(401, 0.3, 30)
    joined = 0
    for step in range(30):
        indices = larger.indices(step)
        joined += 400 in indices
        np.testing.assert_array_equal(indices[indices < 400], smaller.indices(step))
    assert 0 < joined < 30


def test_expected_batch_size_is_public_and_real():
    assert sampler(1001, 0.25, 1).expected_batch_size == 250.25


def test_where_the_size_is_private_another_is_declared():
    hidden = Mechanism(0.25, 1.0, 1, Adjacency.ADD_OR_REMOVE_ONE)
    with pytest.raises(ValueError, match="protects the number of examples"):
        PoissonSampler(hidden, 1001, Seed.from_int(0))
    for examples in (1001, 1002):
        draws = PoissonSampler(hidden, examples, Seed.from_int(0), declared=1000)
        assert draws.expected_batch_size == 250


def test_horizon_raises():
    draws = sampler(10, 0.5, 5)
    draws.indices(4)
    message = "step (=5) must be below the mechanism's 5 steps: more steps cost more"
    with pytest.raises(ValueError, match=re.escape(message)):
        draws.indices(5)
    with pytest.raises(ValueError, match=re.escape("step (=-1) must be at least 0")):
        draws.indices(-1)
    with pytest.raises(ValueError, match=re.escape("step (=5) must be below")):
        draws.batches(5, 4)


def test_a_batch_that_a_program_would_repeat_is_refused():
    draws = sampler(10, 0.5, 5)
    with pytest.raises(ValueError, match=re.escape("sampler.indices must be called")):
        jax.jit(lambda data: data[next(draws.batches(0, 8)).indices])(jnp.zeros(10))


def test_bad_sizes_are_refused():
    with pytest.raises(ValueError, match=re.escape("examples (=0) must be at least 1")):
        sampler(0, 0.5, 1)
    with pytest.raises(ValueError, match="must be at most 2147483648"):
        sampler(2**31 + 1, 0.5, 1)
    message = "physical_batch_size (=0) must be at least 1"
    with pytest.raises(ValueError, match=re.escape(message)):
        pack(np.arange(3), 0)
    with pytest.raises(ValueError, match=re.escape(message)):
        sampler(10, 0.5, 1).batches(0, 0)


@given(
    st.lists(st.integers(0, 2**31 - 1), unique=True, max_size=60), st.integers(1, 17)
)
def test_packing_partitions(indices, size):
    batches = list(pack(np.array(indices, np.int64), size))
    assert len(batches) == -(-len(indices) // size)
    for batch in batches:
        assert batch.indices.shape == batch.mask.shape == (size,)
        assert batch.examples is None
        assert batch.indices.dtype == np.int32
        assert batch.mask.dtype == np.bool_
        assert np.all(batch.indices[~batch.mask] == 0)
    assert all(batch.mask.all() for batch in batches[:-1])
    assert all(batch.mask.any() for batch in batches)
    real = [int(i) for batch in batches for i in batch.indices[batch.mask]]
    assert real == indices


def test_padding_is_not_the_first_example():
    (batch,) = pack(np.array([0]), 3)
    np.testing.assert_array_equal(batch.indices, [0, 0, 0])
    np.testing.assert_array_equal(batch.mask, [True, False, False])


def test_empty_batch_is_a_step_without_physical_batches():
    draws = sampler(3, 0.01, 50)
    empty = [step for step in range(50) if len(draws.indices(step)) == 0]
    assert len(empty) > 30
    for step in empty:
        assert draws.indices(step).dtype == np.int64
        assert list(draws.batches(step, 8)) == []


def test_batches_pack_the_indices():
    draws = sampler(100, 0.3, 2)
    real = [batch.indices[batch.mask] for batch in draws.batches(1, 7)]
    np.testing.assert_array_equal(np.concatenate(real), draws.indices(1))
