"""What is run on a GPU is run here on a CPU, with the same words and tiny inputs."""

import dataclasses
import functools
import json
import os
import shutil
import signal
import subprocess
import types

import pytest
from pytest import __main__ as program

from forks import Fork
from scripts import ROOT, load


@pytest.fixture(scope="module")
def on_gpu():
    module = load("benchmarks/on_gpu.py")
    vars(module)["_machine"] = functools.cache(module._machine)  # starts a process
    return module


@pytest.mark.slow
def test_every_part_runs_and_one_file_goes_on_elsewhere(
    on_gpu, tmp_path, capsys, monkeypatch
):
    def forked(part, seconds, options):
        """Run a script, or pytest, without its imports."""
        script, *words = part.words
        if script == "-m":
            _, *words = words
            script = program.__file__
        plain = {"PYTEST_ADDOPTS": "--assert=plain"}  # its own are imported
        surroundings = os.environ | part.settings | plain
        one = Fork(ROOT / script, words, environment=surroundings)
        one.wait()
        return one.code, one.out

    # Plain SGD in JAX, and another precision: in `test_peers`.
    monkeypatch.setattr(on_gpu, "PEERS", ("torch-sgd", "tanager:auto"))
    monkeypatch.setattr(on_gpu, "_apart", forked)
    out = tmp_path / "here" / "on_gpu"
    words = ["--dry-run", "--out", str(out)]
    assert on_gpu.main(words) == 0
    record = json.loads((out / "on_gpu.json").read_text())
    found = record["parts"]
    assert all({"machine", "versions"} < set(part) for part in found.values())
    for name, part in found.items():
        assert part["code"] == 0, (name, part)
        rows = part.get("result", {}).get("rows", [])
        assert all(row["error"] is None for row in rows), name
        assert bool(rows) == name.startswith(("step", "throughput", "memory"))
    names = [name.split()[0] for name in found]
    assert names.count("step") == 3
    assert {"tests", "killed", "peers", "throughput", "memory", "training"} < {*names}
    assert "1 test collected" in found["killed"]["last_lines"][-1]
    step = found["step linear tf32, deterministic"]
    assert step["command"].startswith("XLA_FLAGS=--xla_gpu_deterministic_ops=true tan")
    assert (out / "run/result.json").exists()
    peers = json.loads((out / "peers.json").read_text())
    ready = [row for row in peers["works"][0]["rows"] if "error" not in row]
    assert "tanager:auto" in {row["system"] for row in ready}
    assert {row["precision"] for row in ready} == {peers["precision"]} == {"float32"}
    # On another machine, from the one file: nothing is run again.
    there = tmp_path / "there"
    there.mkdir()
    shutil.copy(out.with_suffix(".tar"), there)
    assert out.with_suffix(".tar").stat().st_mode & 0o077 == 0
    monkeypatch.setattr(on_gpu, "run", lambda *_: pytest.fail("ran again"))
    assert on_gpu.main(["--dry-run", "--out", str(there / "on_gpu")]) == 0
    assert json.loads((there / "on_gpu/on_gpu.json").read_text())["parts"] == found
    assert "of 9:" not in capsys.readouterr().out.split("go on elsewhere")[1]


def test_the_real_parts_name_what_is_there(on_gpu, tmp_path):
    options = on_gpu.Options(data=tmp_path, out=tmp_path)
    parts = [*on_gpu.parts(options), on_gpu.training(options)]
    assert len({part.name for part in parts}) == len(parts)
    for test in (*on_gpu.TESTS, on_gpu.KILLED):
        path, _, function = test.partition("::")
        assert (ROOT / path).exists()
        assert f"def {function}" in (ROOT / path).read_text() if function else True
    for model in on_gpu.MODELS:
        assert sum(model in part.words for part in parts) >= 6
    assert "--data" in parts[-1].words
    # All but the training are bounded.
    assert all(part.seconds <= 360 for part in parts[:-1])


def test_bad_input_is_refused_before_anything_runs(on_gpu, tmp_path):
    out = ["--out", str(tmp_path / "gpu")]
    with pytest.raises(SystemExit, match="JAX found no GPU"):
        on_gpu.main(out)
    with pytest.raises(SystemExit, match="must be a folder of CIFAR-10"):
        on_gpu.main([*out, "--data", str(tmp_path / "none")])
    assert on_gpu.main([*out, "--dry-run", "--minutes", "0"]) == 1  # nothing was run


def test_a_part_ends_at_its_time_and_says_how(on_gpu, tmp_path):
    script = "import time\ntry: time.sleep(60)\nexcept KeyboardInterrupt: print('kept')"
    part = on_gpu.Part("sleep", ("-c", script + "; raise SystemExit(130)"), 9, True)
    found = on_gpu.run(part, 1.0, on_gpu.Options(out=tmp_path))
    assert (found["code"], found["last_lines"]) == (130, ["kept"])


