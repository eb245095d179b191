"""`benchmarks/costs.py`, with times that are not measured."""

import pytest

from scripts import load


@pytest.fixture
def costs(monkeypatch):
    module = load("benchmarks/costs.py")

    class Bench:
        def __init__(self, group, rows):
            self.rows = rows

        def seconds(self, part):
            return self.rows / 1000, False

    monkeypatch.setattr(module.autotune, "_Bench", Bench)
    return module


def test_every_table_has_a_line_for_each_method(costs, capsys):
    costs.show("convolutions", costs.CONVOLUTIONS[:1], costs.convolution, False)
    costs.show("tables", costs.TABLES[:1], costs.table, True)
    costs.show("products", costs.PRODUCTS[:1], costs.matrix, True)
    lines = capsys.readouterr().out.splitlines()
    assert sum("vmap, retained" in line for line in lines) == 3
    assert "patches, retained        4.00" in lines[2]  # milliseconds
    assert any("gram, batched           32.00" in line for line in lines)


def test_of_a_model_each_kind_of_layer_is_shown_once(costs, capsys):
    costs.show_model("wrn-16-4", 8, "tf32")
    printed = capsys.readouterr().out
    kind = "conv_general_dilated float32[1,32,32,64] float32[3,3,64,64]"
    assert printed.count(f"\n{kind}") == 1
    assert "crossed, retained        8.00" in printed
    assert "\nadd " not in printed  # of what is elementwise there is one way
