"""What commands print, on any terminal."""

import io
import json
import sys

import pytest

from tanager._terminal import escape_unprintable
from tanager.commands.tables import print_json


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
