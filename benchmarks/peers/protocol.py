"""How the runner and its workers speak: one JSON object a line.

A worker is a process of its own, in an environment of its own, with one system (a
library and a way to use it) on one piece of work. It imports nothing of another.

    {"do": "prepare", "work": …}  → losses, memory and seconds of the first steps
    {"do": "step"}                → seconds of one physical batch, after one untimed
    {"do": "poisson", "sizes": …} → seconds of logical batches, compilations
    {"do": "sum", "to": FILE}     → the clipped sum, written as npz
    {"do": "train", …}            → accuracy after equal steps
"""

import abc
import ctypes
import gc
import json
import os
import platform
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np


Arrays = dict[str, np.ndarray]

_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4


class Worker(abc.ABC):
    """One system on one piece of work.

    Args:
        system: its name, as in a table's row.
        work: what is to be done: model, physical_batch, classes, data and params (npz
            files), clip_norm, precision ("float32" or "tf32", of products).
    """

    def __init__(self, system: str, work: dict[str, Any]):
        self.system = system
        self.rows = work["physical_batch"]
        self.clip_norm = work["clip_norm"]
        self.compute_in(work["precision"])
        with np.load(work["data"]) as data:
            self.images, self.labels = data["images"], data["labels"]
        with np.load(work["params"]) as params:
            self.initial: Arrays = dict(params)

    @abc.abstractmethod
    def compute_in(self, precision: str) -> None:
        """Set the precision of products and convolutions on a GPU."""

    @abc.abstractmethod
    def precision(self) -> str:
        """Return what the library says it is: all that it can be set by agree."""

    @abc.abstractmethod
    def build(self) -> None:
        """Make the model from `initial`, and whatever is compiled ahead."""

    @abc.abstractmethod
    def losses(self) -> np.ndarray:
        """Return the loss of each of the first examples, at most 8."""

    @abc.abstractmethod
    def step(self) -> None:
        """Do one full physical batch, and wait for it."""

    @abc.abstractmethod
    def logical(self, images: np.ndarray, labels: np.ndarray) -> None:
        """Do one logical batch of any size, with noise and update, and wait for it."""

    @abc.abstractmethod
    def clipped_sum(self) -> Arrays:
        """Return the sum of clipped gradients of the first physical batch."""

    @abc.abstractmethod
    def parameters(self) -> Arrays:
        """Return the parameters, by name."""

    @abc.abstractmethod
    def logits(self, images: np.ndarray) -> np.ndarray:
        """Return the logits of examples."""

    def configure(self, options: dict[str, Any]) -> None:
        """Set noise_multiplier, learning_rate and expected_batch for `logical`."""
        self.noise_multiplier = options["noise_multiplier"]
        self.learning_rate = options["learning_rate"]
        self.expected_batch = options["expected_batch"]

    def compilations(self) -> int:
        """Return how many programs were compiled so far."""
        return 0

    def device_peak(self) -> int | None:
        """Return the most bytes an accelerator held so far; None on a CPU."""
        return None

    @abc.abstractmethod
    def versions(self) -> dict[str, str]:
        """Return the versions of what matters."""


def serve(make: Any) -> None:
    """Answer the runner until it has no more to say.

    What is freed is kept, in all alike: Opacus gains most by it.

    Args:
        make: from a system's name and the work to a `Worker`.
    """
    mallopt = ctypes.CDLL("libc.so.6").mallopt
    assert mallopt(_M_MMAP_MAX, 0) and mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is not an answer
    worker: Worker | None = None
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            if asked["do"] == "prepare":
                worker, answer = _prepare(make, asked)
            else:
                assert worker is not None
                answer = _DO[asked["do"]](worker, asked)
        except Exception as error:
            traceback.print_exc()
            lines = str(error).strip().splitlines() or [""]
            answer = {"error": f"{type(error).__name__}: {lines[0][:300]}"}
        print(json.dumps(answer), file=answers, flush=True)


def _prepare(make: Any, asked: dict[str, Any]) -> tuple[Worker, dict[str, Any]]:
    before = _resident()
    worker = make(asked["system"], asked["work"])
    started = time.perf_counter()
    worker.build()
    built = time.perf_counter()
    losses = worker.losses().astype(float).tolist()
    stepping = time.perf_counter()
    worker.step()
    first = time.perf_counter() - stepping + built - started
    worker.step()
    _forget_peak()
    settled = _resident()
    for _ in range(2):
        worker.step()
    peak = worker.device_peak()
    return worker, {
        "first_step_seconds": first,
        "losses": losses,
        "peak_bytes": _peak() - before if peak is None else peak,
        "step_bytes": _peak() - settled if peak is None else peak,
        "python": platform.python_version(),
        "precision": worker.precision(),
        "versions": worker.versions(),
    }


def _step(worker: Worker, asked: dict[str, Any]) -> dict[str, Any]:
    del asked
    # After the others had their turns caches are cold and idle pages may be gone: in
    # training a step follows a step.
    worker.step()
    started = time.perf_counter()
    worker.step()
    return {"seconds": time.perf_counter() - started}


def _poisson(worker: Worker, asked: dict[str, Any]) -> dict[str, Any]:
    worker.configure(asked)
    seconds, compiled = [], [worker.compilations()]
    for size in asked["sizes"]:
        started = time.perf_counter()
        worker.logical(worker.images[:size], worker.labels[:size])
        seconds.append(time.perf_counter() - started)
        compiled.append(worker.compilations())
    first, last = compiled[1], compiled[-1]
    return {
        "seconds": seconds,
        "compilations": first - compiled[0],
        "recompilations": last - first,
    }


def _sum(worker: Worker, asked: dict[str, Any]) -> dict[str, Any]:
    np.savez(asked["to"], **worker.clipped_sum())  # pyrefly: ignore[bad-argument-type]
    return {}


def _train(worker: Worker, asked: dict[str, Any]) -> dict[str, Any]:
    """Train on the examples that the runner sampled; only the noise is one's own."""
    worker.configure(asked)
    with np.load(asked["samples"]) as samples:
        for step in range(asked["steps"]):
            taken = samples[str(step)]
            worker.logical(worker.images[taken], worker.labels[taken])
    with np.load(asked["test"]) as test:
        right = worker.logits(test["images"]).argmax(1) == test["labels"]
    np.savez(asked["to"], **worker.parameters())  # pyrefly: ignore[bad-argument-type]
    return {"accuracy": float(right.mean())}


_DO = {"step": _step, "poisson": _poisson, "sum": _sum, "train": _train}


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise LookupError(field)


def _resident() -> int:
    return _status("VmRSS:")


def _peak() -> int:
    return _status("VmHWM:")


def _forget_peak() -> None:
    """Give back what was freed, and measure the peak anew from here."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
