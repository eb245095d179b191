"""Runs the code of a page as a reader would: in order, in one folder.

What is done with a block is said by the words after its three backquotes:

    python           run; all blocks of a page share their names
    python full      not run: it needs weights of a hub, or another's library
    python NAME      run by the interpreter of .venv-NAME, where `make` has made it
    sh               run, line by line; `tanager` in this process, the rest by bash
    sh full          too long for a test: each `tanager` line must be one it takes,
                     and of data that the page does not make
    text printed     what the block before printed; … stands for anything
    text, json, ...  not code
"""

import contextlib
import io
import itertools
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

from tanager.cli import main


ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = [page for page in PAGES if "_build" not in page.parts]

_BLOCK = re.compile(r"^```(\w+)(?: ([\w.-]+))?\n(.*?)^```$", flags=re.S | re.M)


@dataclass(frozen=True)
class Block:
    language: str
    tag: str
    code: str
    line: int

    @property
    def commands(self):
        """The words of every command in a block of shell."""
        whole = self.code.replace("\\\n", " ")
        found = (shlex.split(line, comments=True) for line in whole.splitlines())
        return [words for words in found if words]


def blocks(page, changes=()):
    """Return the blocks of a page, with `changes` made: what is new for what is old."""
    text = page.read_text(encoding="utf-8")
    for old, new in dict(changes).items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return [
        Block(match[1], match[2] or "", match[3], text[: match.start()].count("\n") + 1)
        for match in _BLOCK.finditer(text)
    ]


def run(page, monkeypatch, changes=()):
    """Run the page's blocks, changed; return the names its Python left."""
    names = {}
    printed, ran = io.StringIO(), True
    for block in blocks(page, changes):
        place = f"{page.relative_to(ROOT)}:{block.line}"
        if (block.language, block.tag) == ("text", "printed"):
            if ran:
                compare(printed.getvalue(), block.code, place)
            continue
        print(printed.getvalue(), end="")
        printed = io.StringIO()
        ran = block.tag in ("", "full") or environment(block.tag).exists()
        with contextlib.redirect_stdout(printed):
            _run_block(block, names, place, page, monkeypatch)
    print(printed.getvalue(), end="")
    return names


def _run_block(block, names, place, page, monkeypatch):
    match block.language, block.tag:
        case "python", "":
            code = "\n" * block.line + block.code  # tracebacks tell the page's line
            exec(compile(code, str(page), "exec"), names)
        case "python", "full":
            compile(block.code, place, "exec")
        case "python", peer:
            _run_in(environment(peer), block.code, place)
        case "sh", "":
            for words in block.commands:
                _run_command(words, place)
        case "sh", "full":
            for words in block.commands:
                if words[0] == "tanager":
                    takes([w for w in words[1:] if w != "…"], monkeypatch, place)
                own = [d for f, d in itertools.pairwise(words) if f == "--data"]
                run_it = f"{place}: {own} are the page's own: run this, or write DIR"
                assert not any(Path(data).exists() for data in own), run_it
        case "sh" | "python", tag:
            raise AssertionError(f"{place}: what does {tag!r} mean?")


def compare(printed, shown, place):
    """Check that what was printed is what the page shows."""
    lines, pattern = (
        "\n".join(map(str.rstrip, text.strip().splitlines()))
        for text in (printed, shown)
    )
    parts = [re.escape(part) for part in pattern.split("…")]
    assert re.fullmatch(".*?".join(parts), lines, flags=re.S), f"{place}:\n{lines}"


class Taken(Exception):
    """The command line was fine."""


def takes(words, monkeypatch, place):
    """Check that `tanager` accepts these words, and go no further."""
    if "--from-study" in words:  # its options are those of what the study chose
        return

    def parse_only(right):
        def parse(*arguments, **options):
            found = right(*arguments, **options)
            if options.get("return_unknown_args") and found[1]:
                return found  # the command refuses what is unknown
            raise Taken

        return parse

    with monkeypatch.context() as patched:
        for module, name in ((tyro, "cli"), (tyro.extras, "subcommand_cli_from_dict")):
            patched.setattr(module, name, parse_only(getattr(module, name)))
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                code = main(words)
        except Taken:
            return
    assert code == 0, f"{place}: tanager {shlex.join(words)}"


def _run_command(words, place):
    if words[0] == "tanager":
        assert main(words[1:]) == 0, f"{place}: {shlex.join(words)}"
        return
    command = ["bash", "-euc", shlex.join(words)]
    print(
        subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout,
        end="",
    )


def environment(name):
    """The interpreter that `make` puts where tanager, or a peer, is installed."""
    return ROOT / f".venv-{name}" / "bin/python" if name else Path(sys.executable)


def _run_in(interpreter, code, place):
    if interpreter.exists():
        done = subprocess.run(
            [interpreter, "-c", code], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{place}: {done.stderr}"
        print(done.stdout, end="")
