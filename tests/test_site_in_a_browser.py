"""The site in a real browser, on a phone and on a desk: width, scripts, search."""

import functools
import html
import http.server
import json
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest


NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)
DOCS = Path(__file__).parent.parent / "docs"
WIDTHS = (390, 1280)
SEARCHES = {
    "predict": "use.html",
    "epsilon": "choosing.html",
    "DICOM": "images.html",
    "resume": "training.html",
    "GPU": "scale.html",
}
"""What people look for, and the page that must come first."""
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

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="needs Chromium: apt install chromium"),
]


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format, *arguments):
        pass


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    out = tmp_path_factory.mktemp("site") / "html"
    made = [sys.executable, "-m", "sphinx", "--quiet", DOCS, out]
    subprocess.run(made, check=True, timeout=300)
    handler = functools.partial(Quiet, directory=str(out))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield out, f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def looked_at(site, tmp_path, addresses, width):
    """Return what the frames of these addresses showed, and the console's errors."""
    folder, server = site
    frames = "".join(
        f'<iframe width={width} height=900 src="{address}"></iframe>'
        for address in addresses
    )
    around = folder / f"around-{tmp_path.name}.html"
    around.write_text(AROUND.format(frames=frames), encoding="utf-8")
    command = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu"]
    command += [f"--user-data-dir={tmp_path}/profile", "--enable-logging=stderr"]
    command += ["--virtual-time-budget=60000", "--dump-dom"]
    shown = subprocess.run(
        [*command, f"{server}/{around.name}"],
        check=True,
        capture_output=True,
        timeout=300,
    )
    around.unlink()
    (content,) = re.findall("<pre id=.found.>(.*?)</pre>", shown.stdout.decode())
    errors = re.findall(r"CONSOLE.*(?:Uncaught|Failed).*", shown.stderr.decode())
    return json.loads(html.unescape(content)), errors


@pytest.mark.parametrize("width", WIDTHS)
def test_no_page_is_wider_than_the_screen_or_has_an_error(site, tmp_path, width):
    folder, _ = site
    pages = sorted(
        str(page.relative_to(folder))
        for page in folder.rglob("*.html")
        if "_static" not in page.parts
    )
    assert {"index.html", "commands.html", "api/training.html"} <= {*pages}
    found, errors = looked_at(site, tmp_path, pages, width)
    assert errors == []
    for page, seen in zip(pages, found, strict=True):
        assert seen["width"] <= width, page
        assert seen["missing"] == [], page


def test_a_page_that_is_too_wide_or_wrong_is_seen(site, tmp_path):
    folder, _ = site
    wrong = "<!DOCTYPE html><p style='width:2000px'>long<script>no()</script>"
    (folder / "wrong.html").write_text(wrong, encoding="utf-8")
    (seen,), errors = looked_at(site, tmp_path, ["wrong.html"], 390)
    (folder / "wrong.html").unlink()
    assert seen["width"] > 390
    assert len(errors) == 1


def test_a_search_finds_the_right_page_first(site, tmp_path):
    searches = [f"search.html?q={word}" for word in SEARCHES]
    found, errors = looked_at(site, tmp_path, searches, 1280)
    assert errors == []
    first = [seen["first"].split("?")[0].split("#")[0] for seen in found]
    assert first == list(SEARCHES.values())
