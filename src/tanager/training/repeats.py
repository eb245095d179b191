"""Show that a step repeated after a resume is the same step.

A repeated step is charged only once, because it gives the same update. Other sums under
the same noise would reveal their difference. So the first time, a checksum of the sums
is recorded; every later time, it is compared.
"""

import json
import os
from pathlib import Path
from typing import Self

import numpy as np
from jaxtyping import UInt32

from tanager._files import sync_folder
from tanager._reading import MALFORMED, is_count, parse_json


class Changed(ValueError):
    """A repeated step gave other sums; nothing of it may be used."""


class Repeats:
    """The checksums of a run's sums before noise: one for each step and stream.

    The file is private: the checksums are computed from examples without noise.

    Attributes:
        changed: whether a step of this stream once gave other sums than before. Then no
            charged step of the stream may be repeated.
        made: the number after the highest step on record, in any stream.

    Args:
        path: the file to append to, made with mode 0600 when missing.
        stream: the ledger's name for this run's randomness and environment.

    Raises:
        ValueError: the file is damaged.
    """

    def __init__(self, path: Path, stream: str):
        self.path = path
        self.changed = False
        self.made = 0
        self._stream = stream
        self._known: dict[int, str] = {}
        content = path.read_bytes() if path.exists() else b""
        complete = content.rfind(b"\n") + 1
        self._accept(content[:complete])
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._file = os.fdopen(descriptor, "ab", buffering=0)
        # A torn last line is cut off: nothing of its step had been used.
        self._file.truncate(complete)
        sync_folder(path.parent)

    def check(self, step: int, checksum: UInt32[np.ndarray, " words"]) -> bool:
        """Record the checksum of a step, or compare it with the one on record.

        Call it before anything of the step's update is used or written. It returns
        once the record is on the disk.

        Args:
            step: the number of the step.
            checksum: of its sums before noise.

        Returns:
            Whether the update may be used. False: its sums differ from those of the
            first time; `changed` stays true from now on.
        """
        step, found = int(step), np.asarray(checksum, "<u4").tobytes().hex()
        before = self._known.get(step)
        entry = {"stream": self._stream, "step": step}
        if before is None:
            self._append(entry | {"sums": found})
            self.made = max(self.made, step + 1)
            self._known[step] = found
        elif before != found:
            self.changed = True
            self._append(entry | {"changed": True})
        return before in (None, found)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _append(self, entry: dict) -> None:
        line = memoryview(json.dumps(entry).encode() + b"\n")
        while line:
            line = line[self._file.write(line) :]
        os.fsync(self._file.fileno())

    def _accept(self, content: bytes) -> None:
        for number, line in enumerate(content.split(b"\n")[:-1], 1):
            try:
                entry = parse_json(line)
                if not is_count(entry["step"]):
                    raise ValueError("step")
                self.made = max(self.made, entry["step"] + 1)
                if entry["stream"] != self._stream:
                    continue
                if entry.get("changed"):
                    self.changed = True
                else:
                    self._known.setdefault(entry["step"], str(entry["sums"]))
            except MALFORMED as error:
                raise ValueError(
                    f"{self.path}, line {number}, is damaged, so steps of this run "
                    "cannot be repeated: train into another folder"
                ) from error
