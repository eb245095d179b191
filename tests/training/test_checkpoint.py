"""A checkpoint that was damaged on the disk is never resumed."""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from switch import FULL
from tanager.training.checkpoint import Checkpoints, _is_sound


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
    assert _is_sound(folder)
    flips = 0
    for path in files(folder):
        content = path.read_bytes()
        for place in range(0, len(content), 7 if FULL else 61):
            path.write_bytes(
                content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]
            )
            assert not _is_sound(folder), (path, place)
            flips += 1
        path.write_bytes(content)
    assert _is_sound(folder)
    assert flips > (300 if FULL else 50)


def test_a_lost_added_or_exchanged_file_is_found(written, tmp_path):
    folder = shutil.copytree(written / "2", tmp_path / "2")
    assert not _is_sound(shutil.copytree(folder, tmp_path / "1"))
    first = files(folder)[0]
    content = first.read_bytes()
    first.unlink()
    assert not _is_sound(folder)
    first.write_bytes(content)
    assert _is_sound(folder)
    (folder / "more").write_bytes(b"")
    assert not _is_sound(folder)


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
    assert all(np.array_equal(restored[1][name], STATE[name]) for name in STATE)
    assert "the checkpoint of step 2" in caplog.text
