import json

import pytest

from tanager import models
from tanager.cli import main


NAMES = ("lenet", "wrn-16-4", "bit-50x1")


@pytest.fixture(autouse=True)
def few(monkeypatch):
    """Counting all models takes seconds; test_counts counts the others."""
    entries = {name: models.ENTRIES[name] for name in NAMES}
    monkeypatch.setattr(models, "ENTRIES", entries)


def test_json_has_every_field(capsys):
    assert main(["models", "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    rows = json.loads(captured.out)["models"]
    assert [row["name"] for row in rows] == list(NAMES)
    assert rows[0] == {
        "name": "lenet",
        "parameters": 26_010,
        "flops": 844_416,
        "image_shape": [28, 28, 1],
        "classes": 10,
        "weights": [],
        "source": models.ENTRIES["lenet"].source,
    }
    assert rows[2]["weights"] == [
        "hf:timm/resnetv2_50x1_bit.goog_in21k",
        "hf:timm/resnetv2_50x1_bit.goog_in21k_ft_in1k",
    ]
    assert rows[2]["parameters"] == 25_549_352


def test_the_table_cuts_nothing_off(capsys):
    assert main(["models"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:3] == ["model", "parameters", "GFLOP"]
    assert lines[1].split()[:6] == ["lenet", "26", "010", "0.0008444", "28×28×1", "10"]
    for line, name in zip(lines[1:4], NAMES, strict=True):
        assert line.rstrip().endswith(models.ENTRIES[name].source)
    assert "hf:timm/resnetv2_50x1_bit.goog_in21k" in lines[3]
    assert "Counted in" in lines[-1]
