"""Folders of this user: for files that tanager can make again, and for others."""

import os
import pathlib


def cache_folder() -> pathlib.Path:
    """Return ``$TANAGER_CACHE_DIR``, or by default ``~/.cache/tanager``."""
    named = os.environ.get("TANAGER_CACHE_DIR")
    if named:
        return pathlib.Path(named)
    base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(base) / "tanager"


def state_folder() -> pathlib.Path:
    """Return ``$TANAGER_STATE_DIR``, or by default ``~/.local/state/tanager``.

    What is in it cannot be made again.
    """
    named = os.environ.get("TANAGER_STATE_DIR")
    if named:
        return pathlib.Path(named)
    base = os.environ.get("XDG_STATE_HOME") or pathlib.Path.home() / ".local/state"
    return pathlib.Path(base) / "tanager"


def private_folder(*names: str) -> pathlib.Path:
    """Return a folder in the cache that only its owner can read; create it if missing.

    Raises:
        OSError: it cannot be made.
    """
    folder = cache_folder().joinpath(*names)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)
    return folder
