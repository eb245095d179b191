import dataclasses
import json
import math
import re
from typing import Any

import pytest

from tanager.privacy import accountant, tan
from tanager.privacy.mechanism import Adjacency, Mechanism
from tanager.privacy.plan import Plan, default_delta, delta_warning, few_warning
from tanager.privacy.risk import risk
from tanager.privacy.shown import format_epsilon


CIFAR: dict[str, Any] = {"examples": 50_000, "batch_size": 4096}
CIFAR |= {"steps": 2500, "noise_multiplier": 3.0}


def pld(plan):
    spent = plan.epsilon["pld"]
    assert spent is not None
    return spent


def test_the_plan_of_the_paper():
    # TAN, table 5, N = 50K: ε = 7.1 by RDP.
    plan = Plan.solve(**CIFAR, delta=1e-5)
    assert plan.solved == "epsilon"
    assert plan.delta == 1e-5
    assert plan.epsilon["rdp"] == pytest.approx(7.1, abs=0.05)
    assert plan.epochs == pytest.approx(204.8)
    assert plan.warnings == ("delta (1e-05) is above 0.1/N (2e-06); use 2e-06",)


def test_every_number_is_of_the_same_mechanism():
    plan = Plan.solve(50_000, batch_size=500, steps=300, epsilon=2.0)
    mechanism = Mechanism(0.01, plan.noise_multiplier, 300)
    assert plan.mechanism == mechanism
    record = plan.to_json()
    assert record["epsilon"] == {
        name: accountant.epsilon(mechanism, 2e-6, name)
        for name in ("pld", "rdp", "gdp_clt", "tan")
    }
    assert record["risk"] == risk(mechanism).to_json()
    assert record["eta"] == tan.eta(mechanism)
    assert record["eta_step"] == tan.eta_step(mechanism)
    assert record["total_noise"] == pytest.approx(1 / tan.eta(mechanism))
    assert record["sample_rate"] == 0.01
    assert record["epochs"] == pytest.approx(3.0)
    assert record["adjacency"] == "zero-out"


@pytest.mark.parametrize(
    ("missing", "adjacency"),
    [
        ("batch_size", Adjacency.ADD_OR_REMOVE_ONE),
        ("steps", Adjacency.REPLACE_ONE),
        ("noise_multiplier", Adjacency.ADD_OR_REMOVE_ONE),
        ("epsilon", Adjacency.REPLACE_ONE),
    ],
)
def test_any_one_of_four_is_solved_for(missing, adjacency):
    values: dict[str, Any] = {"batch_size": 500, "steps": 300, "noise_multiplier": 1.1}
    full = Plan.solve(50_000, **values, adjacency=adjacency)
    values["epsilon"] = full.epsilon["pld"]
    del values[missing]
    plan = Plan.solve(50_000, **values, adjacency=adjacency)
    assert plan.solved == missing
    assert pld(plan) <= pld(full)
    assert (plan.epsilon["rdp"] is None) == (adjacency is Adjacency.REPLACE_ONE)
    if missing == "noise_multiplier":
        assert 1.1 <= plan.noise_multiplier <= 1.1 * 1.001
    else:
        assert (plan.batch_size, plan.steps) == (500, 300)


def test_the_batch_size_is_the_largest_whole_number_within_the_budget():
    plan = Plan.solve(1437, steps=100, noise_multiplier=2.0, epsilon=3.0)
    assert pld(plan) <= 3.0
    larger = dataclasses.replace(plan, batch_size=plan.batch_size + 1).mechanism
    assert accountant.epsilon(larger, plan.delta) > 3.0
    plan = Plan.solve(1437, steps=1, noise_multiplier=50.0, epsilon=10.0)
    assert plan.batch_size == 1437


@pytest.mark.parametrize("examples", [1, 9, 10, 960, 999, 1000, 1437, 50_000, 10**9])
def test_the_default_delta_is_a_round_number_well_below_one_over_n(examples):
    delta = default_delta(examples)
    assert 0.5 <= delta * examples / 0.1 <= 1 + 1e-12
    assert delta <= examples**-1.1
    assert float(f"{delta:.0e}") == delta
    assert delta_warning(delta, examples) is None
    assert delta_warning(1.01 * 0.1 / examples, examples) is not None


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_the_budget_is_kept_by_the_accountant_that_claims_it(accountant):
    plan = Plan.solve(50_000, 4096, 100, epsilon=3.0, accountant=accountant)
    spent = plan.epsilon[accountant]
    assert spent is not None and 0.99 * 3 < spent <= 3


def test_a_large_delta_is_warned_about():
    (warning,) = Plan.solve(**CIFAR, delta=1 / 50_000).warnings
    assert warning.startswith("delta (2e-05) is not below 1/N (2e-05)")
    assert "use 2e-06" in warning
    (warning,) = Plan.solve(**CIFAR, delta=0.9 / 50_000).warnings
    assert warning == "delta (1.8e-05) is above 0.1/N (2e-06); use 2e-06"


