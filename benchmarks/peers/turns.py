"""PyTorch's side of `extraction` and `last_layer`, as tanager's side sees it."""

import argparse
import json
import subprocess
from pathlib import Path
from typing import Any

from workers import HERE, ROOT


class Other:
    """`torch_turns.py` at work in its environment."""

    def __init__(self, python: Path, kind: str, **options: Any):
        if not python.exists():
            raise SystemExit(f"{python} is not there: make bench-peers lays it")
        self._process = subprocess.Popen(
            [python, HERE / "torch_turns.py"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.versions = self._ask([kind, options])

    def turn(self, **what: Any) -> dict[str, Any]:
        """Let it have its turn, and wait."""
        return self._ask(what)

    def _ask(self, what: Any) -> dict[str, Any]:
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        print(json.dumps(what), file=process.stdin, flush=True)
        if not (line := process.stdout.readline()):
            raise SystemExit(f"PyTorch's side ended: exit {process.wait()}")
        return json.loads(line)

    def end(self) -> None:
        """Let it go."""
        process = self._process
        assert process.stdin is not None
        process.stdin.close()
        process.wait()


def add_python(parser: argparse.ArgumentParser) -> None:
    """Add the option that names the environment with torch, timm and Opacus."""
    default = ROOT / ".venv-opacus/bin/python"
    parser.add_argument("--python", type=Path, default=default, help="%(default)s")
