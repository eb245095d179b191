"""TAN: its identities by hypothesis, its numbers by the paper."""

import math
import re

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tanager.privacy import tan
from tanager.privacy.mechanism import Mechanism


mechanisms = st.builds(
    Mechanism,
    sample_rate=st.floats(1e-6, 1),
    noise_multiplier=st.floats(1e-2, 1e3),
    steps=st.integers(1, 10**7),
)
deltas = st.floats(1e-12, 0.5)


def close(x):
    return pytest.approx(x, rel=1e-9)


@given(mechanisms)
def test_definition_3_1(mechanism):
    q, sigma, steps = (
        mechanism.sample_rate,
        mechanism.noise_multiplier,
        mechanism.steps,
    )
    assert tan.eta(mechanism) ** 2 == close(q**2 * steps / (2 * sigma**2))
    assert tan.eta(mechanism) ** 2 == close(steps * tan.eta_step(mechanism) ** 2)
    assert tan.total_noise(mechanism) * tan.eta(mechanism) == close(1)


@given(st.floats(1e-9, 1e6), deltas)
def test_equation_4(eta, delta):
    epsilon = tan.epsilon_tan(eta, delta)
    assert epsilon == close(eta**2 + 2 * eta * math.sqrt(math.log(1 / delta)))


@given(st.floats(1e-3, 10), deltas)
def test_equation_4_is_the_minimum_over_orders(eta, delta):
    def at(alpha):
        return alpha * eta**2 + math.log(1 / delta) / (alpha - 1)

    best = 1 + math.sqrt(math.log(1 / delta)) / eta
    assert tan.epsilon_tan(eta, delta) == close(at(best))
    assert tan.epsilon_tan(eta, delta) <= at(1 + (best - 1) * 1.1)
    assert tan.epsilon_tan(eta, delta) <= at(1 + (best - 1) / 1.1)


@given(mechanisms, st.floats(1e-3, 1e3))
def test_at_batch_size_keeps_the_step_and_returns(mechanism, factor):
    assume(factor * mechanism.sample_rate <= 1)
    moved = tan.at_batch_size(mechanism, factor=factor)
    assert tan.eta_step(moved) == close(tan.eta_step(mechanism))
    assert moved.steps == mechanism.steps
    assert moved.sample_rate == close(factor * mechanism.sample_rate)
    back = tan.at_batch_size(moved, factor=1 / factor)
    assert back.sample_rate == close(mechanism.sample_rate)
    assert back.noise_multiplier == close(mechanism.noise_multiplier)


@given(mechanisms, st.integers(1, 10**7))
def test_at_steps_keeps_eta_and_returns(mechanism, steps):
    sample_rate = mechanism.sample_rate * math.sqrt(mechanism.steps / steps)
    assume(sample_rate <= 0.999)
    moved = tan.at_steps(mechanism, steps)
    eta, sigma = tan.eta(mechanism), mechanism.noise_multiplier
    assert moved.sample_rate == close(eta * sigma * math.sqrt(2 / steps))
    assert moved.noise_multiplier == sigma
    assert tan.eta(moved) == close(eta)
    back = tan.at_steps(moved, mechanism.steps) if mechanism.sample_rate < 1 else moved
    assert tan.eta(back) == close(eta)


def test_a_quarter_of_the_steps_goes_with_twice_the_batch():
    # Table 4: S from 72k to 18k, B from 16384 to 32768.
    reference = Mechanism(16384 / 1271167, 2.5, 72_000)
    assert tan.at_steps(reference, 18_000).sample_rate == close(32768 / 1271167)


@pytest.mark.parametrize(
    ("examples", "delta", "published"), [(1271167, 8e-7, 8.26), (635584, 16e-7, 18.06)]
)
def test_epsilon_tan_of_table_6(examples, delta, published):
    eta = tan.eta(Mechanism(16384 / examples, 2.5, 71_589))
    assert tan.epsilon_tan(eta, delta) == pytest.approx(published, abs=0.005)


@pytest.mark.parametrize(
    ("steps", "eta", "epsilon"), [(60_500, 0.95, 8), (1133, 0.13, 1)]
)
def test_the_plans_of_the_docs_are_those_of_figures_2_and_3(steps, eta, epsilon):
    plan = Mechanism(16384 / 1_200_000, 2.5, steps)
    assert tan.eta(plan) == pytest.approx(eta, rel=5e-4)
    assert tan.epsilon_tan(eta, 8e-7) == pytest.approx(epsilon, rel=0.01)
    assert round(1e3 * tan.eta_step(plan), 1) == 3.9


def test_without_noise():
    silent = Mechanism(0.1, 0.0, 10)
    assert tan.eta(silent) == tan.eta_step(silent) == math.inf
    assert tan.total_noise(silent) == 0
    assert tan.epsilon_tan(math.inf, 1e-5) == math.inf
    assert tan.epsilon_tan(1e200, 1e-5) == math.inf


def test_a_delta_that_is_no_probability_is_refused():
    with pytest.raises(ValueError, match=r"delta \(=1.5\) must be"):
        tan.epsilon_tan(1.0, 1.5)


def test_at_batch_size_refuses_more_than_all_examples():
    with pytest.raises(ValueError, match="at most 1: the batch would be larger"):
        tan.at_batch_size(Mechanism(0.5, 1.0, 10), factor=2.1)
    with pytest.raises(ValueError, match=r"factor \(=0.0\) must be"):
        tan.at_batch_size(Mechanism(0.5, 1.0, 10), factor=0.0)


def test_at_steps_names_the_fewest_steps():
    mechanism = Mechanism(0.5, 1.0, 100)
    message = "steps (=24) would need a sample rate of 1.02, above 1: take at least 25"
    with pytest.raises(ValueError, match=re.escape(message)):
        tan.at_steps(mechanism, 24)
    assert tan.at_steps(mechanism, 25).sample_rate == 1
