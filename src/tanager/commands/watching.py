"""A progress bar over many runs: which one, how far, the best so far, time left."""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn


if TYPE_CHECKING:
    from tanager.search.jobs import Job, Outcome


class Watching:
    """Shows a list of runs that are made one after another.

    Args:
        runs: how many there are.
        done: how many of them were made before.
        console: where to show it.
    """

    def __init__(self, runs: int, done: int, console: Console):
        self.console = console
        self._runs, self._done = runs, done
        self._begun, self._before = time.monotonic(), done
        self._best = -math.inf
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[left]}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task(
            "compiling", total=runs, completed=done, left=""
        )

    @contextlib.contextmanager
    def showing(self) -> Iterator[None]:
        """Show the bar while the block runs."""
        with self._bar:
            yield

    def line(self, name: str, line: Mapping[str, Any], steps: int) -> None:
        """Show how far a run of so many steps is: a line of its metrics.jsonl."""
        part = self._done + line["step"] / steps
        text = (
            f"{name}: step {line['step']}/{steps}, "
            f"{100 * line['test_accuracy_ema']:.1f} %"
        )
        if math.isfinite(self._best):
            text += f"; best {100 * self._best:.1f} %"
        self._bar.update(
            self._task, completed=part, description=text, left=self._left(part)
        )

    def ended(self, done: int, accuracy: float | None, text: str) -> None:
        """Print a line for a run that ended, and how long the others will take.

        Args:
            done: how many runs have ended now.
            accuracy: of this one, if it counts.
            text: what to print.
        """
        self._done = done
        self._best = max(self._best, -math.inf if accuracy is None else accuracy)
        left = self._left(done)
        best = f"; best {100 * self._best:.2f} %" if math.isfinite(self._best) else ""
        more = f"; {self._runs - done} to go, {left}" if done < self._runs else ""
        self.console.print(f"{text}{best}{more}", markup=False)
        self._bar.update(self._task, completed=done, left=left)

    def _left(self, done: float) -> str:
        if done <= self._before:
            return ""
        rate = (time.monotonic() - self._begun) / (done - self._before)
        minutes = math.ceil(rate * (self._runs - done) / 60)
        if minutes < 60:
            return f"about {minutes} min"
        return f"about {minutes // 60} h {minutes % 60} min"


def work_through(
    jobs: Sequence["Job"], console: Console, name: Callable[["Job"], str]
) -> list["Outcome"]:
    """Make all runs of a list, together with whoever else works on it, and show them.

    Args:
        jobs: in the order in which they are made.
        console: where to show them.
        name: what a run is called.
    """
    from tanager.search.jobs import compiled_once, outcome, work

    def ended() -> int:
        return sum(outcome(job.folder) is not None for job in jobs)

    shown = Watching(len(jobs), ended(), console)
    with compiled_once(), shown.showing():
        return work(
            jobs,
            lambda job, found: shown.ended(
                ended(), found.accuracy, f"{name(job)}: {100 * found.accuracy:.2f} %"
            ),
            lambda job, line: shown.line(name(job), line, job.recipe.steps or 1),
        )
