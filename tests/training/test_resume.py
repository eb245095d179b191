"""A run that died or stopped goes on as if it had not, or is refused."""

import errno
import json
import re
import shutil
import signal
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from small_runs import MECHANISM, Killed, die, first_params, run, same

import tanager
from cases import in_full
from forks import Fork
from tanager.models import weights
from tanager.parallel import hosts
from tanager.privacy.hashed_file import HashedFile
from tanager.privacy.ledger import Ledger
from tanager.privacy.mechanism import Mechanism
from tanager.training import fingerprint, run_folder
from tanager.training.resume import Repeats


# Event loops that orbax leaves behind say so whenever they are collected.
pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)


def number_of(path):
    return int(path.name)


@pytest.mark.parametrize("calls", in_full([1, 4, 5], 1, 4))
def test_a_run_that_died_goes_on_bit_identically(tmp_path, seeded, calls):
    whole, _ = seeded
    die(tmp_path / "died", calls, seed=5, checkpoint_seconds=0.0)
    (newest, *_) = sorted((tmp_path / "died/checkpoints").glob("[0-9]*"), key=number_of)
    assert 0 < number_of(newest) < 12
    resumed = run(tmp_path / "died", seed=5)
    assert same(resumed.params, whole.params)
    assert same(resumed.average, whole.average)
    assert resumed.epsilon == whole.epsilon
    assert Ledger.read(tmp_path / "died/ledger.jsonl").steps() == 12
    lines = (tmp_path / "died/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [4, 8, 12]


def test_without_its_checkpoints_it_begins_again_with_the_same_randomness(
    tmp_path, seeded
):
    whole, out = seeded
    shutil.copytree(out, tmp_path / "run")
    shutil.rmtree(tmp_path / "run/checkpoints")
    again = run(tmp_path / "run", seed=5)
    assert same(again.params, whole.params)
    assert again.epsilon == whole.epsilon


LONGER = {"seed": 11, "mechanism": Mechanism(0.4, 1.2, 24), "strategy": "bk"}
LONGER |= {"devices": 1}
SCRIPT = """
import sys
sys.path.insert(0, {tests!r})
import test_resume
test_resume.run({out!r}, checkpoint_seconds=0.0, **test_resume.LONGER)
"""


@pytest.mark.slow
def test_killed_for_real_it_goes_on_bit_identically(tmp_path):
    """kill -9 when the ledger has grown a little, twice; then the run ends."""
    out, script = tmp_path / "killed", tmp_path / "script.py"
    script.write_text(SCRIPT.format(tests=str(Path(__file__).parent), out=str(out)))
    for code in (-signal.SIGKILL, -signal.SIGKILL, 0):
        fork, begun = Fork(script), _lines(out)
        while code and fork.running and _lines(out) < begun + 5:
            time.sleep(0.01)
        if code:
            fork.kill()
        fork.wait()
        assert fork.code == code, fork.errors
    whole = run(**LONGER)
    for name, expected in (("model", whole.params), ("model-ema", whole.average)):
        loaded = weights.load(first_params(), out / f"{name}.safetensors")
        assert same(loaded, expected)
    assert Ledger.read(out / "ledger.jsonl").steps() == 24


def _lines(out):
    path = out / "ledger.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.mark.parametrize(
    ("change", "streams"), [({"device": "another"}, 2), ({"deterministic": False}, 1)]
)
def test_steps_that_could_come_out_otherwise_are_not_made_again(
    tmp_path, monkeypatch, caplog, change, streams
):
    here = fingerprint.environment

    def elsewhere(*arguments):
        return here(*arguments) | change

    if "deterministic" in change:
        monkeypatch.setattr(fingerprint, "environment", elsewhere)
    die(tmp_path / "run", 3)
    assert Ledger.read(tmp_path / "run/ledger.jsonl").steps() == 8
    monkeypatch.setattr(fingerprint, "environment", elsewhere)
    with caplog.at_level("WARNING", logger="tanager"):
        result = run(tmp_path / "run")
    assert "8 steps after checkpoint 0" in caplog.text  # the model lacks them
    ledger = Ledger.read(tmp_path / "run/ledger.jsonl")
    lines = (tmp_path / "run/ledger.jsonl").read_text().splitlines()
    assert len({json.loads(line)["stream"] for line in lines}) == streams
    assert ledger.steps() == ledger.next_step() == 12
    assert result.epsilon == tanager.epsilon(MECHANISM, 1e-3)


