"""The ledger grows only, survives torn writes, and never claims too little."""

import dataclasses
import fcntl
import json
import os
import random
import re
import shutil
import subprocess
import sys
import threading
import time
from unittest.mock import Mock

import jax
import pytest

import mutations
from switch import FULL
from tanager.privacy import accountant, hashed_file
from tanager.privacy.hashed_file import digest_of
from tanager.privacy.ledger import CLASS_COUNTS, Ledger
from tanager.privacy.mechanism import Adjacency, Mechanism


MECHANISM = Mechanism(sample_rate=0.1, noise_multiplier=2.0, steps=50)


def charged(path, steps=10):
    with Ledger(path) as ledger:
        for step in range(steps):
            ledger.charge(MECHANISM, step, "a")
    return path


def test_counts_each_step_of_a_stream_once():
    ledger = Ledger()
    for step in (0, 1, 1, 2, 0):
        ledger.charge(MECHANISM, step, "a")
    assert ledger.steps() == 3
    assert ledger.next_step() == 3


def test_the_same_step_in_another_stream_is_charged_on_top():
    ledger = Ledger()
    for stream in ("a", "b"):
        for step in range(3):
            ledger.charge(MECHANISM, step, stream)
    assert (ledger.steps(), ledger.steps("a"), ledger.steps("b")) == (6, 3, 3)
    ledger.charge(MECHANISM, 3, "b")
    assert ledger.next_step() == ledger.next_step(other_than="a") == 4
    assert ledger.next_step(other_than="b") == 3
    [spent] = ledger.mechanisms()
    assert spent == Mechanism(0.1, 2.0, 7)


def test_epsilon_is_that_of_the_steps_charged():
    ledger = Ledger()
    assert ledger.epsilon(1e-5) == 0.0
    for step in range(7):
        ledger.charge(MECHANISM, step)
    assert ledger.epsilon(1e-5) == accountant.epsilon(Mechanism(0.1, 2.0, 7), 1e-5)
    ledger.charge(Mechanism(0.2, 3.0, 5), 0, "b")
    spent = [Mechanism(0.1, 2.0, 7), Mechanism(0.2, 3.0, 1)]
    assert ledger.epsilon(1e-5) == accountant.composed_epsilon(spent, 1e-5)


def test_survives_closing_and_opening(tmp_path):
    path = charged(tmp_path / "ledger.jsonl")
    with Ledger(path) as ledger:
        assert ledger.steps() == ledger.next_step() == 10
        ledger.charge(MECHANISM, 10, "a")
    assert Ledger.read(path).steps() == 11


@pytest.mark.parametrize("adjacency", Adjacency)
def test_what_is_read_is_what_was_charged(tmp_path, adjacency):
    mechanism = dataclasses.replace(MECHANISM, adjacency=adjacency)
    with Ledger(tmp_path / "ledger.jsonl") as ledger:
        ledger.charge(mechanism, 0)
    read = Ledger.read(tmp_path / "ledger.jsonl")
    assert read.mechanisms() == [dataclasses.replace(mechanism, steps=1)]


@pytest.mark.parametrize("share", [0.01, 0.7, 0.99])
def test_a_torn_last_line_is_cut_and_nothing_else(tmp_path, share):
    path = charged(tmp_path / "ledger.jsonl")
    last = len(path.read_bytes().splitlines(keepends=True)[-1])
    os.truncate(path, path.stat().st_size - last + round(1 + share * (last - 2)))
    assert Ledger.read(path).steps() == 9
    with Ledger(path) as ledger:
        assert ledger.steps() == 9
        ledger.charge(MECHANISM, 9, "a")
    assert Ledger.read(path).steps() == 10


