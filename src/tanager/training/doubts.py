"""Signs that a run learns nothing. Private: they depend on the examples."""

from collections.abc import Mapping
from typing import Any


class Doubts:
    """Counts over the private lines of a run, and what they give reason to doubt."""

    def __init__(self):
        self._examples = self._dropped = self._flat = 0

    def add(self, line: Mapping[str, Any]) -> None:
        """Count the examples of one update.

        Args:
            line: of private/metrics.jsonl.
        """
        self._examples += line.get("examples", 0)
        self._dropped += line.get("dropped", 0)
        self._flat += next(iter(line.get("norms", ())), 0)

    def text(self) -> str:
        """Return one line for each doubt; nothing where there is none."""
        usable = self._examples - self._dropped
        if self._examples and not usable:
            return (
                f"All {self._examples} examples drawn so far were dropped, because "
                "their loss or gradient was not finite: the model saw noise alone.\n"
            )
        if usable and self._flat == usable:
            return (
                f"All {usable} gradients so far had a norm below 0.001: the loss "
                "hardly depends on the trained parameters.\n"
            )
        return ""
