"""Scores found so far: a file of JSON lines that survives a kill."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tanager._files import json_text
from tanager._reading import read_json_lines
from tanager._record import check_record


class Records:
    """Lines that are added and never changed; only in memory if there is no file.

    Args:
        path: the file; its lines are read, and a torn last line is removed.
        shape: what every line must hold, see `tanager._record`.

    Attributes:
        lines: all of them, in order.

    Raises:
        ValueError: the file holds other lines; the message names it.
    """

    def __init__(self, path: Path | None, shape: Mapping[str, Any]):
        self._path = path
        self.lines: list[dict[str, Any]] = []
        if path is None or not path.exists():
            return
        remedy = "delete it, and its models are trained again"
        self.lines = read_json_lines(path, remedy=remedy)
        check_record(path, self.lines, [shape], remedy)
        whole = path.read_bytes()
        whole_lines = whole.rfind(b"\n") + 1
        if whole_lines < len(whole):
            os.truncate(path, whole_lines)

    def add(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Add lines; on return they are on the disk."""
        lines = [dict(line) for line in lines]
        self.lines += lines
        if self._path is None:
            return
        with self._path.open("ab") as file:
            file.write("".join(json_text(line) + "\n" for line in lines).encode())
            file.flush()
            os.fsync(file.fileno())
