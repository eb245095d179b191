import json

import pytest

from tanager.bench import scaling
from tanager.cli import main


SMALL = ["--model", "linear", "--features", "6", "--classes", "3"]
SCALING = ["bench", "scaling", *SMALL]
QUICK = ["--physical-batch", "4", "--chunks", "2", "--repeats", "2"]
CLUSTER = "hosts=2,devices=4,bandwidth=1e-6"
PARAMETERS = 4 * (6 * 3 + 3)


def row(strategy, devices, seconds):
    share = None if seconds is None else 0.5 if devices > 1 else 1.0
    return {
        "strategy": strategy,
        "devices": devices,
        "examples": 128 * devices,
        "seconds": seconds,
        "seconds_spread": 0.01,
        "examples_per_second": seconds and 128 * devices / seconds,
        "share_of_ideal": share,
        "accumulate_bytes": {},
        "update_bytes": {"all-reduce": 100},
        "bytes_per_step": 100,
        "bytes_over_parameters": 100 / PARAMETERS,
        "parameter_bytes": PARAMETERS,
        "error": None if seconds else "stopped before it was timed",
    }


def simulation_laws(record):
    return record["simulation"]["parallel_fraction"]


@pytest.fixture
def planted(monkeypatch):
    def plant(*rows, parallel=None, stopped=False):
        found = scaling.ScalingBench([*rows], parallel or {}, stopped)
        monkeypatch.setattr(scaling, "bench_scaling", lambda *a, **options: found)
        monkeypatch.setattr(scaling, "crowding", lambda devices: None)

    return plant


def test_json_has_what_was_measured_and_what_was_simulated(capsys, tmp_path):
    path = tmp_path / "scaling.png"
    words = [*SCALING, *QUICK, "--strategies", "sgd", "per_example"]
    words += ["--simulate", CLUSTER, "--plot", str(path), "--json"]
    assert main(words) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    record = json.loads(captured.out)
    names = [(found["strategy"], found["devices"]) for found in record["rows"]]
    assert names == [(s, n) for s in ("sgd", "per_example") for n in (1, 2)]
    for found in record["rows"]:
        assert set(found) == set(row("sgd", 1, 1.0))
        assert found["error"] is None
        assert found["examples"] == 8 * found["devices"]
    assert record["parallel_fraction"] == {}
    assert simulation_laws(record) == {}
    assert record["sum_bytes"] == {"sgd": PARAMETERS, "per_example": 2 * PARAMETERS}
    simulation = record["simulation"]
    assert simulation["cluster"]["hosts"] == 2
    assert [found["devices"] for found in simulation["rows"]] == [4, 8] * 2
    one = record["rows"][0]["seconds"]
    second, private = simulation["rows"][1], simulation["rows"][3]
    # 84 bytes at 1 kB/s: 2 · 1/2 · 0.084 s.
    assert second["communicating_seconds"] == pytest.approx(0.084)
    assert second["share_of_ideal"] == pytest.approx(one / (one + 0.084))
    assert private["communicating_seconds"] == pytest.approx(2 * 0.084)
    assert (record["physical_batch"], record["chunks"]) == (4, 2)
    assert record["logical_batch"] is None
    assert {"machine", "versions", "command", "date", "warnings"} <= set(record)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_tables_of_both(capsys, planted, tmp_path):
    planted(row("sgd", 1, 0.5), row("sgd", 2, 1.0), parallel={"sgd": 0.987})
    path = tmp_path / "scaling.svg"
    words = [*SCALING, "--strategies", "sgd", "--simulate", CLUSTER]
    assert main([*words, "--plot", str(path)]) == 0
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    cells = [line.split() for line in lines]
    assert ["sgd", "1", "500", "±", "10", "256", "100.0", "100", "0"] in cells
    assert ["sgd", "2", "1,000", "±", "10", "256", "50.0", "100", "0"] in cells
    assert f"Bytes of a sum of gradients: {PARAMETERS} (sgd)" in captured.out
    assert "Amdahl's law for sgd: 98.7 % parallel." in lines
    assert any(line.startswith("Simulated: 4 devices a host") for line in lines)
    # 0.5 s of computing, 84 ms of communication: 85.6 % of 8 · 256.
    assert ["sgd", "2", "8", "500", "0", "84", "1,753", "85.6"] in cells
    assert lines[-1].startswith("Drawn to")
    assert path.read_text().startswith("<?xml")


