"""Turn the examples into executed notebooks.

    python examples/make_notebooks.py [NAME ...]

Each script in percent format beside this file becomes `notebooks/NAME.ipynb`, executed
from the beginning in an empty folder. Its first code cell installs tanager where it is
missing, as on Colab; it is not executed here. What differs between machines without
telling anything (times of execution, widgets, random identifiers) is left out, so that
a notebook that is made again differs only where it says something else. Needs the extra
"examples".
"""

import argparse
import re
import tempfile
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode


HERE = Path(__file__).parent
LARGEST = 300_000
INSTALL = """\
# Not needed on your own machine, if tanager is installed there.
import subprocess
import sys
from importlib import metadata
from pathlib import Path


SOURCE = "tanager"  # the folder of tanager's source, with its pyproject.toml

try:
    metadata.version("tanager-dp")
except metadata.PackageNotFoundError:
    if not Path(SOURCE, "pyproject.toml").exists():
        raise SystemExit(
            f"tanager is missing. Clone its repository into the folder {SOURCE!r} "
            "beside this notebook, or upload a zip of it and unzip it there. Then run "
            f"this cell again: it runs pip install './{SOURCE}[examples]'"
        ) from None
    words = ["-m", "pip", "install", "--quiet", f"./{SOURCE}[examples]"]
    subprocess.run([sys.executable, *words], check=True)"""
_NOISE = ("ipywidgets",)  # words of warnings that are about the notebook, not its code


def scripts() -> list[Path]:
    """Return the examples, in order of their names."""
    return sorted(path for path in HERE.glob("*.py") if path != Path(__file__))


def read(path: Path) -> NotebookNode:
    """Read a script as a notebook without outputs, its docstring left out."""
    notebook = jupytext.read(path, fmt="py:percent")
    if notebook.cells[0].cell_type == "code":  # the first cell says what it says
        del notebook.cells[0]
    for number, cell in enumerate(notebook.cells):
        cell.metadata = {}
        cell.id = f"cell-{number}"
    notebook.metadata = {
        "kernelspec": {
            "display_name": "Python 3",
            "language": "python",
            "name": "python3",
        },
        "language_info": {"name": "python"},
    }
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    return notebook


def execute(notebook: NotebookNode) -> str:
    """Run all cells in an empty folder; return its path."""
    with tempfile.TemporaryDirectory() as folder:
        NotebookClient(
            notebook,
            timeout=600,
            kernel_name="python3",
            record_timing=False,
            resources={"metadata": {"path": folder}},
        ).execute()
    return folder


def add_install(notebook: NotebookNode) -> None:
    """Put the cell that installs tanager before the first code cell."""
    kinds = [cell.cell_type for cell in notebook.cells]
    cell = nbformat.v4.new_code_cell(INSTALL, id="cell-install")
    notebook.cells.insert(kinds.index("code"), cell)


def clean(notebook: NotebookNode, folder: str) -> None:
    """Leave of the outputs what a reader looks at: text, and pictures.

    Paths in the folder in which it ran become relative.
    """
    for cell in notebook.cells:
        cell.metadata = {}
        if cell.cell_type != "code":
            continue
        kept: list[NotebookNode] = []
        for output in cell.outputs:
            _keep(output, kept)
        for output in kept:
            if "text" in output:
                text = output.text.replace(f"{folder}/", "")
                output.text = re.sub(r"\x1b\[[\d;]*m", "", text)  # bold, colours
        cell.outputs = [output for output in kept if output.get("text", "x")]
    notebook.metadata.language_info = {"name": "python"}


def _keep(output: NotebookNode, kept: list[NotebookNode]) -> None:
    if output.output_type in ("display_data", "execute_result"):
        if "image/png" in output.data:
            image = {"image/png": output.data["image/png"]}
            kept.append(nbformat.v4.new_output("display_data", image))
            return
        text = output.data.get("text/plain", "")
    elif output.output_type == "stream":
        text = output.text
    else:
        kept.append(output)
        return
    lines = text.splitlines(keepends=True)
    text = "".join(line for line in lines if not any(word in line for word in _NOISE))
    if kept and kept[-1].output_type == "stream":
        kept[-1].text += text
    else:
        kept.append(nbformat.v4.new_output("stream", name="stdout", text=text))


def make(path: Path) -> Path:
    """Make the notebook of one script and return its path.

    Raises:
        ValueError: it is larger than a notebook should be.
    """
    notebook = read(path)
    clean(notebook, execute(notebook))
    add_install(notebook)
    nbformat.validate(notebook)
    text = nbformat.writes(notebook)
    if len(text.encode()) > LARGEST:
        raise ValueError(
            f"notebook of {path.name} has {len(text.encode()):,} bytes, must have at "
            f"most {LARGEST:,}: draw less, or smaller"
        )
    to = HERE / "notebooks" / f"{path.stem}.ipynb"
    to.parent.mkdir(exist_ok=True)
    to.write_text(text + "\n", encoding="utf-8")
    return to


def main() -> None:
    """Make the notebooks that are named, or all of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    names = [path.stem for path in scripts()]
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(names))
    chosen = parser.parse_args().names or names
    for name in chosen:
        if name not in names:
            parser.error(f"no example {name!r}: there are {', '.join(names)}")
    for name in chosen:
        print(make(HERE / f"{name}.py"), flush=True)


if __name__ == "__main__":
    main()
