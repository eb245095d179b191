"""`tanager audit` on the digits: what it prints, and that it fails on a violation."""

import json

import pytest

from tanager import noise
from tanager.cli import main


WORDS = ["audit", "digits", "--steps", "40", "--noise-multiplier", "1", "--strategy"]
WORDS += ["bk", "--batch-size", "150", "--canaries", "600", "--audited-examples", "32"]
WORDS += ["--physical-batch-size", "64", "--seed", "1"]


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
    # Done already: the same call trains nothing and says the same.
    assert main(words) == 0
    assert capsys.readouterr().out == printed


@pytest.mark.slow
def test_a_violation_is_said_and_is_the_exit_status(tmp_path, capsys, monkeypatch):
    made = noise.GaussianNoise.__init__

    def init(self, *arguments, **options):
        made(self, *arguments, **options)
        self.standard_deviation /= 2

    monkeypatch.setattr(noise.GaussianNoise, "__init__", init)
    assert main([*WORDS, "--knows-sample", "--out", str(tmp_path / "audit")]) == 1
    printed = capsys.readouterr().out
    assert "VIOLATED: the bound is above the claim" in printed
    assert json.loads((tmp_path / "audit/audit.json").read_text())["violated"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--non-private"], "non_private (=True) claims nothing"),
        (["--audited-examples", "0"], "audited_examples (=0) must be at least 1"),
        (["--canaries", "3"], "canaries (=3) must be at least 20"),
        (["--confidence", "1"], "confidence (=1.0)"),
        (["--adjacency", "replace-one"], "is not what joining canaries test"),
        (["--audited-steps", "2", "--knows-sample"], "steps (=2) are too few"),
    ],
)
def test_bad_input_is_refused(tmp_path, words, message, capsys):
    out = tmp_path / "audit"
    assert main(["audit", "digits", *words, "--out", str(out)]) == 2
    assert message in capsys.readouterr().err
    assert not (out / "audit.json").exists()
