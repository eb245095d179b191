"""`tanager audit` on the digits: what it prints, and its exit status.

That audits find planted bugs is in tests/audit/test_planted_bugs.py.
"""

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from tanager import models
from tanager.audit.replay import Finding
from tanager.cli import main
from tanager.commands import audit
from tanager.commands.audit import methods
from tanager.commands.audit.progress import ModelsProgress
from tanager.data import Dataset, as_source
from tanager.models.pretrained import save_weights
from tanager.seed import Seed


WORDS = "audit digits --steps 4 --noise-multiplier 1 --strategy bk --batch-size 1437 "
WORDS += "--canaries 600 --audited-examples 32 --physical-batch-size 64 --seed 1 "
WORDS = [*WORDS.split(), "--model", "linear"]


@pytest.mark.slow
@pytest.mark.usefixtures("no_audit_pictures")
def test_an_audit_tells_its_bound_and_goes_on(tmp_path, capsys, monkeypatch):
    words = [*WORDS, "--out", str(tmp_path / "audit")]
    assert main([*words, "--json"]) == 0
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
    # Done already: the same call trains nothing and says the same.
    assert main([*words, "--json"]) == 0
    assert capsys.readouterr().out == printed
    assert main([*words, "--clip-norm", "2"]) == 2
    assert "or give another folder" in capsys.readouterr().err
    # A violation is said, and is the exit status.
    monkeypatch.setattr(methods, "white_box", lambda *given: found | {"violated": True})
    assert main(words) == 1
    assert "VIOLATED: the lower bound is above the claim" in capsys.readouterr().out
    assert json.loads((tmp_path / "audit/audit.json").read_text())["violated"]


@pytest.mark.slow
@pytest.mark.usefixtures("no_audit_pictures")
def test_membership_tells_which_canary_gives_most_away(tmp_path, capsys):
    words = "audit digits --method membership --model linear --epsilon 8 --delta 0.01 "
    words += "--update-counts 8 --models 120 --sweep-models 100 --models-at-once 20 "
    words += "--learning-rates 0.5 --clip-norms 1 --strategy bk --confidence 0.8 "
    words += f"--seed 1 --json --out {tmp_path}"
    assert main(words.split()) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["models"] == 120
    assert 7.9 < found["claimed_epsilon"] <= 8
    assert 0 < found["epsilon_lower_bound"] < found["trade_off_bound"] < 8
    assert found["setting"]["canary"] in ("blank", "noise")
    tried = [each["canary"] for each in found["tried"]]
    assert set(tried) == {"blank", "noise", "7 as 8", "6 as 7", "0 as 1"}
    assert found["mechanism"]["sample_rate"] == 0.64
    page = (tmp_path / "report.html").read_text()
    assert "Settings tried" in page
    assert "An attacker who trains 120 models" in page


