"""Tables beside the peers: what they say of a record, and that the page has them."""

import json
import re
import sys
import types

import numpy as np
import pytest

from scripts import ROOT, load


PAGES = {
    "docs/benchmarks.md": "2026-11-23-xeon-peers.json",
}


@pytest.fixture(scope="module")
def tables():
    return load("benchmarks/peers/tables.py")


def row(system, seconds, **more):
    return {
        "system": system,
        "seconds": seconds,
        "peak_bytes": 100 * 2**20,
        "first_step_seconds": 2.0,
        "versions": {"jax": "1.2.3"},
    } | more


def record(*rows, model="wrn-16-4"):
    date = "2026-11-22T10:00:00+00:00"
    work = {"model": model, "physical_batch": 32, "rows": list(rows), "date": date}
    return {
        "machine": {"cpu": "a cpu", "cores": 2, "backend": "cpu", "device": "cpu"},
        "versions": {"python": "3.11"},
        "works": [work],
        "poisson": [],
        "largest": [],
    }


def cells(table, name):
    (line,) = [line for line in table.splitlines() if line.startswith(f"| {name} |")]
    return [cell.strip() for cell in line.strip("|").split("|")[1:]]


def test_rates_are_of_medians_and_ratios_of_the_same_framework(tables):
    made = tables.make(
        record(
            row("torch-sgd", [0.1, 0.1, 9.0]),
            row("jax-sgd", [0.2]),
            row("tanager:auto", [0.25]),
            row("opacus:hooks", [0.3]),
        )
    )["wrn-16-4"]
    assert cells(made, "PyTorch, SGD") == ["320"]
    assert cells(made, "**tanager**") == ["128 (1.25)"]
    assert cells(made, "Opacus") == ["107 (3.00)"]


def test_a_system_that_failed_says_so(tables):
    made = tables.make(
        record(
            row("jax-sgd", [0.2]),
            row("opacus:ghost", [], error="RuntimeError: no"),
            row("jax-privacy", [0.4, 0.4], error="another function: losses differ"),
        )
    )
    assert cells(made["wrn-16-4"], "Opacus, ghost") == ["failed"]
    assert cells(made["wrn-16-4"], "JAX-Privacy") == ["failed"]
    assert "JAX-Privacy" not in made["goals"]


def test_the_largest_batch_is_read_off_a_line_through_the_memory_of_steps(tables):
    whole = record(row("jax-sgd", [0.2], step_bytes=96 * 2**20))
    for rows, mebibytes in ((128, 288), (8, 48)):
        line = row("jax-sgd", [0.2], step_bytes=mebibytes * 2**20)
        whole["works"].append(
            whole["works"][0] | {"physical_batch": rows, "rows": [line]}
        )
    made = tables.make(whole)["wrn-16-4 memory"]
    # A step of batch 32, and a line of 32 MiB and 2 MiB for each example.
    assert cells(made, "JAX, SGD") == ["96", "1,008", "100", "2"]
    assert made.startswith("| at batch 32 | MiB of a step | largest batch in 2 GiB |")


@pytest.mark.parametrize(("seconds", "verdict"), [(0.2, "met"), (0.5, "**missed**")])
def test_a_goal_is_held_against_the_best_of_the_other_side(tables, seconds, verdict):
    made = tables.make(
        record(
            row("jax-sgd", [0.2]),
            row("tanager:auto", [seconds]),
            row("tanager:auto:low", [0.6]),
            row("opacus:hooks", [0.8]),
            row("opacus:ghost", [0.4]),
        )
    )["goals"]
    peer = [line for line in made.splitlines() if "fastest private peer" in line]
    assert f"{0.4 / seconds:.2f}" in peer[0]
    assert verdict in peer[0]


