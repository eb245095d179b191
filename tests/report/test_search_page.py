"""The report of a search, from a result written by hand."""

import json

import pytest

from tanager.report import search_page


@pytest.fixture
def result():
    return {
        "recipe": "digits",
        "target": {"epsilon": 2.336, "delta": 1e-5, "steps": 400},
        "best": {
            "trial": 1,
            "values": {"learning_rate": 0.5, "model": "<b>"},
            "accuracy": 0.5,
            "batch_size": 16,
        },
        "prediction": None,
        "law": None,
        "bands": [],
        "trials": [
            {
                "number": 0,
                "values": {"learning_rate": 2.0},
                "state": "pruned",
                "steps": 200,
                "accuracy": 0.25,
            },
            {
                "number": 1,
                "values": {"learning_rate": 0.5, "model": "<b>"},
                "state": "complete",
                "steps": 400,
                "accuracy": 0.5,
            },
        ],
        "cost": {"trials_share": 0.03125, "winner_share": 0.5, "seconds": 120.0},
        "privacy": {
            "simulations_epsilon": {"8": None, "16": 11435.75, "32": 2e9, "64": 403.39},
            "held_out_examples": 2000,
        },
    }


def page(folder, result):
    (folder / "result.json").write_text(json.dumps(result))
    return search_page.write_report(folder).read_text(encoding="utf-8")


def test_what_simulations_spent_is_in_figures_that_can_be_read(tmp_path, result):
    written = page(tmp_path, result)
    for shown in ("infinite", "11,440", "2e+09", "403.4"):
        assert f"<td>ε = {shown}</td>" in written
    assert "ε = 2.336" in written
    assert "2,000 training examples were held out" in written
    assert "test examples were not read" in written


def test_one_batch_size_predicts_nothing(tmp_path, result):
    assert "there was one simulation batch size" in page(tmp_path, result)
    assert not (tmp_path / "scaling.png").exists()


def test_trials_are_listed_from_the_best_and_cost_is_told_apart(tmp_path, result):
    written = page(tmp_path, result)
    assert written.index("<td>1</td>") < written.index("<td>pruned at step 200</td>")
    words = " ".join(written.split())
    assert "the trials took 3.12 % and the 0 runs of the winner 50 %" in words
    assert "<b>" not in written
    assert "&lt;b&gt;" in written
