"""One message for whatever goes wrong with a file, and JSON with bounds."""

import re

import pytest

from tanager import _reading
from tanager._reading import (
    UnreadableFile,
    read_json,
    read_json_lines,
    reading,
    refuse_file,
)
from tanager._record import Each, Maybe, read_record


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (MemoryError(), "it needs more memory than there is"),
        (RecursionError(), "it is nested too deeply"),
        (KeyError("data"), "it has no 'data'"),
        (OSError(5, "Input/output error"), "Input/output error"),
        (ValueError("two\nlines \x1b[31m"), "two lines �[31m"),
        (TypeError("no"), "TypeError: no"),
        (ValueError(), "ValueError"),
        (ValueError("x" * 9999), "x" * 1000),
    ],
)
def test_a_librarys_error_names_the_file(error, why):
    message = f"path (='a/b') cannot be read ({why}): get the file again"
    with (
        pytest.raises(UnreadableFile, match=f"^{re.escape(message)}$") as told,
        reading("a/b"),
    ):
        raise error
    assert told.value.__cause__ is error


def test_an_error_of_ours_stays_as_it_is():
    with pytest.raises(UnreadableFile, match=r"^path \(='a'\) is empty$"), reading("b"):
        refuse_file("a", "is empty")


@pytest.mark.parametrize("leaves", [KeyboardInterrupt, SystemExit])
def test_a_person_who_stops_it_is_heard(leaves):
    with pytest.raises(leaves), reading("a"):
        raise leaves


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b'{"a": 1, "a": 2}', "it has 'a' more than once"),
        (b'{"a": NaN}', "NaN is not a finite number"),
        (b'{"a": 1e999}', "1e999 is not a finite number"),
        (b'{"a": ' + b"9" * 5000 + b"}", "9 is not a finite number"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a": 1', "cannot be read as JSON"),
        (b"\xff", "cannot be read as JSON"),
        (b"[]", "holds list, and must hold an object"),
        (b'{"a": "' + b"x" * 300 + b'"}', "is larger than"),
    ],
)
def test_json_is_bounded(tmp_path, monkeypatch, text, message):
    if b"xxx" in text:
        monkeypatch.setattr(_reading, "LARGEST_JSON", 200)
    file = tmp_path / "a.json"
    file.write_bytes(text)
    with pytest.raises(UnreadableFile, match=message) as told:
        read_json(file)
    assert "a.json" in str(told.value)


def test_texts_of_json_are_cleaned(tmp_path):
    file = tmp_path / "a.json"
    file.write_text('{"a\\u001b": ["\\ud800", {"b": "two\\nlines"}]}')
    assert read_json(file) == {"a�": ["�", {"b": "two lines"}]}


def test_lines_are_counted_from_one(tmp_path):
    file = tmp_path / "a.jsonl"
    assert read_json_lines(file) == []
    file.write_bytes(b'{"step": 1}\n{"step": 2}\n{"st')
    assert read_json_lines(file, ("step",)) == [{"step": 1}, {"step": 2}]
    for line in (b'{"step": -1}', b'{"step": true}', b'{"other": 1}', b"[1]", b"no"):
        file.write_bytes(b'{"step": 1}\n' + line + b"\n")
        with pytest.raises(UnreadableFile, match=r"a\.jsonl'\) line 2 .*: delete"):
            read_json_lines(file, ("step",))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "has no steps, which must be a whole number from 0"),
        ('{"steps": 1.5}', "has steps 1.5, which must be a whole number from 0"),
        ('{"steps": true}', "has steps True, which must be a whole number from 0"),
        ('{"steps": 1, "rate": "x"}', "has rate 'x', which must be a number"),
        ('{"steps": 1, "rate": 1e301}', "has rate 1e[+]301, which must be a number"),
        ('{"steps": 1, "of": {"a": 3}}', "has of.a 3, which must be text"),
        ('{"steps": 1, "all": ["a", 3]}', "has all.1 3, which must be text"),
        ('{"steps": 1, "all": 3}', "has all 3, which must be a list"),
    ],
)
def test_a_record_is_told_which_field_is_wrong(tmp_path, text, message):
    shape = {
        "steps": int,
        "rate": Maybe(float),
        "of": Maybe(Each(str)),
        "all": Maybe([str]),
    }
    file = tmp_path / "a.json"
    file.write_text(text)
    with pytest.raises(UnreadableFile, match=message):
        read_record(file, shape, "write it again")
    file.write_text('{"steps": 3, "more": 1}')
    missing = {"rate": None, "of": None, "all": None}
    assert read_record(file, shape) == {"steps": 3, "more": 1, **missing}
