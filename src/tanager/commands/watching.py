"""A progress bar over many runs: which one, how far, the best so far, time left."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TimeElapsedColumn, TimeRemainingColumn

from tanager._heap import run_in_place


if TYPE_CHECKING:
    from tanager.search.jobs import Job, Outcome


class Watching:
    """Shows a list of runs that are made one after another.

    Attributes:
        bar: shown while this context is open, on a terminal.

    Args:
        runs: how many there are.
        before: accuracies of those that were made before, 0 if one does not count.
        console: where to show it.
    """

    def __init__(self, runs: int, before: Sequence[float], console: Console):
        self._runs, self._done = runs, len(before)
        self._best = max(before, default=-math.inf)
        self.bar = Progress(
            "{task.description}",
            BarColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self.bar.add_task("compiling", total=runs, completed=self._done)

    def line(self, name: str, line: Mapping[str, Any], steps: int) -> None:
        """Show how far a run is, from a line of its metrics.jsonl."""
        text = (
            f"{name}: step {line['step']}/{steps}, "
            f"{100 * line['test_accuracy_ema']:.1f} %{self._best_so_far()}"
        )
        part = self._done + line["step"] / steps
        self.bar.update(self._task, completed=part, description=text)

    def ended(self, done: int, accuracy: float | None, text: str) -> None:
        """Print a line for a run that ended, as the `done`-th.

        Its accuracy is None if it does not count.
        """
        self._done = done
        self._best = max(self._best, -math.inf if accuracy is None else accuracy)
        more = f"; {self._runs - done} to go" if done < self._runs else ""
        self.bar.console.print(f"{text}{self._best_so_far()}{more}", markup=False)
        self.bar.update(self._task, completed=done)

    def _best_so_far(self) -> str:
        return f"; best {100 * self._best:.2f} %" if math.isfinite(self._best) else ""


def work_through(
    jobs: Sequence["Job"], console: Console, name: Callable[["Job"], str]
) -> list["Outcome"]:
    """Make all runs of a list, with other workers if there are any, and show them."""
    from tanager.search.jobs import compiled_once, outcome, work

    run_in_place()

    def ended() -> list[float]:
        found = [outcome(job.folder) for job in jobs]
        return [each.accuracy for each in found if each is not None]

    shown = Watching(len(jobs), ended(), console)
    with compiled_once(), shown.bar:
        return work(
            jobs,
            lambda job, found: shown.ended(
                len(ended()),
                found.accuracy,
                f"{name(job)}: {100 * found.accuracy:.2f} %",
            ),
            lambda job, line: shown.line(name(job), line, job.recipe.steps or 1),
        )
