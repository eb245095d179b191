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


_EDGE = re.compile(r"(.+?)\s\*\*(.+?)\*\*\\\n(.+)", flags=re.S)


def edges():
    """Every item above the last section: the edge, what tanager does, its guards."""
    text = (ROOT / "docs/sharp_edges.md").read_text(encoding="utf-8")
    listed = text.split("\n## What tanager does not protect against")[0]
    items = re.findall(r"^- (.+?)(?=\n- |\n\n|\Z)", listed, flags=re.M | re.S)
    found = [match.groups() for item in items if (match := _EDGE.fullmatch(item))]
    assert len(found) == len(items)
    return found


@pytest.mark.parametrize("item", edges(), ids=lambda item: item[0])
def test_every_edge_names_its_guard(item):
    edge, done, guards = item
    assert edge.strip() and done.strip()
    assert _NAMED.findall(guards), edge


def test_the_pages_are_not_empty():
    assert len(edges()) >= 110
    assert len({*named("sharp_edges.md")}) >= 200
    assert len({*named("threat_model.md")}) >= 10
    # Whatever looks like a test is read as one.
    for page in PAGES:
        text = (ROOT / "docs" / page).read_text(encoding="utf-8")
        assert text.count(".py::test_") == len(named(page)), page


def test_a_guard_that_went_is_noticed():
    with pytest.raises(AssertionError):
        test_the_guard_exists(("tests/test_house.py", "test_nothing_of_the_kind"))
