"""Metrics as JSON lines and for TensorBoard, and picked up again on resume."""

import json
from pathlib import Path
from typing import Any

from tanager._files import json_text, write_atomically
from tanager.training.run_folder import RunFolder


class Metrics:
    """Writes what may be released and, apart from it, what may not.

    Args:
        folder: the run; None keeps the released metrics in memory only.
        step: how many updates were done before: later lines, of a process that died
            after its last checkpoint, are dropped, as those updates come again.
    """

    def __init__(self, folder: RunFolder | None, step: int):
        self.released: list[dict[str, Any]] = []
        self._public = self._private = self._board = None
        if folder is None:
            return
        public = folder.path / "metrics.jsonl"
        private = folder.private / "metrics.jsonl"
        self.released = _keep_until(public, step, 0o644)
        _keep_until(private, step, 0o600)
        self._public = public.open("a", buffering=1)
        self._private = private.open("a", buffering=1)
        from tensorboardX import SummaryWriter

        board = folder.path / "tensorboard"
        self._board = SummaryWriter(str(board), purge_step=step + 1)

    def release(self, line: dict[str, Any]) -> None:
        """Record numbers that depend on training examples only through noise."""
        self.released.append(line)
        if self._public is not None and self._board is not None:
            self._public.write(json_text(line) + "\n")
            for name, value in line.items():
                if name != "step":
                    self._board.add_scalar(name, value, line["step"])
            self._board.flush()

    def keep(self, line: dict[str, Any]) -> None:
        """Record numbers that must not leave the run's private folder."""
        if self._private is not None:
            self._private.write(json_text(line) + "\n")

    def close(self) -> None:
        """Close all files."""
        for file in (self._public, self._private, self._board):
            if file is not None:
                file.close()


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a JSON lines file; a torn last line is passed over."""
    if not path.exists():
        return []
    complete = path.read_text().rpartition("\n")[0]
    return [json.loads(line) for line in complete.split("\n") if line]


def _keep_until(path: Path, step: int, mode: int) -> list[dict[str, Any]]:
    kept = [line for line in read_lines(path) if line["step"] <= step]
    content = "".join(json.dumps(line) + "\n" for line in kept)
    write_atomically(path, content.encode(), mode)
    return kept