def test_nor_is_the_one_step_of_another_environment(tmp_path, monkeypatch):
    """Under the same noise, sums that differ would show by how much."""
    here = fingerprint.environment
    die(tmp_path, 1, evaluate_every=1)
    assert Ledger.read(tmp_path / "ledger.jsonl").steps() == 1
    monkeypatch.setattr(
        fingerprint, "environment", lambda *of: here(*of) | {"device": "another"}
    )
    run(tmp_path, evaluate_every=1)
    assert Ledger.read(tmp_path / "ledger.jsonl").steps() == 12


def test_after_a_step_that_gave_other_sums_charged_steps_are_left_out(tmp_path, caplog):
    die(tmp_path / "run", 3)
    identities = json.loads((tmp_path / "run/private/fingerprint.json").read_text())
    (stream,) = identities["streams"]
    with closing(Repeats(tmp_path / "run/private/sums.jsonl", stream)) as repeats:
        repeats.check(5, np.zeros(4, np.uint32))
        repeats.check(5, np.ones(4, np.uint32))
    result = run(tmp_path / "run")
    assert Ledger.read(tmp_path / "run/ledger.jsonl").steps() == 12
    assert result.epsilon == tanager.epsilon(MECHANISM, 1e-3)
    assert "8 steps after checkpoint 0" in caplog.text


@pytest.mark.parametrize("kept", [0, 2, 3, 4])
def test_steps_whose_sums_are_not_on_record_are_left_out(dead, caplog, kept):
    """Nobody would know whether they come out as before; the last was not yet used."""
    file = dead / "private/sums.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    charged = Ledger.read(dead / "ledger.jsonl").steps()
    assert len(lines) == charged == 4
    file.unlink() if not kept else file.write_text("".join(lines[:kept]))
    assert run(dead).summary["steps"] == 12
    left_out = f"{charged} steps after checkpoint 0" in caplog.text
    assert left_out == (kept < charged - 1)
    assert Ledger.read(dead / "ledger.jsonl").steps() == 12


def test_sums_before_the_checkpoint_are_not_needed(tmp_path, caplog):
    """But the charges of all its steps are."""
    die(tmp_path, 3, checkpoint_seconds=0.0)
    (tmp_path / "private/sums.jsonl").unlink()
    ledger = tmp_path / "ledger.jsonl"
    charges = ledger.read_text()
    cut(ledger)
    with pytest.raises(ValueError, match="does not charge step 5, which was made"):
        run(tmp_path)
    assert len(ledger.read_text().splitlines()) == 5
    ledger.write_text(charges)
    for call in (1, 2):
        die(tmp_path, call, checkpoint_seconds=0.0)
    assert run(tmp_path).summary["steps"] == 12
    assert "were charged and are now" not in caplog.text


def test_after_a_change_of_environment_a_second_death_costs_nothing(dead, monkeypatch):
    """Lost steps stay lost when the new environment dies before a checkpoint."""
    here = fingerprint.environment
    monkeypatch.setattr(
        fingerprint,
        "environment",
        lambda *arguments: here(*arguments) | {"device": "x"},
    )
    die(dead, 1)
    assert Ledger.read(dead / "ledger.jsonl").next_step() == 8
    result = run(dead)
    assert Ledger.read(dead / "ledger.jsonl").steps() == 12
    assert result.epsilon == tanager.epsilon(MECHANISM, 1e-3)


def test_a_refusal_lets_go_of_the_folder(dead):
    """Whoever keeps the error, as a notebook does: its frames hold nothing open."""
    metrics = dead / "metrics.jsonl"
    before = metrics.read_text()
    metrics.write_text("?\n" + before)
    with pytest.raises(ValueError, match="delete that line") as kept:
        run(dead)
    metrics.write_text(before)
    assert run(dead).summary["steps"] == 12
    assert kept.tb is not None


def test_all_hosts_begin_with_the_same(dead, monkeypatch):
    compared = {}
    monkeypatch.setattr(hosts, "require_same", compared.__setitem__)
    run(dead)
    assert compared.keys() >= {"data", "settings"}
    assert compared["checkpoint"] == "0"


def test_after_a_refusal_the_run_itself_goes_on(dead):
    with pytest.raises(ValueError, match="ema_decay was"):
        run(dead, ema_decay=0.5)
    assert run(dead).summary["steps"] == 12


def charge_elsewhere(mechanism, steps):
    """Put the ledger of another run in the place of a folder's."""

    def put(path):
        path.unlink()
        with Ledger(path) as ledger:
            for step in range(steps):
                ledger.charge(mechanism, step, "0123456789abcdef")

    return put


