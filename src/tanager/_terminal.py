"""What is printed, on terminals that lack the letters."""

import io
import sys


def escape_unprintable() -> None:
    r"""Print a letter that standard output or error cannot encode as ``\u03b5``.

    Without this, an ε on an ASCII terminal raises an error, and ends the run.
    """
    for stream in (sys.stdout, sys.stderr):
        raising = getattr(stream, "errors", None) in ("strict", "surrogateescape")
        if raising and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
