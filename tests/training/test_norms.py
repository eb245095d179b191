"""Histograms of gradient norms: the bins, what a run writes, what it stays out of."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from parts import train
from tanager.adaptive import AdaptiveClipping
from tanager.clipping import Style
from tanager.privacy.mechanism import Mechanism
from tanager.training.norms import BINS, Norms, edges, histogram


def test_bins_are_quarters_of_a_power_of_two():
    assert edges()[0] == 2**-10
    assert edges()[-1] == 2**6
    np.testing.assert_allclose(np.diff(np.log2(edges())), 0.25, rtol=1e-9)
    assert len(edges()) == BINS - 1


def test_a_histogram_is_numpys():
    norms = np.exp(np.random.default_rng(0).normal(0, 4, 1000)).astype(np.float32)
    norms[:3] = 0, 2**-10, 2**6
    usable = np.random.default_rng(1).random(1000) < 0.7
    found = np.asarray(histogram(jnp.asarray(norms), jnp.asarray(usable)))
    ends = np.concatenate([[-1.0], edges().astype(np.float32), [np.inf]])
    expected, _ = np.histogram(norms[usable], ends)
    np.testing.assert_array_equal(found, expected)
    assert found.dtype == np.int32


def loss(params, example):
    return jnp.vdot(params["w"], example["x"])


def trained(loss, x, out, steps, **more):
    train(
        loss=loss,
        params={"w": jnp.zeros(4)},
        data={"x": x},
        mechanism=Mechanism(0.5, 1.0, steps),
        out=out,
        physical_batch_size=8,
        **more,
    )
    return out


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Gradients are the examples themselves: a quarter of norm 0.3, the rest of 3."""
    x = np.zeros((40, 4), np.float32)
    x[:, 0] = np.where(np.arange(40) < 10, 0.3, 3.0)
    return trained(loss, x, tmp_path_factory.mktemp("run") / "run", 8)


def test_a_run_keeps_the_norms_of_all_sampled_examples(run):
    norms = Norms.read(run, parts=2)
    assert norms.steps == (4, 8)
    text = (run / "private/metrics.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert norms.counts.sum() == sum(line["examples"] for line in lines)
    small, large = np.searchsorted(edges(), [0.3, 3.0], side="right")
    assert np.flatnonzero(norms.counts.sum(axis=0)).tolist() == [small, large]
    clipped = sum(line["clipped"] * line["examples"] for line in lines)
    share = np.average(norms.clipped(), weights=norms.counts.sum(axis=1))
    assert share * norms.counts.sum() == pytest.approx(clipped)
    assert norms.quantile(0.1) == pytest.approx(0.3, rel=0.2)
    assert norms.quantile(0.9) == pytest.approx(3.0, rel=0.2)
    assert norms.quantile(0.5) == pytest.approx(3.0, rel=0.2)


def test_the_mean_square_is_that_of_clipped_norms(run, tmp_path):
    norms = Norms.read(run)
    small, large = norms.counts.sum(axis=0)[norms.counts.sum(axis=0) > 0]
    expected = (0.3**2 * small + large) / (small + large)
    assert norms.mean_square() == pytest.approx(expected, rel=0.02)
    x = np.ones((16, 4), np.float32)  # of norm 2, brought to 2 / (2 + γ)
    trained(loss, x, tmp_path, 2, style=Style("automatic", gamma=1.0))
    assert Norms.read(tmp_path).mean_square() == pytest.approx(4 / 9, rel=0.1)


def test_norms_of_adaptive_clipping_are_beside_the_last_clipping_norm(tmp_path):
    x = np.ones((16, 4), np.float32)
    options = {"adaptive": AdaptiveClipping(), "clip_norm": 0.5, "seed": 1}
    trained(loss, x, tmp_path, 4, **options)
    *_, last = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert last["clip_norm"] > 0.5
    assert Norms.read(tmp_path).clip_norm == last["clip_norm"]


def test_norms_stay_in_the_private_folder(run):
    for path in run.rglob("*"):
        if path.is_file() and "private" not in path.parts:
            assert b'"norms"' not in path.read_bytes(), path


def test_views_are_averaged_before_their_norm(tmp_path):
    """Views of opposite gradients, by coin: the norm of two is 0 or that of one.

    Clipped or recorded view by view it would never be 0. A share of opposite
    pairs outside of 0.2 and 0.8, of at least 60, happens once in 10^6 runs.
    """
    x = np.ones((40, 4), np.float32)

    def augment(key, example):
        sign = jnp.where(jax.random.bernoulli(key), 1.0, -1.0)
        return {"x": example["x"] * sign}

    trained(loss, x, tmp_path / "run", 8, augment=augment, augmentation_multiplicity=2)
    counts = Norms.read(tmp_path / "run").counts.sum(axis=0)
    # A Gram matrix of views that cancel is 0 but for rounding: norms of 0.004, not 2.
    near_none = counts[: np.searchsorted(edges(), 0.01)].sum()
    assert counts.sum() > 60
    assert 0.2 < near_none / counts.sum() < 0.8


@pytest.mark.parametrize("parts", [0, 1.5])
def test_parts_are_checked(run, parts):
    with pytest.raises(ValueError, match=r"parts .* must be"):
        Norms.read(run, parts)


def test_a_folder_without_norms_is_refused(tmp_path):
    with pytest.raises(ValueError, match="has no record of gradient norms"):
        Norms.read(tmp_path)
