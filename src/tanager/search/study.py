"""A study: trials at small batch, chosen by Optuna, that survive any worker.

    study.json        what is searched: target, space, batch sizes, held-out examples
    trials/0007/      a trial: trial.json (its choices and the accuracies that pruning
                      looked at), a run folder, done.json
    winner/b0032-1/   the best choices again, at every simulation batch size
    result.json, report.html, scaling.svg, scaling.png

The folders are all that is stored: a worker reads Optuna's study from them whenever it
chooses a trial or decides whether to prune one. A study's folder has no privacy
guarantee: do not release it.
"""

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from filelock import FileLock

from tanager._files import locking, write_json
from tanager._reading import reading
from tanager._record import Each, read_record
from tanager.recipes.recipe import Recipe
from tanager.search import jobs
from tanager.search.jobs import Job, Outcome
from tanager.search.settings import Settings, agreed


if TYPE_CHECKING:
    from optuna import Study as OptunaStudy
    from optuna.pruners import BasePruner
    from optuna.trial import FrozenTrial


_TRIAL = {
    "values": Each(object),
    "accuracies": Each(float),
    "rungs": Each(float),
    "seconds": float,
    "pruned": bool,
}
_ASKS = 20
"""How often Optuna is asked for choices that no trial has."""

_CUT_BEFORE = 0.9
"""The part of a trial after which to end it saves too little."""

_REMEDY = "delete the folder of that trial, and it is run again"


class TrialResult(NamedTuple):
    """One trial.

    Attributes:
        number: from 0.
        values: its choices, by name.
        state: "complete", "pruned" or "diverged".
        accuracy: of the parameter average on the held-out examples, at its last step.
        steps: how many it made; of a diverged one, up to its last evaluation.
        seconds: how long it took.
        flops: expected, of its matrix products and convolutions.
    """

    number: int
    values: dict[str, Any]
    state: str
    accuracy: float
    steps: int
    seconds: float
    flops: float


_DONE = TrialResult.__annotations__ | {"values": Each(object)}


class _Pruned(Exception):
    """Ends the run of a trial that is worse than the others."""


def require_optuna() -> None:
    """Check that Optuna is installed.

    Raises:
        ValueError: it is not; the message says how to install it.
    """
    try:
        import optuna
    except ModuleNotFoundError:
        raise ValueError(
            "a search needs Optuna, which is not installed: pip install 'optuna>=5,<6'"
        ) from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)


