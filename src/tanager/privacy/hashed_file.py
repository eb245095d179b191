"""JSON lines in a file that only grows, each with a hash over itself and those before.

The ledger of a run, the checksums of its steps and the account of a data set are such
files. Anyone can compute the hashes: they show damage, not a careful forgery.
"""

import contextlib
import fcntl
import hashlib
import io
import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from tanager._files import locking, sync_folder
from tanager._reading import MALFORMED, UnreadableFile, parse_json


Accept = Callable[[dict[str, Any]], None]
"""Takes a line without its hash; raises one of `MALFORMED` if it means nothing, or
`UnreadableFile` with what to say of the whole file."""


class HashedFile:
    """The lines of a file, read and checked; it is locked until it is closed.

    A torn last line is cut off: what it says had not begun, because `append` returns
    once the whole line is on the disk. A whole last line counts without its line break,
    which some editors take away.

    Args:
        path: of the file, created if it is missing.
        accept: is called with each line.
        damaged: from the number of a line to what to say if it is damaged.
        busy: what to say if another process holds the lock; None waits for it.
        mode: of a new file, masked by the process's umask.

    Raises:
        ValueError: a line does not follow from the one before, `accept` refuses one, or
            the file is locked, or its disk has no locks.
    """

    def __init__(
        self,
        path: Path,
        accept: Accept,
        damaged: Callable[[int], str],
        *,
        busy: str | None = None,
        mode: int = 0o666,
    ):
        self._path, self._torn = path.absolute(), False
        self._one = threading.Lock()  # that of the file does not keep threads apart
        try:
            with locking(path):
                self._file = _locked(path, mode, wait=busy is None)
        except BlockingIOError as error:
            raise ValueError(busy) from error
        try:
            self._file.seek(0)
            content = self._file.readall()
            self._end = _read(content, accept, damaged)
            if self._end[1] > len(content):
                self._file.write(b"\n")
            self._file.truncate(self._end[1])
        except BaseException:
            self.close()
            raise

    def append(self, entry: Mapping[str, Any]) -> None:
        """Add a line and return once it is on the disk; on an error, change nothing.

        Raises:
            ValueError: another file is at its path now, or none; or others wrote to it.
        """
        with self._one:
            self._append(entry)

    def _append(self, entry: Mapping[str, Any]) -> None:
        if not _is_at(self._file, self._path):
            self._refuse("was replaced or deleted")
        last, length = self._end
        if self._torn:  # an interrupt may have left a line of ours behind
            self._file.truncate(length)
        if os.fstat(self._file.fileno()).st_size != length:
            self._refuse("was written to by another process")
        digest = digest_of(last, entry)
        line = (json.dumps({**entry, "hash": digest}) + "\n").encode()
        self._torn = True
        try:
            data = memoryview(line)
            while data:
                data = data[self._file.write(data) :]
            os.fsync(self._file.fileno())
        except BaseException:
            self._file.truncate(length)
            raise
        self._end = digest, length + len(line)
        self._torn = False

    def _refuse(self, what: str) -> NoReturn:
        raise ValueError(
            f"{self._path} {what} while this process was to write to it: let no other "
            "program change it, put the file back as it was, and start again"
        )

    @property
    def closed(self) -> bool:
        """Whether the file was closed."""
        return self._file.closed

    def close(self) -> None:
        """Close the file; adding a line afterwards is an error."""
        self._file.close()


def read_lines(path: Path, accept: Accept, damaged: Callable[[int], str]) -> None:
    """Read and check the lines of a file that may be locked, without changing it.

    Raises:
        ValueError: a line does not follow from the one before.
    """
    _read(path.read_bytes(), accept, damaged)


def digest_of(previous: str, entry: Mapping[str, Any]) -> str:
    """Return the hash of a line after the line whose hash is `previous`."""
    text = previous + json.dumps(entry, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _locked(path: Path, mode: int, wait: bool) -> io.FileIO:
    """Open and lock a file, the one that is at `path` once the lock is ours."""
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND
    while True:
        new = not path.exists()
        file = os.fdopen(os.open(path, flags, mode), "a+b", buffering=0)
        try:
            _lock(file, wait)
            if _is_at(file, path):
                if new:
                    sync_folder(path.parent)
                return file
        except BaseException:
            file.close()
            raise
        file.close()  # it was replaced or deleted during the wait


def _lock(file: io.FileIO, wait: bool) -> None:
    """Lock a file; without `wait`, only within the moment that a reader may hold it."""
    how = fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB
    for _ in range(10):
        with contextlib.suppress(BlockingIOError):
            return fcntl.flock(file, how)
        time.sleep(0.02)
    return fcntl.flock(file, how)


def _is_at(file: io.FileIO, path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    return False


def _read(
    content: bytes, accept: Accept, damaged: Callable[[int], str]
) -> tuple[str, int]:
    """Read every whole line; return the last hash, and the bytes that they take.

    That is one byte more than there is where the last line lacks its line break.
    """
    last, length = "", 0
    *lines, end = content.split(b"\n")
    for number, line in enumerate(lines if _is_torn(end) else [*lines, end], 1):
        try:
            entry = parse_json(line)
            digest = entry.pop("hash")
            if digest != digest_of(last, entry):
                raise ValueError("hash")
            accept(entry)
        except UnreadableFile:  # It says itself what is wrong with the file.
            raise
        except MALFORMED as error:
            raise ValueError(damaged(number)) from error
        last, length = digest, length + len(line) + 1
    return last, length


def _is_torn(end: bytes) -> bool:
    """Return whether the bytes after the last line break are a part of a line of ours.

    A crash may leave zeros in a file. Whatever else is there, others wrote.
    """
    with contextlib.suppress(*MALFORMED):
        parse_json(end)
        return False
    return b'{"'.startswith(end.lstrip(b"\0")[:2])
