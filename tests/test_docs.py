"""The site is made without a warning, and every public name is on it."""

import ast
import html
import importlib
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from urllib.parse import unquote

import pytest
from sphinx.util.inventory import InventoryFile

import tanager
from switch import FULL
from tanager.cli import COMMANDS
from tanager.commands.experiments import TABLES
from tanager.recipes.recipe import Recipe


PACKAGES = ("tanager", "tanager.clipping", "tanager.models", "tanager.data")
PACKAGES += ("tanager.recipes",)
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


@pytest.mark.slow
@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_has_a_place(places, package):
    module = importlib.import_module(package)
    tree = ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8"))
    imported = [
        name.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module
        for name in node.names
        if name.asname == name.name
    ]
    assert len(imported) > 3
    for name in {*imported} - {"__version__", "tan"}:
        assert {f"{package}.{name}", f"tanager.{name}"} & places, name


@pytest.mark.slow
def test_every_package_that_hands_on_names_is_in_the_reference():
    for init in Path(tanager.__file__).parent.rglob("__init__.py"):
        parts = init.relative_to(Path(tanager.__file__).parent.parent).parent.parts
        if re.search(r"^from .* import (\w+) as \1$", init.read_text(), flags=re.M):
            assert ".".join(parts) in PACKAGES


@pytest.mark.slow
def test_every_command_and_flag_is_on_the_page_of_commands(site):
    text = html.unescape((site / "commands.html").read_text(encoding="utf-8"))
    text = re.sub(r"<[^>]*>", "", text)
    for command in COMMANDS:
        assert f"tanager {command}" in text
    for word in (*TABLES, "norms"):
        assert f"tanager search {word}" in text
    flags = {f"--{field.name.replace('_', '-')}" for field in fields(Recipe)}
    missing = {flag for flag in flags if flag not in text}
    assert missing == {"--solve-for"}


@pytest.mark.slow
def test_every_link_of_the_site_leads_somewhere(site):
    texts = {page: page.read_text(encoding="utf-8") for page in site.rglob("*.html")}
    places = {page: set(re.findall(r'\bid="([^"]+)"', texts[page])) for page in texts}
    links = 0
    for page, text in texts.items():
        for link in re.findall(r'<a\b[^>]*\bhref="([^"]+)"', text):
            path, _, anchor = unquote(html.unescape(link)).partition("#")
            if ":" in path or page.name == "search.html":
                continue
            target = (page.parent / path).resolve() if path else page
            assert target.exists(), f"{page.name}: {link}"
            assert not anchor or anchor in places[target], f"{page.name}: {link}"
            links += 1
    assert links > 1000


@pytest.mark.parametrize(
    "page", [*DOCS.parent.glob("*.md"), *DOCS.glob("*.md")], ids=lambda page: page.name
)
def test_every_link_to_a_file_leads_to_one(page):
    for link in re.findall(r"\]\(([^)#:]+)[^):]*\)", page.read_text(encoding="utf-8")):
        assert (page.parent / link).exists(), link


@pytest.mark.slow
def test_types_link_to_their_public_names(site):
    page = (site / "api/training.html").read_text(encoding="utf-8")
    train = page.split('id="tanager.train"')[1].split('id="tanager.Problem"')[0]
    for name in ("Problem", "DPSGD", "Runtime", "Classification"):
        assert f'#tanager.{name}"' in train


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
