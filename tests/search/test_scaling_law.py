"""The scaling law: fitted as numpy does, its intervals as wide as they should be."""

import math

import numpy as np
import pytest
from scipy import stats

from tanager.search.scaling_law import Run, ScalingLaw, sampling_share


SIZES = (16, 16, 32, 32, 64, 64, 128, 128)
NOISE = (3.0, 2_700_000)  # σ and d of the predicted run


def line(sizes, noise=0.0, seed=0, curve=0.0):
    x = np.log2(np.asarray(sizes, float))
    y = 0.7 - 0.012 * x + curve * (x - x.mean()) ** 2
    return y + noise * np.random.default_rng(seed).normal(size=len(x))


def runs(sizes=SIZES, **options):
    return [Run(*pair) for pair in zip(sizes, line(sizes, **options), strict=True)]


def test_the_line_and_its_deviation_are_those_of_least_squares():
    law = ScalingLaw.fit(runs(noise=0.004))
    x, y = np.log2(SIZES), line(SIZES, noise=0.004)
    slope, intercept, *_ = map(float, stats.linregress(x, y))
    assert law.slope == pytest.approx(slope, rel=1e-12)
    assert law.at(1) == pytest.approx(intercept, rel=1e-12)
    deviation = math.sqrt(np.sum((y - intercept - slope * x) ** 2) / 6)
    assert law.deviation == pytest.approx(deviation, rel=1e-12)
    # The interval of one more run, as textbooks have it.
    far = 12 - x.mean()
    half = (
        stats.t.ppf(0.975, 6)
        * deviation
        * math.sqrt(1 + 1 / 8 + far**2 / np.sum((x - x.mean()) ** 2))
    )
    predicted = law.predict(4096)
    assert predicted.high - predicted.low == pytest.approx(2 * half, rel=1e-9)
    assert predicted.accuracy == pytest.approx(intercept + 12 * slope, rel=1e-12)
    low, high = law.band(4096)
    assert predicted.low < low < high < predicted.high


@pytest.mark.statistical
def test_intervals_hold_as_often_as_they_say():
    """2000 searches: 95 % intervals hold 95 % of outcomes; false-alarm rate 1e-6."""
    held = 0
    for seed in range(2000):
        noisy = runs(noise=0.004, seed=seed)
        outcome = line([1024], noise=0.004, seed=10_000 + seed)[0]
        predicted = ScalingLaw.fit(noisy).predict(1024)
        held += predicted.low <= outcome <= predicted.high
    assert stats.binomtest(held, 2000, 0.95).pvalue > 1e-6


@pytest.mark.statistical
def test_curvature_is_found_where_it_is_and_seldom_elsewhere():
    """The F test at 5 %: 1000 straight laws; false-alarm rate of this test 1e-6."""
    alarms = sum(
        (ScalingLaw.fit(runs(noise=0.004, seed=seed)).curvature() or 0) < 0.05
        for seed in range(1000)
    )
    assert stats.binomtest(alarms, 1000, 0.05).pvalue > 1e-6
    curved = ScalingLaw.fit(runs(noise=0.001, curve=0.01))
    assert (curved.curvature() or 1) < 1e-3
    assert any("on a curve" in doubt for doubt in curved.doubts(512, *NOISE))


def test_a_good_law_leaves_no_doubt():
    law = ScalingLaw.fit(runs(noise=0.004))
    assert law.doubts(4096, *NOISE) == ()
    assert law.doubts(16384, *NOISE) == ()  # 128 times 128, as the paper's Figure 1


@pytest.mark.parametrize(
    ("sizes", "reference", "more", "doubt"),
    [
        ((32, 32, 64, 64), 512, NOISE, "only 2 batch sizes"),
        ((16, 32, 64), 512, NOISE, "no batch size was repeated"),
        (SIZES, 32768, NOISE, "256 times the largest simulated batch; the TAN paper"),
        (SIZES, 4096, (3.0, 10_000), "clipping and sampling decide there"),
    ],
)
def test_a_law_says_why_it_should_not_be_trusted(sizes, reference, more, doubt):
    law = ScalingLaw.fit(runs(sizes, noise=0.004))
    assert any(doubt in each for each in law.doubts(reference, *more))


@pytest.mark.parametrize("accuracies", [(0.93, 0.95, 0.965), (0.2, 0.12, 0.06)])
def test_a_line_that_leaves_what_an_accuracy_can_be_is_doubted(accuracies):
    pairs = zip((16, 32, 64), accuracies, strict=True)
    near = [(size, each + way) for size, each in pairs for way in (-0.004, 0.004)]
    law = ScalingLaw.fit(near)
    assert any("no accuracy can be" in each for each in law.doubts(512, *NOISE))
    assert not any("no accuracy" in each for each in law.doubts(64, *NOISE))


def test_two_runs_tell_nothing_of_their_variation():
    law = ScalingLaw.fit(runs((32, 64)))
    assert law.predict(512)[2:4] == (0.0, 1.0)
    assert law.curvature() is None


@pytest.mark.parametrize("accuracy", [0.1, 1 / 3, 10 / 143, 1.0])
def test_runs_of_one_accuracy_are_a_flat_line(accuracy):
    law = ScalingLaw.fit([(size, accuracy) for size in (16, 32, 64, 64)])
    assert law.slope == pytest.approx(0, abs=1e-15)
    assert law.predict(1024)[1:4] == pytest.approx([accuracy] * 3)
    assert law.curvature() in (None, 1.0)


