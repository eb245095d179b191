"""Hide what the runs of a private search print and leave behind.

The number of runs is secret. Lines on a terminal and programs in a cache can be
counted, so all of them go into `private/`; times of files outside are made equal.
"""

import contextlib
import logging
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

from tanager._cache import cache_folder


@contextlib.contextmanager
def hidden(private: Path) -> Iterator[None]:
    """Send output to a private folder's output.txt, caches to its cache/."""
    with _no_logs(), _caches(private / "cache"), _output(private / "output.txt"):
        yield


def same_times(folder: Path, like: Path) -> None:
    """Give a folder and everything directly in it the time of one of its files."""
    time = like.stat().st_mtime_ns
    for path in (*folder.iterdir(), folder):
        os.utime(path, ns=(time, time))


@contextlib.contextmanager
def _no_logs() -> Iterator[None]:
    """Log nothing: a handler may write to a file of its own."""
    before = logging.root.manager.disable
    logging.disable()
    try:
        yield
    finally:
        logging.disable(before)


@contextlib.contextmanager
def _caches(folder: Path) -> Iterator[None]:
    if not folder.exists():  # Timings that come later would be of later runs only.
        folder.mkdir(mode=0o700)
        for timings in cache_folder().glob("clipping-*.json"):
            shutil.copy(timings, folder)
    variable = os.environ.get("TANAGER_CACHE_DIR")
    programs = getattr(jax.config, "jax_compilation_cache_dir", None)
    os.environ["TANAGER_CACHE_DIR"] = str(folder)
    _keep_programs(str(folder / "programs"))
    try:
        yield
    finally:
        _keep_programs(programs)
        if variable is None:
            del os.environ["TANAGER_CACHE_DIR"]
        else:
            os.environ["TANAGER_CACHE_DIR"] = variable


def _keep_programs(folder: str | None) -> None:
    jax.config.update("jax_compilation_cache_dir", folder)
    compilation_cache.reset_cache()


@contextlib.contextmanager
def _output(path: Path) -> Iterator[None]:
    """Write to a file what Python and the libraries below it print."""
    sys.stdout.flush()
    sys.stderr.flush()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    before = {number: os.dup(number) for number in (1, 2)}
    try:
        with (
            os.fdopen(descriptor, "w", buffering=1, encoding="utf-8") as file,
            contextlib.redirect_stdout(file),
            contextlib.redirect_stderr(file),
        ):
            for number in before:
                os.dup2(descriptor, number)
            try:
                yield
            finally:
                for number, one in before.items():
                    os.dup2(one, number)
    finally:
        for one in before.values():
            os.close(one)
