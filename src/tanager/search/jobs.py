"""Runs as jobs: each in a folder of its own, done once, by the first free worker.

Any number of processes, on any machines that share the folder, can work through the
same list of jobs. A job belongs to the process that holds its lock. The operating
system takes the lock back when that process dies, and the next worker resumes the run.
"""

import contextlib
import dataclasses
import functools
import hashlib
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from filelock import FileLock, Timeout

from tanager._cache import private_folder
from tanager._files import locking, write_json
from tanager._record import Maybe, read_record
from tanager.data import Dataset
from tanager.privacy.account import Account
from tanager.privacy.mechanism import Mechanism
from tanager.recipes import cost, runner, tasks
from tanager.recipes.accounts import account_of
from tanager.recipes.fields import LAYOUT_FIELDS
from tanager.recipes.recipe import Recipe
from tanager.training import charging


Watch = Callable[[Mapping[str, Any]], None]
"""Called at each evaluation with its line of metrics.jsonl."""

POLL_SECONDS = 1.0
SHARED = "private/features"
"""Where in the folder of a search its runs share features."""

_PENDING = "pending.json"
_REMEDY = "delete the folder of that run, and it is run again"


class Job(NamedTuple):
    """One run to make.

    Attributes:
        folder: of the run.
        recipe: of the run; its `out` and its physical batch, which the devices share
            evenly, are set when it starts.
        name: of the recipe.
        shared: folder in which runs share the features of frozen layers.
        on_training: whether to measure the accuracy on the training examples, too.
    """

    folder: Path
    recipe: Recipe
    name: str
    shared: Path
    on_training: bool = False


def repeats(first: Job, count: int) -> tuple[Job, ...]:
    """Return jobs like the first, in the folders FOLDER-0, FOLDER-1 and so on.

    A seed is that of the first run; the next has the next seed.
    """
    seed = first.recipe.seed
    return tuple(
        first._replace(
            folder=Path(f"{first.folder}-{n}"),
            recipe=dataclasses.replace(
                first.recipe, seed=None if seed is None else seed + n
            ),
        )
        for n in range(count)
    )


class Outcome(NamedTuple):
    """The result of a run.

    Attributes:
        accuracy: of the parameter average on the held-out examples; 0 if it diverged.
        flops: expected, of its matrix products and convolutions.
        seconds: of training, with compilation.
        diverged: whether parameters became infinite or NaN.
        training_accuracy: like `accuracy`, on the training examples; None if it was not
            measured.
    """

    accuracy: float
    flops: float
    seconds: float
    diverged: bool = False
    training_accuracy: float | None = None


_OUTCOME = {**Outcome.__annotations__, "training_accuracy": Maybe(float)}


def outcome(folder: Path, name: str = "outcome.json") -> Outcome | None:
    """Return the result of the run in a folder; None while it is not complete."""
    path = folder / name
    if not path.exists():
        return None
    content = read_record(path, _OUTCOME, _REMEDY)
    return Outcome(**{name: content[name] for name in _OUTCOME})


@contextlib.contextmanager
def claimed(path: Path) -> Iterator[bool]:
    """Try to hold a lock during the block, and tell whether it is ours."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path, blocking=False, fallback_to_soft=False)
    with contextlib.suppress(Timeout), locking(path):
        lock.acquire()
    try:
        yield lock.is_locked
    finally:
        lock.release()


def make(job: Job, watch: Watch | None = None) -> Outcome:
    """Start or resume a run whose lock this process holds, and write its result.

    Its model and checkpoints are deleted at the end: a simulation has no privacy
    guarantee, so its model must not be released by mistake. An exception that `watch`
    raises ends the run.

    The account of its data is charged with all of its steps, however it ends.
    """
    if done := outcome(job.folder):
        return done
    if done := outcome(job.folder, _PENDING):
        keep(job.folder, done)
        return done
    devices = job.recipe.devices or jax.device_count()
    rows = job.recipe.physical_rows
    rows = rows if rows == "auto" else -(-rows // devices) * devices
    features = features_of(job.recipe, job.shared)
    prepared, account = _prepared(job, physical_batch_size=rows, features=features)
    expected = flops(prepared.recipe, prepared.budget.mechanism.steps)
    started, training = time.monotonic(), []
    try:
        result = runner.run(
            prepared,
            progress=False,
            on_metrics=watch,
            account=account,
            on_training=training.append if job.on_training else None,
        )
    except FloatingPointError:
        spent = time.monotonic() - started
        worst = 0.0 if job.on_training else None
        found = Outcome(0.0, expected, spent, True, training_accuracy=worst)
    else:
        assert result.evaluation_ema is not None
        found = Outcome(
            result.evaluation_ema.accuracy,
            expected,
            result.summary["seconds"],
            training_accuracy=training[0].accuracy if training else None,
        )
    keep(job.folder, found)
    return found


_NOT_OF_FEATURES = {
    *("out", "seed", "epsilon", "delta", "noise_multiplier", "steps", "solve_for"),
    *("batch_size", "physical_batch_size", "learning_rate", "optimizer", "clip_norm"),
    *("optimizer_options", "warmup_steps", "ema_decay", "evaluate_every", "clipping"),
}


def features_of(recipe: Recipe, shared: Path) -> str | None:
    """Return the folder of a run's features, that of all runs that have the same.

    None for a run that computes none.
    """
    if recipe.features is not None or not recipe.caches:
        return recipe.features
    fields = recipe.to_json().items()
    own = sorted((key, repr(v)) for key, v in fields if key not in _NOT_OF_FEATURES)
    return str(shared / hashlib.blake2b(repr(own).encode(), digest_size=8).hexdigest())


def require_room(
    jobs: Sequence[Job], then: Sequence[Mechanism] = (), words: str | None = None
) -> None:
    """Refuse runs that could not all be charged, before a folder for one is made.

    Those that have begun are charged. `then` is what is spent after them, and `words`
    say what all of it is.
    """
    new = [job for job in jobs if not (job.folder / "ledger.jsonl").exists()]
    if not new:
        return
    prepared, account = _prepared(new[0])
    spent, budget, first = [*then], prepared.budget, new[0]
    if account is not None and account.read().limit is not None:
        for job in new[1:]:
            spent += _prepared(job)[0].budget.mechanisms()
    spent = [*budget.mechanisms(), *spent]
    seed = first.recipe.seed
    charging.require_room(account, spent, budget.delta, first.folder, seed, words)


def _prepared(job: Job, **fields: Any) -> tuple[runner.Prepared, Account | None]:
    """Return a job's run, with other `fields` of its recipe, and its account."""
    recipe = dataclasses.replace(job.recipe, out=str(job.folder), **fields)
    with warnings.catch_warnings():
        # The search has already said what it assumes of pretrained weights, and that
        # simulations have no privacy guarantee.
        for said in ("ε = .* protects", "weights .* preprocessing"):
            warnings.filterwarnings("ignore", message=said)
        prepared = runner.prepare(job.name, recipe, dataset=load(recipe))
    return prepared, account_of(recipe, prepared.dataset, "search")


