"""Runs of `tanager train` for the scripts beside this one: made once, then read."""

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tanager.cli import main as tanager


def trained(words: Sequence[str], run: Path) -> dict[str, Any]:
    """Print a command, run it or go on with it, and return the result in its folder."""
    words = ["train", *words, "--out", str(run)]
    print(f"\n$ tanager {shlex.join(words)}", flush=True)
    if not (run / "result.json").exists() and (status := tanager(words)):
        raise SystemExit(status)
    return json.loads((run / "result.json").read_text())


def heading(columns: Sequence[str], epsilons: Sequence[float]) -> list[str]:
    """Return the first two lines of a table with a column for each ε."""
    names = [*columns, *(f"ε = {epsilon}" for epsilon in epsilons)]
    return [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
