"""The README's Python runs as it stands, from top to bottom."""

import re
from pathlib import Path

import pytest


README = Path(__file__).parent.parent / "README.md"


@pytest.mark.slow
def test_the_examples_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.S)
    assert len(blocks) == 2
    names = {}
    for block in blocks:
        exec(compile(block, str(README), "exec"), names)
    printed = capsys.readouterr().out
    assert float(re.findall(r"ε = ([\d.]+)", printed)[0]) <= 3.0
    assert 0 < float(re.findall(r"ε so far: ([\d.]+)", printed)[0]) < 3.0
    assert (tmp_path / "runs/mine/report.html").exists()
