"""Calibration never overspends, and wastes little."""

import collections
import dataclasses
import math
import re
from typing import Any

import pytest

from tanager.privacy import accountant
from tanager.privacy import calibrate as calibration
from tanager.privacy.accountant import Accountant
from tanager.privacy.calibrate import calibrate
from tanager.privacy.mechanism import Adjacency, Mechanism
from tanager.privacy.risk import risk


ADD, REPLACE = Adjacency.ZERO_OUT, Adjacency.REPLACE_ONE

# How much further each parameter could be pushed at most: (towards less privacy).
_FURTHER = {
    "sample_rate": lambda value: min(1.0, value * (1 + 1e-4)),
    "noise_multiplier": lambda value: value / (1 + 1e-3),
    "steps": lambda value: value + 1,
}


def check_best(name, mechanism, epsilon, delta, by="pld"):
    assert accountant.epsilon(mechanism, delta, by) <= epsilon
    value = getattr(mechanism, name)
    if name == "noise_multiplier":
        assert float(f"{value:.6g}") == value, "typed again as shown, it is the same"
    further = _FURTHER[name](value)
    if further != value:
        beyond = dataclasses.replace(mechanism, **{name: further})
        assert accountant.epsilon(beyond, delta, by) > epsilon


CORNERS = {
    "the papers": (Mechanism(4096 / 50_000, 3.0, 2500), 1e-5),
    "below the wall": (Mechanism(0.01, 0.6, 500), 1e-5),
    "full batches": (Mechanism(1, 20.0, 40), 1e-6),
    "one quiet step": (Mechanism(1e-2, 30.0, 1), 1e-6),
    "replace one": (Mechanism(0.02, 2.0, 1000, REPLACE), 1e-5),
    "large delta": (Mechanism(0.02, 2.0, 1000), 0.1),
}


@pytest.mark.parametrize(
    ("corner", "name"),
    [
        *(("below the wall", name) for name in _FURTHER),
        ("the papers", "noise_multiplier"),
        *(
            pytest.param("the papers", name, marks=pytest.mark.full)
            for name in ("sample_rate", "steps")
        ),
        ("full batches", "noise_multiplier"),
        ("one quiet step", "sample_rate"),
        ("replace one", "steps"),
        ("large delta", "noise_multiplier"),
    ],
)
def test_it_finds_its_way_back(name, corner):
    mechanism, delta = CORNERS[corner]
    epsilon = accountant.epsilon(mechanism, delta)
    known = {
        field.name: getattr(mechanism, field.name)
        for field in dataclasses.fields(mechanism)
        if field.name != name
    }
    found = calibrate(epsilon=epsilon, delta=delta, **known)
    check_best(name, found, epsilon, delta)
    expected = getattr(mechanism, name)
    if name == "steps":
        assert found.steps == expected
    else:
        assert getattr(found, name) == pytest.approx(expected, rel=2e-3)
    assert dataclasses.replace(found, **{name: expected}) == mechanism


@pytest.mark.parametrize("by", [Accountant.RDP, Accountant.GDP_CLT, Accountant.TAN])
@pytest.mark.parametrize("name", list(_FURTHER))
def test_any_accountant_can_be_asked(name, by):
    known = {"sample_rate": 0.05, "noise_multiplier": 1.5, "steps": 800}
    del known[name]
    found = calibrate(epsilon=3.0, delta=1e-5, accountant=by, **known)
    check_best(name, found, 3.0, 1e-5, by)


TARGETS: dict[str, dict[str, Any]] = {
    "advantage": {"advantage": 0.2},
    "tpr_at_1_percent": {"tpr": 0.023, "fpr": 0.01},
    "tpr_at_0_1_percent": {"tpr": 0.5, "fpr": 0.001},
}


# Each target and each unknown once: they do not meet.
@pytest.mark.parametrize(
    ("target", "name"),
    [
        pytest.param(target, name, marks=[pytest.mark.full] * (i != j))
        for i, target in enumerate(TARGETS)
        for j, name in enumerate(_FURTHER)
    ],
)
def test_a_risk_can_be_the_target(name, target):
    known: dict[str, Any] = {"sample_rate": 0.05, "noise_multiplier": 1.5, "steps": 800}
    del known[name]
    budget = next(iter(TARGETS[target].values()))
    found = calibrate(**TARGETS[target], **known)
    assert getattr(risk(found), target) <= budget
    further: dict[str, Any] = {name: _FURTHER[name](getattr(found, name))}
    beyond = dataclasses.replace(found, **further)
    assert getattr(risk(beyond), target) > budget