def keep(folder: Path, found: Outcome) -> None:
    """Write the result of a run, then delete its model and its seed.

    A run is complete once its model is deleted. If this is killed before, the next
    `make` goes on from the pending result.
    """
    write_json(folder / _PENDING, found._asdict())
    for path in folder.iterdir():
        if path.suffix in (".json", ".jsonl", ".lock"):
            continue
        if path.name == "private":
            # Norms and losses of a simulation are useful; its seed is not.
            (path / "seed.json").unlink(missing_ok=True)
        elif path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    (folder / _PENDING).replace(folder / "outcome.json")


def work(
    jobs: Sequence[Job],
    report: Callable[[Job, Outcome], None] = lambda job, outcome: None,
    watch: Callable[[Job, Mapping[str, Any]], None] = lambda job, line: None,
) -> list[Outcome]:
    """Make all runs of a list, together with other workers, and return their results.

    `report` is called with each run that this process finished, `watch` at each
    evaluation. In the end the features that they shared are deleted.
    """
    while True:
        for job in jobs:
            if outcome(job.folder) is None:
                with claimed(job.folder / "job.lock") as mine:
                    if mine:
                        report(job, make(job, functools.partial(watch, job)))
        found = [done for job in jobs if (done := outcome(job.folder))]
        if len(found) == len(jobs):
            for shared in {job.shared for job in jobs}:
                shutil.rmtree(shared, ignore_errors=True)
            return found
        time.sleep(POLL_SECONDS)


def parameters(job: Job) -> int:
    """Return how many parameters a run that has begun trains."""
    config = read_record(job.folder / "config.json", {"parameters": int}, _REMEDY)
    return config["parameters"]


def flops(recipe: Recipe, steps: int) -> float:
    """Return the expected operations of a run, from shapes alone."""
    return flops_of(recipe, load(recipe)) * steps


def flops_of(recipe: Recipe, dataset: Dataset) -> float:
    """Return the expected operations of one step, from shapes alone."""
    shape = tasks.seen_shape(recipe, dataset)
    return cost.estimate(recipe, 1, len(dataset.classes), shape).flops


@contextlib.contextmanager
def compiled_once() -> Iterator[None]:
    """Cache compiled programs on the disk during the block.

    The runs of a study differ only in numbers of the small update program; the large
    gradient program is the same and is compiled once.
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
    """Return how many examples, or persons, a recipe trains on if it holds none out.

    Some are held out while it counts: then no test example is read.
    """
    if recipe.train_examples is not None:
        return recipe.train_examples
    held = max(1, recipe.validation_examples)
    rest = load(dataclasses.replace(recipe, validation_examples=held))
    if recipe.unit == "group":
        return tasks.size(recipe, rest) + held
    return len(rest.train) + len(rest.test)


_OF_DATA = ("dataset", "data", *LAYOUT_FIELDS, "model", "weights", "preprocessing")
_OF_DATA += ("classes", "validation_examples", "train_examples", "image_size", "stream")
_OF_DATA += ("groups", "features_from")
_loaded: dict[tuple[Any, ...], Dataset] = {}


def load(recipe: Recipe) -> Dataset:
    """Load the data of a recipe; runs in a row with the same data share it."""
    key = tuple(getattr(recipe, name) for name in _OF_DATA)
    if key not in _loaded:
        _loaded.clear()
        _loaded[key] = runner.load(recipe)
    return _loaded[key]
