"""`tanager audit` on the digits: what it prints, and that it fails on a violation."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from tanager import noise
from tanager.cli import main
from tanager.commands import audit


WORDS = ["audit", "digits", "--steps", "40", "--noise-multiplier", "1", "--strategy"]
WORDS += ["bk", "--batch-size", "150", "--canaries", "600", "--audited-examples", "32"]
WORDS += ["--physical-batch-size", "64", "--seed", "1", "--model", "linear"]


@pytest.mark.slow
def test_an_audit_tells_its_bound_and_goes_on(tmp_path, capsys):
    words = [*WORDS, "--json", "--out", str(tmp_path / "audit")]
    assert main(words) == 0
    printed = capsys.readouterr().out
    found = json.loads(printed)
    assert 0 < found["epsilon_lower_bound"] < found["claimed_epsilon"]
    assert found["noise_multiplier_not_refuted"] > 1
    assert 0.5 < found["auc"] < 1
    assert found["advantage"] < found["highest_advantage"]
    assert found["models"] == 1
    assert not found["violated"]
    scores = found["scores"]
    assert len(scores["inside"]) + len(scores["outside"]) == 600
    assert json.loads((tmp_path / "audit/audit.json").read_text()) == found
    page = (tmp_path / "audit/report.html").read_text()
    assert found["sentence"] in page
    assert "Nothing here contradicts the claim" in page
    for name in ("epsilon", "roc", "scores"):
        for ending in ("png", "svg"):
            assert (tmp_path / f"audit/{name}.{ending}").stat().st_size > 1000
    # Done already: the same call trains nothing and says the same.
    assert main(words) == 0
    assert capsys.readouterr().out == printed


@pytest.mark.slow
def test_a_violation_is_said_and_is_the_exit_status(tmp_path, capsys, monkeypatch):
    draw = noise.GaussianNoise.draw

    def half(self, step):
        return jax.tree.map(lambda limb: limb // 2, draw(self, step))

    monkeypatch.setattr(noise.GaussianNoise, "draw", half)
    assert main([*WORDS, "--knows-sample", "--out", str(tmp_path / "audit")]) == 1
    printed = capsys.readouterr().out
    assert "VIOLATED: the lower bound is above the claim" in printed
    assert json.loads((tmp_path / "audit/audit.json").read_text())["violated"]


MEMBERSHIP = ["audit", "digits", "--method", "membership", "--model", "linear"]
MEMBERSHIP += ["--epsilon", "8", "--delta", "0.01", "--update-counts", "20"]
MEMBERSHIP += ["--models", "400", "--sweep-models", "240", "--models-at-once", "40"]
MEMBERSHIP += ["--learning-rates", "0.5", "--clip-norms", "1", "--strategy", "bk"]
MEMBERSHIP += ["--confidence", "0.95", "--seed", "1"]


@pytest.mark.slow
def test_membership_tells_which_canary_gives_most_away(tmp_path, capsys):
    words = [*MEMBERSHIP, "--json", "--out", str(tmp_path)]
    assert main(words) == 0
    printed = capsys.readouterr().out
    found = json.loads(printed)
    assert found["models"] == 400
    assert 7.9 < found["claimed_epsilon"] <= 8
    assert 0.3 < found["epsilon_lower_bound"] < found["trade_off_bound"] < 8
    assert found["setting"]["canary"] in ("blank", "noise")
    tried = [each["canary"] for each in found["tried"]]
    assert set(tried) == {"blank", "noise", "7 as 8", "6 as 7", "0 as 1"}
    assert found["mechanism"]["sample_rate"] == 0.64
    page = (tmp_path / "report.html").read_text()
    assert "Settings tried" in page
    assert "An attacker who trains 400 models" in page
    # More models: those there are serve again.
    more = [*words, "--models", "440"]
    assert main(more) == 0
    found_more = json.loads(capsys.readouterr().out)
    assert found_more["scores"]["inside"][:200] == found["scores"]["inside"]


@pytest.mark.slow
def test_one_run_audits_the_model_alone(tmp_path, capsys):
    words = ["audit", "digits", "--method", "one-run", "--steps", "20", "--canaries"]
    words += ["100", "--model", "linear", "--strategy", "bk", "--seed", "1", "--json"]
    words += ["--noise-multiplier", "1", "--guessed", "0.3"]
    assert main([*words, "--out", str(tmp_path)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["guesses"]["made"] == 30
    assert len(found["scores"]["inside"]) + len(found["scores"]["outside"]) == 100
    assert found["epsilon_lower_bound"] <= found["trade_off_bound"]
    assert found["trade_off_bound"] < found["claimed_epsilon"]
    page = (tmp_path / "report.html").read_text()
    assert "A stranger who has the trained model alone" in page


@pytest.mark.slow
def test_a_replay_passes_and_fails(tmp_path, capsys, monkeypatch):
    words = ["audit", "digits", "--method", "replay", "--model", "linear", "--strategy"]
    words += ["bk", "--out", str(tmp_path)]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["passed"]
    assert len(found["checks"]) == 12
    assert json.loads((tmp_path / "replay.json").read_text()) == found
    draw = noise.GaussianNoise.draw
    monkeypatch.setattr(
        noise.GaussianNoise,
        "draw",
        lambda *given: jax.tree.map(np.zeros_like, draw(*given)),
    )
    assert main(words) == 1
    assert "FAILED" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--non-private"], "non_private (=True) has no guarantee"),
        (["--audited-examples", "0"], "audited_examples (=0) must be at least 1"),
        (["--audited-examples", "100000"], "must be at most the 1437 training"),
        (
            ["--audited-examples", "1438", "--method", "membership"],
            "audited_examples (=1438) must be at most the 1437 training examples",
        ),
        (["--audited-steps", "999"], "steps (=999) must be at most the mechanism's"),
        (["--canaries", "3"], "canaries (=3) must be at least 20"),
        (["--confidence", "1"], "confidence (=1.0)"),
        (["--method", "one-run", "--canaries", "900"], "canaries (=900) must be at"),
        (
            ["--method", "one-run", "--canaries", "300", "--confidence", "0.999999"],
            "guesses about 300 canaries prove nothing",
        ),
        (["--method", "membership", "--models", "20"], "models (=20) prove nothing"),
        (
            ["--method", "membership", "--audited-batch-size", "101"],
            "batch_size (=101.0) must be at most the 100 examples",
        ),
        (
            ["--method", "membership", "--epsilon", "None", "--noise-multiplier", "1"],
            "epsilon (=None) must be given for membership",
        ),
        (["--adjacency", "replace-one"], "cannot be tested by canaries"),
        (["--audited-steps", "2", "--knows-sample"], "steps (=2) are too few"),
    ],
)
def test_bad_input_is_refused(tmp_path, words, message, capsys):
    out = tmp_path / "audit"
    assert main(["audit", "digits", *words, "--out", str(out)]) == 2
    assert message in capsys.readouterr().err
    assert not (out / "audit.json").exists()


@pytest.mark.parametrize("name", ["config.json", "ledger.jsonl", "study.json"])
def test_the_folder_of_a_run_or_a_search_is_refused(tmp_path, capsys, name):
    for file in (name, "report.html"):
        (tmp_path / file).write_text("kept")
    assert main([*WORDS, "--out", str(tmp_path)]) == 2
    told = capsys.readouterr().err
    assert f"holds a run or a search ({name})" in told
    assert "choose another folder" in told
    assert {path.name for path in tmp_path.iterdir()} == {name, "report.html"}
    assert (tmp_path / "report.html").read_text() == "kept"


def test_a_path_with_the_signs_of_a_markup_is_a_path(tmp_path, capsys):
    found = {"sentence": "s", "violated": False, "auc": 0.5, "advantage": 0.1}
    audit._print({**found, "highest_advantage": 0.2}, Path("[/b]x/report.html"))
    assert "report: [/b]x/report.html" in capsys.readouterr().out
    content = {"checks": [], "passed": True}
    (tmp_path / "[/b]x").mkdir(parents=True)
    audit._replayed(content, tmp_path / "[/b]x", as_json=False)
    assert "[/b]x/replay.json" in capsys.readouterr().out.replace("\n", "")
