"""Compute the ε of every published run again, and say where it differs and why.

    python benchmarks/published_epsilons.py [--json]

For each row: ε as published, by RDP (what the papers used) and by PLD (tight), and a
verdict. A row matches when RDP is within 2 % of the published ε. Where it takes another
N than the paper states, the verdict says so. σ is printed with one decimal, so the
interval of ε that its rounding allows is given as well.
"""

import argparse
import dataclasses
import functools
import json
from collections.abc import Iterable, Sequence

from tanager.privacy.accountant import epsilon
from tanager.privacy.mechanism import Mechanism
from tanager.recipes.papers import PUBLISHED, PublishedRun


TOLERANCE = 0.02
_HALF_A_DIGIT = 0.05


@functools.cache
def _epsilon(mechanism: Mechanism, delta: float, by: str) -> float:
    return epsilon(mechanism, delta, accountant=by)


@dataclasses.dataclass(frozen=True)
class Check:
    """A published run, with its ε computed here."""

    run: PublishedRun

    @property
    def rdp(self) -> float:
        """ε by RDP, with the N that the paper's accounting used."""
        return _epsilon(self.run.mechanism, self.run.delta, "rdp")

    @property
    def pld(self) -> float:
        """ε by PLD, likewise: what may be claimed."""
        return _epsilon(self.run.mechanism, self.run.delta, "pld")

    @property
    def stated(self) -> float:
        """ε by RDP, with the N that the paper says was trained on."""
        run = dataclasses.replace(self.run, examples=self.run.stated_examples)
        return _epsilon(run.mechanism, run.delta, "rdp")

    @property
    def rounding(self) -> tuple[float, float]:
        """ε by RDP with the largest and the smallest σ that round to the printed."""
        sigma, mechanism = self.run.noise_multiplier, self.run.mechanism
        largest, smallest = (
            dataclasses.replace(mechanism, noise_multiplier=sigma + change)
            for change in (_HALF_A_DIGIT, -_HALF_A_DIGIT)
        )
        delta = self.run.delta
        return _epsilon(largest, delta, "rdp"), _epsilon(smallest, delta, "rdp")

    @property
    def ratio(self) -> float:
        """ε by RDP over ε as published."""
        return self.rdp / self.run.epsilon

    @property
    def verdict(self) -> str:
        """Whether the published ε is right, and if not, what it is right for."""
        if abs(self.ratio - 1) > TOLERANCE:
            return f"differs by {self.ratio - 1:+.1%}"
        if self.run.examples != self.run.stated_examples:
            return (
                f"matches with N = {self.run.examples:,}; with the "
                f"{self.run.stated_examples:,} stated ε is {self.stated:.3f}"
            )
        return "matches"


_HEADINGS = (
    "paper, table",
    "task",
    "model",
    "published ε",
    "RDP ε",
    "PLD ε",
    "RDP / published",
    "RDP ε by σ ± 0.05",
    "verdict",
    "note",
)


def cells(checked: Check) -> tuple[str, ...]:
    """Return one row of the table."""
    run = checked.run
    return (
        f"{run.paper} {run.table}",
        run.task,
        run.model,
        f"{run.epsilon:g}",
        f"{checked.rdp:.4f}",
        f"{checked.pld:.4f}",
        f"{checked.ratio:.4f}",
        "{:.4f} to {:.4f}".format(*checked.rounding),
        checked.verdict,
        run.note,
    )


def as_markdown(checks: Iterable[Check]) -> str:
    """Return a Markdown table."""
    rows = [_HEADINGS, ("---",) * len(_HEADINGS), *map(cells, checks)]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def as_json(checks: Iterable[Check]) -> str:
    """Return a JSON list with every hyper-parameter and every number."""
    computed = ("rdp", "pld", "stated", "rounding", "ratio", "verdict")
    records = [
        dataclasses.asdict(checked.run)
        | {name: getattr(checked, name) for name in computed}
        for checked in checks
    ]
    return json.dumps(records, indent=2, ensure_ascii=False)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true")
    form = as_json if parser.parse_args(arguments).json else as_markdown
    print(form([Check(run) for run in PUBLISHED]))


if __name__ == "__main__":
    main()
