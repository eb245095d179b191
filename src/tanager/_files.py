"""Files that are written whole or not at all, and JSON that every reader takes."""

import json
import math
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np


def write_atomically(path: Path, content: bytes, mode: int = 0o644) -> None:
    """Write to a neighbouring file, force it to the disk, and rename it into place.

    A reader sees the old file or the new one, never a part.

    Args:
        path: the file to write or replace; its folder must exist.
        content: all of it.
        mode: permissions, less what the process's umask takes away.
    """
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, mode & ~_umask())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Force a folder's entries, such as a new or renamed file, to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def json_text(content: Any, indent: int | None = None) -> str:
    """Return `content` as valid JSON; numbers that are not finite become null."""
    return json.dumps(_finite(content), indent=indent, allow_nan=False)


def as_json(content: Any) -> Any:
    """Return what a reader of `json_text` gets: NumPy's numbers as Python's."""
    return json.loads(json_text(content))


def write_json(path: Path, content: Any, mode: int = 0o644) -> None:
    """Write a JSON file whole or not at all."""
    write_atomically(path, (json_text(content, indent=2) + "\n").encode(), mode)


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a JSON lines file; none where there is no file.

    A torn last line, which does not end in a line break, is passed over.
    """
    if not path.exists():
        return []
    complete = path.read_text(encoding="utf-8").rpartition("\n")[0]
    return [json.loads(line) for line in complete.split("\n") if line]


def _finite(content: Any) -> Any:
    match content:
        case np.generic():
            return _finite(content.item())
        case float():
            return content if math.isfinite(content) else None
        case Mapping():
            return {name: _finite(value) for name, value in content.items()}
        case list() | tuple():
            return [_finite(value) for value in content]
        case _:
            return content


def _umask() -> int:
    # The only way to read it is to set it.
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
