"""A step that is made again must be the same step."""

import json
import os
import stat
from contextlib import closing

import jax.numpy as jnp
import numpy as np
import pytest

from tanager.training.resume import Position, Repeats
from tanager.training.state import State


def checksum(number):
    return np.array([number, 2**32 - 1, 0, 7], np.uint32)


def test_a_new_step_is_recorded_and_the_same_sums_pass(tmp_path):
    with closing(Repeats(tmp_path / "sums.jsonl", "a")) as repeats:
        assert repeats.check(0, checksum(1))
        assert repeats.check(1, checksum(1))
    before = (tmp_path / "sums.jsonl").read_bytes()
    with closing(Repeats(tmp_path / "sums.jsonl", "a")) as repeats:
        assert repeats.check(0, checksum(1))
        assert repeats.check(1, checksum(1))
        assert not repeats.changed
    assert (tmp_path / "sums.jsonl").read_bytes() == before
    assert stat.S_IMODE((tmp_path / "sums.jsonl").stat().st_mode) == 0o600


@pytest.mark.parametrize("word", range(4))
def test_other_sums_are_found_and_stay_found(tmp_path, word):
    path = tmp_path / "sums.jsonl"
    other = checksum(1)
    other[word] ^= 1 << 31
    with closing(Repeats(path, "a")) as repeats:
        assert repeats.check(5, checksum(1))
        assert not repeats.check(5, other)
        assert repeats.changed
        assert repeats.check(5, checksum(1))
    with closing(Repeats(path, "a")) as repeats:
        assert repeats.changed
        assert not repeats.check(5, other)


def test_it_counts_the_steps_of_all_streams(tmp_path):
    for stream, step in (("a", 3), ("b", 1)):
        with closing(Repeats(tmp_path / "sums.jsonl", stream)) as repeats:
            assert repeats.check(step, checksum(1))
            assert repeats.made == 4


def test_another_stream_has_sums_of_its_own(tmp_path):
    with closing(Repeats(tmp_path / "sums.jsonl", "a")) as repeats:
        assert repeats.check(0, checksum(1))
        assert not repeats.check(0, checksum(2))
    with closing(Repeats(tmp_path / "sums.jsonl", "b")) as repeats:
        assert not repeats.changed
        assert repeats.check(0, checksum(2))


def test_a_record_is_on_the_disk_before_the_step_may_be_used(tmp_path, monkeypatch):
    synced = []
    with closing(Repeats(tmp_path / "sums.jsonl", "a")) as repeats:
        monkeypatch.setattr(os, "fsync", synced.append)
        repeats.check(0, checksum(1))
        assert len(synced) == 1
        (line,) = (tmp_path / "sums.jsonl").read_text().splitlines()
        assert json.loads(line)["step"] == 0


def test_a_torn_last_line_is_cut(tmp_path):
    path = tmp_path / "sums.jsonl"
    with closing(Repeats(path, "a")) as repeats:
        repeats.check(0, checksum(1))
        repeats.check(1, checksum(1))
    os.truncate(path, path.stat().st_size - 5)
    with closing(Repeats(path, "a")) as repeats:
        assert repeats.check(1, checksum(2))
        assert not repeats.check(0, checksum(2))
    assert len(path.read_text().splitlines()) == 3


@pytest.mark.parametrize("line", ["rubbish", "{}", '{"stream": "a", "step": 1}'])
def test_a_damaged_file_is_refused(tmp_path, line):
    (tmp_path / "sums.jsonl").write_text(line + "\n")
    with pytest.raises(ValueError, match=r"sums.jsonl, line 1, is damaged"):
        Repeats(tmp_path / "sums.jsonl", "a")


def test_a_run_stops_at_a_repeated_step_with_other_sums(tmp_path):
    state = State(None, None, None)
    with closing(Repeats(tmp_path / "sums.jsonl", "a")) as repeats:
        position = Position(state, repeats=repeats)
        position.require_same(5, jnp.asarray(checksum(1)))
        position.require_same(5, jnp.asarray(checksum(1)))
        with pytest.raises(
            ValueError, match="step 5 was computed before and gives other"
        ):
            position.require_same(5, jnp.asarray(checksum(2)))
