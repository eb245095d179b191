"""Checkpoints of the training state, by orbax: whole or not there at all."""

import contextlib
import gc
import hashlib
import json
import logging
import os
import shutil
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

import jax
import numpy as np
import orbax.checkpoint as ocp
from jaxtyping import PyTree

from tanager import _processor
from tanager._files import write_json
from tanager._reading import MALFORMED
from tanager.parallel import hosts


_log = logging.getLogger(__name__)
_DIGEST = "digest.json"


class Checkpoints:
    """The checkpoints of one run; the newest two are kept.

    A checkpoint is written under a temporary name and renamed when it is complete, so
    a process that dies while writing leaves the one before it. A digest of its files
    is written last; a checkpoint whose files differ from their digest is not used.
    """

    def __init__(self, folder: Path):
        self.folder, self._failed = folder, False
        options = ocp.CheckpointManagerOptions(
            max_to_keep=2, create=True, enable_async_checkpointing=False
        )
        self._manager = ocp.CheckpointManager(folder.absolute(), options=options)

    def save(self, step: int, state: PyTree) -> None:
        """Write the state after `step` updates; returns when it is on the disk.

        Raises:
            OSError: it could not be written; the checkpoint before it is kept.
        """
        if step in self._manager.all_steps():
            return
        try:
            with _quiet():
                self._manager.save(step, args=ocp.args.StandardSave(_named(state)))
                self._manager.wait_until_finished()
            if hosts.is_chief():
                written = self.folder / str(step)
                write_json(written / _DIGEST, _digest(written))
        except (OSError, ValueError) as error:
            self._failed = True
            size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
            full = shutil.disk_usage(self.folder).free < size
            reason = "the disk is full" if full else str(error)
            raise OSError(
                f"the checkpoint of step {step} cannot be written to {self.folder} "
                f"({reason}): free the disk, and run the same command again with this "
                "run's folder as --out, which resumes from the checkpoint before"
            ) from error

    def restore(self, template: PyTree) -> tuple[int, PyTree] | None:
        """Return the newest sound checkpoint as (step, state); None without one.

        It is shaped and placed like `template`. Every host reads all files, and all
        hosts pass over what is damaged for one, and delete it.

        Raises:
            OSError: one cannot be read, which may be no fault of its files.
        """
        for step in sorted(self._manager.all_steps(), reverse=True):
            try:
                damage = _damage(self.folder / str(step))
            except OSError as error:
                raise self._unreadable(step, error) from error
            if hosts.total(damage is not None) != (0,):
                self._pass_over(step, damage or "it is for another host")
                continue
            target = jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct(
                    np.shape(leaf), leaf.dtype, sharding=leaf.sharding
                ),
                _named(template),
            )
            try:
                with _quiet():
                    named = self._manager.restore(
                        step, args=ocp.args.StandardRestore(target)
                    )
            except (MemoryError, jax.errors.JaxRuntimeError):
                raise  # it can be read where there is more memory
            except Exception as error:  # orbax raises nearly anything
                self._failed = True
                raise self._unreadable(step, error) from error
            leaves = [named[name] for name in _named(template)]
            return step, jax.tree.unflatten(jax.tree.structure(template), leaves)
        return None

    def _unreadable(self, step: int, error: Exception) -> OSError:
        remedy = "use the version of orbax-checkpoint that wrote it"
        if isinstance(error, OSError):
            remedy = "give yourself the right to read it, or mend the disk"
        return OSError(
            f"the checkpoint of step {step} in {self.folder} cannot be read "
            f"({type(error).__name__}: {error}): {remedy}, and run the same command "
            "again. Without its folder, training resumes from the checkpoint before it"
        )

    def _pass_over(self, step: int, reason: str) -> None:
        _log.warning(
            "the checkpoint of step %d in %s is damaged and was deleted (%s): training "
            "resumes from the checkpoint before it, or from the first step",
            step,
            self.folder,
            reason,
        )
        self._manager.delete(step)

    def close(self) -> None:
        """Wait for writes under way and let the folder go."""
        with _quiet():
            self._manager.close()
            if self._failed:
                gc.collect()  # the event loops that orbax left behind


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence orbax in the block: it logs whole stacks of what is raised here anyway.

    The event loops that it leaves behind warn when they are collected, so they are
    collected here after an error.
    """
    loggers = [logging.getLogger(name) for name in ("absl", "asyncio")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            try:
                yield
            except Exception:
                gc.collect()
                raise
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _named(state: PyTree) -> dict[str, Any]:
    paths = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(path): leaf for path, leaf in paths}


def _damage(folder: Path) -> str | None:
    """Return how a folder is not what was sealed; None for the same name and files."""
    try:
        sealed = (folder / _DIGEST).read_bytes()
    except FileNotFoundError:
        return "the process died before it was complete"
    with contextlib.suppress(*MALFORMED):
        if json.loads(sealed) == _digest(folder):
            return None
    return "its files differ from their digest"


def _digest(folder: Path) -> list[str]:
    def stop(error: OSError) -> NoReturn:
        raise error

    found = os.walk(folder, onerror=stop)  # `rglob` passes over what it may not read
    files = sorted(Path(place, name) for place, _, names in found for name in names)
    files = [path for path in files if path != folder / _DIGEST]
    with ThreadPoolExecutor(_processor.cores()) as threads:
        digests = threads.map(_digest_file, files)
        names = [path.relative_to(folder.parent).as_posix() for path in files]
        return [f"{name} {digest}" for name, digest in zip(names, digests, strict=True)]


def _digest_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()
