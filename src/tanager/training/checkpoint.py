"""Checkpoints of the training state, by orbax: whole or not there at all."""

import contextlib
import gc
import hashlib
import json
import logging
import shutil
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

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
_BLOCK = 1 << 24  # bytes digested at once


class Checkpoints:
    """The checkpoints of one run; the newest two are kept.

    A checkpoint is written under a temporary name and renamed when it is complete, so
    a process that dies while writing leaves the one before it. A digest of its files
    is written last; a checkpoint whose files differ from their digest is not used.

    Args:
        folder: created when missing.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        options = ocp.CheckpointManagerOptions(
            max_to_keep=2, create=True, enable_async_checkpointing=False
        )
        self._manager = ocp.CheckpointManager(folder.absolute(), options=options)

    def save(self, step: int, state: PyTree) -> None:
        """Write the state after `step` updates; returns when it is on the disk.

        Raises:
            OSError: it could not be written, because the disk is full for instance. The
                checkpoint before it is kept.
        """
        if step in self._manager.all_steps():
            return
        try:
            with _quiet():
                self._manager.save(step, args=ocp.args.StandardSave(_named(state)))
                self._manager.wait_until_finished()
            if hosts.is_chief():
                seal(self.folder / str(step), str(step))
        except (OSError, ValueError) as error:
            full = shutil.disk_usage(self.folder).free < _nbytes(state)
            reason = "the disk is full" if full else str(error)
            raise OSError(
                f"the checkpoint of step {step} cannot be written to {self.folder} "
                f"({reason}): free the disk, and run the same command again, which "
                "resumes from the checkpoint before"
            ) from error

    def restore(self, template: PyTree) -> tuple[int, PyTree] | None:
        """Return the newest sound checkpoint as (step, state); None without one.

        Every host reads all files, and all hosts pass over what is damaged for one.

        Args:
            template: a state of the same structure, shapes and dtypes, placed on the
                devices as the restored one will be.
        """
        for step in sorted(self._manager.all_steps(), reverse=True):
            damaged = not is_sound(self.folder / str(step), str(step))
            if hosts.total(damaged) != (0,):
                self._pass_over(step, "its files differ from their digest")
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
                self._pass_over(step, str(error))
                continue
            leaves = [named[name] for name in _named(template)]
            return step, jax.tree.unflatten(jax.tree.structure(template), leaves)
        return None

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
            gc.collect()  # the event loops that orbax leaves behind


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


def _nbytes(state: PyTree) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(state))


def _named(state: PyTree) -> dict[str, Any]:
    paths = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(path): leaf for path, leaf in paths}


def seal(folder: Path, label: str) -> None:
    """Write the digest of a folder's files beside them, and force it to the disk.

    Args:
        folder: complete; what is added or changed later damages it.
        label: what the folder is, such as the step of a checkpoint.
    """
    write_json(folder / _DIGEST, {"label": label, "blake2b": _digest(folder)})


def is_sound(folder: Path, label: str) -> bool:
    """Return whether a folder holds what it held when it was sealed with this label."""
    try:
        sealed = json.loads((folder / _DIGEST).read_bytes())
        return sealed == {"label": label, "blake2b": _digest(folder)}
    except (OSError, *MALFORMED):
        return False


def _digest(folder: Path) -> str:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    files = [path for path in files if path != folder / _DIGEST]
    names = [
        [path.relative_to(folder).as_posix(), path.stat().st_size] for path in files
    ]
    total = hashlib.blake2b(json.dumps(names).encode())
    with ThreadPoolExecutor(_processor.cores()) as threads:
        for block in threads.map(_digest_block, *zip(*_blocks(files), strict=True)):
            total.update(block)
    return total.hexdigest()


def _blocks(files: list[Path]) -> Iterator[tuple[Path, int]]:
    for path in files:
        for start in range(0, max(1, path.stat().st_size), _BLOCK):
            yield path, start


def _digest_block(path: Path, start: int) -> bytes:
    with path.open("rb") as file:
        file.seek(start)
        return hashlib.blake2b(file.read(_BLOCK)).digest()
