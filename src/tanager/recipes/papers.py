"""The papers' tables of hyper-parameters and what they reached, as data.

Rows are those of Tables 13 to 23 of the Unlocking paper (De et al. 2022,
arXiv:2204.13650, appendix C.5), with the accuracies of its Tables 3, 4, 5, 6, 7 and 11
and of its text, and of the TAN paper (Sander et al. 2023, arXiv:2210.03403) the
reference run on CIFAR-10 (section 4.4, Table 5) and both on ImageNet (Table 4).
Where the paper gives two numbers, the numbered table of results is taken (Table 5 over
Table 1 on CIFAR-10, Table 3 over the 78.7 % of section 3.2).

Left out: the two columns of Table 23 with ε = ∞, which spend nothing that could be
checked (they are recipes, ``-non-private``); Table 10, as the paper gives no
hyper-parameters for it; the other rows of the TAN paper's Table 5, which none of the δ
that the text suggests (1/N, or 1e-5 · 50 000/N) reproduces.

The rows are in `papers.csv`. `benchmarks/published_epsilons.py` computes every row's ε
again.
"""

import csv
import dataclasses
import math
from collections.abc import Sequence
from importlib import resources
from typing import Any, get_type_hints

from tanager.privacy.mechanism import Mechanism


_FIELDS = (
    *("model", "epsilon", "delta", "augmentation_multiplicity", "batch_size"),
    *("clip_norm", "learning_rate", "noise_multiplier", "steps"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PublishedRun:
    """One column of a published table: hyper-parameters, budget and accuracy.

    Attributes:
        recipe: name of the recipe that trains with these hyper-parameters.
        paper: Unlocking or TAN.
        table: number of the table with the hyper-parameters.
        task: data set, and what was trained on what.
        model: the architecture, as tanager names it where it has it.
        epsilon: ε as published, under add-or-remove-one.
        delta: δ as published.
        augmentation_multiplicity: K; 0 is no augmentation.
        batch_size: B.
        clip_norm: C.
        learning_rate: constant, for the update of equation (3).
        noise_multiplier: σ as printed, so within 0.05 of what was used.
        steps: number of updates T.
        examples: the N that the published ε was computed with.
        stated_examples: the N that the paper says the model was trained on.
        accuracy: in percent, top-1, on the test set; None where there is only a plot.
        accuracy_std: standard deviation over 5 runs (TAN: 3), in points; None where
            none is given.
        note: what a reader of this row must know; often empty.
    """

    recipe: str
    paper: str
    table: int
    task: str
    model: str
    epsilon: float
    delta: float
    augmentation_multiplicity: int
    batch_size: int
    clip_norm: float
    learning_rate: float
    noise_multiplier: float
    steps: int
    examples: int
    stated_examples: int
    accuracy: float | None
    accuracy_std: float | None
    note: str

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of a recipe that the run gives."""
        return {name: getattr(self, name) for name in _FIELDS}

    @property
    def mechanism(self) -> Mechanism:
        """The mechanism that the published ε was computed for."""
        return Mechanism(
            self.batch_size / self.examples, self.noise_multiplier, self.steps
        )


def _read() -> tuple[PublishedRun, ...]:
    kinds = get_type_hints(PublishedRun)
    text = (resources.files("tanager.recipes") / "papers.csv").read_text("utf-8")

    def value(name: str, cell: str) -> Any:
        kind = kinds[name]
        if kind in (str, int):
            return kind(cell)
        return float(cell) if cell else None

    return tuple(
        PublishedRun(**{name: value(name, cell) for name, cell in row.items()})
        for row in csv.DictReader(text.splitlines())
    )


PUBLISHED = _read()
"""Every row of every table."""


def rows_of(recipe: str) -> tuple[PublishedRun, ...]:
    """Return the published runs of a recipe, at rising ε."""
    return tuple(row for row in PUBLISHED if row.recipe == recipe)


def fields_at(rows: Sequence[PublishedRun], epsilon: float) -> dict[str, Any]:
    """Return the fields of a recipe at any ε, from published runs at rising ε."""
    for row in rows:
        if row.epsilon == epsilon:
            return row.fields
    below = [row for row in rows if row.epsilon < epsilon]
    above = [row for row in rows if row.epsilon > epsilon]
    fields = {"epsilon": epsilon, "noise_multiplier": None}
    if not (below and above):
        row = below[-1] if below else above[0]
        steps = max(1, round(row.steps * epsilon / row.epsilon))
        return row.fields | fields | {"steps": steps}
    low, high = below[-1], above[0]
    share = math.log(epsilon / low.epsilon) / math.log(high.epsilon / low.epsilon)

    def between(name: str) -> float:
        return getattr(low, name) ** (1 - share) * getattr(high, name) ** share

    return low.fields | {
        **fields,
        "batch_size": round(between("batch_size")),
        "steps": round(between("steps")),
        "learning_rate": between("learning_rate"),
    }
