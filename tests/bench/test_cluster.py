import re

import numpy as np
import pytest

from tanager.bench.cluster import (
    Cluster,
    amdahl,
    amdahl_fit,
    communicating_seconds,
    doubling,
    largest_draw,
    predict,
    ring_seconds,
)


def amdahl_speedup(parallel, devices):
    return 1 / ((1 - parallel) + parallel / devices)


def test_a_cluster_is_read_from_words():
    assert Cluster.parse("hosts=20,devices=4,bandwidth=12.5") == Cluster(20, 4, 12.5)
    text = "bandwidth=1e1, hosts=2,devices=8,local_bandwidth=300,latency=2e-5"
    assert Cluster.parse(text) == Cluster(2, 8, 10.0, 300.0, 2e-5)
    text = "hosts=1,devices=1,bandwidth=1,sample_rate=0.5,overlap=2"
    assert Cluster.parse(text) == Cluster(1, 1, 1.0, sample_rate=0.5, overlap=2.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hosts=2,devices=4", "must give bandwidth: for example hosts=20,"),
        ("hosts=2,hosts=2", "must give hosts once"),
        ("host=2,devices=4,bandwidth=1", "did you mean hosts?"),
        ("", "simulate (='') must be one of hosts, devices, bandwidth"),
        ("hosts=2.5,devices=4,bandwidth=1", "hosts (='2.5') must be a whole number"),
        ("hosts=2,devices=4,bandwidth", "bandwidth (='') must be a number"),
        ("hosts=0,devices=4,bandwidth=1", "hosts (=0) must be at least 1"),
        ("hosts=2,devices=4,bandwidth=nan", "bandwidth (=nan) must be a number"),
        ("hosts=2,devices=4,bandwidth=1,latency=-1", "latency (=-1.0) must be finite"),
        ("hosts=2,devices=4,bandwidth=1,local_bandwidth=0", "local_bandwidth (=0.0)"),
        ("hosts=2,devices=4,bandwidth=1,sample_rate=1.5", "sample_rate (=1.5) must be"),
        ("hosts=2,devices=4,bandwidth=1,overlap=-1", "overlap (=-1.0) must be finite"),
        ("hosts=2,devices=4,bandwidth=1,logical_batch=9", "must be one of hosts"),
    ],
)
def test_what_is_no_cluster_is_refused(text, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Cluster.parse(text)


def test_numbers_of_devices_double_up_to_all_there_are():
    assert [doubling(most) for most in (1, 2, 6)] == [(1,), (1, 2), (1, 2, 4, 6)]


def test_a_ring_moves_twice_the_bytes_less_a_member_s_share():
    # 4 members: 2 · 3/4 · 3 GB over 1.5 GB/s.
    assert ring_seconds(4, 3e9, 1.5) == pytest.approx(3.0)
    assert ring_seconds(1, 3e9, 1.5) == 0


def test_hosts_exchange_after_their_devices_did():
    cluster = Cluster(8, 2, bandwidth=2.0, local_bandwidth=10.0, latency=0.25)
    # Within: 2 · 1/2 · 4/10 = 0.4. Between 2: 2 · 1/2 · 4/2 = 2. Between 8: 3.5.
    assert communicating_seconds(cluster, 1, 4e9) == pytest.approx(0.4)
    assert communicating_seconds(cluster, 2, 4e9) == pytest.approx(0.4 + 2 + 0.25)
    assert communicating_seconds(cluster, 8, 4e9) == pytest.approx(0.4 + 3.5 + 0.25)
    free_within = Cluster(8, 2, bandwidth=2.0)
    assert communicating_seconds(free_within, 1, 4e9) == 0


def test_each_device_keeps_its_examples():
    cluster = Cluster(3, 2, bandwidth=1.0)
    rows = predict(cluster, 4.0, examples=100, size=1e9)
    assert [(row["hosts"], row["devices"]) for row in rows] == [(1, 2), (2, 4), (3, 6)]
    assert [row["computing_seconds"] for row in rows] == [4.0] * 3
    # 0, 2 · 1/2 and 2 · 2/3 seconds.
    shares = [row["share_of_ideal"] for row in rows]
    assert shares == pytest.approx([1, 4 / 5, 4 / (4 + 4 / 3)])
    rates = [row["examples_per_second"] for row in rows]
    assert rates == pytest.approx([200 / 4, 400 / 5, 600 / (4 + 4 / 3)])


def test_or_a_logical_batch_is_divided_among_all_devices():
    rows = predict(Cluster(2, 2, bandwidth=1.0), 32.0, 800, size=1e9, strong=True)
    # 800 examples take one device 32 seconds, two 16, four 8.
    assert [row["computing_seconds"] for row in rows] == [16, 8]
    assert [row["examples_per_second"] for row in rows] == [800 / 16, 800 / 9]
    assert [row["share_of_ideal"] for row in rows] == [1, 8 / 9]


def test_all_wait_for_the_device_that_drew_most():
    rng = np.random.default_rng(0)
    for devices, rate in ((80, 0.5), (8, 0.1)):
        # Each device draws from its own 1/n of the data: n · 625 · q in the mean.
        draws = rng.binomial(625, rate, (4000, devices))
        expected = draws.max(1).mean() / (625 * rate)
        found = largest_draw(devices, devices * 625 * rate, rate)
        assert found - 1 == pytest.approx(expected - 1, rel=0.05)
    assert largest_draw(1, 100, 0.5) == 1
    cluster = Cluster(2, 40, bandwidth=1.0, sample_rate=0.5)
    *_, row = predict(cluster, 80.0, 25_000, size=1e9, strong=True)
    assert row["waiting_seconds"] == pytest.approx(largest_draw(80, 25_000, 0.5) - 1)
    assert row["share_of_ideal"] == pytest.approx(1 / (2 + row["waiting_seconds"]))


@pytest.mark.parametrize(("overlap", "left"), [(0.25, 0.75), (3.0, 0.0)])
def test_gradients_are_sent_during_the_backward_pass_only_without_privacy(
    overlap, left
):
    cluster = Cluster(2, 1, bandwidth=1.0, overlap=overlap)
    found = [
        [row["communicating_seconds"] for row in predict(cluster, 4.0, 8, 1e9, **how)]
        for how in ({"private": False}, {"private": True})
    ]
    assert found == [[0, left], [0, 1]]


def test_the_fit_is_least_squares_in_the_inverse_speedup():
    speedups = {1: 1.0, 2: 1.7, 4: 3.5, 8: 5.0}
    grid = np.linspace(0, 1, 100_001)
    errors = sum((1 / s - (1 - grid) - grid / n) ** 2 for n, s in speedups.items())
    assert amdahl_fit(speedups) == pytest.approx(grid[np.argmin(errors)], abs=2e-5)


def test_one_device_tells_nothing_of_the_law():
    assert amdahl_fit({1: 1.0}) is None
    assert amdahl_fit({}) is None


@pytest.mark.parametrize(
    ("parallel", "share"), [(0.989, 0.535), (0.995, 0.717), (-0.3, None)]
)
def test_the_fit_to_a_law_is_its_fraction(parallel, share):
    """The paper's fractions, and the shares of 80 devices in docs/scale.md."""
    speedups = {n: amdahl_speedup(parallel, n) for n in (1, 20, 80)}
    assert amdahl_fit(speedups) == pytest.approx(parallel)
    assert share is None or speedups[80] / 80 == pytest.approx(share, abs=5e-4)


# The efficiency paper: section 7, ViT-Base of 86.6 M parameters on 20 hosts of 4 V100.
DEVICES, LOGICAL, SIZE, PRIVATE, PLAIN = 80, 25_000, 4 * 86.6e6, 0.692, 0.533
# Table 2, ms: forward, backward, clip and accumulate, optimizer step.
TIMES = {
    "sgd": (81.14, 163.85, 0, 38.17),
    "per_example": (101.53, 681.48, 26.76, 99.65),
}


def test_one_fitted_bandwidth_predicts_the_paper_s_80_gpus_within_three_points():
    """`docs/scale.md` shows these numbers."""
    ratio = sum(TIMES["per_example"]) / sum(TIMES["sgd"])
    assert ratio == pytest.approx(3.2117, abs=5e-5)
    share = 1 / DEVICES  # the seconds of a device's part, of 1 s on one device
    # 312 examples a device are two physical batches: 216 fit (Table 3).
    overlap = share / 2 * TIMES["sgd"][1] / sum(TIMES["sgd"])
    spent = share / PLAIN - share * largest_draw(DEVICES, LOGICAL, 0.5) + overlap
    bandwidth = 2 * 19 / 20 * SIZE / spent / 1e9
    cluster = Cluster(20, 4, bandwidth, sample_rate=0.5, overlap=overlap)
    rows = {
        name: [
            {"strategy": name} | row
            for row in predict(
                cluster, seconds, LOGICAL, SIZE, strong=True, private=name != "sgd"
            )
        ]
        for name, seconds in (("sgd", 1.0), ("per_example", ratio))
    }
    shares = {n: [float(row["share_of_ideal"]) for row in rows[n]] for n in rows}
    assert [row["devices"] for row in rows["sgd"]] == [4, 8, 16, 32, 64, 80]
    assert shares["sgd"][-1] == pytest.approx(PLAIN)  # fitted
    assert shares["per_example"][-1] == pytest.approx(PRIVATE, abs=0.03)
    assert shares["per_example"][-1] == pytest.approx(0.700, abs=0.001)
    for found in shares.values():
        # Almost ideal in a host, and then less with each host.
        assert found[0] > 0.99
        assert found == sorted(found, reverse=True)
    fits = amdahl([*rows["sgd"], *rows["per_example"]])
    assert fits == pytest.approx({"sgd": 0.989, "per_example": 0.995}, abs=0.0025)
