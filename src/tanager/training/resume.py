"""Where a run stands, and how it goes on from there."""

import dataclasses
import time
from collections.abc import Mapping
from typing import Any

import jax

from tanager.privacy.ledger import Ledger
from tanager.seed import Seed
from tanager.training import identity
from tanager.training.checkpoint import Checkpoints
from tanager.training.run_folder import RunFolder
from tanager.training.step import State


_MARGIN = 20_000_000


@dataclasses.dataclass
class Position:
    """Where a run stands.

    Attributes:
        ledger: of everything spent so far.
        stream: the name to charge further steps under.
        begun: the number of the next step.
        state: what the steps before it led to.
        checkpoints: of the run; None without a folder.
    """

    ledger: Ledger
    stream: str
    begun: int
    state: State
    checkpoints: Checkpoints | None
    _saved: float = dataclasses.field(default_factory=time.monotonic)

    def save(self, done: int, state: State) -> None:
        """Write a checkpoint of the state after `done` steps."""
        if self.checkpoints is not None:
            self.checkpoints.save(done, state)
            self._saved = time.monotonic()

    def save_is_due(self, seconds: float) -> bool:
        """Return whether the last checkpoint is at least `seconds` old."""
        return time.monotonic() - self._saved >= seconds

    def close(self) -> None:
        """Let go of the files."""
        self.ledger.close()
        if self.checkpoints is not None:
            self.checkpoints.close()


def resume(
    folder: RunFolder,
    seed: Seed,
    config: Mapping[str, Any],
    prints: Mapping[str, str],
    state: State,
) -> Position:
    """Open a run's folder and return where it stands.

    1. The ledger is opened first: it locks the folder against a second process.
    2. The configuration must be the folder's.
    3. The newest readable checkpoint gives the state; without one, `state` does.
    4. Steps charged after that checkpoint come again, in the same environment
       bit-identically and at no further charge. In another environment, or on a GPU
       without ``XLA_FLAGS=--xla_gpu_deterministic_ops=true``, they could come out
       otherwise than what they were charged for, so they are given up: their charge
       stands, and training goes on with the step after them.

    Raises:
        ValueError: the folder is in use, holds another run, or its ledger is behind
            its checkpoints; or the disk is nearly full.
    """
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    folder.require_space(4 * size + _MARGIN)
    ledger = Ledger(folder.ledger)
    try:
        surroundings = identity.environment(
            config["physical_batch_size"], config["clipping"]
        )
        stream = identity.settle(folder, seed, config, prints, surroundings)
        checkpoints = Checkpoints(folder.path / "checkpoints")
        begun, state = checkpoints.restore(state) or (0, state)
        if begun > ledger.next_step():
            raise ValueError(
                f"run folder {folder.path} has a checkpoint of step {begun} but its "
                f"ledger ends at step {ledger.next_step()}: restore the ledger from a "
                "copy, or train into another folder"
            )
    except BaseException:
        ledger.close()
        raise
    lost = ledger.next_step(
        other_than=stream if surroundings["deterministic"] else None
    )
    return Position(ledger, stream, max(begun, lost), state, checkpoints)
