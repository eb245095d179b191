"""Checkpoints of the training state, by orbax: whole or not there at all."""

import logging
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jaxtyping import PyTree


_log = logging.getLogger(__name__)


class Checkpoints:
    """The checkpoints of one run; the newest two are kept.

    A checkpoint is written under a temporary name and renamed when it is complete, so
    a process that dies while writing leaves the one before it.

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
        """Write the state after `step` updates; returns when it is on the disk."""
        if step not in self._manager.all_steps():
            self._manager.save(step, args=ocp.args.StandardSave(_named(state)))
            self._manager.wait_until_finished()

    def restore(self, template: PyTree) -> tuple[int, PyTree] | None:
        """Return the newest readable checkpoint as (step, state); None without one.

        Args:
            template: a state of the same structure, shapes and dtypes.
        """
        for step in sorted(self._manager.all_steps(), reverse=True):
            target = jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype),
                _named(template),
            )
            try:
                named = self._manager.restore(
                    step, args=ocp.args.StandardRestore(target)
                )
            except (OSError, ValueError, KeyError) as error:
                _log.warning(
                    "checkpoint %s of step %d cannot be read (%s): "
                    "going back to the one before",
                    self.folder,
                    step,
                    error,
                )
                self._manager.delete(step)
                continue
            leaves = [jax.numpy.asarray(named[name]) for name in _named(template)]
            return step, jax.tree.unflatten(jax.tree.structure(template), leaves)
        return None

    def close(self) -> None:
        """Wait for writes under way and let the folder go."""
        self._manager.close()


def _named(state: PyTree) -> dict[str, Any]:
    paths = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(path): leaf for path, leaf in paths}
