"""Figures are drawn wherever a program was started."""

import subprocess
import sys


def test_the_backend_of_a_notebook_elsewhere_ends_no_run(tmp_path, monkeypatch):
    # As `!tanager train` has it; matplotlib refuses it where the package is missing.
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    program = (
        "from tanager.report import figures\n"
        "with figures.drawing('drawn.svg') as (_, [axes]): axes.plot([1, 2])"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=tmp_path)
    assert "<svg" in (tmp_path / "drawn.svg").read_text()
