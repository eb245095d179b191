"""Metrics as JSON lines and for TensorBoard, and picked up again on resume."""

import contextlib
import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tanager._files import json_text, write_atomically
from tanager._reading import read_json_lines
from tanager.training.run_folder import RunFolder


class Metrics:
    """Writes what may be released and, apart from it, what may not.

    Without a folder, what may be released stays in memory. Lines after `step` updates,
    of a process that died after its last checkpoint, are dropped: they come again.
    """

    def __init__(self, folder: RunFolder | None, step: int):
        self.released: list[dict[str, Any]] = []
        self._public = self._private = self._board = None
        self._folder = folder
        self._counts = np.zeros(3, np.int64)
        if folder is None:
            return
        public = folder.path / "metrics.jsonl"
        private = folder.private / "metrics.jsonl"
        self.released = _keep_until(public, step, 0o644)
        for line in _keep_until(private, step, 0o600):
            self._counts += _counts(line)
        self._public = public.open("a", buffering=1)
        self._private = private.open("a", buffering=1)
        self._board = _Board(folder.path / "tensorboard", step)

    def release(self, line: dict[str, Any]) -> None:
        """Record numbers that depend on training examples only through noise."""
        self.released.append(line)
        if self._public is not None and self._board is not None:
            self._public.write(json_text(line) + "\n")
            self._board.write(line)

    def keep(self, line: dict[str, Any]) -> None:
        """Record numbers that must not leave the run's private folder."""
        if self._private is not None:
            self._private.write(json_text(line) + "\n")
            self._counts += _counts(line)

    def close(self) -> None:
        """Close all files, and write private/warnings.txt."""
        for file in (self._public, self._private, self._board):
            if file is not None:
                file.close()
        if self._folder is not None:
            text = doubts(*self._counts.tolist())
            file = self._folder.private / "warnings.txt"
            write_atomically(file, text.encode(), 0o600)


def _counts(line: Mapping[str, Any]) -> list[int]:
    flat = next(iter(line.get("norms", ())), 0)
    return [line.get("examples", 0), line.get("dropped", 0), flat]


def doubts(examples: int, dropped: int, flat: int) -> str:
    """Return a sign that a run learns nothing, or "".

    `flat` is how many of the gradients had a norm in the lowest bin.
    """
    usable = examples - dropped
    if examples and not usable:
        return (
            f"All {examples} examples drawn so far were dropped, because their loss or "
            "gradient was not finite: the model saw only noise.\n"
        )
    if usable and flat == usable:
        return (
            f"All {usable} gradients so far had a norm below 0.001: the loss hardly "
            "depends on the trained parameters.\n"
        )
    return ""


class _Board:
    """An event file for TensorBoard, written in this thread.

    tensorboardX's `SummaryWriter` writes in another thread: on a full disk that thread
    dies, and the run hangs once its queue is full. The first event tells TensorBoard to
    forget the steps after `step`.
    """

    def __init__(self, folder: Path, step: int):
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto import event_pb2

        folder.mkdir(exist_ok=True)
        self._messages = event_pb2
        self._writer = EventsWriter(str(folder / "events"), f".{os.getpid()}")
        start = self._messages.SessionLog(status=self._messages.SessionLog.START)
        self._write(step=step + 1, session_log=start)

    def write(self, line: dict[str, Any]) -> None:
        from tensorboardX.summary import scalar

        for name, value in line.items():
            # TensorBoard cannot draw the infinite ε of a run without privacy.
            if name != "step" and math.isfinite(value):
                self._write(step=line["step"], summary=scalar(name, value))
        self._writer.flush()

    def close(self) -> None:
        # It only repeats metrics.jsonl, so the run need not fail for it.
        with contextlib.suppress(OSError):
            self._writer.close()

    def _write(self, **content: Any) -> None:
        event = self._messages.Event(wall_time=time.time(), **content)
        self._writer.write_event(event)


def _keep_until(path: Path, step: int, mode: int) -> list[dict[str, Any]]:
    lines = read_json_lines(path, ("step",))
    kept = [line for line in lines if line["step"] <= step]
    content = "".join(json.dumps(line) + "\n" for line in kept)
    write_atomically(path, content.encode(), mode)
    return kept
