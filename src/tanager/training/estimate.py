"""How long a run will take: a physical batch without examples is timed before it.

So the figure tells nothing of the private data, and nothing was spent when it is shown.
"""

import math
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jaxtyping import PyTree

from tanager.sampling import PhysicalBatch, PoissonSampler
from tanager.training.state import State
from tanager.training.step import Step


@dataclass(frozen=True)
class Estimate:
    """What the rest of a run will take.

    Attributes:
        updates: how many are left.
        update_seconds: of one.
        evaluations: how many are left, of the parameters and of their average.
        evaluation_seconds: of one of both.
        memory_bytes: the most that this process, or a device, has held so far.
    """

    updates: int
    update_seconds: float
    evaluations: int
    evaluation_seconds: float
    memory_bytes: int

    @property
    def seconds(self) -> float:
        """Of all that is left."""
        return (
            self.updates * self.update_seconds
            + self.evaluations * self.evaluation_seconds
        )

    def sentence(self) -> str:
        """Return one line for people."""
        text = f"about {duration(self.seconds)}: {_counted(self.updates, 'update')} of "
        text += f"{self.update_seconds:.2g} s"
        if self.evaluations and self.evaluation_seconds:
            text += f", {_counted(self.evaluations, 'evaluation')} of "
            text += f"{self.evaluation_seconds:.2g} s"
        return f"{text}; {self.memory_bytes / 1e9:.1f} GB of memory"


def duration(seconds: float) -> str:
    """Return seconds, minutes, hours or days, whichever reads best."""
    units = ((1, "second"), (60, "minute"), (3600, "hour"), (86400, "day"))
    size, name = next((u for u in reversed(units) if seconds >= 1.5 * u[0]), units[0])
    count = max(1, round(seconds / size))
    return _counted(count, name)


def _counted(count: float, name: str) -> str:
    return f"{count} {name}{'s' * (count != 1)}"


def physical_batches(sampler: PoissonSampler, size: int) -> float:
    """Return how many physical batches an update has on average, at least 1.

    The size drawn is taken as normal, which it nearly is.
    """
    mean = sampler.expected_batch_size
    spread = max(math.sqrt(2 * mean * (1 - sampler.mechanism.sample_rate)), 1e-9)
    most = int((mean + 5 * spread) / size)
    return 1 + sum(
        math.erfc((number * size + 0.5 - mean) / spread) / 2
        for number in range(1, most + 1)
    )


def time_update(
    step: Step, state: State, number: int, empty: PhysicalBatch, batches: float
) -> float:
    """Return the seconds of an update, compilation apart; nothing is changed.

    The rows of `empty` are all masked, and `batches` is that of `physical_batches`. The
    noise of update `number` is drawn, and dropped.
    """
    key, norm = step.augmentation_key(number), state.clip_norm
    drawn, noise = 0.0, 0.0
    total = step.zero()
    for _ in range(2):  # the first compiles
        noise, _ = _timed(lambda: step.draw(number))
        drawn, total = _timed(
            lambda total=total: step.accumulate(state.params, total, empty, key, norm)
        )
    return noise + batches * drawn


def time_evaluation(evaluate: Callable[[PyTree], Any], model: PyTree) -> float:
    """Return the seconds of an evaluation of the parameters and of their average."""
    return 2 * _timed(lambda: evaluate(model))[0]


def memory_bytes() -> int:
    """Return the most memory that was held: by a device, or by this process."""
    held = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    if held is not None:
        return held
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _timed(work: Callable[[], Any]) -> tuple[float, Any]:
    started = time.perf_counter()
    done = jax.block_until_ready(work())
    return time.perf_counter() - started, done
