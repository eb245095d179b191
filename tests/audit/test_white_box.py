"""The white-box audit on a real run: near the claim, never above it without cause."""

import dataclasses
from typing import Any

import jax
import numpy as np
import optax
import pytest
from scipy import stats

from tanager.noise import GaussianNoise
from tanager.privacy import accountant
from tanager.privacy.mechanism import Adjacency, Mechanism


CLAIMED = Mechanism(0.1, 0.8, 40)  # as in conftest
SHORT = dataclasses.replace(CLAIMED, steps=12)


@pytest.fixture(scope="module")
def found(white_box):
    return white_box(canaries=3000, physical_batch_size=256, seed=0)


@pytest.fixture(scope="module")
def few(white_box):
    return white_box(SHORT, canaries=100)


def same(one, two, rtol):
    np.testing.assert_allclose(one.inside, two.inside, rtol=rtol, atol=rtol)
    np.testing.assert_allclose(one.outside, two.outside, rtol=rtol, atol=rtol)


def test_the_bound_is_near_the_claim_and_not_above(found):
    claimed = accountant.epsilon(CLAIMED, 1e-3)
    assert found.claimed_epsilon == claimed
    assert 0.75 * claimed < found.epsilon_lower_bound < claimed
    assert not found.violated


def test_scores_are_the_log_likelihood_ratio_of_the_mechanism(found):
    """As its law says, by Kolmogorov and Smirnov at 1e-4 for each of two."""
    rng = np.random.default_rng(0)
    q, sigma, steps = CLAIMED.sample_rate, CLAIMED.noise_multiplier, CLAIMED.steps
    for inside, scores in ((True, found.inside), (False, found.outside)):
        seen = rng.normal(0, sigma, (20_000, steps))
        if inside:
            seen += rng.random(seen.shape) < q
        expected = np.log1p(q * np.expm1((2 * seen - 1) / (2 * sigma**2))).sum(1)
        result: Any = stats.ks_2samp(scores, expected)
        assert result.pvalue > 1e-4
    assert 1300 < len(found.inside) < 1700


def test_what_does_not_change_the_mechanism_changes_no_score(white_box, few):
    """The same seed draws the same batches and noise for the canaries."""
    others = {
        "strategy": "per_example",
        "physical_batch_size": 16,
        "optimizer": optax.sgd(0.1, momentum=0.9),
        "clip_norm": 0.05,
        "augment": lambda key, example: (
            example[0] + jax.random.normal(key, (5,)),
            example[1],
        ),
        "augmentation_multiplicity": 4,
    }
    same(few, white_box(SHORT, canaries=100, **others), rtol=1e-3)


def test_examples_that_are_read_one_by_one_are_joined_too(white_box, few, regression):
    class OneByOne:
        def __len__(self):
            return len(regression[0])

        def __getitem__(self, index):
            return tuple(leaf[index] for leaf in regression)

    same(few, white_box(SHORT, canaries=100, data=OneByOne()), rtol=1e-4)


def test_a_killed_audit_goes_on_and_no_other_does(
    white_box, few, tmp_path, monkeypatch
):
    class Killed(Exception):
        pass

    draw = GaussianNoise.draw

    def kill(noise, step):
        if step == 7:
            raise Killed
        return draw(noise, step)

    options = {"mechanism": SHORT, "canaries": 100, "checkpoint_seconds": 0.0}
    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(GaussianNoise, "draw", kill)
        white_box(**options, out=tmp_path / "run")
    begun = (tmp_path / "run/ledger.jsonl").read_text().splitlines()
    found = white_box(**options, out=tmp_path / "run")
    np.testing.assert_array_equal(found.inside, few.inside)
    ledger = (tmp_path / "run/ledger.jsonl").read_text().splitlines()
    assert ledger[: len(begun)] == begun
    assert len(ledger) - len(begun) >= 4

    for changes, message in (
        ({"clip_norm": 2.0}, "clip_norm"),
        ({"canaries": 101}, "parameters"),
        ({"mechanism": Mechanism(0.1, 0.9, 12)}, "mechanism"),
        ({"seed": 2}, "seed"),
    ):
        with pytest.raises(ValueError, match=message):
            white_box(**(options | changes), out=tmp_path / "run")