def cut(path):
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:5]))


@pytest.mark.parametrize(
    ("put", "message"),
    [
        (charge_elsewhere(Mechanism(0.01, 5.0, 12), 12), "a stream of another run"),
        (charge_elsewhere(MECHANISM, 12), "a stream of another run"),
        (cut, "does not charge step 5, which was made"),
    ],
)
def test_the_ledger_of_another_run_is_refused(complete, put, message):
    """A run of ε = 8 must not claim 0.5 because the ledger beside it does."""
    put(complete / "ledger.jsonl")
    with pytest.raises(ValueError, match=message) as refused:
        run(complete)
    assert "from a copy" not in str(refused.value)


def test_an_older_copy_of_the_ledger_is_refused(complete):
    """Without checkpoints, checksums still tell how many steps were made."""
    shutil.rmtree(complete / "checkpoints")
    identities = json.loads((complete / "private/fingerprint.json").read_text())
    with closing(
        Repeats(complete / "private/sums.jsonl", *identities["streams"])
    ) as repeats:
        for step in range(12):
            repeats.check(step, np.zeros(4, np.uint32))
    cut(complete / "ledger.jsonl")
    with pytest.raises(ValueError, match="does not charge step 5, which was made"):
        run(complete)


def test_a_folder_in_use_is_refused(complete):
    with (
        Ledger(complete / "ledger.jsonl"),
        pytest.raises(ValueError, match="written by another process"),
    ):
        run(complete)


@pytest.mark.parametrize("written", [5, 6])  # then checksums do not fit, or a charge
def test_a_disk_that_fills_up_is_named_and_the_run_resumes(
    tmp_path, seeded, monkeypatch, written
):
    append, calls = HashedFile.append, iter(range(written))

    def until_full(*arguments):
        if next(calls, None) is None:
            raise OSError(errno.ENOSPC, "No space left on device")
        append(*arguments)

    out = tmp_path / "my run"
    with monkeypatch.context() as patch:
        patch.setattr(HashedFile, "append", until_full)
        message = f"a disk is full, likely that of run folder {out} (No space left on"
        with pytest.raises(OSError, match=re.escape(message)) as refused:
            run(out, seed=5)
    assert f"with --out '{out}', which resumes" in str(refused.value)
    assert same(run(out, seed=5).params, seeded[0].params)


def test_a_full_disk_is_refused_before_anything_is_spent(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=10_000)
    monkeypatch.setattr(run_folder.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(
        ValueError, match=r"9\.8 KiB left, but the run needs about [\d.]+ MiB"
    ):
        run(tmp_path / "run")
    assert not (tmp_path / "run/ledger.jsonl").exists()


def test_a_copy_is_refused_while_the_run_itself_is_there(first_dead, tmp_path):
    """Else, on machines that compute otherwise, one noise hides two sums."""
    for name in ("moved", "one", "two"):
        shutil.copytree(first_dead, tmp_path / name)
    with pytest.raises(ValueError, match=f"is a copy of the run in {first_dead}: if"):
        run(tmp_path / "one")
    for name in ("moved", "one", "two"):
        file = tmp_path / name / "private/seed.json"
        kept = json.loads(file.read_text())
        file.write_text(json.dumps(kept | {"place": str(tmp_path / "moved")}))
    (tmp_path / "moved").rename(tmp_path / "here")
    (tmp_path / "link").symlink_to(tmp_path / "here")
    assert run(tmp_path / "link").summary["steps"] == 12
    place = json.loads((tmp_path / "here/private/seed.json").read_text())["place"]
    assert place == str(tmp_path / "link")
    assert run(tmp_path / "here").summary["steps"] == 12
    shutil.copytree(tmp_path / "here", tmp_path / "finished")
    assert run(tmp_path / "finished").summary["steps"] == 12  # nothing is made again
    # One of two copies of what is gone resumes, and the other cannot be told apart.
    assert run(tmp_path / "one").summary["steps"] == 12


def test_a_secret_that_no_step_was_charged_for_is_used(tmp_path, monkeypatch):
    """A run that was killed as it began goes on in the same folder."""

    def dies(*arguments):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "charge", dies)
        with pytest.raises(Killed):
            run(tmp_path / "run")
    (tmp_path / "run/ledger.jsonl").unlink()
    assert run(tmp_path / "run").summary["steps"] == 12
