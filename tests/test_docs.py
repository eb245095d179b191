"""The site is made without a warning, and every public name is on it.

In a real browser, on a phone and on a desk: width, scripts, search.
"""

import ast
import functools
import html
import http.server
import importlib
import json
import re
import shutil
import subprocess
import threading
from dataclasses import fields
from pathlib import Path
from urllib.parse import unquote

import pytest
from sphinx.util.inventory import InventoryFile

import tanager
from forks import Fork
from switch import FULL
from tanager.cli import COMMANDS
from tanager.commands.experiments import TABLES
from tanager.recipes.recipe import Recipe


PACKAGES = ("tanager", "tanager.clipping", "tanager.models", "tanager.data")
PACKAGES += ("tanager.recipes",)
DOCS = Path(__file__).parent.parent / "docs"
# Collecting garbage takes a tenth of the time.
SPHINX = """
import gc, sys
gc.disable()
from sphinx.cmd.build import main
sys.exit(main(sys.argv[1:]))
"""
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)
in_a_browser = pytest.mark.skipif(
    BROWSER is None, reason="needs Chromium: apt install chromium"
)
WIDTHS = PHONE, DESK = 390, 1280
ON_A_DESK = {"index.html", "commands.html", "results.html", "api/training.html"}
"""What has room on a phone has it on a desk, where a menu stands beside each page."""
SEARCHES = {
    "predict": "use.html",
    "epsilon": "choosing.html",
    "DICOM": "images.html",
    "resume": "training.html",
    "GPU": "scale.html",
    "hyperparameters": "searching.html",
    "class+imbalance": "images.html",
    "sigma": "budget.html",
}
"""What people look for, and the page that must come first."""
WRONG = "<!DOCTYPE html><p style='width:2000px'>long<script>no()</script>"
# A frame shows each page; one of the search has ended when it shows a result.
AROUND = """<!DOCTYPE html><body>{frames}<pre id=found>waiting</pre><script>
const frames = [...document.querySelectorAll("iframe")];
const look = () => {{
  const found = frames.map(frame => {{
    const page = frame.contentDocument, root = page.documentElement;
    const first = page.querySelector("#search-results li a");
    return {{
      width: root.scrollWidth,
      missing: [...page.images].filter(each => !each.naturalWidth).map(
        each => each.src),
      first: first && first.getAttribute("href"),
    }};
  }});
  if (frames.some((frame, k) => frame.src.includes("?q=") && !found[k].first))
    return setTimeout(look, 100);
  document.getElementById("found").textContent = JSON.stringify(found);
}};
onload = look;
</script></body>"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    out = tmp_path_factory.mktemp("site")
    script = out / "make_site.py"  # of Python 3.13's -c, inspect gives wrong sources
    script.write_text(SPHINX)
    options = ["--quiet", "--fail-on-warning", "--keep-going"]
    made = Fork(script, [*options, "-d", out / "trees", DOCS, out / "html"])
    made.wait()
    assert made.code == 0, made.errors
    return out / "html"


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format, *arguments):
        pass


@pytest.fixture(scope="module")
def shown(site, tmp_path_factory):
    """What each page showed at each width in a browser, and the console's errors."""
    pages = sorted(
        str(page.relative_to(site))
        for page in site.rglob("*.html")
        if "_static" not in page.parts
    )
    desk = pages if FULL else sorted(ON_A_DESK)
    looks = [(page, PHONE) for page in pages] + [(page, DESK) for page in desk]
    looks += [(f"search.html?q={word}", DESK) for word in SEARCHES]
    looks += [("wrong.html", PHONE)]
    frames = "".join(
        f'<iframe width={width} height=900 src="{address}"></iframe>'
        for address, width in looks
    )
    more = {"wrong.html": WRONG, "around.html": AROUND.format(frames=frames)}
    for name, text in more.items():
        (site / name).write_text(text, encoding="utf-8")
    command = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu"]
    command += [f"--user-data-dir={tmp_path_factory.mktemp('profile')}"]
    command += ["--enable-logging=stderr", "--virtual-time-budget=60000", "--dump-dom"]
    handler = functools.partial(Quiet, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/around.html"
        done = subprocess.run(
            [*command, address], check=True, capture_output=True, timeout=300
        )
        server.shutdown()
    for name in more:
        (site / name).unlink()
    (content,) = re.findall("<pre id=.found.>(.*?)</pre>", done.stdout.decode())
    errors = re.findall(r"CONSOLE.*(?:Uncaught|Failed).*", done.stderr.decode())
    found = json.loads(html.unescape(content))
    return dict(zip(looks, found, strict=True)), errors


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


@pytest.mark.slow
@in_a_browser
@pytest.mark.parametrize("width", WIDTHS)
def test_no_page_is_wider_than_the_screen_or_has_an_error(shown, width):
    looks, errors = shown
    assert [error for error in errors if "wrong.html" not in error] == []
    pages = {page: seen for (page, own), seen in looks.items() if own == width}
    pages.pop("wrong.html", None)
    assert {*pages} >= ON_A_DESK
    for page, seen in pages.items():
        assert seen["width"] <= width, page
        assert seen["missing"] == [], page


@pytest.mark.slow
@in_a_browser
def test_a_page_that_is_too_wide_or_wrong_is_seen(shown):
    looks, errors = shown
    assert looks["wrong.html", PHONE]["width"] > PHONE
    assert len([error for error in errors if "wrong.html" in error]) == 1


@pytest.mark.slow
@in_a_browser
def test_a_search_finds_the_right_page_first(shown):
    first = [shown[0][f"search.html?q={word}", DESK]["first"] for word in SEARCHES]
    assert [re.split("[?#]", page)[0] for page in first] == list(SEARCHES.values())
