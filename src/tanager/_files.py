"""Files that are written whole or not at all, and JSON that every reader takes."""

import contextlib
import json
import math
import os
import tempfile
from collections.abc import Iterator, Mapping
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
    with _neighbour(path, content, mode) as temporary:
        os.replace(temporary, path)
    sync_folder(path.parent)


def write_text(path: Path, text: str) -> None:
    r"""Write a UTF-8 file whole or not at all.

    What UTF-8 cannot hold, such as a byte of a file name that is no letter, is escaped
    as ``\udcff``.
    """
    write_atomically(path, text.encode(errors="backslashreplace"))


def write_once(path: Path, content: bytes, mode: int = 0o644) -> None:
    """Write a file whole, unless it is there: of many writers at once, the first.

    Where the file system has no hard links, the last of those that write at once.

    Args:
        path: the file to write; its folder must exist.
        content: all of it.
        mode: permissions, less what the process's umask takes away.
    """
    with _neighbour(path, content, mode) as temporary:
        try:
            os.link(temporary, path)
        except FileExistsError:
            return
        except OSError:
            if not path.exists():
                os.replace(temporary, path)
    sync_folder(path.parent)


@contextlib.contextmanager
def _neighbour(path: Path, content: bytes, mode: int) -> Iterator[Path]:
    """Give a file beside `path` that is on the disk, and take it away afterwards."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, mode & ~_umask())
        yield Path(name)
    finally:
        Path(name).unlink(missing_ok=True)


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
    write_atomically(path, _json_file(content), mode)


def write_json_once(path: Path, content: Any, mode: int = 0o644) -> None:
    """Write a JSON file as `write_once` does."""
    write_once(path, _json_file(content), mode)


def _json_file(content: Any) -> bytes:
    return (json_text(content, indent=2) + "\n").encode()


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
