"""The two phases of membership inference: every score is put on record."""

import dataclasses
import functools
import itertools
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from tanager._files import json_text
from tanager._reading import read_json_lines
from tanager._record import Maybe, check_record
from tanager.audit.bounds import finite
from tanager.audit.many_models import ManyModels
from tanager.seed import Seed


FEWEST = 4
"""Models of a setting, with z and as many without, that a round of phase I trains."""


class Setting(NamedTuple):
    """What the attacker chose; the noise multiplier follows from the budget."""

    learning_rate: float
    clip_norm: float
    steps: int
    canary: str


class Tried(NamedTuple):
    """A setting in phase I, its models, half of them with z, and how they differed.

    `total_variation` is that between the Gaussians fitted to the losses of z.
    """

    setting: Setting
    models: int
    total_variation: float


_SCORE = {"phase": int, "setting": int, "model": int, "score": Maybe(float)}


class Records:
    """Lines in a file that survives a kill: added to and never changed.

    Without a path nothing is kept.

    Raises:
        ValueError: the file holds other lines; the message names it.
    """

    def __init__(self, path: Path | None):
        self._path = path
        self.lines: list[dict[str, Any]] = []
        if path is None or not path.exists():
            return
        remedy = "delete it, and its models are trained again"
        self.lines = read_json_lines(path, remedy=remedy)
        check_record(path, self.lines, [_SCORE], remedy)
        os.truncate(path, path.read_bytes().rfind(b"\n") + 1)

    def add(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Add lines; on return they are on the disk."""
        if self._path is None:
            return
        with self._path.open("ab") as file:
            file.write("".join(json_text(line) + "\n" for line in lines).encode())
            file.flush()
            os.fsync(file.fileno())


@dataclasses.dataclass(eq=False)
class MembershipTrainer:
    """Trains the models that a phase asks for and that are not on record.

    `program` returns what trains the models of a clipping norm and number of steps;
    `canaries` are the names of the last examples of its data. `report` is called with
    the phase, how many models are trained, and what is being done or known so far.
    """

    program: Callable[[float, int], ManyModels]
    settings: Sequence[Setting]
    canaries: Sequence[str]
    secret: Seed
    records: Records
    models_at_once: int
    report: Callable[[str, float, str], None]

    def __post_init__(self):
        self._scores = {
            (line["phase"], line["setting"], line["model"]): line["score"]
            for line in self.records.lines
        }

    def choose(self, rounds: Sequence[Sequence[int]]) -> list[Tried]:
        """Return what phase I tried in its `rounds` (settings left, models of each)."""
        best = list(range(len(self.settings)))
        seen: dict[int, Tried] = {}
        for number, (left, models) in enumerate(rounds, 1):
            best = best[:left]
            name = f"phase I, round {number} of {len(rounds)}"
            scores = self.scores(0, dict.fromkeys(best, models), name)
            for index in best:
                setting = self.settings[index]
                seen[index] = Tried(setting, models, total_variation(*scores[index]))
            best.sort(key=lambda index: -seen[index].total_variation)
        return sorted(
            seen.values(), key=lambda tried: (-tried.models, -tried.total_variation)
        )

    def scores(
        self,
        phase: int,
        wanted: Mapping[int, int],
        name: str,
        so_far: Callable[[Sequence[np.ndarray]], str] = lambda scores: "",
    ) -> dict[int, list[np.ndarray]]:
        """Return the scores of settings, with z and without, training missing models.

        `wanted` says how many models, by number of a setting; even ones have z. `name`
        is what is reported to be done.
        """
        jobs = [
            (setting, number)
            for setting, models in wanted.items()
            for number in range(models)
        ]
        missing = [job for job in jobs if (phase, *job) not in self._scores]
        missing.sort(key=lambda job: (self._key(job), job))

        def tell(known: str, making: float = 0.0) -> None:
            self.report(name, len(self._scores) + making, known)

        for _, alike in itertools.groupby(missing, key=self._key):
            group, known = list(alike), ""
            tell("compiling")
            for start in range(0, len(group), self.models_at_once):
                part = group[start : start + self.models_at_once]
                self._train(phase, part, functools.partial(tell, known))
                setting = part[0][0]
                known = so_far(self._of(phase, setting, wanted[setting]))
                tell(known)
        return {
            setting: self._of(phase, setting, models)
            for setting, models in wanted.items()
        }

    def _key(self, job: tuple[int, int]) -> tuple[float, int]:
        setting = self.settings[job[0]]
        return setting.clip_norm, setting.steps

    def _train(
        self,
        phase: int,
        part: list[tuple[int, int]],
        tell: Callable[[float], None],
    ) -> None:
        # Filled up: another number of models would be another program.
        jobs = [*part, *part[-1:] * (self.models_at_once - len(part))]
        settings = [self.settings[index] for index, _ in jobs]
        many = self.program(*self._key(jobs[0]))
        own = np.array([self.canaries.index(each.canary) for each in settings])
        examples = many.size - len(self.canaries)
        left_out = np.zeros((len(jobs), many.size), bool)
        left_out[:, examples:] = True
        for row, (_, number) in enumerate(jobs):
            left_out[row, examples + own[row]] = number % 2 == 1
        secrets = [
            Seed(self.secret.derive("audited model", phase, *job), self.secret.private)
            for job in jobs
        ]
        rates = np.array([each.learning_rate for each in settings])
        of_one_update = len(part) / many.mechanism.steps
        params = many.train(
            secrets, rates, left_out, lambda updates: tell(of_one_update * updates)
        )
        canaries = many.last(len(self.canaries))
        losses = many.losses(params, canaries)[np.arange(len(jobs)), own]
        scores = finite(-losses)
        found = {
            (phase, *job): float(score)
            for job, score in zip(part, scores, strict=False)
        }
        self.records.add(
            {"phase": phase, "setting": setting, "model": number, "score": score}
            for (phase, setting, number), score in found.items()
        )
        self._scores |= found

    def _of(self, phase: int, setting: int, models: int) -> list[np.ndarray]:
        keys = [(phase, setting, number) for number in range(models)]
        return [
            np.array([self._scores[key] for key in side if key in self._scores])
            for side in (keys[::2], keys[1::2])
        ]


def total_variation(inside: np.ndarray, outside: np.ndarray) -> float:
    """Return the total variation between the Gaussians fitted to two sets of scores."""
    if not (np.isfinite(inside).all() and np.isfinite(outside).all()):
        return 0.0
    (m, s), (n, t) = (
        (np.mean(each), np.std(each, ddof=1)) for each in (inside, outside)
    )
    if min(s, t) == 0:
        return 0.0
    # Where the densities are equal: x²·a + x·b + c = 0, between which one is larger.
    a = 1 / t**2 - 1 / s**2
    b = 2 * (m / s**2 - n / t**2)
    c = n**2 / t**2 - m**2 / s**2 + 2 * math.log(t / s)
    places = np.roots([a, b, c] if abs(a) > 1e-9 / s**2 else [b, c])
    places = np.sort(places[np.isreal(places)].real)
    more = np.diff(stats.norm.cdf([-np.inf, *places, np.inf], m, s))
    less = np.diff(stats.norm.cdf([-np.inf, *places, np.inf], n, t))
    return float(np.abs(more - less).sum() / 2)