def test_every_system_is_held_against_one_that_ran():
    run, system = load("benchmarks/peers/run.py"), "tanager:auto"
    rows = {
        "jax-sgd:options": {"losses": [1.0, 2.0]},
        system: {"losses": [1.0, 2.0]},
        "opacus:hooks": {"losses": [1.0, 2.0001]},
        "opacus:ghost": {"losses": [1.0, 2.1]},
    }
    sums = {system: [1.0, 2.0], "opacus:hooks": [1.0, 3.0], "opacus:ghost": [1.0, 2.0]}
    held = run.compare(
        rows, {name: {"w": np.array(leaf)} for name, leaf in sums.items()}
    )
    assert held == {"losses": "jax-sgd:options", "sums": system}
    assert "another sum: 0.45" in rows["opacus:hooks"]["error"]
    assert "losses differ" in rows["opacus:ghost"]["error"]
    assert "error" not in rows[system]
    assert rows["opacus:ghost"]["sum_difference"] == 0
    # Where nothing can be compared, nothing is said of it.
    rows = {"opacus:hooks": {"losses": [1.0]}}
    sums = {"opacus:hooks": {"w": np.ones(2)}}
    assert run.compare(rows, sums) == {"losses": None, "sums": None}
    assert rows == {"opacus:hooks": {}}


@pytest.mark.slow
def test_all_systems_compute_in_one_precision(tmp_path, monkeypatch, capsys):
    run, out = load("benchmarks/peers/run.py"), tmp_path / "peers.json"
    words = f"run.py --work linear:8 --poisson --no-training --rounds 1 --out {out} "
    words += "--systems jax-sgd tanager:auto --precision"
    monkeypatch.setattr("sys.argv", [*words.split(), "tf32"])
    run.main()
    found = json.loads(out.read_text())
    rows = found["works"][0]["rows"]
    assert (
        [row["precision"] for row in rows]
        == ["tf32", "tf32"]
        == 2 * [found["precision"]]
    )
    assert not any("error" in row for row in rows)
    monkeypatch.setattr("sys.argv", [*words.split(), "float32"])
    with pytest.raises(SystemExit):
        run.main()
    assert "peers.json is in tf32: another --out" in capsys.readouterr().err


@pytest.mark.parametrize("precision", ["float32", "tf32"])
def test_torch_computes_products_and_convolutions_in_one_precision(
    monkeypatch, precision
):
    matmul = types.SimpleNamespace(allow_tf32=False)
    cudnn = types.SimpleNamespace(allow_tf32=True)  # as PyTorch comes
    cuda = types.SimpleNamespace(matmul=matmul)
    torch = types.ModuleType("torch")
    vars(torch).update(nn=None, backends=types.SimpleNamespace(cuda=cuda, cudnn=cudnn))
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "torch_models", types.ModuleType("torch_models"))
    worker = load("benchmarks/peers/torch_worker.py").TorchWorker
    worker.compute_in(None, precision)
    assert matmul.allow_tf32 is cudnn.allow_tf32 is (precision == "tf32")
    assert worker.precision(None) == precision


def test_a_page_is_filled_between_its_markers(tables):
    page = "a\n<!-- table: one -->\nold\n<!-- end -->\nb\n"
    filled = tables.filled(page, {"one": "| new |"})
    assert filled == "a\n<!-- table: one -->\n| new |\n<!-- end -->\nb\n"
    assert tables.filled(filled, {"one": "| new |"}) == filled
    with pytest.raises(LookupError, match="nothing was measured for 'one'"):
        tables.filled(page, {})


def test_the_page_has_the_ratios_of_the_other_processor(tables):
    record = ROOT / "benchmarks/results/2026-11-22-cpu-peers.json"
    goals = tables.make(json.loads(record.read_text()))["goals"].splitlines()[2:]
    ratios = [line.split("|")[4].strip() for line in goals]
    _, section = (ROOT / "docs/benchmarks.md").read_text().split("## Another processor")
    plain, standardised, (vit,) = ratios[:4], ratios[4:8], ratios[8:]
    shown = re.findall(r"\| (\d\.\d\d) \| (\d\.\d\d) \| (\d\.\d\d|–) \|", section)
    assert shown == list(zip(plain, standardised, [vit, "–", "–", "–"], strict=True))


@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_what_was_measured_and_nothing_else(tables, page):
    record = ROOT / "benchmarks/results" / PAGES[page]
    made = tables.make(json.loads(record.read_text()))
    text = (ROOT / page).read_text()
    assert "<!-- table: " in text
    assert tables.filled(text, made) == text
