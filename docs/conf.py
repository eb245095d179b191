"""How Sphinx makes the site: `make docs`, then docs/_build/index.html."""

import re

from sphinx.application import Sphinx

import tanager


project = "tanager"
author = "The tanager authors"
version = release = tanager.__version__
copyright = author

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "tanager"
html_static_path = ["_static"]
html_css_files = ["tables.css"]
html_show_copyright = False
pygments_style = "default"

myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "none"
autodoc_default_options = {"members": True}
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
# Attributes of one name in several classes, such as `blocks`: none is linked to.
suppress_warnings = ["ref.python"]


_CODE = re.compile(r"(?<!`)`([^`]+)`(?!`)")


def _as_markup(app: Sphinx, what: str, name: str, of: object, options, lines):
    """Docstrings are written as Markdown: `code`, tables and indented examples."""
    del app, name, of, options
    told: list[str] = []
    for line in lines:
        before = told[-1] if told else ""
        if line.startswith("|"):
            if not before.startswith("   |"):
                told += [".. code-block:: text", ""]
            told.append("   " + line)
            continue
        indented = what == "module" and line.startswith("    ")
        if indented and not before:
            told += [".. code-block:: text", ""]
        if before.startswith("   |"):
            told.append("")
        told.append(line if indented else re.sub(_CODE, r"``\1``", line))
    lines[:] = told


def _is_field(app: Sphinx, what: str, name: str, of: object, skip: bool, options):
    """Skip the fields of a named tuple: its own docstring describes them."""
    del app, what, name, options
    doc = getattr(of, "__doc__", None) or ""
    return True if doc.startswith("Alias for field number") else skip


def _without_tags(app: Sphinx, source_name: str, source: list[str]):
    del app, source_name
    source[0] = re.sub(r"^```(\w+) [\w.-]+$", r"```\1", source[0], flags=re.M)


def setup(app: Sphinx) -> None:
    """Connect what turns our docstrings and pages into markup for Sphinx."""
    app.connect("autodoc-process-docstring", _as_markup, priority=100)
    app.connect("autodoc-skip-member", _is_field)
    app.connect("source-read", _without_tags)
