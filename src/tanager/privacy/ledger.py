"""The ledger: an append-only record of every noisy update that was begun.

A step is charged, and the charge is on the disk, before its update is computed. So the
ledger never claims less than was spent, whatever happens afterwards. Each line is a
JSON object with a hash of itself and of the line before it:

    {"stream": "9f0c…", "step": 17, "sample_rate": 0.178, "noise_multiplier": 3.1,
     "adjacency": "add-or-remove-one", "hash": "…"}

A *stream* names one source of randomness for one configuration. If a resumed run
computes a step again in the same stream, the output is the same and counts once. The
same step in another stream is a new release and counts again. Step 0 of the stream
`CLASS_COUNTS` is not an update: it is the release of the class counts before the first.
"""

import dataclasses
import os
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Any, NoReturn, Self

from tanager import _validate as validate
from tanager._reading import is_count
from tanager.privacy.hashed_file import HashedFile, read_lines
from tanager.privacy.mechanism import Adjacency, Mechanism, require_step


CLASS_COUNTS = "class counts"

_UNKNOWN = (
    "What this run spent is unknown: train into another folder, and count the cost of "
    "this run in full"
)


class Ledger:
    """The charges of a run, in a file that is appended to, or in memory.

    Raises:
        ValueError: the file was altered (a line does not follow from the one before),
            or another process is writing to it, or this one has it open.
    """

    def __init__(self, path: str | os.PathLike | None = None):
        self.path = None if path is None else Path(path)
        self._charges: dict[tuple[str, int], Mechanism] = {}
        self._file = None
        if self.path is not None:
            self._file = HashedFile(
                self.path,
                self._accept,
                self._damaged,
                busy=f"ledger {path} is being written by another process, or still "
                "open in this one: wait until that run ends or call close() of the "
                "open Ledger, or train into another folder",
            )

    @classmethod
    def read(cls, path: str | os.PathLike) -> Self:
        """Read a ledger that another process may be writing, without changing it.

        Charging what this returns stays in memory.
        """
        ledger = cls()
        ledger.path = Path(path)
        read_lines(ledger.path, ledger._accept, ledger._damaged)
        return ledger

    def charge(self, mechanism: Mechanism, step: int, stream: str = "") -> None:
        """Record that `step` is about to be spent, and return once it is on the disk.

        Raises:
            ValueError: `step` is outside the mechanism's steps, or was charged in this
                stream for another mechanism, or a compiled program makes the call.
        """
        remedy = "charge before, or call noise(total, step), which charges each run"
        validate.not_traced("ledger.charge", remedy)
        validate.instance(Mechanism, mechanism=mechanism)
        require_step(mechanism, step)
        single = dataclasses.replace(mechanism, steps=1)
        before = self._charges.get((stream, step))
        if before == single:
            return
        if before is not None:
            rule = "was charged in this stream for another mechanism"
            remedy = f"{before} before, {single} now; use another stream"
            validate.refuse("step", step, rule, remedy)
        entry = {"stream": stream, "step": int(step)} | dataclasses.asdict(single)
        del entry["steps"]
        if self._file is not None:
            if self._file.closed:
                raise ValueError(
                    f"ledger {self.path} was closed, and charges no step: open it "
                    f"again with tanager.Ledger({str(self.path)!r})"
                )
            self._file.append(entry)
        self._charges[stream, int(step)] = single

    def require(
        self,
        mechanism: Mechanism,
        done: int,
        streams: Collection[str] | None = None,
        class_counts: Mechanism | None = None,
    ) -> None:
        """Check that this is the complete ledger of a run that made `done` steps.

        `class_counts` is what a run spends on them before the first step, if it does.

        Raises:
            ValueError: a charge is of another mechanism or of none of the `streams`
                (None allows any), or a step that was made is not charged.
        """
        single = dataclasses.replace(mechanism, steps=1)
        released = self._charges.get((CLASS_COUNTS, 0))
        if released != class_counts and (released is not None or done):
            self._refuse(
                "does not charge the class counts as the run releases them: it belongs "
                "to another"
            )
        for (stream, step), charged in self._updates().items():
            if streams is not None and stream not in streams:
                self._refuse(f"charges step {step} to {stream!r}, a stream of another")
            if charged != single:
                self._refuse(
                    f"charges step {step} with {_settings(charged)}, and the run "
                    f"spends {_settings(mechanism)}: it belongs to another"
                )
        missing = set(range(done)) - {step for _, step in self._updates()}
        if missing:
            self._refuse(
                f"does not charge step {min(missing)}, which was made: it is not the "
                "complete ledger of this"
            )

    def _refuse(self, what: str) -> NoReturn:
        raise ValueError(f"ledger {self.path} {what} run. {_UNKNOWN}")

    def steps(self, stream: str | None = None) -> int:
        """Return how many updates were charged, in one stream or in all."""
        return sum(stream in (None, name) for name, _ in self._updates())

    def next_step(self, *, other_than: str | None = None) -> int:
        """Return the step after the last charged, not counting one stream."""
        steps = [step for name, step in self._updates() if name != other_than]
        return max(steps, default=-1) + 1

    def _updates(self) -> dict[tuple[str, int], Mechanism]:
        charges = self._charges.items()
        return {where: one for where, one in charges if where[0] != CLASS_COUNTS}

    def mechanisms(self) -> list[Mechanism]:
        """Return what was spent: a mechanism for each setting, with its steps."""
        counts = Counter(self._charges.values())
        return [dataclasses.replace(one, steps=many) for one, many in counts.items()]

    def epsilon(self, delta: float) -> float:
        """Return ε at `delta` of everything charged, by PLD; 0 for nothing.

        Raises:
            ValueError: the charges have different adjacencies and so no common ε.
        """
        from tanager.privacy import accountant

        return accountant.composed_epsilon(self.mechanisms(), delta)

    def close(self) -> None:
        """Close the file; charging afterwards is an error."""
        if self._file is not None:
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _damaged(self, line: int) -> str:
        return (
            f"ledger {self.path}, line {line}, does not follow from the line before "
            f"it: the file was changed or damaged. {_UNKNOWN}"
        )

    def _accept(self, entry: dict[str, Any]) -> None:
        where = entry["stream"], entry["step"]
        if not isinstance(where[0], str) or not is_count(where[1]):
            raise ValueError("stream or step")
        rate, noise = entry["sample_rate"], entry["noise_multiplier"]
        single = Mechanism(rate, noise, 1, Adjacency(entry["adjacency"]))
        if self._charges.setdefault(where, single) != single:
            raise ValueError("charged twice")


def _settings(one: Mechanism) -> str:
    return (
        f"sample rate {one.sample_rate:g}, noise multiplier {one.noise_multiplier:g} "
        f"({one.adjacency})"
    )
