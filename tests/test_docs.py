"""The site is made without a warning, and every public name is on it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from sphinx.util.inventory import InventoryFile

import tanager


DOCS = Path(__file__).parent.parent / "docs"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "--quiet", "--fail-on-warning"]
    made = subprocess.run(
        [*command, "--keep-going", "-d", out / "trees", DOCS, out / "html"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stderr
    return out / "html"


@pytest.mark.slow
def test_every_public_name_has_a_place(site):
    inventory = InventoryFile.loads((site / "objects.inv").read_bytes(), uri="")
    places = {name for kind in inventory.data.values() for name in kind}
    for name in tanager.__all__:
        if name in ("__version__", "tan"):
            continue
        home = getattr(tanager, name).__module__
        assert f"{home}.{name}" in places, name
    assert {"tanager.privacy.tan", "tanager.models.zoo.create"} <= places


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
