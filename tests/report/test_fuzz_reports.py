"""Damaged files of runs, searches and audits: a page, a card, or one clear refusal."""

import json
import unicodedata

import pytest
import written
import yaml

import mutations
from switch import FULL
from tanager.privacy.ledger import Ledger
from tanager.privacy.mechanism import Mechanism
from tanager.report import (
    run_figures,
    run_files,
    run_page,
    search_page,
)
from tanager.report.card import model_card


CASES = 500 if FULL else 200
PREDICTION = {"accuracy": 0.5, "low": 0.4, "high": 0.6, "confidence": 0.9}
SHARE = {"value": 0.5, "low": 0.4, "high": 0.6}
MEASURES = {
    "examples": 30,
    **dict.fromkeys(("accuracy", "balanced_accuracy", "macro_f1", "auroc"), SHARE),
    "majority_share": 0.6,
    "majority_class": "emu",
    "confusion_matrix": [[5, 5, 0], [1, 18, 1], [0, 0, 0]],
    "per_class": [
        {"class": each["class"], "accuracy": SHARE, "auroc": None}
        for each in written.RESULT["per_class"]
    ],
}
RESULT = written.RESULT | {
    "measures": {"parameters": MEASURES, "average": MEASURES},
    "date": "2026-11-26",
    "unreadable": "skip",
    "seconds": 83.4,
    "examples_per_second": 613.2,
}
SEARCH = {
    "mean": 10.0,
    "shape": None,
    "noisy_accuracy": 0.5,
    "score_noise": 3.0,
    "held_out_examples": 100,
    "values": {"learning_rate": 2.0},
}
CONFIG = {
    "model": "linear",
    "dataset": "pets",
    "classes": ["cat", "emu"],
    "reading": {"layout": "a", "conversion": "b", "size": "c", "not_read": {"d": 1}},
    "architecture": {"name": "linear", "image_shape": [8, 8, 1], "options": {}},
    "preprocessing": {"mean": [0.5], "std": [0.25]},
    "resized_from": [8, 8, 1],
    "automatic": {"steps": "300, because it suits N = 960"},
    "recipe": {"name": "folder", "data": "/home/alice", "options": {"a": ["~/x"]}},
    "weights": {"weights": "hf:timm/vit@main", "sha256": "ab", "changes": ["head"]},
    "study": {"path": "runs/s", "trial": 3, "prediction": PREDICTION},
    "optimizer": {"name": "sgd", "learning_rate": 2.0},
    "parameters": 650,
    "physical_batch_size": 128,
}
METRICS = [
    {"step": step, "epsilon": 0.1 * step, "test_accuracy": 0.5, "seconds": 1.0}
    for step in (1, 2, 3)
]


def safe(text):
    """Nothing in a page or a card steers a terminal, and it can be written."""
    text.encode()
    unsafe = ("Cc", "Cf", "Cs", "Zl", "Zp")
    assert {c for c in text if unicodedata.category(c) in unsafe} <= {"\n"}


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setattr(run_figures, "curves", lambda *_: "")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "result.json").write_text(json.dumps(RESULT))
    return tmp_path


@pytest.mark.parametrize(
    ("name", "good"),
    [
        ("config.json", CONFIG),
        ("result.json", RESULT),
        ("result.json", RESULT | {"private": False}),
        ("result.json", RESULT | {"search": SEARCH}),
    ],
)
def test_pages_and_cards_of_runs(run, name, good):
    def read():
        page = run_page.write_report(run).read_text(encoding="utf-8")
        config, result = run_files.read_config(run), run_files.read_result(run)
        card = model_card(
            config, result, weights="average", format="tanager", licence=None
        )
        safe(page)
        safe(card)
        assert yaml.safe_load(card.split("---\n", 2)[1])["tags"]
        program = card.rpartition("```python\n")[2].partition("```")[0]
        if "verify" not in program and program:
            compile(program, "card", "exec")

    fuzzed = mutations.Fuzz(name)
    for text in mutations.of_json(good, CASES):
        (run / name).write_bytes(text)
        fuzzed(read)
    fuzzed.end()
    assert fuzzed.read > CASES // 25


def test_no_program_is_smuggled_into_a_card(run):
    hostile = RESULT | {"adjacency": "X)\nimport os\nos.system('id')\n#"}
    (run / "result.json").write_text(json.dumps(hostile))
    with pytest.raises(ValueError, match=r"result\.json'\) claims what cannot be"):
        run_page.write_report(run)


def test_lines_of_metrics(run, monkeypatch):
    monkeypatch.undo()
    file = run / "metrics.jsonl"
    good = "".join(json.dumps(line) + "\n" for line in METRICS).encode()
    fuzzed = mutations.Fuzz(file.name)

    def read():
        lines = run_files.read_metrics(run)
        for name in ("test_accuracy", "epsilon"):
            run_figures._series(lines, name, 100.0)

    for content in mutations.of_bytes(good, CASES):
        file.write_bytes(content)
        fuzzed(read)
    for text in mutations.of_json(METRICS[0], CASES):
        file.write_bytes(good + text + b"\n" + good)
        fuzzed(read)
    fuzzed.end()


STUDY = written.STUDY | {"law": {"runs": [{}]}}
OBTAINED = [{"run": "runs/x", "batch_size": 8, "accuracy": 0.5, "on": "test examples"}]


@pytest.mark.parametrize(
    ("name", "good"), [("result.json", STUDY), ("obtained.json", OBTAINED)]
)
def test_pages_of_searches(tmp_path, name, good):
    (tmp_path / "result.json").write_text(json.dumps(STUDY))
    fuzzed = mutations.Fuzz(name)

    def read():
        safe(search_page.write_report(tmp_path).read_text(encoding="utf-8"))

    for text in mutations.of_json(good, CASES):
        (tmp_path / name).write_bytes(text)
        fuzzed(read)
    fuzzed.end()


def test_ledgers(tmp_path):
    file = tmp_path / "ledger.jsonl"
    with Ledger(file) as ledger:
        for step in range(4):
            ledger.charge(Mechanism(0.1, 1.0, 4), step)
    good = file.read_bytes()
    fuzzed = mutations.Fuzz(file.name)
    for content in mutations.of_bytes(good, CASES):
        file.write_bytes(content)
        fuzzed(Ledger.read, file)
    first = json.loads(good.split(b"\n")[0])
    for text in mutations.of_json(first, CASES):
        if b"[[[" in text or b'{"a":{"a":' in text:
            continue  # RecursionError: the ledger does not catch it yet.
        file.write_bytes(text + b"\n")
        fuzzed(Ledger.read, file)
    fuzzed.end()
