"""Folders are written whole, and are on the disk before they take their name."""

import contextlib
import errno
import fcntl
import os
import re
import stat
from types import SimpleNamespace
from typing import Any

import pytest

from tanager._files import make_folder, new_folder, write_json, write_json_once
from tanager.data import load
from tanager.data.features import write_features
from tanager.privacy.ledger import Ledger
from tanager.report import runs
from tanager.search import jobs
from tanager.search.study import Study
from tanager.training.features import _alone


@pytest.fixture
def events(monkeypatch):
    """What is forced to the disk, and what is renamed, in order."""
    found = []
    fsync, replace = os.fsync, os.replace

    def watched_fsync(handle):
        kind = "folder" if stat.S_ISDIR(os.fstat(handle).st_mode) else "file"
        found.append(f"fsync {kind}")
        fsync(handle)

    def watched_replace(source, target):
        assert os.path.dirname(source) == os.path.dirname(target)
        found.append("replace")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(os, "replace", watched_replace)
    return found


def two_files(to):
    with new_folder(to, "to") as folder:
        for name in "ab":
            (folder / name).write_text(name)


def features(to):
    write_features(lambda batch: batch["image"].reshape(-1, 64) + 1, load("digits"), to)


@pytest.mark.parametrize(("write", "files"), [(two_files, 2), (features, 5)])
def test_a_folder_is_on_the_disk_before_it_takes_its_name(
    tmp_path, events, write, files
):
    write(tmp_path / "new" / "folder")
    assert events == ["fsync file"] * files + [
        "fsync folder",
        "replace",
        "fsync folder",
    ]
    assert [each.name for each in (tmp_path / "new").iterdir()] == ["folder"]
    assert (tmp_path / "new" / "folder").stat().st_mode & 0o777 == 0o700


def test_a_file_is_on_the_disk_before_it_takes_its_name(tmp_path, events):
    write_json(tmp_path / "a.json", {})
    assert events == ["fsync file", "replace", "fsync folder"]


def test_a_disk_that_refuses_modes_keeps_files_of_their_owner(tmp_path, monkeypatch):
    def refuse(*of):
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "chmod", refuse)
    write_json_once(tmp_path / "secret.json", {}, mode=0o600)
    write_json(tmp_path / "a.json", {})
    two_files(tmp_path / "folder")
    assert (tmp_path / "a.json").stat().st_mode & 0o777 == 0o600


def test_a_disk_that_cannot_force_folders_is_named(tmp_path, monkeypatch):
    def refuse(handle):
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(os, "fsync", refuse)
    for write in (write_json, write_json_once):
        with pytest.raises(ValueError, match=r"folder .* cannot force folders to it"):
            write(tmp_path / f"{write.__name__}.json", {})


def test_a_folder_is_masked_as_its_files_are(tmp_path):
    before = os.umask(0o077)
    try:
        with new_folder(tmp_path / "a", "to", 0o755):
            pass
    finally:
        os.umask(before)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o700


def test_a_folder_that_fails_leaves_nothing(tmp_path):
    with pytest.raises(KeyboardInterrupt), new_folder(tmp_path / "a", "to") as folder:
        (folder / "half").write_text("half")
        raise KeyboardInterrupt
    assert not [*tmp_path.iterdir()]
    (tmp_path / "file").touch()
    with (
        pytest.raises(ValueError, match=r"^to \(=.*cannot be written"),
        new_folder(tmp_path / "file" / "a", "to"),
    ):
        pass


@pytest.mark.parametrize("write", [write_json, write_json_once])
def test_a_full_disk_is_told_with_the_file_that_is_written(
    tmp_path, monkeypatch, write
):
    def full(handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError) as caught:
        write(tmp_path / "a.json", {})
    assert caught.value.filename == str(tmp_path / "a.json")
    message = re.escape(f"to (='{tmp_path}/b') cannot be written: No space left on")
    with (
        pytest.raises(ValueError, match=message),
        new_folder(tmp_path / "b", "to") as folder,
    ):
        write(folder / "c.json", {})
    assert not [*tmp_path.iterdir()]


def test_a_file_below_a_file_cannot_be_made(tmp_path):
    (tmp_path / "a").write_text("")
    with pytest.raises(ValueError, match=r"out .* cannot be written: Not a directory"):
        make_folder(tmp_path / "a/b", "out")
    with pytest.raises(NotADirectoryError, match=re.escape(f"'{tmp_path}/a/b'")):
        write_json(tmp_path / "a/b", {})


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_disk_without_locks_is_named(tmp_path, monkeypatch, number):
    def lockless(*of):
        raise OSError(number, os.strerror(number))

    study: Any = SimpleNamespace(folder=tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/ledger.jsonl").touch()
    monkeypatch.setattr(fcntl, "flock", lockless)
    for take in (
        lambda: Ledger(tmp_path / "run/ledger.jsonl"),
        lambda: jobs.claimed(tmp_path / "trial.lock").__enter__(),
        lambda: Study._next(study, 1, contextlib.ExitStack()),
        lambda: _alone(tmp_path, print).__enter__(),
    ):
        with pytest.raises(ValueError, match=r"file .* on a disk that cannot lock"):
            take()
    assert not runs._is_held(tmp_path / "run")
