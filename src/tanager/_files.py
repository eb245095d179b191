"""Write files atomically, and JSON that every reader accepts."""

import contextlib
import errno
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tanager import _validate as validate


_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}


@contextlib.contextmanager
def locking(path: Path) -> Iterator[None]:
    """Name the file that cannot be locked, if its disk has no locks.

    Raises:
        ValueError: the disk has none.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        rule = f"is on a disk that cannot lock files ({error.strerror})"
        remedy = "locks keep two processes apart: name a folder on another disk"
        text = validate.message("file", str(path), rule, remedy)
        raise ValueError(text) from error


def write_atomically(path: Path, content: bytes, mode: int = 0o644) -> None:
    """Write to a neighbouring file, force it to the disk, and rename it into place.

    A reader sees the old file or the new one, never a part. `mode` is masked by the
    process's umask.
    """
    with _naming(path):
        with _neighbour(path, content, mode) as temporary:
            os.replace(temporary, path)
        sync_folder(path.parent)


def write_text(path: Path, text: str) -> None:
    r"""Write a UTF-8 file whole or not at all.

    A character that UTF-8 cannot encode, such as a stray byte of a file name, is
    escaped as ``\udcff``.
    """
    write_atomically(path, text.encode(errors="backslashreplace"))


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Name the file that is written in an error, not the temporary one beside it."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error


@contextlib.contextmanager
def _neighbour(path: Path, content: bytes, mode: int) -> Iterator[Path]:
    """Write a temporary file beside `path` to the disk; delete it afterwards."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        _let_others(name, mode)
        yield Path(name)
    finally:
        Path(name).unlink(missing_ok=True)


def _let_others(path: str | os.PathLike[str], mode: int) -> None:
    """Give a file or folder, so far only of its owner, a mode that is masked."""
    mask = os.umask(0o077)  # Reading it requires setting it.
    os.umask(mask)
    with contextlib.suppress(PermissionError):  # It stays only of its owner.
        os.chmod(path, mode & ~mask)


def make_folder(path: Path, argument: str, mode: int = 0o777) -> None:
    """Make a folder and those above it, unless it is there.

    Raises:
        ValueError: it cannot be made; `argument` names it.
    """
    try:
        path.mkdir(mode, parents=True, exist_ok=True)
    except OSError as error:
        reason = error.strerror or str(error)
        validate.refuse(argument, str(path), "cannot be written", reason)


@contextlib.contextmanager
def new_folder(path: Path, argument: str, mode: int = 0o700) -> Iterator[Path]:
    """Give a folder to write files in, and rename it to `path` when it is whole.

    The files are on the disk before it takes its name. On an error it is deleted.
    `mode` is masked by the process's umask.

    Raises:
        ValueError: the folder cannot be written; `argument` names it.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        parts = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
    except OSError as error:
        validate.refuse(argument, str(path), "cannot be written", str(error))
    try:
        yield parts
        for file in parts.iterdir():
            with open(file, "rb") as written:
                os.fsync(written.fileno())
        _let_others(parts, mode)
        sync_folder(parts)
        os.replace(parts, path)
    except BaseException as error:
        shutil.rmtree(parts, ignore_errors=True)
        if isinstance(error, OSError) and _is_of(error, parts):
            reason = error.strerror or ""
            validate.refuse(argument, str(path), "cannot be written", reason)
        raise
    sync_folder(path.parent)


def _is_of(error: OSError, folder: Path) -> bool:
    """Return whether an error names a file in a folder, or none."""
    named = Path(os.fsdecode(error.filename or folder))
    return error.errno is not None and named.is_relative_to(folder)


def sync_folder(folder: Path) -> None:
    """Force a folder's entries, such as a new or renamed file, to the disk.

    Raises:
        ValueError: the disk cannot do this.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        rule = f"is on a disk that cannot force folders to it ({error.strerror})"
        remedy = "a crash could lose files: name a folder on another disk"
        validate.refuse("folder", str(folder), rule, remedy)
    finally:
        os.close(descriptor)


def json_text(content: Any, indent: int | None = None) -> str:
    """Return `content` as valid JSON; infinity and NaN become null."""
    return json.dumps(_finite(content), indent=indent, allow_nan=False)


def as_json(content: Any) -> Any:
    """Return `content` as a reader of `json_text` sees it: without NumPy numbers."""
    return json.loads(json_text(content))


def write_json(path: Path, content: Any, mode: int = 0o644) -> None:
    """Write a JSON file atomically."""
    write_atomically(path, _json_file(content), mode)


def write_json_once(path: Path, content: Any, mode: int = 0o644) -> None:
    """Write a JSON file atomically, unless it exists: the first of several wins.

    On a file system without hard links, the last of several writers wins.
    """
    with _naming(path), _neighbour(path, _json_file(content), mode) as temporary:
        try:
            os.link(temporary, path)
        except FileExistsError:
            return
        except OSError:
            if not path.exists():
                os.replace(temporary, path)
    sync_folder(path.parent)


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
