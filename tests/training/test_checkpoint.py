"""A checkpoint that was damaged on the disk is never resumed."""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tanager.training import checkpoint
from tanager.training.checkpoint import Checkpoints


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
    assert checkpoint.is_sound(folder, "2")
    flips = 0
    for path in files(folder):
        content = path.read_bytes()
        for place in range(0, len(content), 7):
            path.write_bytes(
                content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]
            )
            assert not checkpoint.is_sound(folder, "2"), (path, place)
            flips += 1
        path.write_bytes(content)
    assert checkpoint.is_sound(folder, "2")
    assert flips > 300


def test_a_lost_added_or_exchanged_file_is_found(written, tmp_path):
    folder = shutil.copytree(written / "2", tmp_path / "2")
    assert not checkpoint.is_sound(folder, "1")
    first = files(folder)[0]
    content = first.read_bytes()
    first.unlink()
    assert not checkpoint.is_sound(folder, "2")
    first.write_bytes(content)
    (folder / "more").write_bytes(b"")
    assert not checkpoint.is_sound(folder, "2")


def test_large_files_are_digested_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "_BLOCK", 100)
    content = np.arange(250, dtype=np.uint8).tobytes()
    (tmp_path / "file").write_bytes(content)
    checkpoint.seal(tmp_path, "")
    for place in (0, 99, 100, 249):
        changed = bytearray(content)
        changed[place] ^= 128
        (tmp_path / "file").write_bytes(changed)
        assert not checkpoint.is_sound(tmp_path, "")


@pytest.mark.parametrize("number", range(14))
def test_the_checkpoint_before_a_damaged_one_is_restored(
    written, tmp_path, caplog, number
):
    folder = shutil.copytree(written, tmp_path / "checkpoints")
    every = files(folder / "2")
    path = every[number % len(every)]
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 8
    path.write_bytes(content)
    checkpoints = Checkpoints(folder)
    restored = checkpoints.restore(STATE)
    checkpoints.close()
    assert restored is not None
    assert restored[0] == 1
    assert all(np.array_equal(restored[1][name], STATE[name]) for name in STATE)
    assert "the checkpoint of step 2" in caplog.text


def test_a_checkpoint_without_its_digest_is_not_restored(written, tmp_path):
    """Its process died before it was known to be whole."""
    folder = shutil.copytree(written, tmp_path / "checkpoints")
    (folder / "2/digest.json").unlink()
    checkpoints = Checkpoints(folder)
    restored = checkpoints.restore(STATE)
    checkpoints.close()
    assert restored is not None and restored[0] == 1