def test_predictions_stay_shares():
    law = ScalingLaw.fit([(1, 0.9), (2, 0.95), (4, 1.0), (4, 0.99)])
    assert law.predict(1 << 20).accuracy == 1.0
    assert law.at(1 << 20) > 1


def test_sampling_share_is_the_ratio_of_two_variances():
    """Of a sum of unit vectors, drawn by Poisson, and of the noise on each of them."""
    random = np.random.default_rng(0)
    d, n, batch, sigma = 50, 4000, 40, 0.2
    vectors = random.normal(size=(n, d))
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    sums = [(random.random(n) < batch / n) @ vectors for _ in range(2000)]
    sampled = float(np.var(sums, axis=0).sum())
    noise = sigma**2 * d
    assert sampling_share(sigma, batch, d) == pytest.approx(sampled / noise, rel=0.05)
    # Half as long: a quarter of the variance.
    assert sampling_share(sigma, batch, d, 0.25) == pytest.approx(
        float(np.var([s / 2 for s in sums], axis=0).sum()) / noise, rel=0.05
    )
    assert sampling_share(0.0, batch, d) == math.inf


def with_sampling(sizes, fall, noise=0.0):
    """Accuracies that only the noise of sampling lowers; σ = 3 at B = 4096."""
    random = np.random.default_rng(1)
    shares = [sampling_share(3 * size / 4096, size, 175_722) for size in sizes]
    return [
        (size, 0.5 - fall * math.log2(1 + share) + random.normal(0, noise))
        for size, share in zip(sizes, shares, strict=True)
    ]


def test_a_rise_that_sampling_explains_is_doubted_and_seen_to_its_end():
    sizes = (16, 16, 32, 32, 64, 64, 128, 128)
    law = ScalingLaw.fit(with_sampling(sizes, 0.1, 0.002))
    (doubt,) = (
        each for each in law.doubts(4096, 3.0, 175_722) if "accuracy rises" in each
    )
    assert "adds up to 66 % of the noise's variance" in doubt
    end = law.without_sampling(4096, 3.0, 175_722)
    assert end == pytest.approx(0.5, abs=0.005)
    assert f"at {100 * end:.1f} % here" in doubt
    # The line goes on.
    assert law.at(4096) > 0.55
    # Shorter gradients give another curve, and at last are no reason for a rise.
    (doubt,) = (each for each in law.doubts(4096, 3.0, 175_722, 0.3) if "rises" in each)
    assert "examples adds 20 % of the noise's variance" in doubt
    further = law.without_sampling(4096, 3.0, 175_722, 0.3)
    assert f"at {100 * further:.1f} % here" in doubt
    assert abs(further - end) > 0.001
    doubts = law.doubts(4096, 3.0, 175_722, 0.05)
    assert not any("rises" in each for each in doubts)


def test_sampling_may_be_next_to_nothing_or_all_there_is():
    law = ScalingLaw.fit([(16, 0.5), (16, 0.501), (32, 0.55), (64, 0.6)])
    end = law.without_sampling(4096, 3.0, 10**18)
    # So little of it that it goes as 1/B: one more doubling gains half of the last.
    assert end == pytest.approx(
        law.without_sampling(1 << 30, 3.0 * 2**18, 10**18), abs=1e-3
    )
    assert 0.6 < end < 0.7
    (doubt,) = (each for each in law.doubts(4096, 3.0, 10_000) if "rises" in each)
    assert "adds up to 1165 % of" in doubt


def test_a_law_that_falls_or_whose_noise_is_large_is_not_doubted_for_a_rise():
    falling = ScalingLaw.fit([(b, 1 - a) for b, a in with_sampling((16, 32, 64), 0.1)])
    assert (falling.rises or 0.0) > 0.9
    rising = ScalingLaw.fit([(16, 0.5), (16, 0.501), (32, 0.55), (64, 0.6)])
    assert (rising.rises or 1.0) < 0.01
    for law, parameters in ((falling, 175_722), (rising, 10_000_000)):
        doubts = law.doubts(4096, 3.0, parameters)
        assert not any("accuracy rises" in each for each in doubts)
    assert any("accuracy rises" in each for each in rising.doubts(4096, 3.0, 175_722))


def test_a_rise_that_is_not_there_is_seen_in_one_of_twenty():
    """The test of the slope, on 2000 flat laws; false alarm 1e-6."""
    random = np.random.default_rng(2)
    sizes = (32, 32, 64, 64, 128, 128)
    alarms = sum(
        (ScalingLaw.fit([(b, random.normal(0.5, 0.01)) for b in sizes]).rises or 1)
        < 0.05
        for _ in range(2000)
    )
    assert (
        stats.binom.ppf(1e-6, 2000, 0.05) <= alarms <= stats.binom.isf(1e-6, 2000, 0.05)
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([(32, 0.5), (32, 0.6)], "runs .* must be at two batch sizes or more"),
        ([], "runs .* must be at two batch sizes"),
        ([(32, 1.5), (64, 0.5)], r"accuracy \(=1.5\) must be at most 1"),
        ([(0, 0.5), (64, 0.5)], r"batch_size \(=0\) must be positive"),
    ],
)
def test_what_makes_no_line_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        ScalingLaw.fit(given)
