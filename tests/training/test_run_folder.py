"""The folder of a run: its secret, what it may hold, and a disk that is full."""

import errno
import json
import os
import re
import shutil
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from small_runs import run

import tanager
from tanager.training import run_folder
from tanager.training.run_folder import RunFolder, seed_of


def test_a_copy_is_refused_before_its_seed_is_used(tmp_path):
    """Else two runs have one noise, and the account counts them once."""
    secret = RunFolder(tmp_path / "one").seed(None)
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    with pytest.raises(ValueError, match=f"is a copy of the run in {tmp_path}/one: if"):
        run(tmp_path / "two")
    (tmp_path / "one").rename(tmp_path / "moved")
    assert RunFolder(tmp_path / "moved").seed(None) == secret


def test_a_run_of_version_0_1_is_refused(tmp_path):
    (tmp_path / "private").mkdir()
    (tmp_path / "private/identity.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tanager 0\.1 began, .* finish it with"):
        run(tmp_path)
    assert [path.name for path in tmp_path.rglob("*")] == ["private", "identity.json"]


@pytest.mark.parametrize(("first", "second"), [(None, 1), (1, None), (1, 2)])
def test_another_seed_in_the_same_folder_is_refused(tmp_path, first, second):
    RunFolder(tmp_path).seed(first)
    with pytest.raises(ValueError, match="differs from the seed"):
        RunFolder(tmp_path).seed(second)


@pytest.mark.parametrize("links", [True, False])
def test_processes_that_begin_at_once_share_a_secret(tmp_path, monkeypatch, links):
    if not links:

        def link(*paths):
            raise OSError("Operation not supported")

        monkeypatch.setattr(os, "link", link)
    drawn, at_once = tanager.Seed.from_os, threading.Barrier(8 if links else 1)

    def from_os():
        seed = drawn()
        at_once.wait()  # nobody has written yet
        return seed

    monkeypatch.setattr(run_folder.Seed, "from_os", from_os)
    with ThreadPoolExecutor(8 if links else 1) as threads:
        begun = [threads.submit(RunFolder(tmp_path).seed, None) for _ in range(8)]
        secrets = {each.result().secret for each in begun}
    assert len(secrets) == 1
    (kept,) = (tmp_path / "private").iterdir()
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert json.loads(kept.read_text())["secret"] == secrets.pop().hex()


@pytest.mark.parametrize(
    ("lost", "message"),
    [
        ("private/seed.json", "its secret seed"),
        ("config.json", "lost config.json, but its secret seed has been used"),
        (
            "private/fingerprint.json",
            "lost private/fingerprint.json, but its secret seed",
        ),
        ("ledger.jsonl", "lost ledger.jsonl, but its secret seed has been used"),
    ],
)
def test_a_folder_that_lost_a_part_is_refused(complete, lost, message):
    (complete / lost).unlink()
    with pytest.raises(ValueError, match=re.escape(message)):
        RunFolder(complete).seed(None)
    if lost != "private/seed.json":
        (complete / lost).touch()
        with pytest.raises(ValueError, match=re.escape(message)):
            RunFolder(complete).seed(None)


@pytest.mark.parametrize(
    "left", [("seed.json",), ("seed.json", "fingerprint.json"), None]
)
def test_a_secret_without_its_run_is_not_used_again(complete, left):
    """The other files were moved out, to be published."""
    for path in complete.iterdir():
        if path.name != "private":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    for path in (complete / "private").iterdir():
        if left is not None and path.name not in left:
            path.unlink()
    with pytest.raises(ValueError, match="would add the same noise to other sums"):
        RunFolder(complete).seed(None)


def test_a_copy_of_a_run_that_was_moved_is_refused(tmp_path):
    RunFolder(tmp_path / "old").seed(None)
    (tmp_path / "old").rename(tmp_path / "new")
    moved = RunFolder(tmp_path / "new")
    for name in ("config.json", "ledger.jsonl", "private/fingerprint.json"):
        (moved.path / name).write_text("{}")
    moved.seed_is_used()
    kept = moved.private / "seed.json"
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    shutil.copytree(moved.path, tmp_path / "old")
    with pytest.raises(ValueError, match="is a copy of the run in"):
        RunFolder(tmp_path / "old").seed(None)


def test_a_search_that_lost_its_runs_is_refused(tmp_path):
    folder = RunFolder(tmp_path, of_search=True)
    folder.seed(None)
    (tmp_path / "study.json").write_text("{}")
    folder.seed_is_used()
    with pytest.raises(ValueError, match="lost private/runs, but its secret seed"):
        folder.seed(None)


def test_a_private_folder_that_others_can_read_is_closed_to_them(tmp_path):
    (tmp_path / "private").mkdir()
    os.chmod(tmp_path / "private", 0o755)
    assert stat.S_IMODE(RunFolder(tmp_path).private.stat().st_mode) == 0o700


