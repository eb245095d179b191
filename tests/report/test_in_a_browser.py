"""A run's report in a real browser, as wide as a phone and as wide as a desk."""

import html
import json
import re
import shutil
import subprocess

import numpy as np
import pytest
from test_run_page import measured, run_files, write_run

from tanager.measures import measure
from tanager.report.evaluation_page import write_evaluation
from tanager.report.run_page import write_report


NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)
WIDTHS = (360, 1280)
# The page forbids programs, so one around it looks at it in frames.
AROUND = """<!DOCTYPE html><body>{frames}<pre id=found></pre><script>
onload = () => {{
  const found = [...document.querySelectorAll("iframe")].map(frame => {{
    const page = frame.contentDocument;
    const hidden = [...page.querySelectorAll("h1, h2, h3, p, li, td, th")].filter(
      each => each.checkVisibility() && !each.closest(".scroll, pre") &&
        each.getBoundingClientRect().right > frame.clientWidth + 1);
    return {{
      width: page.documentElement.scrollWidth,
      cut: hidden.map(each => each.textContent),
      tables: [...page.querySelectorAll(".scroll")].filter(
        each => each.checkVisibility()).every(
        each => each.getBoundingClientRect().right <= frame.clientWidth),
      headings: page.querySelectorAll("h2").length,
    }};
  }});
  document.getElementById("found").textContent = JSON.stringify(found);
}};
</script></body>"""


def page_of_a_run(folder, names):
    config, result, metrics = run_files(classes=names)
    run = write_run(folder, config, result | measured(20), metrics)
    return write_report(run)


def page_of_an_evaluation(folder, names):
    truth = np.repeat(np.arange(20), 3)
    scores = np.random.default_rng(0).dirichlet(np.ones(20), 60)
    found = measure(scores, truth, names, bootstrap=False)
    return write_evaluation(folder.with_suffix(".html"), found, "m" * 90, "d", "all")


PAGES = [
    (page_of_a_run, 1, 10),
    (page_of_a_run, 60, 10),
    (page_of_an_evaluation, 60, 1),
]


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium: apt install chromium")
def test_nothing_is_wider_than_the_screen(tmp_path):
    frames = []
    for write, length, _ in PAGES:
        names = [f"{k} {'long' * length}"[: length + 3] for k in range(20)]
        page = html.escape(write(tmp_path / f"{len(frames)}", names).read_text())
        frames += [
            f'<iframe width={width} height=900 srcdoc="{page}"></iframe>'
            for width in WIDTHS
        ]
    around = tmp_path / "around.html"
    around.write_text(AROUND.format(frames="".join(frames)))
    command = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu"]
    command += [f"--user-data-dir={tmp_path}/profile", "--window-size=1700,1000"]
    shown = subprocess.run(
        [*command, "--dump-dom", around.as_uri()],
        check=True,
        capture_output=True,
        timeout=120,
    ).stdout.decode()
    (content,) = re.findall("<pre id=.found.>(.*?)</pre>", shown)
    asked = [(page, width) for page in PAGES for width in WIDTHS]
    all_found = json.loads(html.unescape(content))
    for ((_, _, headings), width), found in zip(asked, all_found, strict=True):
        assert found["headings"] >= headings
        assert found["width"] <= width
        assert found["cut"] == []
        assert found["tables"]
