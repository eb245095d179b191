"""A terminal that lacks the letters does not end a run."""

import io
import os
import subprocess
import sys

import pytest
from rich.console import Console
from rich.table import Table

from tanager._files import write_text
from tanager._terminal import escape_unprintable, new_console
from tanager.training.progress import TrainingProgress, measuring


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_letters_that_a_terminal_lacks_are_escaped(monkeypatch, name, errors):
    stream = io.TextIOWrapper(io.BytesIO(), "ascii", errors)
    monkeypatch.setattr(sys, name, stream)
    with pytest.raises(UnicodeEncodeError):
        Console(file=stream).print("ε = 3")
    escape_unprintable()
    Console(file=stream).print("ε = 3")
    stream.flush()
    assert stream.buffer.getvalue().endswith(b"\\u03b5 = 3\n")


def test_a_run_says_its_epsilon_on_an_ascii_terminal(monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    shown = TrainingProgress(10, 0, True)
    with shown.bar:
        shown.step(1, 0.5)
        shown.say("step 1/10  ε = 0.5")
    stream.flush()
    assert b"\\u03b5 = 0.5" in stream.buffer.getvalue()


def test_another_handler_is_left_as_it_is(monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), "ascii", "replace")
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    escape_unprintable()
    assert stream.errors == "replace"


def test_a_file_name_that_is_no_utf8_can_stand_in_a_report(tmp_path):
    write_text(tmp_path / "page", "ε of \udcff")
    assert (tmp_path / "page").read_text() == "ε of \\udcff"


def test_into_a_pipe_every_line_goes_whole(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    stream = io.StringIO()
    console = new_console(file=stream)
    console.print("word " * 60)
    table = Table("name", "why")
    table.add_row("name" * 30, "word " * 30)
    console.print(table)
    assert stream.getvalue().splitlines()[0] == "word " * 60
    assert any("word " * 29 in line for line in stream.getvalue().splitlines()[1:])
    shown = new_console(file=io.StringIO(), force_terminal=True)
    assert shown.width == 80 and not shown.soft_wrap


def test_a_notebook_gets_plain_lines(monkeypatch):
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")  # as its kernel sets it
    monkeypatch.setattr(sys, "stdout", lines := io.StringIO())
    monkeypatch.setattr(sys, "stderr", errors := io.StringIO())
    shown = TrainingProgress(10, 0, True)
    with shown.bar, measuring(True) as report:
        report("a method")
        shown.step(1, 0.5)
        shown.say("step 1/10  ε = 0.5")
    assert lines.getvalue() == "step 1/10  ε = 0.5\n"
    assert errors.getvalue().endswith("a method\n")


def test_what_libraries_print_is_kept_out_of_json():
    program = """
import os
from tanager._terminal import libraries_on_stderr
print("before")
with libraries_on_stderr():
    os.write(1, b"[Gloo] Rank 0 is connected")
    print('{"ε": 3}')
    os.write(1, b" to 1 peer")
print("after")
"""
    command, utf8 = [sys.executable, "-c", program], {"PYTHONIOENCODING": "utf-8"}
    done = subprocess.run(
        command, capture_output=True, check=True, env=os.environ | utf8
    )
    assert done.stdout.decode() == 'before\n{"ε": 3}\nafter\n'
    assert done.stderr == b"[Gloo] Rank 0 is connected to 1 peer"