def test_a_disk_that_keeps_no_permissions_is_warned_of(tmp_path, monkeypatch):
    (tmp_path / "private").mkdir(mode=0o755)
    monkeypatch.setattr(os, "chmod", lambda *of: None)
    with pytest.warns(UserWarning, match=r"^out \(=.* disk that keeps no permissions"):
        RunFolder(tmp_path)


def test_a_seed_of_another_user_is_named(tmp_path, monkeypatch):
    def forbid(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "exists", forbid)
    message = r"seed.json'\) cannot be read \(Permission denied\): .* ask its owner"
    with pytest.raises(ValueError, match=message):
        seed_of(tmp_path)


def test_a_refused_folder_is_removed_only_if_nothing_is_lost(tmp_path):
    for name in ("unused", "used", "more"):
        folder = RunFolder(tmp_path / name)
        folder.seed(None)
        if name == "used":
            folder.seed_is_used()
        elif name == "more":
            (folder.path / "notes").write_text("")
        run_folder.remove_unused(folder.path)
    assert {path.name for path in tmp_path.iterdir()} == {"used", "more"}


def test_a_new_folder_is_removed_by_the_last_who_is_in_it(tmp_path):
    run = tmp_path / "run"
    removed = run_folder.removed_if_refused
    with pytest.raises(KeyboardInterrupt), removed(run):
        RunFolder(run).seed(None)
        # `new`: both began before the folder was there.
        with pytest.raises(ValueError, match="other"), removed(run, new=True):
            raise ValueError("other")
        assert (run / "private/seed.json").exists()
        raise KeyboardInterrupt
    assert not run.exists()


@pytest.mark.parametrize("name", [None, "run/config.json", "elsewhere.jsonl"])
def test_a_full_disk_of_another_file_is_not_that_of_the_run(tmp_path, name):
    named = None if name is None else str(tmp_path / name)
    with pytest.raises(OSError) as caught:  # noqa: SIM117
        with run_folder.naming_full_disks(tmp_path / "run"):
            raise OSError(errno.ENOSPC, "No space left on device", named)
    elsewhere = caught.value.filename == str(tmp_path / "elsewhere.jsonl")
    assert elsewhere != ("which resumes" in str(caught.value))


def test_out_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(ValueError, match="must be a folder, not a file"):
        run(tmp_path / "run")


def test_a_path_that_is_not_utf8_is_refused_before_anything_is_spent(
    tmp_path, monkeypatch
):
    """Checkpoints and models could not be written there."""
    with pytest.raises(ValueError, match=r"run.udcff'\) must be a path that is valid"):
        run(tmp_path / "run\udcff")
    os.mkdir(tmp_path / "above\udcff")
    monkeypatch.chdir(tmp_path / "above\udcff")
    with pytest.raises(ValueError, match="like the folders above it"):
        run("run")
    assert not list((tmp_path / "above\udcff").iterdir())


@pytest.mark.parametrize("name", ["patients.csv", "images/1.png", "private/names.csv"])
def test_a_folder_with_files_of_others_is_refused(tmp_path, name):
    """A run's folder is shown and handed on. Hidden files do not matter."""
    (tmp_path / "run/private").mkdir(parents=True)
    (tmp_path / "run/.DS_Store").write_text("")
    RunFolder(tmp_path / "run")
    (tmp_path / "run" / name).parent.mkdir(exist_ok=True)
    (tmp_path / "run" / name).write_text("Anna")
    if not name.startswith("private"):
        (tmp_path / "run/private").rmdir()
    with pytest.raises(
        ValueError, match="must be new, be empty or hold a run, but it holds "
    ):
        run(tmp_path / "run")
    assert len([*(tmp_path / "run").iterdir()]) == 2


def test_the_log_of_a_job_is_better_elsewhere(tmp_path):
    """A traceback in it may show more than the guarantee covers."""
    for name in ("slurm-123.out", "slurm-123.err"):
        (tmp_path / name).write_text("")
    beside = re.escape(str(tmp_path / "run"))
    message = f"holds slurm-123.err: if that is the log of .* such as --out {beside}$"
    with pytest.raises(ValueError, match=message):
        RunFolder(tmp_path)
    (tmp_path / "names.csv").write_text("Anna")
    with pytest.raises(ValueError, match="move that elsewhere"):
        RunFolder(tmp_path)


def test_an_exported_model_is_no_folder_to_train_in(tmp_path):
    (tmp_path / "config.json").write_text('{"tanager": {}}')
    with pytest.raises(ValueError, match="holds an exported model, not a run: train"):
        RunFolder(tmp_path)


@pytest.mark.parametrize(
    "name", ["config.json", "metrics.jsonl", "model.safetensors", "report.html"]
)
def test_a_folder_with_the_work_of_another_program_is_refused(tmp_path, name):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).write_text('{"mine": true}')
    with pytest.raises(ValueError, match=f"holds a {name} that tanager did not write"):
        run(tmp_path / "run")
    assert [path.name for path in (tmp_path / "run").iterdir()] == [name]
    assert (tmp_path / "run" / name).read_text() == '{"mine": true}'