def test_a_risk_without_sampling_has_a_closed_form():
    """An advantage of 2Φ(μ/2) − 1 at μ = 1 needs σ = √T; replace-one twice that."""
    advantage = math.erf(1 / math.sqrt(8))
    for adjacency in Adjacency:
        found = calibrate(
            advantage=advantage, sample_rate=1, steps=49, adjacency=adjacency
        )
        least = 7 * adjacency.signals
        assert least * (1 - 1e-9) <= found.noise_multiplier <= 1.001 * least


CURVES = {
    "a step": lambda last, value: -1.0 if value <= last else 1.0,
    "a cliff": lambda last, value: -0.01 if value <= last else 5.0,
    "a plateau": lambda last, value: -5.0 if value <= last else 0.001,
    "a root": lambda last, value: math.log(value / (last + 0.5)) / 2,
}


@pytest.mark.parametrize("curve", list(CURVES))
@pytest.mark.parametrize("unknown", calibration._UNKNOWNS, ids=lambda one: one.name)
def test_the_last_value_within_the_budget_is_found_on_any_curve(unknown, curve):
    for last in (1, 2, 17, 64, 199):
        found = calibration._root(
            unknown, 1.0, 200.0, lambda value, last=last: CURVES[curve](last, value)
        )
        assert CURVES[curve](last, found) <= 0
        if unknown.tolerance is None:
            assert found == last
        elif curve != "a root":
            assert found == pytest.approx(last, rel=2 * unknown.tolerance)


@pytest.mark.parametrize(
    ("sigma", "overspending", "found"),
    [
        (1.5, set(), 1.5),
        (1.23456001, set(), 1.23457),
        (1.23456001, {1.23457, 1.23458}, 1.23459),
        (99999.9, {99999.9}, 100000),
        (0.0123, {0.0123}, 0.0123001),
    ],
)
def test_noise_that_is_solved_for_has_six_digits_and_keeps_the_budget(
    sigma, overspending, found
):
    """Where ε does not fall to the last digit, rounding up alone would overspend."""
    assert calibration.in_six_digits(sigma, overspending.__contains__) == found


def test_the_last_bit_of_an_overspent_budget_counts():
    target = calibration._target({"epsilon": 1e3, "delta": 1e-5}, "pld")
    assert calibration._log_ratio(math.nextafter(1e3, 2e3), target) > 0
    assert calibration._log_ratio(1e3, target) <= 0


@pytest.mark.parametrize(
    ("name", "adjacency"), [("sample_rate", REPLACE), ("noise_multiplier", ADD)]
)
def test_a_tiny_noise_multiplier_takes_few_fine_grids(name, adjacency, monkeypatch):
    grids = collections.Counter()
    epsilon = accountant.epsilon

    def counted(*given, coarseness=1.0):
        grids[coarseness] += 1
        return epsilon(*given, coarseness=coarseness)

    monkeypatch.setattr(accountant, "epsilon", counted)
    known = {"sample_rate": 128 / 50_000, "noise_multiplier": 0.09375, "steps": 50}
    del known[name]
    found = calibrate(epsilon=200.0, delta=1e-5, adjacency=adjacency, **known)
    assert 2 <= grids[1.0] <= 8
    assert grids[8.0] <= 15
    assert epsilon(found, 1e-5) <= 200


def test_a_tiny_budget():
    found = calibrate(epsilon=1e-3, delta=1e-8, sample_rate=0.01, steps=100)
    check_best("noise_multiplier", found, 1e-3, 1e-8)
    found = calibrate(epsilon=1e-3, delta=1e-8, noise_multiplier=2.0, steps=100)
    check_best("sample_rate", found, 1e-3, 1e-8)


def test_where_every_example_fits_the_sample_rate_is_one():
    for adjacency in Adjacency:
        found = calibrate(
            epsilon=100.0,
            delta=1e-5,
            noise_multiplier=50.0,
            steps=1,
            adjacency=adjacency,
        )
        assert found == Mechanism(1.0, 50.0, 1, adjacency)


