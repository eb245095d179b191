"""A study: trials at small batch, found by Optuna, that survive any worker.

    study.json        what is searched: target, space, batch sizes, held-out examples
    journal.log       what Optuna knows (or a data base, see `storage`)
    trials/0007/      a trial: trial.json (its choices), a run folder, outcome.json
    winner/b0032-1/   the best choices again, at every simulation batch size
    result.json, report.html, scaling.svg, scaling.png

The folders are the truth and Optuna's storage is its memory: where that is lost, it is
put together again from them. Nothing here is private: a study's folder is not to be
released.
"""

import contextlib
import dataclasses
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tanager._files import write_json
from tanager._reading import reading
from tanager._record import Each, read_record
from tanager.recipes.recipe import Recipe
from tanager.search import jobs
from tanager.search.jobs import Job, Outcome
from tanager.search.settings import Settings, agreed
from tanager.search.storage import answering, open_storage


if TYPE_CHECKING:
    from optuna import Study as OptunaStudy
    from optuna import Trial


_DONE = {
    "number": int,
    "values": Each(object),
    "state": str,
    "accuracy": float,
    "steps": int,
    "seconds": float,
    "flops": float,
}
_REMEDY = "delete the folder of that trial, and it is made again"


class TrialResult(NamedTuple):
    """One trial.

    Attributes:
        number: from 0.
        values: that it chose, by name.
        state: "complete", "pruned" or "diverged".
        accuracy: of the average of parameters on the held-out examples, where it ended.
        steps: it made.
        seconds: it took.
        flops: of its matrix products and convolutions, expected.
    """

    number: int
    values: dict[str, Any]
    state: str
    accuracy: float
    steps: int
    seconds: float
    flops: float


