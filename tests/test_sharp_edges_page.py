"""Every test that docs/sharp_edges.md and docs/threat_model.md name is there."""

import ast
import functools
import re
from pathlib import Path

import pytest


ROOT = Path(__file__).parent.parent
PAGES = ("sharp_edges.md", "threat_model.md")
_NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def named(page):
    return _NAMED.findall((ROOT / "docs" / page).read_text(encoding="utf-8"))


GUARDS = sorted({guard for page in PAGES for guard in named(page)})


@functools.cache
def functions_of(path):
    """Return the names of the tests in a file, methods too."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


@pytest.mark.parametrize("guard", GUARDS, ids="::".join)
def test_the_guard_exists(guard):
    path, name = guard
    assert name in functions_of(path)


def rows():
    """The edges: every row of the page's tables but headings and rules."""
    lines = (ROOT / "docs/sharp_edges.md").read_text(encoding="utf-8").splitlines()
    return [
        line
        for line in lines
        if line.startswith("|") and not line.startswith(("| edge |", "|---"))
    ]


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.split("|")[1].strip())
def test_every_edge_names_its_guard(row):
    _, edge, done, guards, _ = row.split("|")
    assert edge.strip() and done.strip()
    assert _NAMED.findall(guards), edge


def test_the_pages_are_not_empty():
    assert len(rows()) >= 80
    assert len({*named("sharp_edges.md")}) >= 80
    assert len({*named("threat_model.md")}) >= 10
    # Whatever looks like a test is read as one.
    for page in PAGES:
        text = (ROOT / "docs" / page).read_text(encoding="utf-8")
        assert text.count(".py::test_") == len(named(page)), page


def test_a_guard_that_went_is_noticed():
    with pytest.raises(AssertionError):
        test_the_guard_exists(("tests/test_house.py", "test_nothing_of_the_kind"))
