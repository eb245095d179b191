"""`benchmarks/tpu_compiled.py`, compiled here for this machine's own devices."""

import importlib.metadata
import json

import jax
import pytest

from scripts import load


@pytest.fixture(scope="module")
def bench():
    return load("benchmarks/tpu_compiled.py")


def _row(strategy, rows, needed, **more):
    named = ("linear", "float32", strategy, rows, 1, "v5e:2x2", -1.0)
    keys = ("model", "dtype", "strategy", "rows", "chips", "topology", "effort")
    figures = {"temp_bytes": 2 * needed, "bytes_needed": needed, "flops": 8.0 * needed}
    same = {"bytes_accessed": 4.0 * needed, "loops": 0, "seconds": 1.0}
    return dict(zip(keys, named, strict=True)) | figures | same | more


def test_without_libtpu_one_message_says_what_to_install(bench, monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(SystemExit, match=r"libtpu is not .* pip install 'jax\[tpu\]'"):
        bench.main(["--models", "linear"])


def test_for_a_gpu_another_plugin_compiles_and_times_nothing(bench, monkeypatch):
    asked = {}

    def topology(name, platform, **more):
        asked.update(more, name=name, platform=platform)
        return type("Topology", (), {"devices": jax.devices()})

    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(SystemExit, match=r"jax-cuda13-plugin is not installed, and"):
        bench.devices_of("h200")
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1")
    monkeypatch.setattr(bench.topologies, "get_topology_desc", topology)
    monkeypatch.setenv("XLA_FLAGS", "--mine")
    assert bench.devices_of("h200") == jax.devices()
    assert bench.os.environ["XLA_FLAGS"] == f"{bench.UNTIMED} --mine"
    target = asked.pop("target_config")
    assert asked == {"name": "h200", "platform": "cuda", "topology": "1x1x8"}
    assert "device_memory_size: 150000000000\n" in target
    assert "cuda_compute_capability { major: 9 }" in target
    assert bench.Options(topology="h200").taken == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--models", "resnot-50"), r"^model \(='resnot-50'\)"),
        (("--strategies", "slow"), r"^strategies \(='slow'\)"),
        (("--dtypes", "int4"), r"^dtypes \(='int4'\)"),
        (("--topology", "v9z:1x1"), r"^topology \(='v9z:1x1'\) is unknown to libtpu"),
        (("--chips", "5000"), r"^chips \(=5000\) must be from 1 to \d+"),
        (("--effort", "0.5"), r"^effort \(=0.5\) must be 0 with JAX "),
    ],
)
def test_what_cannot_be_compiled_is_refused_in_one_line(
    bench, monkeypatch, words, message
):
    def topology(name, platform):
        assert platform == "tpu"
        if name == "v9z:1x1":
            raise RuntimeError("INVALID_ARGUMENT: Invalid TPU external name\nat 0x7f")
        return type("Topology", (), {"devices": jax.devices()})

    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1")
    monkeypatch.setattr(bench.topologies, "get_topology_desc", topology)
    if "--effort" in words:
        monkeypatch.setattr(bench, "EFFORT", "jax_no_such_setting")
    with pytest.raises(SystemExit, match=message) as caught:
        bench.main(["--models", "linear", *words])
    assert "\n" not in str(caught.value.code)


@pytest.mark.cpu
def test_rows_are_compiled_once_and_kept(bench, tmp_path, capsys, monkeypatch):
    options = bench.Options(
        models=("linear",),
        dtypes=("float32",),
        strategies=("sgd", "auto"),
        physical_batch=(4,),
        chips=(1, 2),
        json=tmp_path / "new" / "rows.jsonl",
        effort=0.0,
    )
    devices, before = jax.devices(), jax.default_backend()
    rows = bench.compile_all(options, devices)
    assert [row["strategy"] for row in rows] == ["sgd", "auto"] * 2
    assert not any("error" in row for row in rows)
    assert all(row["flops"] > 0 and row["bytes_needed"] > 0 for row in rows)
    parameters = 4 * (32 * 32 * 3 * 10 + 10)
    one, two = rows[0], rows[2]
    assert "update_exchanges" not in one
    assert two["accumulate_exchanges"] == {}
    assert parameters <= two["update_exchanges"]["all-reduce"] < 2 * parameters
    lines = options.json.read_text().splitlines()
    assert [json.loads(text) for text in lines] == rows

    # The file lacks its last row: that one alone is compiled.
    options.json.write_text("\n".join(lines[:3]) + "\n")
    asked = []
    monkeypatch.setattr(bench, "measure", lambda job: asked.append(job) or {})
    monkeypatch.setattr(bench, "line", lambda *row: "")
    assert bench.compile_all(options, devices)[:3] == rows[:3]
    assert [(job["strategy"], job["chips"]) for job in asked] == [("auto", 2)]
    assert "1 of 1: linear float32 auto 4 2" in capsys.readouterr().err
    assert jax.default_backend() == before

    # Rows of other versions are not put beside those of these.
    options.json.write_text(json.dumps(rows[0] | {"versions": {"jax": "0.1"}}) + "\n")
    asked.clear()
    bench.compile_all(options, devices)
    assert len(asked) == 4


@pytest.mark.cpu
def test_what_does_not_compile_is_a_row(bench, capsys, monkeypatch):
    def fail(job):
        raise RuntimeError("XLA:TPU ran out of memory\nand more")

    monkeypatch.setattr(bench, "measure", fail)
    options = bench.Options(("linear",), ("float32",), ("sgd",))
    (row,) = bench.compile_all(options, jax.devices())
    assert row["error"] == "RuntimeError: XLA:TPU ran out of memory"
    assert "ran out of memory |" in capsys.readouterr().out


def test_figures_are_relative_to_sgd_at_the_same_batch(bench):
    gib = 2**30
    rows = [
        _row("sgd", 8, 2 * gib),
        _row("sgd", 16, 3 * gib),
        _row("auto", 8, 5 * gib, loops=1),
        _row("auto", 16, 7 * gib, error="RuntimeError: no"),
    ]
    cells = bench.line(rows[2], rows, 16.0).strip("| ").split(" | ")
    assert cells[5:10] == ["10240", "2.50", "2.50", "2.50 (loops)", "–"]
    assert bench.largest(rows[0], rows, 16.0) == 8 * 15  # 1 GiB, and 1/8 for each
    assert bench.largest(rows[1], rows, 16.0) == 8 * 15
    assert bench.largest(rows[2], rows, 16.0) is None
