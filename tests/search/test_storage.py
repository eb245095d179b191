"""The journal survives its writers; what cannot be opened is one message."""

import fcntl
import json
import sqlite3
import sys

import optuna
import pytest

from tanager.search.storage import Lock, open_storage, without_password


def study_in(folder):
    return optuna.create_study(
        study_name="s", storage=open_storage(None, folder), load_if_exists=True
    )


def test_a_torn_line_is_cut_off_and_nothing_else(tmp_path):
    study = study_in(tmp_path)
    trial = study.ask()
    study.tell(trial, 0.5)
    whole = (tmp_path / "journal.log").read_bytes()
    with (tmp_path / "journal.log").open("ab") as file:
        file.write(b'{"op_code": 4, "worker')
    again = study_in(tmp_path)
    assert again.best_value == 0.5
    assert (tmp_path / "journal.log").read_bytes().startswith(whole)
    study.tell(study.ask(), 0.25)
    lines = (tmp_path / "journal.log").read_text().splitlines()
    assert all(json.loads(line) for line in lines)
    assert study_in(tmp_path).best_value == 0.25


def test_a_lock_that_another_process_keeps_is_named(tmp_path):
    journal = tmp_path / "journal.log"
    with (tmp_path / "journal.log.lock").open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        lock = Lock(journal, patience=0.05)
        with pytest.raises(
            TimeoutError, match=r"locked by another process for 0\.05 s"
        ):
            lock.acquire()
    assert lock.acquire()
    lock.release()


def test_a_damaged_journal_is_named(tmp_path):
    study_in(tmp_path)
    (tmp_path / "journal.log").write_text("no json\nno json\n")
    with pytest.raises(ValueError, match=r"storage .* cannot be read .*: move it away"):
        open_storage(None, tmp_path)


def test_a_data_base_works_and_one_that_is_not_there_is_named(tmp_path):
    url = f"sqlite:///{tmp_path}/study.db"
    optuna.create_study(storage=open_storage(url, tmp_path)).ask()
    with sqlite3.connect(tmp_path / "study.db") as base:
        assert base.execute("select count(*) from trials").fetchone() == (1,)
    with pytest.raises(
        ValueError, match=r"storage .*nowhere.* cannot be opened"
    ) as told:
        open_storage("sqlite:////nowhere/at/all.db", tmp_path)
    assert "nothing is lost" in str(told.value)


def test_a_driver_that_is_missing_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "psycopg", None)
    monkeypatch.setitem(sys.modules, "psycopg2", None)
    with pytest.raises(
        ValueError, match=r"needs psycopg2?, which is not installed: pip install psyc"
    ):
        open_storage("postgresql://user:secret@host/name", tmp_path)


def test_passwords_are_not_shown():
    shown = without_password("postgresql://user:secret@host:5432/name")
    assert shown == "postgresql://user:***@host:5432/name"
    assert without_password("sqlite:///file.db") == "sqlite:///file.db"
