"""What is printed: on terminals that lack the letters, and into pipes and files."""

import contextlib
import io
import os
import sys
from collections.abc import Iterator
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


@contextlib.contextmanager
def libraries_on_stderr() -> Iterator[None]:
    """Send to standard error what compiled libraries print on standard output.

    What Python prints goes on to standard output.
    """
    if sys.stdout is None:  # It was closed, and 1 may be any file.
        yield
        return
    sys.stdout.flush()
    own = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.ExitStack() as stack:
            if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.fileno() == 1:
                like = {"encoding": sys.stdout.encoding, "errors": sys.stdout.errors}
                kept = stack.enter_context(open(own, "w", 1, closefd=False, **like))
                stack.enter_context(contextlib.redirect_stdout(kept))
            yield
    finally:
        os.dup2(own, 1)
        os.close(own)


def new_console(*, stderr: bool = False, **options: Any) -> "Console":
    """Return a console that breaks lines, and draws bars, on a terminal only.

    A log, a notebook, or the next program of a pipe, gets every line whole. Options are
    rich's.
    """
    from rich.console import Console

    console = Console(stderr=stderr, highlight=False, **options)
    if console.is_jupyter:  # a bar there needs a widget, which no saved file shows
        options |= {"force_jupyter": False, "force_terminal": False}
        console = Console(stderr=stderr, highlight=False, **options)
    if not console.is_terminal:
        console.width, console.soft_wrap = _ENDLESS, True
    return console