def test_a_last_line_without_its_line_break_counts(tmp_path):
    """Editors and shells take it away; the whole line says that the step was spent."""
    path = charged(tmp_path / "ledger.jsonl")
    path.write_bytes(path.read_bytes().rstrip())
    assert Ledger.read(path).steps() == 10
    for steps in (10, 11):
        with Ledger(path) as ledger:
            assert ledger.steps() == steps
            ledger.charge(MECHANISM, steps, "a")
    path.write_bytes(path.read_bytes().rstrip().replace(b"2.0", b"9.0"))
    with pytest.raises(ValueError, match="does not follow from the line before"):
        Ledger(path)


@pytest.mark.parametrize("when", ["while it is written", "once it is on the disk"])
def test_a_ledger_outlives_an_interrupted_charge(tmp_path, monkeypatch, when):
    """In a notebook, Ctrl-C may come at any time, and the loop is started again."""
    path, early = charged(tmp_path / "ledger.jsonl"), when == "while it is written"
    stop = Mock(side_effect=KeyboardInterrupt)
    with Ledger(path) as ledger:
        with monkeypatch.context() as patch:
            if early:
                patch.setattr(os, "fsync", stop)
            else:
                patch.setattr(hashed_file, "len", stop, raising=False)
            with pytest.raises(KeyboardInterrupt):
                ledger.charge(MECHANISM, 10, "a")
        assert Ledger.read(path).steps() == 11 - early
        for step in (10, 11):
            ledger.charge(MECHANISM, step, "a")
    assert Ledger.read(path).steps() == 12


def test_what_another_process_charged_is_never_cut_off(tmp_path):
    """Where locks do not exclude it: after a fork, or on some network disks."""
    path, copy = charged(tmp_path / "ledger.jsonl"), tmp_path / "copy"
    with Ledger(path) as ledger:
        ledger.charge(MECHANISM, 10, "a")
        before = len(path.read_bytes())
        shutil.copy(path, copy)
        with Ledger(copy) as other:
            other.charge(MECHANISM, 11, "a")
        with path.open("ab") as file:
            file.write(copy.read_bytes()[before:])
        for _ in range(2):
            with pytest.raises(ValueError, match="written to by another process"):
                ledger.charge(MECHANISM, 12, "a")
    assert Ledger.read(path).steps() == 12