HEAD = (
    "--method membership --delta 0.01 --models 120 --sweep-models 40 --seed 1 --json "
)
HEAD += "--models-at-once 20 --strategy bk --confidence 0.8 --head-input norm"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "steps", "rate"),
    [
        ("--solver class-means", 1, 1.0),
        ("--solver auto --steps 3 --learning-rate 4", 3, 4.0),
    ],
)
@pytest.mark.usefixtures("no_audit_pictures")
def test_a_head_on_given_features_is_attacked_as_it_is_trained(
    tmp_path, capsys, words, steps, rate
):
    draw, file = np.random.default_rng(0), tmp_path / "features.npz"
    arrays: dict[str, Any] = {}
    for split, count in (("train", 40), ("test", 20)):
        arrays[f"{split}_features"] = draw.normal(size=(count, 6)).astype(np.float32)
        arrays[f"{split}_labels"] = np.arange(count) % 2
    np.savez(file, **arrays)
    start = ["audit", "features", "--features-from", str(file), "--epsilon", "8"]
    start += ["--account", "none", "--out", str(tmp_path / "out")]
    assert main([*start, *HEAD.split(), *words.split()]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["mechanism"]["sample_rate"] == 1
    assert found["mechanism"]["steps"] == found["setting"]["steps"] == steps
    assert found["setting"]["learning_rate"] == rate
    # Features of one value in all places have no gradient: "blank" is left out.
    assert found["setting"]["canary"] in ("noise", "0 as 1")
    assert 0 < found["trade_off_bound"] < 8
    assert found["auc"] > 0.75


@pytest.mark.slow
@pytest.mark.usefixtures("no_audit_pictures")
def test_a_head_on_cached_features_is_attacked_with_images(tmp_path, capsys):
    """The folder of features is of all examples: an audit of a few leaves it alone."""
    start = "audit digits --model small-cnn --fine-tune last-layer --batch-size 0 "
    start += "--solver class-means --epsilon 8 --augmentation none --account none "
    start += f"--features {tmp_path / 'all'} --out {tmp_path / 'out'}"
    assert main([*start.split(), *HEAD.split()]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {each["canary"] for each in found["tried"]} > {"blank", "noise"}
    assert found["mechanism"]["steps"] == found["mechanism"]["sample_rate"] == 1
    assert found["auc"] > 0.75
    assert not (tmp_path / "all").exists()


@pytest.mark.slow
@pytest.mark.parametrize("words", ["--method one-run --guessed 0.3", "--canaries 200"])
@pytest.mark.usefixtures("no_audit_pictures")
def test_a_part_of_the_data_is_audited_in_spite_of_a_folder_of_features(
    tmp_path, capsys, words
):
    model = models.create(
        "small-cnn", classes=10, image_shape=(8, 8, 1), key=jax.random.key(0)
    )
    save_weights(model, tmp_path / "weights")
    start = "audit digits --model small-cnn --fine-tune last-layer --batch-size 0 "
    start += "--solver class-means --epsilon 8 --augmentation none --account none "
    start += f"--head-input norm --head zero --weights {tmp_path / 'weights'} --seed 1 "
    start += f"--canaries 100 --audited-examples 40 --features {tmp_path / 'all'} "
    start += f"--strategy bk --out {tmp_path / 'out'} --json {words}"
    assert main(start.split()) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["mechanism"]["sample_rate"] == 1
    assert found["auc"] > 0.5
    assert not found["violated"]
    assert not (tmp_path / "all").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("no_audit_pictures")
def test_one_run_audits_the_model_alone(tmp_path, capsys):
    words = ["audit", "digits", "--method", "one-run", "--steps", "20"]
    words += ["--model", "linear", "--strategy", "bk", "--seed", "1", "--json"]
    words += ["--noise-multiplier", "1", "--guessed", "0.3"]
    assert main([*words, "--out", str(tmp_path)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["guesses"]["made"] == 108
    assert len(found["scores"]["inside"]) + len(found["scores"]["outside"]) == 360
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
    # Which faults fail which check is in test_planted_bugs.
    failed = Finding("noise is Gaussian", False, "it is 0")
    monkeypatch.setattr(methods, "replay", lambda *given: [failed])
    assert main(words) == 1
    assert "FAILED" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--non-private"], "--non-private (=True) has no guarantee"),
        (["--audited-examples", "100000"], "must be at most the 1437 training"),
        (
            ["--audited-examples", "1438", "--method", "membership"],
            "--audited-examples (=1438) must be at most the 1437 training examples",
        ),
        (
            ["--method", "membership", "--audited-examples", "50"],
            "--audited-batch-size (=64) must be at most the 50 audited examples",
        ),
        (["--audited-steps", "999"], "--audited-steps (=999) must be at most the"),
        (["--audited-steps", "0"], "--audited-steps (=0) must be at least 1"),
        (["--confidence", "1"], "--confidence (=1.0) must be strictly between"),
        (["--method", "one-run", "--canaries", "900"], "canaries (=900) must be at"),
    ],
)
def test_bad_input_is_refused(tmp_path, words, message, capsys):
    out = tmp_path / "audit"
    assert main(["audit", "digits", *words, "--out", str(out)]) == 2
    assert message in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("digits --audited-examples 0", "--audited-examples (=0) must be at least 1"),
        ("digits --method membership", "epsilon (=None) must be given for membership"),
        (
            "digits --method membership --epsilon 8 --clipping adaptive",
            "clipping (='adaptive') must be clip or automatic for membership",
        ),
        (
            "digits --method membership --noise-multiplier 5 --epsilon 8",
            "--noise-multiplier (=5.0) must be left out for membership",
        ),
        (
            "digits --method membership --steps 9",
            "--steps (=9) does not apply to --method membership: give --update-counts",
        ),
        (
            "digits --method membership --weight-decay 0.1",
            "--weight-decay (=0.1) does not apply to --method membership: leave it out",
        ),
        (
            "digits --method replay --account mine",
            "--account (='mine') is not charged for a replay, whose findings may not",
        ),
        (
            "digits --evaluate-every 5",
            "--evaluate-every (=5) does not apply to an audit, which measures no acc",
        ),
        (
            "digits --method one-run --models 9",
            "--models (=9) applies to --method membership alone: leave it out",
        ),
    ],
)
def test_bad_input_is_refused_before_data_are_read(
    tmp_path, monkeypatch, capsys, words, message
):
    monkeypatch.setattr(methods.runner, "load", None)
    more = (
        ["--epsilon", "None", "--noise-multiplier", "1"] if "=None" in message else []
    )
    assert main(["audit", *words.split(), *more, "--out", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err


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
    mechanism = {"sample_rate": 1.0, "noise_multiplier": 2.0, "steps": 3}
    found = {"sentence": "s", "violated": False, "auc": 0.5, "advantage": 0.1}
    found |= {"method": "one-run", "scores": {"inside": [1.0], "outside": [0.0]}}
    found |= {"mechanism": mechanism, "highest_advantage": 0.2}
    audit._print(found, Path("[/b]x/report.html"), "")
    assert "report: [/b]x/report.html" in capsys.readouterr().out
    content = {"checks": [], "passed": True}
    (tmp_path / "[/b]x").mkdir(parents=True)
    audit._replayed(content, tmp_path / "[/b]x", as_json=False)
    assert "[/b]x/replay.json" in capsys.readouterr().out.replace("\n", "")


def test_findings_of_a_replay_are_for_their_owner_alone(tmp_path, capsys):
    """They are of sums without noise."""
    audit._replayed({"checks": [], "passed": True}, tmp_path, as_json=False)
    assert (tmp_path / "replay.json").stat().st_mode & 0o077 == 0
    assert "do not publish them if the data are private" in capsys.readouterr().out


def test_membership_resizes_mixed_images_as_training_does(tmp_path, monkeypatch):
    draw = np.random.default_rng(0)
    for number in range(20):
        folder = tmp_path / "data" / "ab"[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        pixels = draw.integers(0, 256, (20 + number, 30, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    words = ["audit", "folder", "--data", str(tmp_path / "data"), "--method"]
    words += ["membership", "--model", "linear", "--epsilon", "8", "--delta", "0.01"]
    words += ["--account", "none", "--out", str(tmp_path / "out")]
    seen = []

    def task(recipe, *_):
        seen.append(recipe)
        raise KeyboardInterrupt

    monkeypatch.setattr(methods, "_task", task)
    with contextlib.suppress(KeyboardInterrupt):
        main(words)
    assert [recipe.image_size for recipe in seen] == [32]


def test_membership_says_a_word_before_it_reads_the_data(tmp_path, capsys, monkeypatch):
    def load(recipe):
        raise KeyboardInterrupt

    monkeypatch.setattr(methods.runner, "load", load)
    words = "audit digits --method membership --epsilon 8 --delta 0.01 --out"
    with contextlib.suppress(KeyboardInterrupt):
        main([*words.split(), str(tmp_path / "out")])
    assert "digits: attack on ε = 8 at δ = 0.01" in capsys.readouterr().err


@pytest.fixture
def piped():
    """Return an audit's progress that is not on a terminal, its clock, its lines."""
    file, now = io.StringIO(), [0.0]
    shown = ModelsProgress(Console(file=file, width=200), lambda: now[0])

    def tell(at, *told):
        now[0] = at
        with shown.bar:
            shown.tell(*told)
        return file.getvalue().splitlines()

    return tell


def test_models_are_counted_in_a_pipe_by_lines_some_seconds_apart(piped):
    one, two = "phase I, round 1 of 2", "phase I, round 2 of 2"
    piped(0, one, 0, 100, "compiling")
    piped(30, one, 0.5, 100, "")  # that took the compilation
    piped(31, one, 1.5, 100, "")
    piped(32, one, 2.5, 100, "")
    piped(42, one, 12.5, 100, "")
    piped(43, two, 13.5, 100, "compiling")
    lines = piped(44, two, 13.5, 100, "")
    assert lines == [
        f"{one}: 0 of 100 models; compiling",
        f"{one}: 0 of 100 models",
        f"{one}: 1 of 100 models; about 2 minutes left",
        f"{one}: 12 of 100 models; about 88 seconds left",
        f"{two}: 13 of 100 models; compiling",
    ]
    piped(1060, two, 20, 100, "")
    piped(1090, two, 21, 100, "")  # too soon, in a long audit
    lines = piped(1100, two, 100, 100, "ε ≥ 1")
    assert lines[5:] == [
        f"{two}: 20 of 100 models",
        f"{two}: 100 of 100 models; ε ≥ 1",
    ]


def test_models_that_were_on_record_took_no_time(piped):
    lines = []
    for seconds in range(4):
        lines = piped(seconds, "phase II", 90 + seconds, 100, "")
    assert lines[-1] == "phase II: 92 of 100 models; about 8 seconds left"


def test_features_have_no_blank_canary():
    rows = np.ones((4, 3), np.float32)
    source = as_source({"features": rows, "label": np.zeros(4, np.int32)})
    dataset = Dataset("features", source, source, ("a", "b"), (3,), (), ())
    rule = r"canary_kinds \(='blank'\) make no canary of these kinds on features"
    with pytest.raises(ValueError, match=rule):
        methods._canaries(dataset, ("blank",), Seed.from_int(0))
    assert [*methods._canaries(dataset, ("noise",), Seed.from_int(0))] == ["noise"]
