"""Folders of this user: home, for files that tanager can make again, for others."""

import os
import pathlib


def cache_folder() -> pathlib.Path:
    """Return ``$TANAGER_CACHE_DIR``, or by default ``~/.cache/tanager``."""
    return _folder("TANAGER_CACHE_DIR", "XDG_CACHE_HOME", ".cache")


def state_folder() -> pathlib.Path:
    """Return ``$TANAGER_STATE_DIR``, or by default ``~/.local/state/tanager``.

    What is in it cannot be made again.
    """
    return _folder("TANAGER_STATE_DIR", "XDG_STATE_HOME", ".local/state")


def _folder(own: str, variable: str, usual: str) -> pathlib.Path:
    if named := os.environ.get(own):
        return pathlib.Path(named)
    if base := os.environ.get(variable):
        return pathlib.Path(base) / "tanager"
    try:
        return pathlib.Path.home() / usual / "tanager"
    except RuntimeError as error:
        raise OSError(
            f"this user has no home folder: name a folder with {own}"
        ) from error


def expanded(path: str | os.PathLike[str]) -> pathlib.Path:
    """Return a path with the home folder in place of ``~``.

    Where no user has the name after it, it is a name like others.
    """
    return pathlib.Path(os.path.expanduser(path))


def private_folder(*names: str) -> pathlib.Path:
    """Return a folder in the cache that only its owner can read; create it if missing.

    Raises:
        OSError: it cannot be made.
    """
    folder = cache_folder().joinpath(*names)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)
    return folder