@pytest.mark.parametrize(
    "trainable",
    [
        pytest.param({"w": True, "b": False}, marks=pytest.mark.full),
        lambda leaf: leaf.ndim == 1,
    ],
)
def test_of_a_part_of_a_model_whole_batches_are_the_gaussian_mechanism(
    white_box, trainable
):
    whole = {"mechanism": Mechanism(1.0, 4.0, 4), "physical_batch_size": 512}
    moving = {"trainable": trainable, "optimizer": optax.sgd(0.1)}
    found = white_box(canaries=3000, **whole, **moving)
    assert 0 < found.epsilon_lower_bound < found.claimed_epsilon
    # Σ (2s − 1)/(2σ²) is N(±T/(2σ²), T/σ²).
    assert np.mean(found.inside) == pytest.approx(4 / 32, abs=6 * 0.5 / 36)
    assert np.mean(found.outside) == pytest.approx(-4 / 32, abs=6 * 0.5 / 36)


def test_who_knows_the_sample_tells_much_too(white_box):
    found = white_box(canaries=1500, physical_batch_size=256, knows_sample=True)
    assert not found.violated
    assert found.claimed_epsilon == accountant.epsilon(CLAIMED, 1e-3)
    assert found.epsilon_lower_bound > 0.75 * found.claimed_epsilon
    assert found.noise_multiplier > CLAIMED.noise_multiplier
    with pytest.raises(ValueError, match=r"steps \(=9\) are too few"):
        white_box(steps=9, knows_sample=True)

    # What is heard is Gaussian: Kolmogorov and Smirnov at 1e-4 for each of two. There
    # are as many of both as a canary's steps allow: the shorter of its sampled and
    # others, of 1500 · 40 draws of sampling rate 0.1: 6000 ± 6 · 74.
    for scores, mean in ((found.inside, 1), (found.outside, 0)):
        assert 5550 < len(scores) < 6450
        standard = (scores - mean) / CLAIMED.noise_multiplier
        result: Any = stats.kstest(standard, "norm")
        assert result.pvalue > 1e-4
    assert len(found.inside) == len(found.outside)


def test_of_a_long_run_a_part_of_the_steps_counts(white_box, monkeypatch):
    monkeypatch.setattr("tanager.audit.white_box._MOST_KEPT", 3)
    found = white_box(Mechanism(0.3, 2.0, 40), canaries=200, knows_sample=True)
    assert len(found.inside) == len(found.outside) == 600
    assert np.mean(found.inside) == pytest.approx(1, abs=6 * 2 / 600**0.5)
    assert np.mean(found.outside) == pytest.approx(0, abs=6 * 2 / 600**0.5)


def test_from_some_of_the_steps_the_whole_mechanism_is_bounded(white_box, found):
    part = white_box(canaries=3000, physical_batch_size=256, steps=20, seed=5)
    assert part.claimed_epsilon == found.claimed_epsilon
    assert part.audit.epsilon < part.epsilon_lower_bound < part.claimed_epsilon
    assert part.epsilon_lower_bound > 0.6 * part.claimed_epsilon
    assert part.noise_multiplier > CLAIMED.noise_multiplier
    assert found.audit.epsilon == found.epsilon_lower_bound


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"canaries": 5}, "canaries (=5) must be at least 20"),
        ({"mechanism": Mechanism(0.1, 0.0, 4)}, "noise_multiplier (=0) claims nothing"),
        (
            {"mechanism": Mechanism(0.1, 1.0, 4, Adjacency.REPLACE_ONE)},
            "cannot be tested by canaries that join the data",
        ),
        ({"confidence": 1.0}, "confidence (=1.0)"),
        ({"delta": 1.0}, "delta (=1.0)"),
        ({"steps": 0}, "steps (=0) must be at least 1"),
        ({"steps": 4000}, "steps (=4000) must be at most the mechanism's 40"),
    ],
)
def test_bad_input_is_one_message(white_box, changes, message):
    with pytest.raises(ValueError) as told:
        white_box(**changes)
    assert message in str(told.value)
