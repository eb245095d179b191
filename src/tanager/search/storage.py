"""Where Optuna keeps a study: a journal file in the study's folder, or a data base.

The journal is written under a lock that dies with its process, and a line that a
killed process left torn is cut off before the next is written.
"""

import contextlib
import fcntl
import os
import time
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from tanager import _validate as validate
from tanager._reading import reading


if TYPE_CHECKING:
    from optuna.storages import BaseStorage


PATIENCE = 60.0
"""Seconds to wait for another process that writes to the journal."""


def require_optuna() -> None:
    """Refuse to begin where Optuna is not installed.

    Raises:
        ValueError: it is not; the message says how to get it.
    """
    try:
        import optuna
    except ModuleNotFoundError:
        raise ValueError(
            "a search needs Optuna, which is not installed: pip install 'optuna>=5,<6'"
        ) from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)


def open_storage(url: str | None, folder: Path) -> "BaseStorage":
    """Open the storage of a study.

    Args:
        url: of a data base, as SQLAlchemy knows it, such as
            ``postgresql://user@host/name``; None for a journal in the folder.
        folder: of the study.

    Raises:
        ValueError: the data base does not answer, or the journal cannot be read.
    """
    require_optuna()
    if url is None:
        return _journal(folder / "journal.log")
    from optuna.storages import RDBStorage

    try:
        return RDBStorage(url)
    except ImportError as error:
        driver = getattr(error.__cause__ or error, "name", None)
        validate.refuse(
            "storage",
            without_password(url),
            f"needs {driver or 'a driver'}, which is not installed",
            f"pip install {driver}" if driver else _first_line(error),
        )
    except Exception as error:  # of SQLAlchemy, its drivers, Optuna
        validate.refuse(
            "storage",
            without_password(url),
            "cannot be opened",
            f"{_first_line(error)}; nothing is lost: the same command goes on when it "
            "answers again",
        )


@contextlib.contextmanager
def answering(url: str | None) -> Iterator[None]:
    """Say plainly that a storage was lost, if it is while the block runs.

    Args:
        url: of the data base, or None.

    Raises:
        ValueError: the data base stopped answering.
    """
    from optuna.exceptions import StorageInternalError
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except (StorageInternalError, SQLAlchemyError) as error:
        validate.refuse(
            "storage",
            without_password(url or ""),
            "stopped answering",
            f"{_first_line(error.__cause__ or error)}; nothing is lost: the same "
            "command goes on when it answers again",
        )


def without_password(url: str) -> str:
    """Return a URL that may be shown."""
    parts = urllib.parse.urlsplit(url)
    if parts.password is None:
        return url
    shown = parts.netloc.replace(f":{parts.password}@", ":***@")
    return urllib.parse.urlunsplit(parts._replace(netloc=shown))


def _journal(path: Path) -> "BaseStorage":
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    remedy = (
        "move it away, and the study is put together again from the folders of its "
        "trials"
    )
    with reading(path, "cannot be read", remedy, "storage"):
        lock = Lock(path)
        lock.acquire()  # mends what a killed process left
        lock.release()
        backend = JournalFileBackend(
            str(path),
            lock_obj=lock,  # pyright: ignore[reportArgumentType]
        )
        return JournalStorage(backend)


class Lock:
    """A lock of the journal: `optuna.storages.journal.BaseJournalFileLock`.

    Args:
        journal: whose end is mended when the lock is taken.
        patience: seconds to wait for another process.
    """

    def __init__(self, journal: Path, patience: float = PATIENCE):
        self._journal = journal
        self._patience = patience
        self._file = None

    def acquire(self) -> bool:
        """Wait for the lock.

        Raises:
            TimeoutError: another process keeps it.
        """
        path = self._journal.with_name(f"{self._journal.name}.lock")
        file = path.open("a")
        until = time.monotonic() + self._patience
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    file.close()
                    raise TimeoutError(
                        f"the journal {self._journal} has been locked by another "
                        f"process for {self._patience:g} s: end that process, and "
                        "start this command again; nothing is lost"
                    ) from None
                time.sleep(0.01)
        self._file = file
        self._mend()
        return True

    def release(self) -> None:
        """Give the lock back."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _mend(self) -> None:
        if not self._journal.exists():
            return
        with self._journal.open("r+b") as journal:
            size = journal.seek(0, os.SEEK_END)
            if size == 0:
                return
            journal.seek(size - 1)
            if journal.read(1) == b"\n":
                return
            journal.seek(0)
            journal.truncate(journal.read().rfind(b"\n") + 1)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
