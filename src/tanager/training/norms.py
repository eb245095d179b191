"""How long the gradients of examples are, as a histogram. Private.

Norms are those that clipping sees: of an example's gradient averaged over its augmented
views, before clipping. The bins are the same for every run.

References:
    Sander, Stock and Sablayrolles 2023, TAN Without a Burn, appendix C and Figure 7.
"""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from tanager import _validate as validate
from tanager._reading import is_count, read_json_lines, reading
from tanager._record import Maybe, read_record


_FINEST, _LOWEST, _HIGHEST = 4, -10, 6  # bins for each power of two, and its ends
BINS = 2 + _FINEST * (_HIGHEST - _LOWEST)
"""The first is for norms below 2⁻¹⁰, zero among them, the last from 2⁶ on."""


def edges() -> np.ndarray:
    """Return the norms between one bin and the next, float64[BINS − 1]."""
    return 2.0 ** np.linspace(_LOWEST, _HIGHEST, BINS - 1)


def histogram(norms: Float[Array, " b"], usable: Bool[Array, " b"]) -> Int[Array, " n"]:
    """Count those norms that are usable by bin, int32[BINS]."""
    borders = jnp.asarray(edges(), norms.dtype)
    bins = jnp.searchsorted(borders, norms, side="right")
    return jnp.bincount(bins, usable.astype(jnp.int32), length=BINS)


@dataclasses.dataclass(frozen=True)
class Norms:
    """Gradient norms of a run, in a few parts of its steps one after another. Private.

    `steps` are the last step of each part, `counts` int64[parts, BINS], `clip_norm` is
    C, the last one that is on record if it changed, `gamma` that of automatic clipping.
    """

    steps: tuple[int, ...]
    counts: np.ndarray
    clip_norm: float
    gamma: float | None = None

    @classmethod
    def read(cls, run: str | os.PathLike, parts: int = 4) -> "Norms":
        """Read them from a run's private folder, in parts of equal numbers of steps."""
        validate.whole(parts=parts, at_least=1)
        run = Path(run)
        file = run / "private/metrics.jsonl"
        lines = [ln for ln in read_json_lines(file, ("step",)) if ln.get("norms")]
        if not lines or not (run / "config.json").exists():
            validate.refuse(
                "run",
                str(run),
                "has no record of gradient norms" if run.exists() else "does not exist",
                "give the folder of a run, with its private/metrics.jsonl",
            )
        pieces = np.array_split(np.arange(len(lines)), min(parts, len(lines)))
        fields: dict[str, Any] = {"clip_norm": Maybe(float), "clip_gamma": Maybe(float)}
        fields["adaptive_clipping"] = Maybe({})
        config = read_record(run / "config.json", fields)
        clip_norm = config["clip_norm"]
        if clip_norm is None:
            rule = "was not clipped, so no norms were computed"
            validate.refuse("run", str(run), rule)
        with reading(file, "does not hold counts of norms"):
            counts = [_sum([lines[i] for i in piece]) for piece in pieces]
        steps = tuple(lines[piece[-1]]["step"] for piece in pieces)
        if config["adaptive_clipping"] is not None:
            for line in read_json_lines(run / "metrics.jsonl", ("step",)):
                clip_norm = line.get("clip_norm", clip_norm)
        return cls(steps, np.stack(counts), clip_norm, config["clip_gamma"])

    def quantile(self, share: float) -> float:
        """Return the norm that a share of all examples stays below, to a fifth."""
        validate.probability(share=share)
        counts = self.counts.sum(axis=0)
        number = int(np.searchsorted(np.cumsum(counts), share * counts.sum()))
        return float(edges()[min(number, BINS - 2)])

    def clipped(self) -> tuple[float, ...]:
        """Return for each part the share of examples in bins above C, to a bin."""
        above = np.searchsorted(edges(), self.clip_norm, side="left") + 1
        totals = np.maximum(self.counts.sum(axis=1), 1)
        return tuple((self.counts[:, above:].sum(axis=1) / totals).tolist())

    def mean_square(self) -> float:
        """Return the mean square of clipped norms over C², from 0 to 1.

        Each example i of N is in a batch by a coin of its own, so the sum of clipped
        gradients c_i has the variance q·(1 − q)·Σ‖c_i‖², with B = q·N: this mean times
        (1 − q)·B·C². Norms are taken to be in the middle of their bin.
        """
        ends = edges()
        middle = np.sqrt(ends[:-1] * ends[1:])
        norms = np.array([0.0, *middle, max(ends[-1], self.clip_norm)])
        if self.gamma is None:
            shares = np.minimum(norms / self.clip_norm, 1.0)
        else:
            shares = norms / (norms + self.gamma)
        counts = self.counts.sum(axis=0)
        return float(shares**2 @ counts / max(counts.sum(), 1))


def _sum(lines: Sequence[Mapping[str, Any]]) -> np.ndarray:
    counts = [line["norms"] for line in lines]
    for line in counts:
        if len(line) != BINS or not all(map(is_count, line)):
            raise ValueError(f"a line must have {BINS} whole numbers from 0")
    return np.asarray(counts, np.int64).sum(axis=0)