def test_too_few_examples_for_the_noise_are_warned_about():
    few = Plan.solve(4, batch_size=4, steps=60, epsilon=8.0).mechanism
    several = few_warning(few, 4, None, "person")
    assert several is not None
    assert several.startswith("4 persons are few for this much noise: half of them add")
    warning = few_warning(few, 4, 2)
    assert warning is not None
    assert warning.startswith("4 examples of 2 classes are few for this much noise")
    enough = Plan.solve(960, batch_size=960, steps=60, epsilon=1.0).mechanism
    assert few_warning(enough, 960, 3) is None
    classes = next(k for k in range(3, 960) if few_warning(enough, 960, k))
    signal = 960 * math.sqrt(60) / enough.noise_multiplier
    assert signal / classes < 10 <= signal / (classes - 1)
    assert few_warning(Mechanism(1.0, 0.0, 1), 4, 2) is None


def test_the_privacy_wall_is_warned_about_with_the_way_out():
    plan = Plan.solve(50_000, batch_size=512, steps=2500, noise_multiplier=0.5)
    (warning,) = plan.warnings
    for factor, cost in ((2, "twice"), (4, "4 times")):
        moved = tan.at_batch_size(plan.mechanism, factor=factor)
        spent = accountant.epsilon(moved, 2e-6)
        move = (
            f"batch size {512 * factor} and noise multiplier {0.5 * factor:g} give"
            f" ε = {format_epsilon(spent)} for {cost} the epochs"
        )
        assert move in warning
    assert f"ε is {format_epsilon(plan.epsilon['pld'])} where" in warning
    assert f"ε_TAN is {plan.epsilon['tan']:.3g}" in warning


def test_the_wall_names_a_batch_that_does_not_exist():
    plan = Plan.solve(1000, batch_size=400, steps=20, noise_multiplier=0.6)
    (warning,) = [text for text in plan.warnings if text.startswith("privacy wall")]
    assert "batch size 800 and noise multiplier 1.2 give" in warning
    assert "batch size 1600 with noise multiplier 2.4 would follow" in warning
    assert "exceeds the 1000 examples" in warning


def test_a_loud_example_is_warned_about():
    plan = Plan.solve(50_000, batch_size=2048, steps=2500, noise_multiplier=2.0)
    assert plan.warnings == ()
    plan = Plan.solve(1000, batch_size=500, steps=100, noise_multiplier=1.5)
    assert any("η = 2.36 times the noise" in text for text in plan.warnings)


@pytest.mark.parametrize(
    ("sigma", "nulls"), [(0.0, {"pld", "rdp", "gdp_clt", "tan"}), (0.02, {"gdp_clt"})]
)
def test_what_is_infinite_is_null_in_json_and_warned_about(sigma, nulls):
    plan = Plan.solve(1000, batch_size=100, steps=5, noise_multiplier=sigma)
    record = json.loads(json.dumps(plan.to_json(), allow_nan=False))
    assert {name for name, ε in record["epsilon"].items() if ε is None} == nulls
    expected = "without noise there is no privacy" if sigma == 0 else "by gdp_clt is"
    assert any(expected in text for text in record["warnings"])
    assert (record["eta"] is None) == (sigma == 0)
    assert (record["risk"]["mu"] is None) == (sigma == 0)
    assert math.isfinite(record["total_noise"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"epsilon": 3.0},
            "leave out one of batch_size, steps, noise_multiplier and epsilon, to be"
            " solved for: all four are given",
        ),
        (
            {"steps": None, "noise_multiplier": None},
            "give three of batch_size, steps, noise_multiplier and epsilon, the fourth"
            " is solved for: steps, noise_multiplier, epsilon are missing",
        ),
        (
            {"batch_size": 50_001},
            "batch_size (=50001) must not exceed the number of examples (50000)",
        ),
        ({"batch_size": 4096.5}, "batch_size (=4096.5) must be a whole number"),
        ({"examples": 0}, "examples (=0) must be at least 1"),
        ({"delta": 0.0}, "delta (=0.0) must be strictly between 0 and 1"),
        (
            {"adjacency": "remove-one"},
            "adjacency (='remove-one') is unknown: did",
        ),
        ({"steps": None, "epsilon": -1.0}, "epsilon (=-1.0) must be positive"),
        (
            {"examples": 20, "batch_size": None, "epsilon": 0.5, "delta": 1e-6},
            "epsilon (=0.5) is exceeded even with one example a batch",
        ),
    ],
)
def test_what_does_not_make_a_plan_is_refused(change, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Plan.solve(**{**CIFAR, **change})