def test_a_part_that_does_not_end_is_left(on_gpu, tmp_path, monkeypatch):
    """Even where a process of its own lives on and holds what it prints."""
    monkeypatch.setattr(on_gpu, "_TO_STOP", 1)
    script = "import signal, subprocess\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    script += "child = subprocess.Popen(['sleep', '60'])\n"
    script += f"open({str(tmp_path / 'child')!r}, 'w').write(str(child.pid))\n"
    script += "child.wait()"
    part = on_gpu.Part("deaf", ("-c", script), 9, True)
    found = on_gpu.run(part, 3.0, on_gpu.Options(out=tmp_path))
    assert found["code"] == -signal.SIGKILL
    os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)  # it lives


def test_the_minutes_are_kept_and_the_essential_comes_first(
    on_gpu, tmp_path, monkeypatch, capsys
):
    """Every part takes all that it may, and as long again as it may to stop."""
    now, given = [0.0], {}

    def run(part, seconds, options):
        given[part.name] = seconds
        assert seconds <= part.seconds
        now[0] += seconds + on_gpu._TO_STOP
        return {"code": 1}

    def prepare(parts, seconds, options):
        now[0] += seconds + on_gpu._TO_STOP
        return {part.name: {"code": 1} for part in parts if part.name == "killed"}

    here = {"machine": {"backend": "gpu"}, "versions": {}}
    monkeypatch.setattr(on_gpu, "_machine", lambda: here)
    monkeypatch.setattr(on_gpu, "prepare", prepare)
    monkeypatch.setattr(on_gpu, "run", run)
    monkeypatch.setattr(on_gpu, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    assert on_gpu.main(["--out", str(tmp_path / "o"), "--data", str(tmp_path)]) == 1
    assert 24 * 60 < now[0] <= 25 * 60 - on_gpu._TO_PACK
    names = {part.name for part in on_gpu.parts(on_gpu.Options())}
    assert set(on_gpu.ESSENTIAL) < names
    assert "killed" not in given  # what failed beside others is not run again
    first = list(given)[: len(on_gpu.ESSENTIAL) - 1]
    assert set(first) <= set(on_gpu.ESSENTIAL)
    assert "no time left for training" in capsys.readouterr().out


def test_all_that_is_timed_is_compiled_at_once_before(on_gpu, tmp_path, monkeypatch):
    """And keeps its programs for when it is timed; tests are run only once."""
    ran, options = [], on_gpu.Options(out=tmp_path / "gpu")

    def run(part, seconds, options):
        ran.append((part.name, part.words, seconds))
        return {"code": 0}

    monkeypatch.setattr(on_gpu, "run", run)
    tests, step = list(on_gpu.parts(options))[:2]
    assert on_gpu.prepare([tests, step], 600.0, options) == {"tests": {"code": 0}}
    (first, words, most), (second, others, more) = sorted(ran, reverse=True)
    assert (first, words) == ("tests", tests.words)
    assert most == tests.seconds < step.seconds * 5 < more <= 600
    assert second == f"{step.name}, prepared"
    assert others[others.index("--repeats") + 1] == "1"
    assert len(others) == len(step.words)
    ran.clear()
    assert on_gpu.prepare([tests, step], 0.0, options) == {}
    assert ran == []


def test_programs_are_kept(on_gpu, tmp_path):
    options = on_gpu.Options(out=tmp_path / "gpu")
    script = "import os; print(os.environ['JAX_COMPILATION_CACHE_DIR'])"
    part = on_gpu.Part("where", ("-c", script), 60, True)
    found = on_gpu.run(part, 60.0, options)["last_lines"]
    assert found == [str(tmp_path / "gpu-programs")]


def test_what_is_patched_is_patched(on_gpu, tmp_path):
    seen = f"open({str(tmp_path / 'seen')!r}, 'w').write(TapValues.exactly.__name__)"
    patch = f"{on_gpu._INEXACT}\n{seen}\n"
    part = on_gpu.Part("patched", ("--version",), 9, patch=patch)
    found = on_gpu.run(part, 60.0, on_gpu.Options(out=tmp_path))
    assert found["code"] == 0
    assert (tmp_path / "seen").read_text() == "<lambda>"
    plain = dataclasses.replace(part, patch="")
    assert on_gpu._command(plain) == "tanager --version"


def test_make_runs_it(tmp_path):
    words = ["make", "--dry-run", "--always-make", "bench-gpu", f"DATA={tmp_path}"]
    printed = subprocess.run(
        words, cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert f"benchmarks/on_gpu.py --out runs/on_gpu --data {tmp_path}" in printed
    assert '".[cuda]"' in printed
