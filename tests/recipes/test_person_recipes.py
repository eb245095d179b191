"""A folder of persons, from the command to the report and the exported card."""

import json

import numpy as np
import pytest
from PIL import Image

from tanager.cli import main
from tanager.privacy.account import Account


@pytest.fixture
def folder(tmp_path):
    draw = np.random.default_rng(0)
    for person in range(40):
        for image in range(1 + person % 7):
            label = "sick" if person % 2 else "well"
            file = tmp_path / "data" / label / f"patient-zoe-{person}" / f"{image}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            pixels = draw.integers(0, 256, (8, 8), np.uint8)
            Image.fromarray(pixels).save(file)
    return tmp_path / "data"


def command(folder, out, *more):
    return [
        *("train", "folder", "--data", str(folder), "--model", "linear"),
        *("--steps", "2", "--noise-multiplier", "2", "--batch-size", "9"),
        *("--out", str(out), "--delta", "0.001", *more),
    ]


def test_persons_are_trained_on_reported_and_exported(folder, tmp_path, capsys):
    persons = ["--groups", "folder", "--unit", "group", "--examples-per-group", "3"]
    assert main(command(folder, tmp_path / "run", *persons)) == 0
    assert "36 persons of folder" in capsys.readouterr().out
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert result["unit"] == "person"
    assert result["examples"] == 36
    assert sum(each["examples"] for each in result["per_class"]) == 15  # of 4 others
    assert result["sample_rate"] == 0.25
    page = (tmp_path / "run/report.html").read_text()
    for text in ("about one person", "36 persons", "at most 3 images", "per person"):
        assert text in page, text
    assert "patient-zoe" not in page
    (account,) = tmp_path.glob("*.account.jsonl")
    assert Account(account).read().unit == "person"
    out = tmp_path / "model"
    assert main(["export", str(tmp_path / "run"), "--to", str(out)]) == 0
    assert "one person, with all of their images" in (out / "README.md").read_text()
    public = [path for path in tmp_path.glob("run/*") if path.is_file()]
    assert all(b"patient-zoe" not in path.read_bytes() for path in public)
    assert main(command(folder, tmp_path / "run", *persons[:4])) == 2
    assert "examples_per_group was 3 and is 4" in capsys.readouterr().err


def test_persons_need_owners(folder, tmp_path, capsys):
    assert main(command(folder, tmp_path / "run", "--unit", "group")) == 2
    assert "--groups folder" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
