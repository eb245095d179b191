"""The report of a search, from a result written by hand."""

import json

from written import STUDY

from tanager.report import search_figures, search_page


def page(folder, **more):
    (folder / "result.json").write_text(json.dumps(STUDY | more))
    return search_page.write_report(folder).read_text(encoding="utf-8")


def test_what_simulations_spent_is_in_figures_that_can_be_read(tmp_path):
    written = page(tmp_path)
    for shown in ("infinite", "11,440", "2e+09", "403.4"):
        assert f"<td>ε = {shown}</td>" in written
    assert "ε = 2.336" in written
    assert "2,000 training examples were held out" in written
    assert "test examples were not read" in written


def test_one_batch_size_predicts_nothing(tmp_path):
    assert "there was one simulation batch size" in page(tmp_path)
    assert not (tmp_path / "scaling.png").exists()


def test_trials_are_listed_from_the_best_and_cost_is_told_apart(tmp_path):
    written = page(tmp_path)
    assert written.index("<td>1</td>") < written.index("<td>pruned at step 200</td>")
    words = " ".join(written.split())
    assert "the trials took 3.12 % and the 0 runs of the winner 50 %" in words
    assert "All processes together took" in words and "minutes" not in words
    assert words.count("class=scroll") == 2
    assert "<b>" not in written
    assert "&lt;b&gt;" in written


def test_a_run_at_another_batch_size_was_not_predicted(tmp_path, monkeypatch):
    def plot(*arguments, obtained, **rest):
        drawn.extend(obtained)
        (tmp_path / "scaling.svg").write_text("<svg></svg>")

    drawn = []
    monkeypatch.setattr(search_figures, "plot_law", plot)
    share = dict.fromkeys(("accuracy", "low", "high", "confidence"), 0.9)
    prediction = {"reference_batch_size": 512, **share, "doubts": []}
    obtained = [
        {"run": f"run-{size}", "batch_size": size, "accuracy": 0.5, "on": "test"}
        for size in (512, 64)
    ]
    (tmp_path / "obtained.json").write_text(json.dumps(obtained))
    written = page(tmp_path, prediction=prediction, law={"runs": []})
    assert drawn == [(512, 0.5)]
    assert "</strong> on the same held-out examples. In 90 of 100 such" in written
    assert "run-512" in written
    assert "run-64" not in written
