"""The site is made without a warning, and every public name is on it."""

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
from sphinx.util.inventory import InventoryFile

import tanager
from switch import FULL


DOCS = Path(__file__).parent.parent / "docs"
# Nothing below reads the index of the search or the theme (`make docs` needs both).
# Collecting garbage takes a tenth of the time.
QUICKLY = """
import gc, sys
gc.disable()
from sphinx.builders.html import StandaloneHTMLBuilder
from sphinx.cmd.build import main
StandaloneHTMLBuilder.search = False
sys.exit(main([*sys.argv[1:], "-D", "html_theme=basic"]))
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    out = tmp_path_factory.mktemp("site")
    quickly = out / "quickly.py"  # of Python 3.13's -c, inspect gives wrong sources
    quickly.write_text(QUICKLY)
    sphinx = ["-m", "sphinx"] if FULL else [quickly]
    options = ["--quiet", "--fail-on-warning", "--keep-going"]
    made = subprocess.run(
        [sys.executable, *sphinx, *options, "-d", out / "trees", DOCS, out / "html"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stderr
    return out / "html"


@pytest.fixture(scope="module")
def places(site):
    """All that has a place in the reference, by its full name."""
    inventory = InventoryFile.loads((site / "objects.inv").read_bytes(), uri="")
    return {name for kind in inventory.data.values() for name in kind}


def handed_on():
    """The full name, where it is defined, of every name that a package hands on."""
    for package in sorted(Path(tanager.__file__).parent.rglob("__init__.py")):
        for node in ast.parse(package.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ImportFrom) and node.module:
                for name in node.names:
                    if name.asname == name.name:
                        value = getattr(importlib.import_module(node.module), name.name)
                        home = getattr(value, "__module__", node.module)
                        yield f"{home}.{name.name}"


@pytest.mark.slow
def test_every_public_name_has_a_place(places):
    for name in tanager.__all__:
        if name in ("__version__", "tan"):
            continue
        home = getattr(tanager, name).__module__
        assert f"{home}.{name}" in places, name
    assert {"tanager.privacy.tan", "tanager.recipes.RECIPES"} <= places


@pytest.mark.slow
def test_what_a_package_hands_on_has_a_place(places):
    names = set(handed_on())
    assert "tanager.models.exported.load_pretrained" in names
    assert names - places == {"tanager._version.__version__"}


@pytest.mark.slow
def test_docstrings_come_through_as_they_are_meant(site):
    page = (site / "api/clipping.html").read_text()
    assert "clipped_grad" in page
    text = re.sub(r"<[^>]*>", "", page)
    # A lone backquote, or an open pair of them, was taken for something else.
    assert "`" not in text


def test_no_page_is_overwritten_by_one_of_sphinx():
    pages = {page.stem for page in DOCS.glob("*.md")}
    assert "searching" in pages
    assert not pages & {"search", "genindex", "py-modindex"}