def test_millions_of_steps():
    found = calibrate(epsilon=2.0, delta=1e-5, sample_rate=1e-3, noise_multiplier=20.0)
    assert found.steps > 10**6
    assert accountant.epsilon(found, 1e-5) <= 2.0
    # ε grows like √T: 0.2 % more steps cost 0.1 %.
    more = accountant.epsilon(found, 1e-5, steps=math.ceil(1.002 * found.steps))
    assert more > 2.0


@pytest.mark.parametrize(
    ("known", "message"),
    [
        (
            {"sample_rate": 0.1, "noise_multiplier": 0.3},
            "epsilon (=1.0) is below what any value of steps spends: steps = 1 spends "
            "more at delta = 1e-05: raise epsilon or delta, or change the sample rate "
            "or the noise multiplier",
        ),
        (
            {"sample_rate": 1e-6, "steps": 1},
            "is above what any value of noise_multiplier spends: noise_multiplier = "
            "0.001",
        ),
        (
            {"sample_rate": 1e-9, "noise_multiplier": 1.0},
            "is above what any value of steps spends: steps = 1e+09 spends less",
        ),
        (
            {"sample_rate": 0.1},
            "leave out exactly one of sample_rate, noise_multiplier and steps, to be"
            " solved for; left out: noise_multiplier, steps",
        ),
        (
            {"sample_rate": 0.1, "noise_multiplier": 1.0, "steps": 3},
            "left out: none of them",
        ),
        (
            {"sample_rate": 0.1, "noise_multiplier": 0.0},
            "noise_multiplier (=0.0) must be positive and finite: without noise",
        ),
        ({"sample_rate": 1.1, "steps": 3}, "sample_rate (=1.1) must be above 0"),
        ({"sample_rate": 0.1, "steps": 0}, "steps (=0) must be at least 1"),
        ({"sample_rate": 0.1, "steps": 3, "epsilon": 0.0}, "epsilon (=0.0) must be"),
        ({"sample_rate": 0.1, "steps": 3, "delta": 1.0}, "delta (=1.0) must be"),
        ({"sample_rate": 0.1, "steps": 3, "accountant": "rpd"}, "did you mean rdp?"),
        (
            {"sample_rate": 0.1, "steps": 3, "accountant": "rdp", "adjacency": REPLACE},
            "has no RDP bound under Poisson sampling",
        ),
    ],
)
def test_what_cannot_be_is_refused(known, message):
    given: dict[str, Any] = {"epsilon": 1.0, "delta": 1e-5, **known}
    with pytest.raises(ValueError, match=re.escape(message)):
        calibrate(**given)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (
            {},
            "give one target: epsilon and delta, or advantage, or tpr and fpr; found:"
            " none of them",
        ),
        ({"advantage": 0.1, "epsilon": 1.0}, "found: epsilon, advantage"),
        ({"epsilon": 1.0}, "found: epsilon"),
        ({"tpr": 0.1, "advantage": 0.1, "fpr": 0.01}, "found: advantage, tpr, fpr"),
        ({"advantage": 1.0}, "advantage (=1.0) must be strictly between 0 and 1"),
        ({"tpr": 0.1, "fpr": 0.0}, "fpr (=0.0) must be strictly between 0 and 1"),
        (
            {"tpr": 0.1, "fpr": 0.1},
            "tpr (=0.1) must be above fpr (0.1), which guessing at random reaches",
        ),
        (
            {"advantage": 0.1, "accountant": "rdp"},
            "accountant (='rdp') must be 'pld' if the target is advantage",
        ),
        (
            {"advantage": 1e-3},
            "advantage (=0.001) is below what any value of steps spends: steps = 1 "
            "spends more: raise advantage, or change the sample rate or the noise "
            "multiplier",
        ),
        (
            {"tpr": 0.0101, "fpr": 0.01},
            "tpr (=0.0101) is below what any value of steps spends: steps = 1 spends "
            "more at fpr = 0.01: raise tpr, or change",
        ),
    ],
)
def test_a_target_that_cannot_be_is_refused(target, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        calibrate(**target, sample_rate=0.1, noise_multiplier=0.5)