def test_a_ledger_that_was_closed_says_how_to_open_it_again(tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.charge(MECHANISM, 0, "a")
    with pytest.raises(ValueError, match=r"still open in this one.* call close"):
        Ledger(tmp_path / "ledger.jsonl")
    ledger.close()
    with pytest.raises(ValueError, match="was closed, and charges no step: open it"):
        ledger.charge(MECHANISM, 1, "a")
    assert ledger.steps() == 1


def test_a_ledger_stays_where_it_was_opened(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with Ledger("ledger.jsonl") as ledger:
        monkeypatch.chdir("/")
        ledger.charge(MECHANISM, 0)
    assert Ledger.read(tmp_path / "ledger.jsonl").steps() == 1


@pytest.mark.parametrize("how", ["replaced", "deleted"])
def test_a_ledger_that_was_replaced_takes_no_more_charges(tmp_path, how):
    """Its lock is on the file that is gone: another process can lock the new one."""
    path = charged(tmp_path / "ledger.jsonl")
    with Ledger(path) as ledger:
        if how == "replaced":
            shutil.copy(path, tmp_path / "copy")
            (tmp_path / "copy").rename(path)
        else:
            path.unlink()
        with pytest.raises(ValueError, match="was replaced or deleted while"):
            ledger.charge(MECHANISM, 10, "a")
    assert how == "deleted" or Ledger.read(path).steps() == 10


def test_who_looks_at_a_run_does_not_stop_it(tmp_path):
    """`tanager runs` locks a ledger for a moment, to see whether a process has it."""
    path = charged(tmp_path / "ledger.jsonl")
    with open(path, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        threading.Timer(0.05, fcntl.flock, (file, fcntl.LOCK_UN)).start()
        with Ledger(path) as ledger:
            ledger.charge(MECHANISM, 10, "a")


def alter(line: str, **changes) -> str:
    return json.dumps(json.loads(line) | changes)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda lines: lines[:3] + lines[4:],
        lambda lines: [lines[1], lines[0], *lines[2:]],
        lambda lines: [*lines[:4], alter(lines[4], noise_multiplier=9.0), *lines[5:]],
        lambda lines: [*lines[:-1], alter(lines[-1], step=3)],
        lambda lines: [*lines, lines[0]],
        lambda lines: lines[1:],
    ],
    ids=["line-gone", "swapped", "altered", "last-altered", "repeated", "first-gone"],
)
def test_an_altered_ledger_is_refused(tmp_path, spoil):
    path = charged(tmp_path / "ledger.jsonl")
    path.write_text("\n".join(spoil(path.read_text().splitlines())) + "\n")
    with pytest.raises(ValueError, match="does not follow from the line before"):
        Ledger(path)


@pytest.mark.parametrize(
    "changes",
    [
        {"step": "1"},
        {"step": -5},
        {"step": True},
        {"stream": 7},
        {"noise_multiplier": "2"},
        {"noise_multiplier": True},
        {"sample_rate": 1.5},
        {"adjacency": 3},
        {"noise_multiplier": 9.0, "step": 0},
    ],
    ids=str,
)
def test_a_line_must_be_a_charge_whatever_its_hash(tmp_path, changes):
    """Anyone can compute the hash; the last of these would lower what was spent."""
    path = charged(tmp_path / "ledger.jsonl", steps=1)
    first = json.loads(path.read_text())
    entry = {name: first[name] for name in first if name != "hash"} | changes
    entry["hash"] = digest_of(first["hash"], entry)
    with path.open("a") as file:
        file.write(json.dumps(entry) + "\n")
    with pytest.raises(ValueError, match=r"ledger\.jsonl, line 2, does not follow"):
        Ledger.read(path)


def test_damaged_ledgers(tmp_path):
    path = charged(tmp_path / "ledger.jsonl")
    good = path.read_bytes()
    fuzzed = mutations.Fuzz(path.name)
    for content in mutations.of_bytes(good, 300 if FULL else 200):
        path.write_bytes(content)
        fuzzed(Ledger.read, path)
    for text in mutations.of_json(
        json.loads(good.splitlines()[0]), 300 if FULL else 200
    ):
        path.write_bytes(text + b"\n" + good)
        fuzzed(Ledger.read, path)
    fuzzed.end()


def test_a_second_writer_is_refused(tmp_path):
    path = charged(tmp_path / "ledger.jsonl")
    with Ledger(path), pytest.raises(ValueError, match="written by another process"):
        Ledger(path)
    with Ledger(path) as ledger:
        assert ledger.steps() == 10


def test_a_ledger_must_be_the_run_s_own_and_whole():
    ledger = Ledger()
    for step in range(3):
        ledger.charge(MECHANISM, step, "a")
    ledger.require(MECHANISM, 3)
    ledger.require(MECHANISM, 2, ["a", "b"])
    with pytest.raises(ValueError, match="does not charge step 3, which was made"):
        ledger.require(MECHANISM, 4)
    with pytest.raises(ValueError, match="step 0 to 'a', a stream of another run"):
        ledger.require(MECHANISM, 3, ["b"])
    with pytest.raises(ValueError, match=r"step 0 with sample rate 0\.1, noise multip"):
        ledger.require(Mechanism(0.1, 2.5, 50), 3)
    counts = Mechanism(1.0, 5.0, 1)
    with pytest.raises(ValueError, match="does not charge the class counts"):
        ledger.require(MECHANISM, 3, class_counts=counts)
    ledger.charge(counts, 0, CLASS_COUNTS)
    ledger.require(MECHANISM, 3, class_counts=counts)
    assert ledger.mechanisms() == [dataclasses.replace(MECHANISM, steps=3), counts]
    with pytest.raises(ValueError, match="does not charge the class counts"):
        ledger.require(MECHANISM, 0)
    ledger = Ledger()
    ledger.charge(MECHANISM, 1)
    with pytest.raises(ValueError, match="does not charge step 0, which was made"):
        ledger.require(MECHANISM, 2)


def test_what_cannot_be_charged_is_refused():
    ledger = Ledger()
    with pytest.raises(ValueError, match=re.escape("step (=50) must be below")):
        ledger.charge(MECHANISM, 50)
    with pytest.raises(ValueError, match=re.escape("step (=-1)")):
        ledger.charge(MECHANISM, -1)
    ledger.charge(MECHANISM, 0, "a")
    with pytest.raises(ValueError, match="for another mechanism"):
        ledger.charge(Mechanism(0.1, 3.0, 50), 0, "a")
    ledger.charge(Mechanism(0.1, 2.0, 5, Adjacency.REPLACE_ONE), 0, "b")
    with pytest.raises(ValueError, match="must be the same for all mechanisms"):
        ledger.epsilon(1e-5)


def test_a_charge_that_a_program_would_leave_out_is_refused():
    ledger = Ledger()
    with pytest.raises(ValueError, match=re.escape("ledger.charge must be called out")):
        jax.jit(lambda: ledger.charge(MECHANISM, 0))()
    assert ledger.steps() == 0


def test_a_new_file_is_on_the_disk_with_its_name(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(hashed_file, "sync_folder", synced.append)
    for _ in range(2):
        Ledger(tmp_path / "ledger.jsonl").close()
    assert synced == [tmp_path]


def test_a_line_that_is_written_in_parts_is_whole(tmp_path, monkeypatch):
    path = charged(tmp_path / "ledger.jsonl")
    with Ledger(path) as ledger:
        assert ledger._file is not None
        file, write = ledger._file._file, ledger._file._file.write
        monkeypatch.setattr(file, "write", lambda data: write(data[:7]))
        ledger.charge(MECHANISM, 10, "a")
    assert Ledger.read(path).steps() == 11


def test_threads_charge_one_after_the_other(tmp_path, monkeypatch):
    """Programs on two devices ask for noise at once: each charge is on the disk."""
    sync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (time.sleep(0.01), sync(file)))
    ledger = Ledger(tmp_path / "ledger.jsonl")
    threads = [
        threading.Thread(target=ledger.charge, args=(MECHANISM, step, "a"))
        for step in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ledger.close()
    assert Ledger.read(tmp_path / "ledger.jsonl").steps() == 4


def test_a_failed_write_leaves_the_ledger_as_it_was(tmp_path, monkeypatch):
    path = charged(tmp_path / "ledger.jsonl")
    with Ledger(path) as ledger:

        def full(descriptor):
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full)
            with pytest.raises(OSError, match="No space left"):
                ledger.charge(MECHANISM, 10, "a")
        assert ledger.steps() == 10
        ledger.charge(MECHANISM, 10, "a")
    assert Ledger.read(path).steps() == 11


SPENDING = """
import os, sys
from tanager.privacy.ledger import Ledger
from tanager.privacy.mechanism import Adjacency, Mechanism

mechanism = Mechanism(0.1, 2.0, 10**9)
with Ledger(sys.argv[1]) as ledger:
    step = ledger.next_step()
    while True:
        ledger.charge(mechanism, step, "a")
        step += 1
        os.write(1, b"spent %d;" % step)
"""


@pytest.mark.slow
def test_killed_at_random_it_never_claims_less_than_was_spent(tmp_path):
    path = tmp_path / "ledger.jsonl"
    pause = random.Random(0)
    spent = 0
    for _ in range(6):
        process = subprocess.Popen(
            [sys.executable, "-c", SPENDING, path], stdout=subprocess.PIPE
        )
        assert process.stdout is not None
        output = process.stdout.read(1)
        time.sleep(0.02 * pause.random())
        process.kill()
        output += process.stdout.read()
        process.wait()
        process.stdout.close()
        spent = int(re.findall(rb"spent (\d+);", output)[-1])
        claimed = Ledger.read(path).steps()
        assert spent <= claimed <= spent + 1
    assert spent >= 6
