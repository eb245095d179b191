"""Where a run stands, and how it resumes from there.

A repeated step is charged only once, because it gives the same update. Other sums under
the same noise would reveal their difference. So the first time, a checksum of the sums
is recorded; every later time, it is compared.
"""

import dataclasses
import logging
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import UInt32

from tanager._reading import is_count
from tanager.parallel import hosts
from tanager.privacy.class_counts import release_in
from tanager.privacy.hashed_file import HashedFile
from tanager.privacy.ledger import CLASS_COUNTS, Ledger
from tanager.privacy.mechanism import Mechanism
from tanager.seed import Seed
from tanager.training import fingerprint
from tanager.training.checkpoint import Checkpoints
from tanager.training.run_folder import RunFolder
from tanager.training.state import State


_log = logging.getLogger(__name__)

_MARGIN = 20_000_000


class Repeats:
    """The checksums of a run's sums before noise: one for each step and stream.

    The file is private: the checksums are computed from examples without noise.

    Attributes:
        changed: whether a step of this stream once gave other sums than before. Then no
            charged step of the stream may be repeated.
        made: the number after the highest step on record, in any stream.
    """

    def __init__(self, path: Path, stream: str):
        self.path = path
        self.changed = False
        self.made = 0
        self._stream = stream
        self._known: dict[int, str] = {}
        self._file = HashedFile(path, self._accept, self._damaged, mode=0o600)

    def check(self, step: int, checksum: UInt32[np.ndarray, " words"]) -> bool:
        """Return whether the sums of a step are those of its first time.

        Call it before anything of the step's update is used or written. It returns
        once the record is on the disk. After False, `changed` stays true.
        """
        step, found = int(step), np.asarray(checksum, "<u4").tobytes().hex()
        before = self._known.get(step)
        entry = {"stream": self._stream, "step": step}
        if before is None:
            self._file.append(entry | {"sums": found})
            self.made = max(self.made, step + 1)
            self._known[step] = found
        elif before != found:
            self.changed = True
            self._file.append(entry | {"changed": True})
        return before in (None, found)

    def know(self, steps: Iterable[int]) -> bool:
        """Return whether the sums of all these steps are on record."""
        return self._known.keys() >= {*steps}

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _damaged(self, line: int) -> str:
        return (
            f"{self.path}, line {line}, is damaged, so steps of this run cannot be "
            "repeated: train into another folder"
        )

    def _accept(self, entry: dict[str, Any]) -> None:
        if not is_count(entry["step"]):
            raise ValueError("step")
        self.made = max(self.made, entry["step"] + 1)
        if entry["stream"] == self._stream:
            if entry.get("changed"):
                self.changed = True
            else:
                self._known.setdefault(entry["step"], str(entry["sums"]))


@dataclasses.dataclass
class Position:
    """Where a run stands: `begun` is the number of the next step.

    Steps are charged under the name `stream`. Only the chief has a ledger and checksums
    of the steps made (`repeats`); only a run with a folder has checkpoints.
    """

    state: State
    ledger: Ledger | None = None
    stream: str = ""
    begun: int = 0
    checkpoints: Checkpoints | None = None
    folder: RunFolder | None = None
    repeats: Repeats | None = None
    _saved: float = dataclasses.field(default_factory=time.monotonic)

    def charge(self, mechanism: Mechanism, step: int) -> None:
        """Charge a step; no other host can finish it before the chief has done so."""
        if self.ledger is not None:
            self.ledger.charge(mechanism, step, self.stream)
            if self.folder is not None and step == self.begun:
                self.folder.seed_is_used()

    def charge_class_counts(self, release: Mechanism) -> None:
        """Charge the class counts, which are computed before the first step."""
        if self.ledger is not None:
            self.ledger.charge(release, 0, CLASS_COUNTS)
            if self.folder is not None:
                self.folder.seed_is_used()

    def require_same(self, step: int, checksum: jax.Array) -> None:
        """Stop the run if a repeated step gives other sums than before.

        To be called by all hosts before anything of the step's update is used.
        """

        def is_same() -> bool:
            sums = np.asarray(checksum)
            return self.repeats is None or self.repeats.check(step, sums)

        if not hosts.from_chief(is_same):
            raise ValueError(
                f"step {step} was computed before and gives other sums now: the "
                "machine or its settings changed. Its result was not used. Run the "
                "same command again with this run's folder as --out: it skips the "
                "steps charged since the last checkpoint"
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
       other sums than before, they could differ from what they were charged for, and
       without their checksums nobody would know. So they are given up: their charge
       stands, and training resumes with the step after them.

    Raises:
        ValueError: the folder is in use or holds another run; its ledger is another
            run's or lacks a step; the disk is nearly full; or the hosts differ in data,
            settings or newest checkpoint.
    """
    for what, value in prints.items():
        hosts.require_same(what, value)
    hosts.require_same("settings", fingerprint.of_settings(config))
    mechanism, counts = Mechanism(**config["mechanism"]), release_in(config)
    position = Position(state, folder=folder)

    def open_ledger() -> tuple[str, bool]:
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        folder.require_space(4 * size + _MARGIN)
        position.ledger = ledger = Ledger(folder.ledger)
        surroundings = fingerprint.environment(
            config["physical_batch_size"] // config["devices"], config["clipping"]
        )
        *others, stream = fingerprint.check_fingerprint(
            folder, seed, config, prints, surroundings
        )
        ledger.require(mechanism, 0, [*others, stream], counts)
        position.repeats = repeats = Repeats(folder.private / "sums.jsonl", stream)
        return stream, surroundings["deterministic"] and not repeats.changed

    def first_step() -> int:
        ledger, repeats = position.ledger, position.repeats
        assert ledger is not None and repeats is not None
        ledger.require(mechanism, max(begun, repeats.made), class_counts=counts)
        lost = max(begun, ledger.next_step(other_than=position.stream))
        after = max(begun, ledger.next_step())
        # Of the last, nothing may have been used when its process died.
        known = repeats.know(range(lost, after - 1))
        return lost if repeatable and known else after

    try:
        position.stream, repeatable = hosts.from_chief(open_ledger)
        position.checkpoints = Checkpoints(folder.path / "checkpoints")
        begun, position.state = position.checkpoints.restore(state) or (0, state)
        hosts.require_same("checkpoint", str(begun))
        position.begun = hosts.from_chief(first_step)
    except BaseException:
        position.close()
        raise
    if begun < position.begun:
        _log.warning(
            "%d steps after checkpoint %d of run folder %s were charged and are now "
            "skipped, because repeated they could differ: the machine, the physical "
            "batch size, the versions or the settings of JAX may have changed, or "
            "private/sums.jsonl was lost",
            *(position.begun - begun, begun, folder.path),
        )
    return position
