"""The Python of the README and of the pages in docs runs as it stands, in order."""

import re
from pathlib import Path

import pytest

from tanager.cli import main


ROOT = Path(__file__).parent.parent


def run_the_examples_of(page, count):
    text = (ROOT / page).read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.S)
    assert len(blocks) == count
    names = {}
    for block in blocks:
        exec(compile(block, page, "exec"), names)


@pytest.mark.slow
def test_the_examples_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    run_the_examples_of("README.md", 2)
    printed = capsys.readouterr().out
    assert float(re.findall(r"ε = ([\d.]+)", printed)[0]) <= 3.0
    assert 0 < float(re.findall(r"ε so far: ([\d.]+)", printed)[0]) < 3.0
    assert (tmp_path / "runs/mine/report.html").exists()


@pytest.mark.slow
def test_the_examples_of_weights_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "digits", "--model", "linear", "--steps", "2"]) == 0
    capsys.readouterr()
    run_the_examples_of("docs/weights.md", 4)
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [
        "('tanager', 'timm', 'huggingface', 'huggingface-backbone')",
        "timm ['head set to zero', 'positions resized from 17 to 37 (bicubic)']",
    ]
    assert "read as timm, do not fit this VisionTransformer:" in lines[2]
    assert lines[3] == "  differs: head.weight is [1000, 192], must be [10, 192]"
    published = (
        "hf:timm/vit_base_patch16_224.augreg_in21k 21843 (0.5, 0.5, 0.5) apache-2.0"
    )
    assert published in lines
    assert re.fullmatch(r"a \d", lines[-1])


def test_the_examples_of_searching_run(capsys):
    run_the_examples_of("docs/search.md", 1)
    printed = capsys.readouterr().out
    assert 0 < float(re.findall(r"multiplier ([\d.]+)", printed)[0]) < 10
    assert 7.9 < float(re.findall(r"ε = ([\d.]+)", printed)[0]) <= 8


@pytest.mark.slow
def test_the_examples_of_fine_tuning_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run_the_examples_of("docs/fine_tuning.md", 1)
    lines = capsys.readouterr().out.splitlines()
    # Per block 4·(32+96) + 4·(32+32) + 2·4·(32+128), and the head of 32·10 + 10.
    assert lines[0] == str(2 * (512 + 256 + 1280) + 330)
    assert lines[-1] == "Linear"


@pytest.mark.slow
def test_the_examples_of_auditing_run(capsys):
    run_the_examples_of("docs/audit.md", 3)
    claimed, least, *of_many = re.findall(r"[\d.]+\d", capsys.readouterr().out)
    assert all(0 <= float(bound) < 6 for bound in of_many)
    assert len(of_many) == 2
    assert 0 <= float(least) <= float(claimed)