class Study:
    """A study in its folder; any number of processes can work on it at once.

    Args:
        folder: made when missing, mode 0700.
        settings: what to search; None for what the folder says.
        storage: URL of its data base, where that is called otherwise here.

    Raises:
        ValueError: the folder has a study of other settings or of another version of
            tanager, or none where `settings` are missing; its storage cannot be opened.
    """

    def __init__(
        self,
        folder: str | os.PathLike,
        settings: Settings | None = None,
        storage: str | None = None,
    ):
        self.folder = Path(folder)
        self.settings = agreed(self.folder, settings, storage)
        opened = open_storage(self.settings.storage, self.folder)
        with self._alone():
            self._optuna = _optuna_study(opened, self.folder, self.settings)
            if not self._optuna.get_trials(deepcopy=False):
                self._put_together_again()

    def work(
        self,
        trials: int,
        report: Callable[[TrialResult], None] = lambda result: None,
        watch: Callable[[int, Mapping[str, Any]], None] = lambda number, line: None,
    ) -> None:
        """Make trials until there are so many, with whoever else works on the study.

        A trial whose process died is gone on with first. Returns when as many trials
        as asked for are complete, pruned or diverged.

        Args:
            trials: of the whole study; of a grid at most as many as it has points.
            report: told of each trial that this process finished.
            watch: told of each evaluation: the trial, and its line of metrics.jsonl.

        Raises:
            ValueError: the storage stopped answering; the same call goes on.
            KeyboardInterrupt: after a checkpoint was written; likewise.
        """
        if self.settings.sampler == "grid":
            trials = min(trials, int(self.settings.space.size))
        while True:
            with (
                answering(self.settings.storage),
                contextlib.ExitStack() as held,
            ):
                with self._alone():
                    trial = self._next(trials, held)
                if trial is not None:
                    report(self._make(trial, watch))
                    continue
            if len(self.results()) >= trials:
                return
            time.sleep(jobs.POLL_SECONDS)

    def results(self) -> list[TrialResult]:
        """Return the trials that are done, by number."""
        folders = sorted((self.folder / "trials").glob("[0-9]*"))
        return [
            _trial_result(folder)
            for folder in folders
            if (folder / "done.json").exists()
        ]

    def best(self) -> TrialResult | None:
        """Return the best complete trial; None while there is none."""
        complete = [each for each in self.results() if each.state == "complete"]
        return max(complete, key=lambda each: each.accuracy, default=None)

    def confirmations(self, values: Mapping[str, Any]) -> list[Job]:
        """Return the runs of some choices at every batch size, `repeats` times."""
        settings = self.settings
        return [
            Job(
                self.folder / "winner" / f"b{batch_size:05d}-{repeat}",
                self._recipe(batch_size, values),
                settings.target.name,
            )
            for batch_size in settings.batch_sizes
            for repeat in range(settings.repeats)
        ]

    def _recipe(self, batch_size: int, values: Mapping[str, Any]) -> Recipe:
        simulated = self.settings.target.simulated(
            batch_size, validation_examples=self.settings.validation_examples
        )
        return self.settings.space.recipe(simulated, values)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep other workers from choosing trials for the time of the block."""
        while True:
            with jobs.claimed(self.folder / "study.lock") as mine:
                if mine:
                    yield
                    return
            time.sleep(0.05)

    def _next(self, trials: int, held: contextlib.ExitStack) -> "Trial | None":
        """Return a trial left behind, else a new one; None if nothing is left to do."""
        from optuna.trial import Trial, TrialState

        known = self._optuna.get_trials(deepcopy=False)
        for frozen in known:
            if frozen.state == TrialState.RUNNING and held.enter_context(
                jobs.claimed(self._trial_folder(frozen.number) / "trial.lock")
            ):
                return Trial(self._optuna, frozen._trial_id)
        if sum(frozen.state != TrialState.FAIL for frozen in known) >= trials:
            return None
        trial = self._optuna.ask()
        held.enter_context(
            jobs.claimed(self._trial_folder(trial.number) / "trial.lock")
        )
        return trial

    def _trial_folder(self, number: int) -> Path:
        return self.folder / "trials" / f"{number:04d}"

    def _make(
        self, trial: "Trial", tell: Callable[[int, Mapping[str, Any]], None]
    ) -> TrialResult:
        from optuna import TrialPruned

        settings, folder = self.settings, self._trial_folder(trial.number)
        if (folder / "done.json").exists():  # and was killed before it told so
            return self._tell(trial, _trial_result(folder))
        values = settings.space.suggest(trial, settings.target.recipe)
        recipe = self._recipe(settings.batch_sizes[0], values)
        if settings.pruner == "halving":
            every = _first_rung(settings)
            recipe = dataclasses.replace(recipe, evaluate_every=every)
        write_json(folder / "trial.json", {"number": trial.number, "values": values})
        seen = {"step": 0, "accuracy": 0.0, "seconds": 0.0}
        known = self._optuna.get_trials(deepcopy=False)[trial.number]
        reported = set(known.intermediate_values)

        def watch(line: Mapping[str, Any]) -> None:
            seen.update(
                step=line["step"],
                accuracy=line["test_accuracy_ema"],
                seconds=line["seconds"],
            )
            tell(trial.number, line)
            if line["step"] not in reported:
                trial.report(line["test_accuracy_ema"], line["step"])
            if line["step"] < settings.target.steps and trial.should_prune():
                raise TrialPruned

        try:
            job = Job(folder / "run", recipe, settings.target.name)
            found = jobs.make(job, watch)
        except TrialPruned:
            state = "pruned"
            found = Outcome(seen["accuracy"], 0.0, None, 0.0, seen["seconds"])
        else:
            state = "diverged" if found.diverged else "complete"
            seen["step"] = seen["step"] if found.diverged else settings.target.steps
        flops = jobs.flops(recipe, settings.target.steps)
        result = TrialResult(
            trial.number,
            values,
            state,
            found.accuracy,
            seen["step"],
            found.seconds,
            flops * seen["step"] / settings.target.steps,
        )
        write_json(folder / "done.json", result._asdict())
        jobs.keep(folder / "run", found)
        return self._tell(trial, result)

    def _tell(self, trial: "Trial", result: TrialResult) -> TrialResult:
        from optuna.trial import TrialState

        pruned = result.state == "pruned"
        told = TrialState.PRUNED if pruned else TrialState.COMPLETE
        self._optuna.tell(trial, None if pruned else result.accuracy, state=told)
        return result

    def _put_together_again(self) -> None:
        """Tell an empty storage of the trials whose folders are there."""
        from optuna.trial import TrialState, create_trial

        space = self.settings.space
        folders = sorted((self.folder / "trials").glob("[0-9]*"))
        for folder in folders:
            if not (folder / "trial.json").exists():
                # It had not chosen yet.
                self._optuna.ask()
                continue
            values = _values(folder)
            state, value = TrialState.RUNNING, None
            if (folder / "done.json").exists():
                done = _trial_result(folder)
                pruned = done.state == "pruned"
                state = TrialState.PRUNED if pruned else TrialState.COMPLETE
                value = None if pruned else done.accuracy
            with reading(folder / "trial.json", "is of another search", _REMEDY):
                told = create_trial(
                    state=state,
                    value=value,
                    params=values,
                    distributions={
                        name: space.values[name].distribution() for name in values
                    },
                )
            self._optuna.add_trial(told)


def _first_rung(settings: Settings) -> int:
    return max(1, settings.target.steps // 16)


def _trial_result(folder: Path) -> TrialResult:
    content = read_record(folder / "done.json", _DONE, _REMEDY)
    return TrialResult(**{name: content[name] for name in _DONE})


def _values(folder: Path) -> dict[str, Any]:
    return read_record(folder / "trial.json", {"values": Each(object)}, _REMEDY)[
        "values"
    ]


def _grid_sampler(seed: int | None) -> Any:
    """Return a sampler of every point once, in an order drawn by chance."""
    import optuna

    class Grid(optuna.samplers.BruteForceSampler):
        def after_trial(self, study: Any, trial: Any, state: Any, values: Any) -> None:
            # After the last point it tries to stop a loop of Optuna's, which there
            # is none of here.
            with contextlib.suppress(RuntimeError):
                super().after_trial(study, trial, state, values)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return Grid(seed=seed)


def _optuna_study(storage: Any, folder: Path, settings: Settings) -> "OptunaStudy":
    import optuna

    sampler = {
        "tpe": lambda: optuna.samplers.TPESampler(seed=settings.seed),
        "random": lambda: optuna.samplers.RandomSampler(seed=settings.seed),
        "grid": lambda: _grid_sampler(settings.seed),
    }[settings.sampler]()
    pruner = optuna.pruners.NopPruner()
    if settings.pruner == "median":
        third = settings.target.steps // 3
        pruner = optuna.pruners.MedianPruner(n_startup_trials=5, n_warmup_steps=third)
    elif settings.pruner == "halving":
        pruner = optuna.pruners.SuccessiveHalvingPruner(_first_rung(settings))
    own = read_record(folder / "study.json", {"id": str})["id"]
    return optuna.create_study(
        study_name=f"tanager-{own}",
        storage=storage,
        sampler=sampler,
        pruner=pruner,
        direction="maximize",
        load_if_exists=True,
    )
