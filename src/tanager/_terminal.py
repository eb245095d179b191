"""What is printed: on terminals that lack the letters, and into pipes and files."""

import io
import sys
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from rich.console import Console


_ENDLESS = 10_000


def escape_unprintable() -> None:
    r"""Print a letter that standard output or error cannot encode as ``\u03b5``.

    Without this, an ε on an ASCII terminal raises an error, and ends the run.
    """
    for stream in (sys.stdout, sys.stderr):
        raising = getattr(stream, "errors", None) in ("strict", "surrogateescape")
        if raising and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def new_console(*, stderr: bool = False, **options: Any) -> "Console":
    """Return a console that breaks lines on a terminal only.

    A log, or the next program of a pipe, gets every line whole. Options are rich's.
    """
    from rich.console import Console

    console = Console(stderr=stderr, highlight=False, **options)
    if not (console.is_terminal or console.is_jupyter):
        console.width, console.soft_wrap = _ENDLESS, True
    return console
