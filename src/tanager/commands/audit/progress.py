"""What a person sees while an audit trains many models."""

import math
import time
from collections.abc import Callable

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress

from tanager.training.estimate import duration


class ModelsProgress:
    """Shows how many models are trained, how long the others take, what is known.

    A terminal shows a bar. A file or a pipe gets a line at the start of each phase, one
    with the first estimate, and more of them 10 s apart, later a twentieth of the time
    so far.

    Attributes:
        bar: shown while this context is open, on a terminal.
    """

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic):
        self.bar = Progress(
            "{task.description}",
            BarColumn(),
            MofNCompleteColumn(),
            "{task.fields[known]}",
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self.bar.add_task("", known="")
        self._clock, self._began, self._said = clock, clock(), -math.inf
        self._phase, self._before = "", 0.0
        self._first: tuple[float, float] | None = None
        self._estimated = False

    def tell(self, phase: str, trained: float, models: int, known: str) -> None:
        """Show how far it is; arguments as of `on_models` of `audit_membership`."""
        now, new, left = self._clock(), phase != self._phase, ""
        if new:
            self._phase, self._before, self._first = phase, trained, None
        elif self._first is None:
            if trained > self._before:  # by the first update, which compiles first
                self._first = trained, now
        elif self._first[0] < trained < models:
            speed = (now - self._first[1]) / (trained - self._first[0])
            left = f"about {duration((models - trained) * speed)} left"
        known = "; ".join(filter(None, (left, known)))
        self.bar.update(
            self._task,
            completed=trained,
            total=models,
            description=escape(phase),
            known=escape(known),
        )
        due = now - self._said >= max(10.0, (now - self._began) / 20)
        new |= bool(left) and not self._estimated
        self._estimated |= bool(left)
        console = self.bar.console
        if (new or due or trained == models) and not console.is_terminal:
            self._said = now
            line = f"{phase}: {int(trained)} of {models} models"
            console.print("; ".join(filter(None, (line, known))), markup=False)
