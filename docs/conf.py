"""How Sphinx makes the site: `make docs`, then docs/_build/index.html."""

import inspect
import re
import sys
from pathlib import Path

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx

import tanager


sys.path.insert(0, str(Path(__file__).parent))
import reference


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
html_css_files = ["site.css"]
html_search_scorer = str(Path(__file__).parent / "search_scores.js")
html_show_copyright = False
pygments_style = "default"

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_format = "short"
autodoc_typehints_description_target = "documented"
autodoc_default_options = {"members": True}
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
# Attributes of one name in several classes, such as `blocks`: none is linked to.
suppress_warnings = ["ref.python"]


_CODE = re.compile(r"(?<!`)`([^`]+)`(?!`)")
_PUBLIC = reference.public_names()
_NAMES = {name: name for name in _PUBLIC.values()}
_NAMES |= {name.rpartition(".")[2]: name for name in _PUBLIC.values()}


def _as_markup(app: Sphinx, what: str, name: str, of: object, options, lines):
    """Docstrings are written as Markdown: `code`, tables and indented examples."""
    del app, options, of
    told: list[str] = []

    def code(found: re.Match[str]) -> str:
        public = _NAMES.get(found[1])
        if public is None or public == name:
            return f"``{found[1]}``"
        return f":py:obj:`{found[1]} <{public}>`"

    if what in ("property", "attribute", "data"):
        # Napoleon would take what is before a colon for the type.
        lines[:1] = [line.replace(": ", " – ", 1) for line in lines[:1]]
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
        told.append(line if indented else re.sub(_CODE, code, line))
    lines[:] = told


def _elsewhere(app: Sphinx, what: str, name: str, of: object, skip: bool, options):
    """Skip what has its place elsewhere, fields of named tuples, others' functions."""
    del app, name, options
    if (getattr(of, "__doc__", None) or "").startswith("Alias for field number"):
        return True
    module = getattr(of, "__module__", "")
    if what == "class" and inspect.isfunction(of) and "tanager" not in module:
        return True
    home = f"{module}.{getattr(of, '__qualname__', '')}"
    return True if what == "module" and home in _PUBLIC else skip


def _public(app: Sphinx, env, node, content):
    """Link a type to its public name, whatever module it is defined in."""
    public = _PUBLIC.get(node.get("reftarget", ""))
    if node.get("refdomain") != "py" or public is None:
        return None
    where = node.get("refdoc", "index")
    python = env.get_domain("py")
    return python.resolve_xref(env, where, app.builder, "obj", public, node, content)


def _short(app: Sphinx, doctree):
    """Show the last part of a type's name alone."""
    del app
    for link in doctree.findall(addnodes.pending_xref):
        (shown,) = link.children if len(link.children) == 1 else (None,)
        if isinstance(shown, addnodes.literal_emphasis):
            name = shown.astext().rpartition(".")[2]
            shown.children = [nodes.Text(name)]


_FROM_CODE = re.compile(
    r"^```{(commands|names)} ?([\w.]*)\n(.*?)```$", flags=re.M | re.S
)


def _written(app: Sphinx, source_name: str, source: list[str]):
    """Leave out what only tests read; write what is read from the code."""
    del app, source_name
    text = re.sub(r"^```(\w+) [\w.-]+$", r"```\1", source[0], flags=re.M)
    source[0] = re.sub(
        _FROM_CODE,
        lambda found: (
            reference.commands()
            if found[1] == "commands"
            else reference.documented(found[2], found[3].split())
        ),
        text,
    )


def setup(app: Sphinx) -> None:
    """Connect what turns our docstrings and pages into markup for Sphinx."""
    app.connect("autodoc-process-docstring", _as_markup, priority=100)
    app.connect("autodoc-skip-member", _elsewhere)
    app.connect("missing-reference", _public)
    app.connect("source-read", _written)
    app.connect("doctree-read", _short)
