"""The table of risks in the docs is what the benchmark prints."""

import pytest

from scripts import ROOT, load


BENCHMARK = load("benchmarks/risks.py")


@pytest.mark.parametrize("name", ["digits", "cifar10-wrn-16-4-tan"])
def test_the_table_in_the_docs_is_what_the_benchmark_prints(name, monkeypatch, capsys):
    monkeypatch.setattr(BENCHMARK, "EXAMPLES", {name: BENCHMARK.EXAMPLES[name]})
    BENCHMARK.main([])
    page = (ROOT / "docs/budget.md").read_text()
    lines = capsys.readouterr().out.strip().splitlines()
    assert len(lines) == 3
    assert [line for line in lines if line not in page] == []
