"""Tables of simulations, with what they came to written down by hand."""

import pytest

from tanager.search import experiments
from tanager.search.jobs import Outcome


@pytest.fixture
def cells(target, tmp_path):
    return experiments.data_quantity(
        target, (512, 1024), experiments.Simulations(tmp_path, 1 / 32, 140, repeats=2)
    )


def outcomes(cells, accuracies):
    jobs = [job for cell in cells for job in cell.jobs]
    return {
        job.folder: Outcome(accuracy, accuracy, None, 1.0, 1.0)
        for job, accuracy in zip(jobs, accuracies, strict=True)
    }


def test_a_row_is_the_mean_of_its_repeats(cells):
    rows = experiments.table(cells, outcomes(cells, (0.5, 0.6, 0.7, 0.7)))
    assert [row.accuracy for row in rows] == pytest.approx([0.55, 0.7])
    assert [row.deviation for row in rows] == pytest.approx([0.05 * 2**0.5, 0.0])
    assert [row.simulated_batch_size for row in rows] == [16, 16]
    assert rows[0].epsilon > rows[1].epsilon


def test_more_data_are_on_the_line_through_the_table(target, cells):
    rows = experiments.table(cells, outcomes(cells, (0.4, 0.42, 0.5, 0.52)))
    more = experiments.more_data(target, rows, 4096)
    assert more.prediction.batch_size == more.examples == 4096
    assert more.prediction.accuracy == pytest.approx(0.71)
    assert more.prediction.low < 0.71 < more.prediction.high
    assert more.epsilon == target.at_examples(4096).epsilon < rows[1].epsilon
    assert more.delta == pytest.approx(target.delta * target.examples / 4096)


def test_one_number_of_examples_is_no_table(target, tmp_path):
    with pytest.raises(ValueError, match=r"try_examples \(=\(512, 512\)\) must be two"):
        experiments.data_quantity(
            target, (512, 512), experiments.Simulations(tmp_path, 1 / 32, 140)
        )


def test_a_simulation_as_large_as_its_target_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"factor \(=2"):
        experiments.Simulations(tmp_path, 2.0, 140)
