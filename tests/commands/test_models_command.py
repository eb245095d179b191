import json

from tanager import models
from tanager.cli import main


def test_json_has_every_field(capsys):
    assert main(["models", "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    listed = json.loads(captured.out)["models"]
    rows = {row["name"]: row for row in listed}
    assert list(rows) == list(models.ENTRIES)
    assert rows["lenet"] == {
        "name": "lenet",
        "parameters": 26_010,
        "flops": 844_416,
        "image_shape": [28, 28, 1],
        "classes": 10,
        "weights": [],
        "source": models.ENTRIES["lenet"].source,
    }
    assert rows["bit-50x1"]["weights"] == [
        "hf:timm/resnetv2_50x1_bit.goog_in21k",
        "hf:timm/resnetv2_50x1_bit.goog_in21k_ft_in1k",
    ]
    assert rows["bit-50x1"]["parameters"] == 25_549_352


def test_the_table_fits_100_columns_and_cuts_nothing_off(capsys):
    assert main(["models"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    assert lines[0].split() == ["model", "parameters", "GFLOP", "image", "weights"]
    assert [line.split()[0] for line in lines[1 : 1 + len(models.ENTRIES)]] == list(
        models.ENTRIES
    )
    row = next(line for line in lines if line.startswith("bit-50x1 "))
    assert row.split()[1:5] == ["25", "549", "352", "8.18"]
    assert row.rstrip().endswith(" timm/resnetv2_50x1_bit.goog_in21k")
