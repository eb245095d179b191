"""A checkpoint is written whole; one that was damaged on the disk is never resumed."""

import gc
import hashlib
import os
import resource
import shutil
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from switch import FULL
from tanager.training.checkpoint import Checkpoints, _damage


# Event loops that orbax leaves behind say so whenever they are collected.
pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)


STATE = {"w": jnp.arange(50.0), "b": jnp.ones(3)}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A folder with the checkpoints of steps 1 and 2."""
    folder = tmp_path_factory.mktemp("written") / "checkpoints"
    checkpoints = Checkpoints(folder)
    checkpoints.save(1, STATE)
    checkpoints.save(2, jax.tree.map(lambda leaf: leaf + 1, STATE))
    checkpoints.close()
    return folder


def files(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_a_flip_of_any_byte_of_any_file_is_found(written, tmp_path):
    folder = shutil.copytree(written / "2", tmp_path / "2")
    assert _damage(folder) is None
    flips = 0
    for path in files(folder):
        content = path.read_bytes()
        for place in range(0, len(content), 7 if FULL else 61):
            path.write_bytes(
                content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]
            )
            assert _damage(folder), (path, place)
            flips += 1
        path.write_bytes(content)
    assert _damage(folder) is None
    assert flips > (300 if FULL else 50)


def test_a_lost_added_or_exchanged_file_is_found(written, tmp_path):
    folder = shutil.copytree(written / "2", tmp_path / "2")
    assert _damage(shutil.copytree(folder, tmp_path / "1"))
    first = files(folder)[0]
    content = first.read_bytes()
    first.unlink()
    assert _damage(folder)
    first.write_bytes(content)
    assert _damage(folder) is None
    (folder / "more").write_bytes(b"")
    assert _damage(folder)


@pytest.mark.parametrize("damage", ["a flipped bit", "no digest"])
def test_the_checkpoint_before_a_damaged_one_is_restored(
    written, tmp_path, caplog, damage
):
    folder = shutil.copytree(written, tmp_path / "checkpoints")
    if damage == "no digest":  # its process died before it was known to be whole
        (folder / "2/digest.json").unlink()
    else:
        path = max(files(folder / "2"), key=lambda path: path.stat().st_size)
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 8
        path.write_bytes(content)
    checkpoints = Checkpoints(folder)
    restored = checkpoints.restore(STATE)
    checkpoints.close()
    assert restored is not None
    assert restored[0] == 1
    assert not (folder / "2").exists()
    assert all(np.array_equal(restored[1][name], STATE[name]) for name in STATE)
    assert "the checkpoint of step 2" in caplog.text


@pytest.mark.parametrize("fault", ["a file", "a folder", "orbax"])
def test_what_cannot_be_read_is_not_deleted(written, tmp_path, monkeypatch, fault):
    """Whoever may not read it, or has no more file handles, comes again."""
    folder = shutil.copytree(written, tmp_path / "checkpoints")
    before = files(folder)
    checkpoints = Checkpoints(folder)
    denied = Mock(side_effect=PermissionError(13, "Permission denied"))
    with monkeypatch.context() as patch:
        if fault == "a file":
            patch.setattr(hashlib, "file_digest", denied)
        elif fault == "a folder":
            patch.setattr(os, "scandir", denied)
        else:
            patch.setattr(checkpoints._manager, "restore", denied)
        with pytest.raises(OSError, match=r"step 2 in .* cannot be read .*Permission"):
            checkpoints.restore(STATE)
    restored = checkpoints.restore(STATE)
    checkpoints.close()
    assert files(folder) == before
    assert restored is not None and restored[0] == 2


def test_a_checkpoint_that_cannot_be_written_is_one_message(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    checkpoints.save(1, STATE)

    def full(*arguments, **options):
        raise ValueError("RESOURCE_EXHAUSTED: No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints._manager, "save", full)
        with pytest.raises(OSError, match="the checkpoint of step 2 cannot be written"):
            checkpoints.save(2, STATE)
    restored = checkpoints.restore(STATE)
    checkpoints.close()
    assert restored is not None
    assert restored[0] == 1


def test_a_full_disk_is_told_of_without_stacks_of_others(tmp_path, capfd):
    noise = np.random.default_rng(0).normal(size=100_000)
    state = {str(n): jnp.asarray(noise, jnp.float32) for n in range(20)}
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, before[1]))
    try:
        with pytest.raises(OSError, match="the checkpoint of step 1 cannot be written"):
            checkpoints.save(1, state)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        checkpoints.close()
    gc.collect()
    assert capfd.readouterr().err == ""


def test_for_want_of_memory_no_checkpoint_is_deleted(tmp_path, monkeypatch):
    def full(*arguments, **options):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    checkpoints = Checkpoints(tmp_path / "checkpoints")
    checkpoints.save(1, STATE)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints._manager, "restore", full)
        with pytest.raises(jax.errors.JaxRuntimeError):
            checkpoints.restore(STATE)
    restored = checkpoints.restore(STATE)
    checkpoints.close()
    assert restored is not None and restored[0] == 1
