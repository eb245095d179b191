"""How cost grows: the exponents of what was measured."""

import json
from types import SimpleNamespace

import pytest

from scripts import ROOT, load
from tanager.models.small import MLP


RECORDS = sorted((ROOT / "benchmarks/results").glob("*-growth.json"))


@pytest.fixture(scope="module")
def growth():
    return load("benchmarks/growth.py")


def test_the_exponent_of_a_power_is_found(growth):
    points = [{"value": n, "cost": 7.0 * n**1.5} for n in (1, 2, 4, 8)]
    assert growth.exponent(points, lambda p: p["cost"]) == pytest.approx(1.5)
    points = [{"value": 1, "cost": 3.0}, {"value": 2, "cost": None}]
    assert growth.exponent(points, lambda p: p["cost"]) is None


def test_arithmetic_grows_as_it_must(growth, monkeypatch):
    small = {"width": 1, "image side": 8, "physical batch": 2}
    monkeypatch.setattr(growth, "BASE", growth.BASE | small)
    with monkeypatch.context() as patch:
        nothing = SimpleNamespace(rows=[])
        patch.setattr(growth, "bench_step", lambda *_, **__: nothing)
        one, two = (growth.measure("views K", views, 1) for views in (1, 2))
    assert two["flops"] == 2 * one["flops"] > 0

    def linear(depth, width, classes, *, key):
        assert (depth, width) == (10, 1)
        return MLP(classes, (8, 8, 3), hidden=(), key=key)

    monkeypatch.setattr(growth, "WideResNet", linear)
    found = growth.measure("views K", 1, 1, strategies=("sgd",))
    assert found["rows"]["sgd"]["seconds"] > 0


def test_the_page_has_the_exponents_of_the_record(growth):
    record = json.loads(RECORDS[-1].read_text())
    assert set(record["axes"]) == set(growth.AXES)
    page = (ROOT / "docs/benchmarks.md").read_text()
    assert growth.table(record) in page
    assert growth.filled(page, record) == page


def test_the_table_says_what_was_measured(growth):
    points = [
        {"value": n, "flops": n, "rows": {"sgd": {"seconds": n**2, "temp_bytes": n}}}
        for n in (1, 2)
    ]
    *_, row = growth.table({"axes": {"width": points}}).splitlines()
    assert row == "| width: 1, 2 | 1.00 | 2.00 / 1.00 | – | – | – |"
