"""Runs as jobs: each in a folder of its own, done once, by whoever comes first.

Any number of processes, on any machines that share the folder, can work through the
same list of jobs. A job belongs to the process that holds its lock, which the operating
system takes back when that process dies; whoever comes next goes on where it was.
"""

import contextlib
import dataclasses
import functools
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from filelock import FileLock, Timeout

from tanager._cache import private_folder
from tanager._files import write_json
from tanager._record import Maybe, read_record
from tanager.data import Dataset
from tanager.recipes import cost, runner, tasks
from tanager.recipes.recipe import Recipe


Watch = Callable[[Mapping[str, Any]], None]
"""Told of each evaluation: the line of metrics.jsonl."""

POLL_SECONDS = 1.0
_OUTCOME = {
    "accuracy": float,
    "accuracy_last": float,
    "epsilon": Maybe(float),
    "flops": float,
    "seconds": float,
    "diverged": Maybe(bool),
}
_REMEDY = "delete the folder of that run, and it is made again"
_KEPT = ("config.json", "ledger.jsonl", "metrics.jsonl", "result.json", "outcome.json")


class Job(NamedTuple):
    """One run to be made.

    Attributes:
        folder: where it is made.
        recipe: what it is; its folder, and a physical batch that the devices can share
            evenly, are settled when it is made.
        name: of the recipe.
    """

    folder: Path
    recipe: Recipe
    name: str


class Outcome(NamedTuple):
    """What a run came to.

    Attributes:
        accuracy: of the average of parameters on the held-out examples; 0 where the
            parameters stopped being finite.
        accuracy_last: of the last parameters.
        epsilon: what it spent: for a simulation, huge.
        flops: of its matrix products and convolutions, expected.
        seconds: training took, compilation included.
        diverged: whether the parameters stopped being finite.
    """

    accuracy: float
    accuracy_last: float
    epsilon: float | None
    flops: float
    seconds: float
    diverged: bool = False


def outcome(folder: Path) -> Outcome | None:
    """Return what the run of a folder came to; None while it is not complete."""
    path = folder / "outcome.json"
    if not path.exists():
        return None
    content = read_record(path, _OUTCOME, _REMEDY)
    found = Outcome(**{name: content[name] for name in _OUTCOME})
    return found._replace(diverged=bool(found.diverged))


