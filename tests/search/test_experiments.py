"""Tables of simulations, with what they came to written down by hand."""

import dataclasses

import pytest

from tanager.privacy import accountant
from tanager.search import experiments
from tanager.search.jobs import Outcome
from tanager.search.simulation import plan_simulation
from tanager.search.space import Space


@pytest.fixture
def cells(target, tmp_path):
    return experiments.data_quantity(
        target, (512, 1024), experiments.Simulations(tmp_path, 1 / 32, 140, repeats=2)
    )


def table(cells, accuracies):
    jobs = [job for cell in cells for job in cell.jobs]
    outcomes = {
        job.folder: Outcome(accuracy, 1.0, 1.0)
        for job, accuracy in zip(jobs, accuracies, strict=True)
    }
    return experiments.table(cells, outcomes)


def test_a_row_is_the_mean_of_its_repeats(cells):
    one, two = table(cells, (0.5, 0.6, 0.7, 0.7))
    assert [one["accuracy"], two["accuracy"]] == pytest.approx([0.55, 0.7])
    assert [one["deviation"], two["deviation"]] == pytest.approx([0.05 * 2**0.5, 0.0])
    assert one["simulated_batch_size"] == two["simulated_batch_size"] == 16
    assert one["epsilon"] > two["epsilon"]


def test_more_data_are_on_the_line_through_the_table(target, cells):
    rows = table(cells, (0.4, 0.42, 0.5, 0.52))
    more = experiments.more_data(target, rows, 4096)
    predicted = more["prediction"]
    assert predicted["batch_size"] == more["examples"] == 4096
    assert predicted["accuracy"] == pytest.approx(0.71)
    assert predicted["low"] < 0.71 < predicted["high"]
    assert more["epsilon"] == target.at_examples(4096).epsilon < rows[1]["epsilon"]
    assert more["delta"] == pytest.approx(target.delta * target.examples / 4096)


def test_a_cumulative_table_tells_the_values_that_it_begins_with(target, tmp_path):
    space = Space.parse(["clip-norm=0.5,1", "learning-rate=0.25,2"])
    simulations = experiments.Simulations(tmp_path, 1 / 32, 140)
    cells = experiments.cumulative(target, space, simulations)
    assert [cell.title["change"] for cell in cells] == [
        "none",
        "clip norm from 0.5 to 1.0",
        "learning rate from 0.25 to 2.0",
    ]


def test_every_epsilon_of_a_table_is_by_the_recipes_accountant(
    target, tmp_path, monkeypatch
):
    recipe = dataclasses.replace(target.recipe, accountant="rdp")
    target = plan_simulation(target.name, recipe, target.examples)
    simulations = experiments.Simulations(tmp_path, 1 / 32, 140)
    steps = target.steps // 2, target.steps
    cells = experiments.privacy_parameters(target, steps, simulations)
    cells += experiments.data_quantity(target, (512, 1024), simulations)
    rows = table(cells, [0.5] * len(cells))
    assert {row["accountant"] for row in rows} == {"rdp"}
    evaluated = [{"step": target.steps, "test_accuracy_ema": 0.5}]
    monkeypatch.setattr(experiments, "read_metrics", lambda _: evaluated)
    curves = experiments.curves(cells)
    for cell, row, curve in zip(cells, rows, curves, strict=True):
        mechanism, delta = cell.target.mechanism, cell.target.delta
        by_rdp = accountant.epsilon(mechanism, delta, "rdp")
        assert row["epsilon"] == by_rdp > accountant.epsilon(mechanism, delta)
        spent = accountant.epsilon(mechanism, delta, "rdp", target.steps)
        assert curve["epsilon"] == [spent]


def test_what_makes_no_table_is_refused(target, tmp_path):
    with pytest.raises(ValueError, match=r"try_examples \(=\(512, 512\)\) must be two"):
        experiments.data_quantity(
            target, (512, 512), experiments.Simulations(tmp_path, 1 / 32, 140)
        )
    with pytest.raises(ValueError, match=r"factor \(=2"):
        experiments.Simulations(tmp_path, 2.0, 140)
