"""Where a run stands, and how it resumes from there."""

import dataclasses
import logging
import time
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from tanager.parallel import hosts
from tanager.privacy.ledger import Ledger
from tanager.privacy.mechanism import Mechanism
from tanager.seed import Seed
from tanager.training import fingerprint
from tanager.training.checkpoint import Checkpoints
from tanager.training.repeats import Changed, Repeats
from tanager.training.run_folder import RunFolder
from tanager.training.state import State


_log = logging.getLogger(__name__)

_MARGIN = 20_000_000


@dataclasses.dataclass
class Position:
    """Where a run stands.

    Attributes:
        ledger: of everything spent so far; None on hosts that are not the chief.
        stream: the name to charge further steps under.
        begun: the number of the next step.
        state: what the steps before it led to.
        checkpoints: of the run; None without a folder.
        folder: of the run.
        repeats: checksums of the steps made; None on hosts that are not the chief.
    """

    ledger: Ledger | None
    stream: str
    begun: int
    state: State
    checkpoints: Checkpoints | None
    folder: RunFolder | None = None
    repeats: Repeats | None = None
    _saved: float = dataclasses.field(default_factory=time.monotonic)

    def charge(self, mechanism: Mechanism, step: int) -> None:
        """Charge a step; no other host can finish it before the chief has done so."""
        if self.ledger is not None:
            self.ledger.charge(mechanism, step, self.stream)
            if self.folder is not None and step == self.begun:
                self.folder.seed_is_used()

    def require_same(self, step: int, checksum: jax.Array) -> None:
        """Stop the run if a repeated step gives other sums than before.

        To be called by all hosts before anything of the step's update is used.

        Raises:
            Changed: the sums differ.
        """

        def is_same() -> bool:
            sums = np.asarray(checksum)
            return self.repeats is None or self.repeats.check(step, sums)

        if not hosts.from_chief(is_same):
            raise Changed(
                f"step {step} was computed before and gives other sums now: the "
                "machine or its settings changed. Its result was not used. Run the "
                "same command again: it skips the steps charged since the last "
                "checkpoint"
            )

    def save(self, done: int, state: State) -> None:
        """Write a checkpoint of the state after `done` steps; all hosts together."""
        if self.checkpoints is not None:
            self.checkpoints.save(done, state)
            self._saved = time.monotonic()

    def save_is_due(self, seconds: float) -> bool:
        """Return whether the last checkpoint is at least `seconds` old."""
        return time.monotonic() - self._saved >= seconds

    def close(self) -> None:
        """Let go of the files."""
        for record in (self.ledger, self.repeats):
            if record is not None:
                record.close()
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

    1. The ledger is opened first: it locks the folder against a second process. Only
       the chief holds it. Its charges must be of this run's streams and mechanism.
    2. The configuration must be the folder's, the same on every host.
    3. The newest sound checkpoint gives the state; without one, `state` does. The
       ledger must charge every step before it, and every step with a checksum.
    4. Steps charged after that checkpoint come again, in the same environment
       bit-identically and at no further charge. In another environment, or on a GPU
       without ``XLA_FLAGS=--xla_gpu_deterministic_ops=true``, or after a step that gave
       other sums than before, they could differ from what they were charged for. So
       they are given up: their charge stands, and training resumes with the step after
       them.

    Raises:
        ValueError: the folder is in use or holds another run; its ledger is another
            run's or lacks a step; the disk is nearly full; or the hosts hold different
            data.
    """
    for what, value in prints.items():
        hosts.require_same(what, value)
    ledgers: list[Ledger] = []
    sums: list[Repeats] = []

    def open_ledger() -> dict[str, Any]:
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        folder.require_space(4 * size + _MARGIN)
        ledgers.append(Ledger(folder.ledger))
        surroundings = fingerprint.environment(
            config["physical_batch_size"] // config["devices"], config["clipping"]
        )
        streams = fingerprint.check_fingerprint(
            folder, seed, config, prints, surroundings
        )
        stream = streams[-1]
        ledgers[0].require(Mechanism(**config["mechanism"]), 0, streams)
        sums.append(Repeats(folder.private / "sums.jsonl", stream))
        repeatable = surroundings["deterministic"] and not sums[0].changed
        return {
            "stream": stream,
            "lost": ledgers[0].next_step(other_than=stream if repeatable else None),
        }

    try:
        spent = hosts.from_chief(open_ledger)
        checkpoints = Checkpoints(folder.path / "checkpoints")
        begun, state = checkpoints.restore(state) or (0, state)
        hosts.from_chief(
            lambda: ledgers[0].require(
                Mechanism(**config["mechanism"]), max(begun, sums[0].made)
            )
        )
    except BaseException:
        for record in (*ledgers, *sums):
            record.close()
        raise
    if begun < spent["lost"]:
        _log.warning(
            "%d steps after checkpoint %d of run folder %s were charged and are now "
            "skipped, because repeated they could differ: the machine, the physical "
            "batch size, the versions or the settings of JAX may have changed",
            spent["lost"] - begun,
            begun,
            folder.path,
        )
    return Position(
        ledgers[0] if ledgers else None,
        spent["stream"],
        max(begun, spent["lost"]),
        state,
        checkpoints,
        folder,
        sums[0] if sums else None,
    )