@contextlib.contextmanager
def claimed(path: Path) -> Iterator[bool]:
    """Try to hold a lock during the block, and tell whether it is ours.

    The operating system takes the lock back when the process that holds it dies.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(FileLock(path, blocking=False, fallback_to_soft=False))
        except Timeout:
            yield False
            return
        yield True


def make(job: Job, watch: Watch | None = None) -> Outcome:
    """Make a run, or what is left of it, and keep what it came to.

    Its model and checkpoints are deleted then: a simulation protects nobody, and nobody
    is to hand it on by mistake.

    Args:
        job: whose lock this process holds.
        watch: told of each evaluation; what it raises ends the run.

    Raises:
        ValueError: the recipe cannot be run.
        KeyboardInterrupt: after a checkpoint was written.
    """
    done = outcome(job.folder)
    if done is not None:
        return done
    devices = job.recipe.devices or jax.device_count()
    rows = -(-job.recipe.physical_batch_size // devices) * devices
    recipe = dataclasses.replace(
        job.recipe, out=str(job.folder), physical_batch_size=rows
    )
    with warnings.catch_warnings():
        # That a simulation protects nobody was said at the beginning.
        warnings.filterwarnings("ignore", message="ε = .* protects next to nothing")
        prepared = runner.prepare(job.name, recipe, dataset=load(recipe))
    expected = flops(recipe, prepared.budget.mechanism.steps)
    started = time.monotonic()
    try:
        result = runner.run(prepared, progress=False, on_metrics=watch)
    except FloatingPointError:
        spent = time.monotonic() - started
        found = Outcome(0.0, 0.0, None, expected, spent, diverged=True)
    else:
        assert result.evaluation is not None
        assert result.evaluation_ema is not None
        found = Outcome(
            result.evaluation_ema.accuracy,
            result.evaluation.accuracy,
            result.epsilon,
            expected,
            result.summary["seconds"],
        )
    keep(job.folder, found)
    return found


def keep(folder: Path, found: Outcome) -> None:
    """Write what a run came to, and delete what is not needed any more."""
    write_json(folder / "outcome.json", found._asdict())
    for path in folder.iterdir():
        if path.name in _KEPT or path.suffix in (".lock", ".json"):
            continue
        if path.name == "private":
            # The norms and losses of a simulation are what one wants to look at.
            for secret in path.glob("seed.json"):
                secret.unlink()
        elif path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def work(
    jobs: Sequence[Job],
    report: Callable[[Job, Outcome], None] = lambda job, outcome: None,
    watch: Callable[[Job, Mapping[str, Any]], None] = lambda job, line: None,
) -> list[Outcome]:
    """Make all runs of a list, together with whoever else works on it.

    Args:
        jobs: in the order in which they are made.
        report: told of each run that this process finished.
        watch: told of each evaluation: the run, and its line of metrics.jsonl.

    Returns:
        What each came to, in the order of `jobs`.
    """
    while True:
        found: list[Outcome | None] = []
        for job in jobs:
            done = outcome(job.folder)
            if done is None:
                with claimed(job.folder / "job.lock") as mine:
                    if mine:
                        done = make(job, functools.partial(watch, job))
                        report(job, done)
            found.append(done)
        complete = [each for each in found if each is not None]
        if len(complete) == len(jobs):
            return complete
        time.sleep(POLL_SECONDS)


def parameters(job: Job) -> int:
    """Return how many parameters a run trains; it has begun."""
    config = read_record(job.folder / "config.json", {"parameters": int}, _REMEDY)
    return config["parameters"]


def flops(recipe: Recipe, steps: int) -> float:
    """Return the expected operations of a run, from shapes alone."""
    return flops_of(recipe, load(recipe)) * steps


def flops_of(recipe: Recipe, dataset: Dataset) -> float:
    """Return the expected operations of one step, from shapes alone.

    Raises:
        ValueError: there is no such model, or not for such images.
    """
    shape = tasks.seen_shape(recipe, dataset)
    return cost.estimate(recipe, 1, len(dataset.classes), shape).flops


@contextlib.contextmanager
def compiled_once() -> Iterator[None]:
    """Keep compiled programs on the disk for the time of the block.

    The runs of a study differ in numbers that only the small program of the update
    contains; the large one, of the gradients, is the same and is compiled once.
    """
    if getattr(jax.config, "jax_compilation_cache_dir", None) is not None:
        yield
        return
    folder = private_folder("programs")
    jax.config.update("jax_compilation_cache_dir", str(folder))
    try:
        yield
    finally:
        jax.config.update("jax_compilation_cache_dir", None)


def training_examples(recipe: Recipe) -> int:
    """Return how many examples a recipe trains on where it holds none out.

    No test example is read to find out.
    """
    if recipe.train_examples is not None:
        return recipe.train_examples
    held = max(1, recipe.validation_examples)
    rest = load(dataclasses.replace(recipe, validation_examples=held)).train
    return len(rest) + held


_OF_DATA = (
    "dataset",
    "data",
    "classes",
    "validation_examples",
    "train_examples",
    "image_size",
    "stream",
)
_loaded: dict[tuple[Any, ...], Dataset] = {}


def load(recipe: Recipe) -> Dataset:
    """Load the data, once for all runs in a row that use the same."""
    key = tuple(getattr(recipe, name) for name in _OF_DATA)
    if key not in _loaded:
        _loaded.clear()
        _loaded[key] = runner.load(recipe)
    return _loaded[key]
