"""What a person sees while training: steps, ε so far, accuracy, time left."""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from tanager._terminal import escape_unprintable, new_console
from tanager.privacy.shown import format_epsilon
from tanager.training.state import Accumulator


Batch = TypeVar("Batch")


class TrainingProgress:
    """A progress bar with ε so far, and a line for every evaluation."""

    def __init__(self, steps: int, begun: int, shown: bool):
        escape_unprintable()
        self._console = new_console(quiet=not shown)
        self.bar = Progress(
            TextColumn("{task.description}"),
            *(BarColumn(), MofNCompleteColumn()),
            TextColumn("{task.fields[epsilon]}"),
            *(TimeElapsedColumn(), TimeRemainingColumn()),
            console=self._console,
            disable=not (shown and self._console.is_terminal),
        )
        self._task = self.bar.add_task(
            "compiling", total=steps, completed=begun, epsilon=""
        )

    def step(self, done: int, epsilon: float) -> None:
        """Show that `done` updates were made and at most `epsilon` is spent."""
        spent = f"ε ≤ {format_epsilon(epsilon)}"
        if math.isinf(epsilon):
            spent = "NOT PRIVATE"
        self.bar.update(
            self._task, completed=done, description="training", epsilon=spent
        )

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        self._console.print(text, markup=False)


@contextlib.contextmanager
def measuring(shown: bool) -> Iterator[Callable[[str], None]]:
    """Give a function that says what is being measured, while the block runs."""
    if not shown:
        yield lambda what: None
        return
    console = new_console(stderr=True)
    text = "measuring how to clip, once for this device (--fast leaves it out): "
    said = False

    def report(what: str) -> None:
        nonlocal said
        status.update(text + what)
        if not (said or console.is_terminal):
            console.print(text + what, markup=False)
            said = True

    with console.status("") as status:
        yield report


class Clock:
    """Time spent training, over all the processes that took part.

    `released` are the metrics of the processes before this one.
    """

    def __init__(self, released: Sequence[Mapping[str, Any]]):
        self._before = released[-1]["seconds"] if released else 0.0
        self._started = time.monotonic()
        self._first_tick = self._last_tick = 0.0
        self._ticks = 0
        self._waited = 0.0
        self._running: Any = None

    def tick(self) -> None:
        """Count one step, which is done."""
        self._running = None
        self._last_tick = time.monotonic()
        self._ticks += 1
        if self._ticks == 1:
            self._first_tick = self._last_tick

    def running(self, total: Accumulator) -> Accumulator:
        """Take note of what the devices are computing, and return it."""
        self._running = total.counts.examples
        return total

    def waiting(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Pass on batches, and count the time that the devices waited for them.

        While they are still computing when the next batch is there, they do not wait.
        """
        while True:
            asked = time.monotonic()
            batch = next(batches, None)
            if batch is None:
                return
            if self._ticks and (self._running is None or self._running.is_ready()):
                self._waited += time.monotonic() - asked
            yield batch

    def wait_fraction(self) -> float | None:
        """Return the share of the time since the first step spent waiting for data."""
        if self._ticks < 2:
            return None
        return self._waited / (self._last_tick - self._first_tick)

    def seconds(self) -> float:
        """Return the seconds so far, compilation included."""
        return round(self._before + time.monotonic() - self._started, 3)

    def speed(self, examples: float) -> dict[str, float | None]:
        """Return times and the rate without compilation; `examples` are of one step."""
        rate = None
        if self._ticks > 1:
            rate = examples * (self._ticks - 1) / (self._last_tick - self._first_tick)
        speed = {"seconds": self.seconds(), "examples_per_second": rate}
        return speed | {"wait_fraction": self.wait_fraction()}