class Study:
    """A study in its folder; any number of processes can work on it at once.

    Args:
        folder: created if missing, with mode 0700.
        settings: what to search; None reads it from the folder.

    Raises:
        ValueError: Optuna is not installed; the folder has a study with other settings
            or of another version of tanager; or it has none and `settings` is None.
    """

    def __init__(self, folder: str | os.PathLike, settings: Settings | None = None):
        require_optuna()
        self.folder = Path(folder)
        self.settings = agreed(self.folder, settings)
        space, self._points = self.settings.space, []
        if self.settings.sampler == "grid" or space.is_finite:
            self._points = space.points(self.settings.target.recipe)
            # In the same random order for all workers.
            np.random.default_rng(self.settings.seed or 0).shuffle(self._points)

    def work(
        self,
        trials: int,
        report: Callable[[TrialResult], None] = lambda result: None,
        watch: Callable[[int, Mapping[str, Any]], None] = lambda number, line: None,
    ) -> None:
        """Run trials until the study has enough, together with its other workers.

        Abandoned trials are resumed first. Returns when all trials are complete, pruned
        or diverged.

        `trials` are those of the whole study, see `count`. `report` is called with each
        trial that this process finished; `watch` at each evaluation, with the number of
        the trial and its line of metrics.jsonl, with all its ``"steps"``.

        Raises:
            KeyboardInterrupt: after a checkpoint was written; the same call resumes.
        """
        trials = self.count(trials)
        while True:
            with contextlib.ExitStack() as held:
                number = self._next(trials, held)
                if number is not None:
                    report(self._run(number, watch))
                    continue
            if all(self._is_done(number) for number in range(trials)):
                return
            time.sleep(jobs.POLL_SECONDS)

    def count(self, trials: int) -> int:
        """Return how many of `trials` are run: each point of a finite space once."""
        return min(trials, len(self._points)) if self._points else trials

    def results(self) -> list[TrialResult]:
        """Return the trials that are done, by number."""
        done = sorted((self.folder / "trials").glob("[0-9]*/done.json"))
        return [_trial_result(path.parent) for path in done]

    def best(self) -> TrialResult | None:
        """Return the best complete trial; None while there is none."""
        complete = [each for each in self.results() if each.state == "complete"]
        return max(complete, key=lambda each: each.accuracy, default=None)

    def confirmations(self, values: Mapping[str, Any]) -> list[Job]:
        """Return `repeats` runs with some choices at every batch size."""
        settings = self.settings
        found: list[Job] = []
        for batch_size in settings.batch_sizes:
            folder = self.folder / "winner" / f"b{batch_size:05d}"
            recipe = settings.simulated(batch_size, values)
            found += jobs.repeats(self._job(folder, recipe), settings.repeats)
        return found

    def _job(self, folder: Path, recipe: Recipe) -> Job:
        name, shared = self.settings.target.name, self.folder / jobs.SHARED
        return Job(folder, recipe, name, shared)

    def _trial_folder(self, number: int) -> Path:
        return self.folder / "trials" / f"{number:04d}"

    def _is_done(self, number: int) -> bool:
        return (self._trial_folder(number) / "done.json").exists()

    def _next(self, trials: int, held: contextlib.ExitStack) -> int | None:
        """Lock and return the first trial that nobody runs; None if there is none."""
        alone = self.folder / "study.lock"
        with locking(alone), FileLock(alone, fallback_to_soft=False):
            for number in range(trials):
                lock = self._trial_folder(number) / "trial.lock"
                if (
                    not self._is_done(number)
                    and held.enter_context(jobs.claimed(lock))
                    and not self._is_done(number)
                ):
                    if not lock.with_name("trial.json").exists():
                        self._choose(number)
                    return number
        return None

    def _choose(self, number: int) -> None:
        """Choose the values of a new trial: the next point of a grid, or by Optuna."""
        settings = self.settings
        if settings.sampler == "grid":
            values = self._points[number]
        else:
            study, taken = self._optuna(number), self._taken(number)
            for _ in range(_ASKS):
                values = settings.space.suggest(study, settings.target.recipe)
                if values not in taken or not self._points:
                    break
            else:
                values = next(each for each in self._points if each not in taken)
        content = {"number": number, "values": values, "accuracies": {}, "rungs": {}}
        content |= {"seconds": 0.0, "pruned": False}
        write_json(self._trial_folder(number) / "trial.json", content)

    def _taken(self, number: int) -> list[dict[str, Any]]:
        """Return the choices of all other trials."""
        others = (self.folder / "trials").glob("[0-9]*/trial.json")
        own = self._trial_folder(number)
        return [_read_trial(p.parent)["values"] for p in others if p.parent != own]

    def _run(
        self, number: int, tell: Callable[[int, Mapping[str, Any]], None]
    ) -> TrialResult:
        settings, folder = self.settings, self._trial_folder(number)
        trial = _read_trial(folder)
        recipe = settings.simulated(settings.batch_sizes[0], trial["values"])
        steps = recipe.steps
        assert steps is not None
        if settings.pruner == "halving":
            recipe = dataclasses.replace(recipe, evaluate_every=_first_rung(settings))

        def watch(line: Mapping[str, Any]) -> None:
            tell(number, {**line, "steps": steps})
            step, accuracy = line["step"], line["test_accuracy_ema"]
            trial["accuracies"].setdefault(str(step), accuracy)
            trial["seconds"] = line["seconds"]
            early = step <= _CUT_BEFORE * steps
            cut = early and not settings.space.varies_steps
            trial["pruned"] = cut and self._is_worse(number, trial)
            write_json(folder / "trial.json", trial)
            if trial["pruned"]:
                raise _Pruned

        try:
            if trial["pruned"]:  # killed before done.json was written
                raise _Pruned
            found = jobs.make(self._job(folder / "run", recipe), watch)
        except _Pruned:
            state, accuracy = "pruned", [*trial["accuracies"].values()][-1]
            found = Outcome(accuracy, 0.0, trial["seconds"])
            jobs.keep(folder / "run", found)
        else:
            state = "diverged" if found.diverged else "complete"
        seen = max(map(int, trial["accuracies"]), default=0)
        made = steps if state == "complete" else seen
        result = TrialResult(
            number,
            trial["values"],
            state,
            found.accuracy,
            made,
            found.seconds,
            jobs.flops(recipe, made),
        )
        write_json(folder / "done.json", result._asdict())
        return result

    def _is_worse(self, number: int, trial: dict[str, Any]) -> bool:
        """Return whether to prune a trial; its rungs of halving are updated."""
        study = self._optuna(number)
        study.add_trial(self._frozen(self._trial_folder(number), trial))
        worse = study.pruner.prune(study, study.get_trials(deepcopy=False)[-1])
        trial["rungs"] = study.get_trials(deepcopy=False)[-1].system_attrs
        return worse

    def _optuna(self, number: int) -> "OptunaStudy":
        """Return Optuna's study of all trials but one, in memory."""
        import optuna

        settings, seed = self.settings, None
        if settings.seed is not None:
            words = np.random.SeedSequence([settings.seed, number])
            seed = int(words.generate_state(1)[0])
        by_model = settings.sampler == "tpe"
        kind = optuna.samplers.TPESampler if by_model else optuna.samplers.RandomSampler
        study = optuna.create_study(
            sampler=kind(seed=seed), pruner=_pruner(settings), direction="maximize"
        )
        for path in sorted((self.folder / "trials").glob("[0-9]*/trial.json")):
            folder = path.parent
            if folder != self._trial_folder(number):
                study.add_trial(self._frozen(folder, _read_trial(folder)))
        return study

    def _frozen(self, folder: Path, trial: Mapping[str, Any]) -> "FrozenTrial":
        """Return a trial as Optuna knows it."""
        from optuna.trial import TrialState, create_trial

        state, value = TrialState.RUNNING, None
        if (folder / "done.json").exists():
            done = _trial_result(folder)
            state = TrialState.PRUNED
            if done.state != "pruned":
                state, value = TrialState.COMPLETE, done.accuracy
        space, values = self.settings.space.values, trial["values"]
        with reading(folder / "trial.json", "belongs to another search", _REMEDY):
            return create_trial(
                state=state,
                value=value,
                params=values,
                distributions={name: space[name].distribution() for name in values},
                intermediate_values={int(n): v for n, v in trial["accuracies"].items()},
                system_attrs=dict(trial["rungs"]),
            )


def _first_rung(settings: Settings) -> int:
    return max(1, settings.target.steps // 16)


def _trial_result(folder: Path) -> TrialResult:
    content = read_record(folder / "done.json", _DONE, _REMEDY)
    return TrialResult(**{name: content[name] for name in _DONE})


def _read_trial(folder: Path) -> dict[str, Any]:
    return read_record(folder / "trial.json", _TRIAL, _REMEDY)


def _pruner(settings: Settings) -> "BasePruner":
    from optuna import pruners

    if settings.pruner == "median":
        third = settings.target.steps // 3
        return pruners.MedianPruner(n_startup_trials=5, n_warmup_steps=third)
    if settings.pruner == "halving":
        return pruners.SuccessiveHalvingPruner(_first_rung(settings))
    return pruners.NopPruner()
