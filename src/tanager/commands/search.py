"""`tanager search`: hyper-parameters at small batch, and what the large run reaches."""

import dataclasses
import shlex
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from rich.console import Console
from tyro.conf import Positional

from tanager import _validate as validate
from tanager._files import write_json
from tanager._heap import run_in_place
from tanager._record import read_record
from tanager._terminal import new_console
from tanager._text import clean
from tanager.commands import accounts, experiments, flags, norms
from tanager.commands.experiments import held_out, target_of
from tanager.commands.tables import print_json
from tanager.commands.watching import Watching, work_through
from tanager.privacy.shown import format_delta, format_epsilon
from tanager.recipes.recipe import Recipe
from tanager.search.space import Space


if TYPE_CHECKING:
    from tanager.search.settings import Settings
    from tanager.search.study import Study, TrialResult


_OF_SIMULATIONS = ("simulation_batch_sizes", "repeats", "sampler", "pruner")
_OF_SIMULATIONS += ("parallel",)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Search hyper-parameters at small batch size; predict what the full run reaches.

    Trials run at the smallest of --simulation-batch-sizes, the winner at all of them.
    By default --vary is learning-rate, ema-decay, momentum and dampening, and the
    augmentation and its multiplicity if the recipe augments.

    With --private, runs use the recipe's own batch size, epsilon is the budget of the
    whole search, --trials the expected number of runs, and --vary is drawn evenly.

    Other searches, each with a --help of its own:

        tanager search budget RECIPE     batch size, steps and learning rate at one ε
        tanager search privacy RECIPE    steps against batch size at constant noise
        tanager search data RECIPE       what more data would do
        tanager search ablation RECIPE   every combination of --vary
        tanager search worker FOLDER     help with a search that was begun elsewhere
        tanager search norms RUN         how long a run's gradients were
    """

    SHORT: ClassVar[tuple[str, ...]] = (
        "trials",
        "simulation_batch_sizes",
        "vary",
        "repeats",
        "parallel",
        "private",
        "json",
        *flags.USUAL,
    )

    trials: int = 20
    """Number of trials in the search. No combination of values is tried twice."""

    simulation_batch_sizes: tuple[int, ...] = ()
    """Simulated batch sizes. Default: b, 2b and 4b; b is B/128, at least 32, but B/8 if
    B is below 128."""

    vary: tuple[str, ...] = ()
    """What to search: NAME=1,2,4, NAME=0.5..8, or NAME for the TAN paper's grid
    (if it has none, for usual values)."""

    repeats: int = 2
    """Runs of the winner at each simulation batch size."""

    sampler: str = "tpe"
    """How choices are made: tpe, random or grid."""

    pruner: str = "median"
    """Which trials end early: median (below it), halving (all but 1/4) or none."""

    parallel: int = 1
    """Number of processes on this machine that run trials."""

    private: bool = False
    """Search privately: a secret number of runs; only the best is released."""

    json: flags.Json = False

    def refuse_unused(self, recipe: Recipe, given: Collection[str]) -> None:
        """Refuse flags of simulations where --private makes none."""
        for name in _OF_SIMULATIONS if self.private else ():
            if name in given:
                rule = "does not apply to --private, which simulates nothing"
                validate.refuse(name, getattr(self, name), rule, "leave it out")


@dataclasses.dataclass(frozen=True)
class WorkerOptions:
    """Join a study that another process started; run trials until it is done."""

    study: Positional[str]
    """Folder of the study, on a file system that all workers share."""


def run(arguments: Sequence[str]) -> int:
    words = list(arguments)
    if words[:1] == ["worker"]:
        return _join(flags.read(WorkerOptions, "search worker", words[1:]))
    if words[:1] == ["norms"]:
        return norms.run(words[1:])
    if words and words[0] in experiments.TABLES:
        return experiments.tabulate(words[0], words[1:])
    entry, recipe, options = flags.parse("search", words, Options)
    validate.whole(trials=options.trials, parallel=options.parallel, at_least=1)
    search = _search_privately if options.private else _search
    return search(entry.name, recipe, options)


def _require_whole_grid(settings: "Settings", trials: int) -> None:
    if settings.sampler != "grid":
        return
    points = len(settings.space.points(settings.target.recipe))
    if trials < points:
        rule = f"must be at least {points}, as many as combinations, for sampler grid"
        validate.refuse("trials", trials, rule, "or choose --sampler random or tpe")


def _search(name: str, recipe: Recipe, options: Options) -> int:
    from tanager.search import jobs
    from tanager.search.study import Study, require_optuna

    require_optuna()
    run_in_place()
    console = new_console(stderr=True)
    settings = _settings(name, recipe, options)
    out = Path(recipe.out or f"runs/{name}-search")
    _require_whole_grid(settings, options.trials)
    first = settings.simulated(settings.batch_sizes[0])
    begun = jobs.Job(out / "trials/0000/run", first, name, out / jobs.SHARED)
    jobs.require_room([begun])
    study = Study(out, settings)
    write_json(out / "asked.json", {"trials": options.trials})
    _announce(settings, study.count(options.trials), console)
    others = [
        subprocess.Popen([sys.executable, "-m", "tanager", "search", "worker", out])
        for _ in range(options.parallel - 1)
    ]
    try:
        result = _finish(study, options.trials, console)
    finally:
        for other in others:
            other.terminate()
    if options.json:
        return print_json(result)
    _print(result, out, _charged(recipe, settings.target.delta))
    return 0


def _search_privately(name: str, recipe: Recipe, options: Options) -> int:
    from tanager.privacy.selection import Selection
    from tanager.search import jobs
    from tanager.search.private import calibrate_selection, search_privately

    run_in_place()
    if recipe.solve_for not in (None, "noise_multiplier"):
        rule = "must be left out of a private search"
        remedy = "it is solved for, so that the whole search spends at most epsilon"
        validate.refuse("noise_multiplier", recipe.noise_multiplier, rule, remedy)
    if not recipe.validation_examples:
        tenth = jobs.training_examples(recipe) // 10
        recipe = dataclasses.replace(recipe, validation_examples=tenth)
    dataset = jobs.load(recipe)
    selection = Selection(float(options.trials))
    space = _space(recipe, options)
    settings = calibrate_selection(name, recipe, space, selection, len(dataset.train))
    settings.check(dataset)
    console = new_console(stderr=True)
    console.print(
        f"{name}: a secret number of runs, {options.trials} on average, at most "
        f"{selection.at_most(0.99)} in 99 of 100 searches; each with noise multiplier "
        f"{settings.search.run.noise_multiplier:.6g}, all of them together at ε = "
        f"{format_epsilon(settings.epsilon)}, δ = {format_delta(settings.delta)} "
        "(RDP). Stopping earlier, or searching again, has another guarantee or none"
    )
    out = Path(recipe.out or f"runs/{name}-private-search")
    winner = search_privately(out, settings)
    if options.json:
        return print_json(winner._asdict())
    new_console(markup=False).print(
        f"best: {100 * winner.noisy_accuracy:.1f} % of the held-out examples, with "
        f"noise, by {_listed(winner.values)}\nε = {format_epsilon(winner.epsilon)} at "
        f"δ = {format_delta(winner.delta)} for the whole search\n"
        f"{_charged(recipe, winner.delta)}report: {clean(out)}/report.html",
        soft_wrap=True,
    )
    return 0


def _join(options: WorkerOptions) -> int:
    from tanager.search.study import Study

    run_in_place()
    study = Study(options.study)
    asked = read_record(study.folder / "asked.json", {"trials": int})["trials"]
    _finish(study, asked, new_console(stderr=True))
    return 0


def _settings(name: str, recipe: Recipe, options: Options) -> "Settings":
    from tanager.search import jobs
    from tanager.search.settings import Settings

    target = target_of(name, recipe)
    settings = Settings(
        target,
        _space(recipe, options),
        options.simulation_batch_sizes or _batch_sizes(recipe.batch_size),
        held_out(recipe, target),
        options.repeats,
        options.sampler,
        options.pruner,
        recipe.seed,
    )
    held = settings.validation_examples
    compared = dataclasses.replace(recipe, validation_examples=held)
    settings.check(jobs.load(compared))
    return settings


def _space(recipe: Recipe, options: Options) -> Space:
    return Space.parse(options.vary) if options.vary else Space.default(recipe)


def _batch_sizes(reference: int) -> tuple[int, ...]:
    smallest = max(32, reference // 128)
    if 4 * smallest > reference:
        smallest = max(1, reference // 8)
    sizes = smallest, 2 * smallest, 4 * smallest
    return tuple(size for size in sizes if size <= reference)


def _finish(study: "Study", trials: int, console: Console) -> dict[str, Any]:
    """Make what is left of a study, and write what it found."""
    from tanager.report import search_page
    from tanager.search import jobs
    from tanager.search.summary import summarise

    before = [
        each.accuracy if each.state == "complete" else 0.0 for each in study.results()
    ]
    with jobs.compiled_once():
        shown = Watching(study.count(trials), before, console)
        with shown.bar:
            study.work(
                trials,
                lambda done: _tell(study, done, shown),
                lambda number, line: shown.line(f"trial {number}", line, line["steps"]),
            )
    best = study.best()
    winner = study.confirmations(best.values) if best else []
    console.print(f"the best choices again, in {len(winner)} simulations:")
    outcomes = work_through(
        winner, console, lambda job: f"batch size {job.recipe.batch_size}"
    )
    result = summarise(study, winner, outcomes)
    write_json(study.folder / "result.json", result)
    search_page.write_report(study.folder)
    return result


def _announce(settings: "Settings", trials: int, console: Console) -> None:
    target = settings.target
    console.print(
        f"{target.name}: for a run of batch size {target.recipe.batch_size}, noise "
        f"multiplier {target.mechanism.noise_multiplier:.6g} and {target.steps} steps "
        f"on {target.examples} examples (ε = {format_epsilon(target.epsilon)} at δ = "
        f"{format_delta(target.delta)}), {trials} trials at batch size "
        f"{settings.batch_sizes[0]}; "
        f"{settings.validation_examples} training examples are held out to compare "
        "them; test examples are not read"
    )
    console.print(
        "simulations have NO privacy guarantee: search on public data, or use --private"
    )
    for name, values in settings.space.values.items():
        console.print(f"  {name}: {values}")


def _tell(study: "Study", done: "TrialResult", shown: Watching) -> None:
    state = "" if done.state == "complete" else f" ({done.state} at step {done.steps})"
    best = study.best()
    shown.ended(
        len(study.results()),
        None if best is None else best.accuracy,
        f"trial {done.number}: {100 * done.accuracy:.2f} %{state} with "
        f"{_listed(done.values)}",
    )


def _listed(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def _charged(recipe: Recipe, delta: float) -> str:
    return accounts.sentence(recipe, accounts.total_of(recipe, delta))


def _print(result: dict[str, Any], out: Path, charged: str) -> None:
    console = new_console(markup=False)
    best, prediction = result["best"], result["prediction"]
    console.print(
        f"best of {len(result['trials'])} trials: {100 * best['accuracy']:.2f} % with "
        f"{_listed(best['values'])}"
    )
    if prediction is not None:
        console.print(
            f"predicted at batch size {prediction['reference_batch_size']}, on the "
            f"same {result['privacy']['held_out_examples']} held-out examples: "
            f"{100 * prediction['accuracy']:.1f} %, between "
            f"{100 * prediction['low']:.1f} and {100 * prediction['high']:.1f} % in "
            f"{100 * prediction['confidence']:g} of 100 such searches"
        )
        for doubt in prediction["doubts"]:
            console.print(f"unreliable: {doubt}", style="yellow")
    cost = result["cost"]
    console.print(
        f"the search took {100 * cost['share_of_reference']:.3g} % of the operations "
        f"of that run: its trials {100 * cost['trials_share']:.3g} %, the runs of the "
        f"best {100 * cost['winner_share']:.3g} %"
    )
    console.print(f"{charged}report: {clean(out)}/report.html", soft_wrap=True)
    console.print(
        f"next: tanager train --from-study {shlex.quote(str(out))}", soft_wrap=True
    )