def test_the_law_of_a_simulation_says_that_it_is(capsys):
    words = [*SCALING, "--simulate", CLUSTER, "--logical-batch", "256"]
    assert main([*words, "--strategies", "sgd", "--step-seconds", "0.5"]) == 0
    law = "Amdahl's law, fitted to the simulation, for sgd: "
    assert law in capsys.readouterr().out


def test_stopping_prints_what_was_measured(capsys, planted):
    planted(row("sgd", 1, 0.5), row("sgd", 2, None), stopped=True)
    assert main([*SCALING, "--strategies", "sgd"]) == 130
    captured = capsys.readouterr()
    assert "sgd on 2: stopped before it was timed" in captured.out
    assert "stopped: this is what was measured before" in captured.err


def test_a_warning_of_shared_cores_is_printed_and_recorded(
    capsys, planted, monkeypatch
):
    planted(row("sgd", 1, 0.5))
    monkeypatch.setattr(scaling, "crowding", lambda devices: "they share")
    assert main([*SCALING, "--strategies", "sgd"]) == 0
    assert "Warning: they share." in capsys.readouterr().out
    assert main([*SCALING, "--strategies", "sgd", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["warnings"] == ["they share"]


def test_given_seconds_are_predicted_from_and_nothing_is_measured(capsys, monkeypatch):
    monkeypatch.delattr(scaling, "bench_scaling")
    words = [*SCALING, "--simulate", CLUSTER + ",overlap=0.5", "--json"]
    words += ["--logical-batch", "1024", "--step-seconds", "8", "24"]
    words += ["--parameter-bytes", "1000"]
    assert main(words) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["rows"] == []
    shares = {
        (found["strategy"], found["hosts"]): found["share_of_ideal"]
        for found in record["simulation"]["rows"]
    }
    # On 8 devices, computing takes 1 s (sgd) and 3 s. Without privacy, half of the
    # communication overlaps with the backward pass.
    assert shares == {
        ("sgd", 1): 1,
        ("sgd", 2): 2 / 3,
        ("auto", 1): 1,
        ("auto", 2): 3 / 4,
    }
    # Least squares through S(4) = 4, and S(8) = 16/3 and 6.
    slope = (7 / 8) / ((3 / 4) ** 2 + (7 / 8) ** 2)
    laws = {"sgd": 1 - slope * (3 / 16 - 1 / 8), "auto": 1 - slope * (1 / 6 - 1 / 8)}
    assert simulation_laws(record) == pytest.approx(laws)
    assert (record["logical_batch"], record["chunks"]) == (1024, None)


def test_strong_scaling_is_measured_and_fitted(capsys):
    words = [*SCALING, "--logical-batch", "16", "--physical-batch", "4", "--json"]
    assert main([*words, "--strategies", "sgd", "--repeats", "2"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert [found["examples"] for found in record["rows"]] == [16, 16]
    assert set(record["parallel_fraction"]) == {"sgd"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--simulate", "hosts=2"], "must give devices"),
        (["--step-seconds", "1"], "step-seconds (=(1.0,)) is for a simulation"),
        (["--parameter-bytes", "5"], "parameter-bytes (=5) is for a simulation"),
        (["--parameter-bytes", "0"], "parameter-bytes (=0) is for a simulation"),
        (["--simulate", CLUSTER, "--step-seconds", "1"], "must be 2 numbers: one for"),
        (["--simulate", CLUSTER, "--step-seconds", "1", "0"], "(=0.0) must be positiv"),
        (["--simulate", CLUSTER, "--devices", "2"], "devices (=(2,)) must hold 1"),
        (["--simulate", CLUSTER, "--parameter-bytes", "0"], "(=0) must be at least 1"),
        (["--devices", "1", "99"], "devices (=99) must be at most"),
        (
            ["--strategies", "sgd", "atuo"],
            "--strategies (='atuo') is unknown",
        ),
        (["--strategies"], "--strategies (='') needs a value"),
        (["--chunks", "0"], "chunks (=0) must be at least 1"),
        (
            ["--chunks", "4", "--logical-batch", "64"],
            "chunks (=4) does not go with --logical-batch: leave one of them away",
        ),
        (
            ["--logical-batch", "100"],
            "logical-batch (=100) must be a multiple of 64: each of 1, 2 devices takes "
            "physical batches of 32 rows; for example 128, or give --devices",
        ),
        (["--plot", "scaling.pdf"], "plot (='scaling.pdf') must end in .png or .svg"),
    ],
)
def test_bad_input_gives_one_message(capsys, words, message):
    assert main([*SCALING, *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("tanager: error: ")
    assert message in error
