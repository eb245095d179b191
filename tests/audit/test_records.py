"""The record of an audit's scores: damaged lines are refused by the file's name."""

import json

import pytest

import mutations
from tanager.audit.membership_trainer import SCORE
from tanager.audit.records import Records


LINE = {"phase": 0, "setting": 1, "model": 2, "score": 0.5}


def test_a_torn_last_line_goes(tmp_path):
    path = tmp_path / "scores.jsonl"
    Records(path, SCORE).add([LINE, LINE | {"model": 3}])
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"phase": 0, "se')
    assert [line["model"] for line in Records(path, SCORE).lines] == [2, 3]
    assert path.read_bytes() == whole
    assert Records(tmp_path / "none", SCORE).lines == []
    Records(None, SCORE).add([LINE])


@pytest.mark.parametrize("before", [b"", json.dumps(LINE).encode() + b"\n"])
def test_damaged_lines_are_refused(tmp_path, before):
    path = tmp_path / "scores.jsonl"
    fuzzed = mutations.Fuzz(path.name)
    for text in mutations.of_json(LINE, 400):
        path.write_bytes(before + text + b"\n")
        fuzzed(Records, path, SCORE)
    fuzzed.end()
