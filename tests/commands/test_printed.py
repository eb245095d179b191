"""What commands print, on any terminal."""

import io
import json
import logging
import os
import re
import sys

import numpy as np
import pytest

from tanager import cli
from tanager._terminal import escape_unprintable
from tanager.commands import plan
from tanager.commands.evaluation_tables import print_classes
from tanager.commands.tables import new_table, print_json, print_table
from tanager.measures import measure


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_json_is_json_in_every_encoding(monkeypatch, encoding):
    stream = io.TextIOWrapper(io.BytesIO(), encoding)
    monkeypatch.setattr(sys, "stdout", stream)
    escape_unprintable()
    content = {"file": "Grüße ε 🙂 \udcff", "loss": None}
    print_json(content, indent=None)
    stream.flush()
    printed = stream.buffer.getvalue()
    assert json.loads(printed.decode(encoding)) == content
    assert ("Grüße ε 🙂".encode() in printed) == (encoding == "utf-8")


@pytest.fixture
def narrow(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "40")


def test_no_table_of_a_plan_lacks_a_number_on_a_narrow_terminal(capsys, narrow):
    words = ["--examples", "50000", "--batch-size", "4096", "--steps", "250"]
    plan.run([*words, "--noise-multiplier", "3"])
    printed = capsys.readouterr().out
    assert re.search(r"^PLD +\d\.\d+ +the guarantee", printed, flags=re.M)
    assert "…" not in printed


def test_no_class_is_cut_on_a_narrow_terminal(capsys, narrow):
    classes = ["a long name of a first class", "a long name of [another] class"]
    labels = np.arange(60) % 2
    print_classes("", measure(np.eye(2)[labels], labels, classes))
    printed = capsys.readouterr().out
    assert classes[0] in printed and classes[1] in printed
    assert "…" not in printed


def test_a_name_in_brackets_is_no_markup(capsys):
    print_table(new_table("run", rows=[("runs/[bold]1",)]))
    assert "runs/[bold]1" in capsys.readouterr().out


def test_a_home_that_cannot_be_written_is_no_warning_of_figures(monkeypatch, caplog):
    """Matplotlib warned on standard error, even with --quiet."""
    log = logging.getLogger("matplotlib")
    monkeypatch.setattr(log, "level", log.level)
    monkeypatch.setitem(os.environ, "JAX_TRANSFER_GUARD", "allow")
    monkeypatch.setattr(cli, "main", lambda: log.warning("no folder for a cache"))
    with pytest.raises(SystemExit):
        cli.process()
    assert not caplog.records
