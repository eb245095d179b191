"""The systems at work: each a process of its own, in an environment of its own."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any


HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent

ENVIRONMENTS = {
    "torch-sgd": "opacus",
    "opacus": "opacus",
    "fastdp": "opacus",
    "private-vision": "opacus",
    "jax-privacy": "jax-privacy",
    "jax-sgd": "",
    "jax-vmap": "",
    "tanager": "",
}
"""Which .venv-NAME a library lives in; "" is that of the interpreter at work."""


class Failed(RuntimeError):
    """A system could not do it; the message says why."""


class Process:
    """A worker in its environment.

    Args:
        system: such as "opacus:ghost".
        checkouts: folders of libraries that are not installed, by library.
    """

    def __init__(self, system: str, checkouts: dict[str, str]):
        library = system.split(":")[0]
        name = ENVIRONMENTS[library]
        python = ROOT / f".venv-{name}/bin/python" if name else Path(sys.executable)
        if not python.exists():
            raise Failed(f"{python} is not there: make bench-peers lays it")
        script = "torch_worker.py" if name == "opacus" else "jax_worker.py"
        environment = dict(os.environ)
        if library in checkouts:
            environment["PYTHONPATH"] = checkouts[library]
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        cores = len(os.sched_getaffinity(0))
        self._process = subprocess.Popen(
            [python, HERE / script, str(cores)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment,
        )

    def ask(self, what: str, **more: Any) -> dict[str, Any]:
        """Ask for something and wait for the answer.

        Raises:
            Failed: the system failed at it, or its process died.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            print(json.dumps({"do": what, **more}), file=self._process.stdin)
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self._log.seek(0)
            said = self._log.read().strip().splitlines()[-1:] or ["killed"]
            raise Failed(f"exit {self._process.wait()}: {said[0][:300]}")
        answer = json.loads(line)
        if "error" in answer:
            raise Failed(answer["error"])
        return answer

    def end(self) -> None:
        """Let it go."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with self._process.stdout, self._log, contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Workers:
    """The systems on one piece of work: those that are ready, and those that failed."""

    def __init__(self, systems: tuple[str, ...], work: dict[str, Any], options):
        self.rows: dict[str, dict[str, Any]] = {name: {} for name in systems}
        self.ready: dict[str, Process] = {}
        work = work | {"precision": options.precision}
        for name in systems:
            say(f"{work['model']}, {work['physical_batch']} rows: preparing {name}")
            try:
                process = Process(name, options.checkouts)
                self.ready[name] = process
                self.rows[name] |= process.ask("prepare", system=name, work=work)
            except Failed as failure:
                self.fail(name, failure)

    def fail(self, name: str, failure: Failed) -> None:
        """Let a system out, with its error in its row."""
        self.rows[name]["error"] = str(failure)
        say(f"  {name} failed: {failure}")
        if name in self.ready:
            self.ready.pop(name).end()

    def each(self, what: str, **more: Any) -> dict[str, dict[str, Any]]:
        """Ask every system that is ready, one after the other."""
        answers = {}
        for name, process in list(self.ready.items()):
            try:
                answers[name] = process.ask(what, **more)
            except Failed as failure:
                self.fail(name, failure)
        return answers

    def end(self) -> None:
        """Let all of them go."""
        for process in self.ready.values():
            process.end()
        self.ready.clear()


def say(text: str) -> None:
    """Tell how far it is."""
    print(text, file=sys.stderr, flush=True)
