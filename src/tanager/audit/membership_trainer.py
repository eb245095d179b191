"""The two phases of membership inference, of which every score is put on record."""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy import stats

from tanager._record import Maybe
from tanager.audit.many_models import ManyModels
from tanager.audit.records import Records
from tanager.seed import Seed
from tanager.training import identity


FEWEST = 4
"""Models of a setting, with z and as many without, that a round of phase I trains."""
_WORST = 1e30


class Setting(NamedTuple):
    """What the attacker chose.

    Attributes:
        learning_rate: η.
        clip_norm: C.
        steps: T; the noise multiplier follows from the budget.
        canary: name of z.
    """

    learning_rate: float
    clip_norm: float
    steps: int
    canary: str


class Tried(NamedTuple):
    """What phase I saw of a setting.

    Attributes:
        setting: which.
        models: trained in it, half of them with z.
        total_variation: between the Gaussians fitted to the losses of z.
    """

    setting: Setting
    models: int
    total_variation: float


class Trainer:
    """Trains models of several settings, those of one program together."""

    def __init__(
        self,
        make: Callable[[Setting], ManyModels],
        settings: Sequence[Setting],
        canaries: Sequence[str],
        examples: int,
        at_once: int,
    ):
        self.settings = settings
        self._make, self._canaries, self._examples = make, canaries, examples
        self._at_once = at_once
        self._program: tuple[Any, ManyModels | None] = (None, None)

    def contents(self, data: Any) -> dict[str, bytes]:
        """Return what must not change from start to resume."""
        many = self._many(self.settings[0])
        one = jax.tree.map(lambda leaf: leaf[0], data)
        traced = identity.computation(
            many.step.example_loss, many.params, many.step.frozen, one
        )
        augment, optimizer = many.step.augment, many.step.optimizer
        if augment is not None:
            traced += identity.computation(augment, jax.random.key(0), one)
        gradient = jax.tree.map(jnp.zeros_like, many.params)
        return {
            "loss": traced,
            "optimizer": identity.computation(
                optimizer.update, gradient, optimizer.init(many.params), many.params
            ),
            "initial parameters": identity.contents((many.params, many.step.frozen)),
            "data": identity.contents(data),
        }

    def scores(
        self, jobs: Sequence[tuple[int, int]], secrets: Callable[[int, int], Seed]
    ) -> Iterator[list[tuple[int, int, float]]]:
        """Yield (setting, number, score), some at a time, of jobs (setting, number).

        Even numbers have z in their data.
        """
        for _, group in itertools.groupby(
            sorted(jobs, key=lambda job: (self._key(job[0]), job)),
            key=lambda job: self._key(job[0]),
        ):
            group = list(group)
            for start in range(0, len(group), self._at_once):
                part = group[start : start + self._at_once]
                # Filled up: another number of models would be another program.
                filled = part + part[-1:] * (self._at_once - len(part))
                found = self._train(filled, [secrets(*job) for job in filled])
                yield [
                    (*job, float(score))
                    for job, score in zip(part, found, strict=False)
                ]

    def _train(
        self, jobs: Sequence[tuple[int, int]], secrets: Sequence[Seed]
    ) -> np.ndarray:
        settings = [self.settings[index] for index, _ in jobs]
        many = self._many(settings[0])
        own = np.array([self._canaries.index(each.canary) for each in settings])
        left_out = np.zeros((len(jobs), self._examples + len(self._canaries)), bool)
        left_out[:, self._examples :] = True
        for row, (_, number) in enumerate(jobs):
            left_out[row, self._examples + own[row]] = number % 2 == 1
        rates = np.array([each.learning_rate for each in settings])
        params = many.train(secrets, rates, left_out)
        losses = many.losses(params, many.rows(self._examples))
        losses = losses[np.arange(len(jobs)), own]
        return -np.nan_to_num(losses, nan=_WORST, posinf=_WORST, neginf=-_WORST)

    def _many(self, setting: Setting) -> ManyModels:
        key = (setting.clip_norm, setting.steps)
        if self._program[0] != key:
            self._program = None, None  # its memory goes first
            self._program = key, self._make(setting)
        assert self._program[1] is not None
        return self._program[1]

    def _key(self, index: int) -> tuple[float, int]:
        setting = self.settings[index]
        return setting.clip_norm, setting.steps


SCORE = {"phase": int, "setting": int, "model": int, "score": Maybe(float)}
"""What a line of the record of scores holds."""


class Phases:
    """Trains what a phase asks for and is not on record."""

    def __init__(
        self,
        trainer: Trainer,
        secret: Seed,
        records: Records,
        tell: Callable[[str, int, int, str], None],
    ):
        self._trainer, self._secret = trainer, secret
        self._records, self._tell = records, tell
        self._known = {
            (line["phase"], line["setting"], line["model"]): line["score"]
            for line in records.lines
        }

    def choose(self, rounds: Sequence[Sequence[int]]) -> list[Tried]:
        """Return what phase I tried, the best first.

        Args:
            rounds: of each, how many settings are left and how many models they have by
                then.
        """
        best = list(range(len(self._trainer.settings)))
        seen: dict[int, Tried] = {}
        for left, models in rounds:
            best = best[:left]
            scores = self.scores(0, dict.fromkeys(best, models), lambda _: "")
            for index in best:
                setting = self._trainer.settings[index]
                seen[index] = Tried(setting, models, total_variation(*scores[index]))
            best.sort(key=lambda index: -seen[index].total_variation)
        ranked = sorted(seen.values(), key=lambda tried: -tried.total_variation)
        return sorted(ranked, key=lambda tried: -tried.models)

    def scores(
        self,
        phase: int,
        wanted: Mapping[int, int],
        so_far: Callable[[Sequence[np.ndarray]], str],
    ) -> dict[int, list[np.ndarray]]:
        """Return the scores of settings, with z and without, training what lacks."""
        jobs = [
            (setting, number)
            for setting, models in wanted.items()
            for number in range(models)
        ]
        missing = [job for job in jobs if (phase, *job) not in self._known]
        done = len(jobs) - len(missing)
        name = "phase I" if phase == 0 else "phase II"
        self._tell(name, done, len(jobs), "")
        for part in self._trainer.scores(
            missing, lambda *job: self._secret_of(phase, *job)
        ):
            self._records.add(
                {"phase": phase, "setting": setting, "model": number, "score": score}
                for setting, number, score in part
            )
            self._known |= {(phase, *job): score for *job, score in part}
            done += len(part)
            known = self._of(phase, part[0][0], wanted[part[0][0]])
            self._tell(name, done, len(jobs), so_far(known))
        return {
            setting: self._of(phase, setting, models)
            for setting, models in wanted.items()
        }

    def _of(self, phase: int, setting: int, models: int) -> list[np.ndarray]:
        return [
            np.array(
                [
                    self._known[phase, setting, number]
                    for number in range(side, models, 2)
                    if (phase, setting, number) in self._known
                ]
            )
            for side in (0, 1)
        ]

    def _secret_of(self, phase: int, setting: int, number: int) -> Seed:
        return Seed(
            self._secret.derive("audited model", phase, setting, number),
            self._secret.private,
        )


def total_variation(inside: np.ndarray, outside: np.ndarray) -> float:
    """Return the total variation between the Gaussians fitted to two sets of scores.

    Args:
        inside: [n] scores, n at least 2.
        outside: [m] scores.
    """
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
