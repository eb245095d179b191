"""`tanager train`: a recipe, with any field overridden on the command line."""

import contextlib
import dataclasses
import shlex
import sys
import warnings
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from tanager import _validate as validate
from tanager import recipes
from tanager._files import write_json
from tanager._heap import run_in_place
from tanager._terminal import libraries_on_stderr, new_console
from tanager._text import clean
from tanager.commands import accounts, flags, studies
from tanager.commands.tables import print_json
from tanager.measures import HEADLINES
from tanager.privacy.class_counts import deviation_of
from tanager.privacy.plan import delta_warning, few_warning
from tanager.privacy.shown import format_delta, format_epsilon
from tanager.recipes.recipe import Recipe


if TYPE_CHECKING:
    from rich.console import Console

    from tanager.recipes.runner import Prepared
    from tanager.training.estimate import Estimate
    from tanager.training.result import TrainResult


_LONG_SECONDS = 3600.0
_SHOWN = 20  # classes


def run(arguments: Sequence[str]) -> int:
    words = list(arguments)
    if "--list" in words:
        return _print_recipes("--json" in words)
    found = studies.named(words)
    start = None if found is None else found.entry
    entry, recipe, options = flags.parse("train", words, Options, start)
    name, found = entry.name, found and found.of(recipe)
    if entry.pretrained_on and recipe.weights is None:
        needed = f"{name} needs a model pretrained on {entry.pretrained_on}"
        rule = f"must be given: {needed}"
        remedy = "give --weights with a file, a folder, hf:OWNER/NAME or timm/NAME"
        validate.refuse("weights", None, rule, remedy)

    # JAX is imported from here on: the command line was fine.
    from tanager.parallel import hosts

    run_in_place()
    if not options.distributed:
        return _train(name, recipe, found, options)
    together = hosts.together(
        options.coordinator, options.hosts, options.host, timeout=options.timeout
    )
    with libraries_on_stderr(), together:  # Gloo says there that it is connected
        return _train(name, recipe, found, options)


def _train(
    name: str, recipe: Recipe, found: studies.Found | None, options: "Options"
) -> int:
    from tanager.parallel import hosts
    from tanager.recipes import repeats, runner, tasks
    from tanager.recipes.accounts import account_of

    quiet = options.quiet or options.json
    if options.resume:
        recipe = dataclasses.replace(recipe, out=_unfinished(name, recipe, options))
    with (
        tasks.progress_bar("reading images", hosts.is_chief() and not quiet) as report,
        runner.saying_how_to_skip(recipe),
    ):
        prepared = runner.prepare(name, recipe, report)
        runner.require_workers(prepared)
    recipe = prepared.recipe
    _warn(name, prepared)
    console = new_console(markup=False, quiet=quiet or not hosts.is_chief())
    _describe(console, name, prepared)
    with runner.in_folder(prepared) as placed, _saying_how_to_resume(recipe, placed):
        runner.require_layout(placed)
        account, results = account_of(recipe, prepared.dataset), []
        links = None if found is None else found.links()
        for each in repeats.repeated(placed, options.repeats):
            runner.require_resumable(each, links)
        repeats.require_room(placed, options.repeats, account)
        out = str(placed.recipe.out)
        again = f"stopped? repeat the command with --out {shlex.quote(out)}"
        if options.repeats == 1 and (Path(out) / "result.json").exists():
            again = "finished before: nothing is trained; for a new run, change --out"
        console.print(f"run: {clean(out)} ({again})", soft_wrap=True)
        events = shlex.quote(out if options.repeats > 1 else f"{out}/tensorboard")
        console.print(f"watch: tensorboard --logdir {events}", soft_wrap=True)
        for each in repeats.repeated(placed, options.repeats):
            if options.repeats > 1:
                console.print(f"run {len(results) + 1} of {options.repeats}")
            result = runner.run(
                each,
                progress=not quiet,
                links=links,
                account=account,
                on_estimate=None if quiet or options.yes else _ask,
                fast=options.fast,
            )
            results.append(result)
            if found is not None and hosts.is_chief():
                found.tell(result)
                console.print(found.sentence(result))
            console.print(_conclusion(result, recipe.ema_decay > 0))
    if not hosts.is_chief():
        return 0
    result, content, where = results[-1], _as_json(results[-1]), f"{out}/report.html"
    if options.repeats > 1:
        content, where = repeats.summary(prepared, results), f"{out}/*/report.html"
        write_json(Path(out) / "repeats.json", content)
        console.print(repeats.sentence(content), soft_wrap=True)
    if options.json:
        return print_json(content)
    charged = accounts.sentence(recipe, result.summary.get("account"))
    console.print(f"{charged}report: {clean(where)}", soft_wrap=True)
    return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Train a model privately, from a recipe.

        tanager train digits
        tanager train folder --data IMAGES --epsilon 4

    Raises:
        ValueError: the timeout is not positive, or `repeats` is below 1.
    """

    SHORT: ClassVar[tuple[str, ...]] = (
        "data",
        "epsilon",
        "delta",
        "model",
        "weights",
        "fine_tune",
        "batch_size",
        "steps",
        "learning_rate",
        "unit",
        "groups",
        "out",
        "repeats",
        "resume",
        "account",
        "quiet",
        "json",
    )

    repeats: int = 1
    """Number of runs. Each spends ε; the median of their scores is printed."""

    resume: bool = False
    """Continue the last runs/RECIPE-NUMBER of this recipe that did not finish."""

    from_study: str | None = None
    """Folder of a finished search: run its recipe with the best choices."""

    distributed: bool = False
    """Train on several hosts, each started by this command; see docs/scale.md."""

    coordinator: str | None = None
    """ADDRESS:PORT of host 0; this port must be free there."""

    hosts: int | None = None
    """Number of hosts."""

    host: int | None = None
    """Number of this host, from 0."""

    timeout: float = 300.0
    """Seconds to wait for the other hosts."""

    quiet: bool = False
    """Print nothing but warnings and errors; do not ask."""

    json: flags.Json = False

    yes: bool = False
    """Do not ask before a run of more than an hour."""

    fast: bool = False
    """Do not measure how to clip, which takes up to a tenth of the run."""

    def __post_init__(self):
        validate.positive(timeout=self.timeout)
        validate.whole(repeats=self.repeats, at_least=1)

    def refuse_unused(self, recipe: Recipe, given: Collection[str]) -> None:
        """Refuse flags that were given and do nothing without --distributed."""
        for name in ("coordinator", "hosts", "host", "timeout"):
            if name in given and not self.distributed:
                value, remedy = getattr(self, name), "add it, or leave this out"
                validate.refuse(name, value, "needs --distributed", remedy)


def _unfinished(name: str, recipe: Recipe, options: "Options") -> str:
    """Return the folder that --resume finds."""
    from tanager.parallel import hosts
    from tanager.training.run_folder import unfinished

    if options.repeats > 1:
        remedy = "name the folder with --out"
        validate.refuse("resume", True, "finds one run only", remedy)
    if recipe.out is not None:
        rule = "names the last folder of the recipe itself"
        validate.refuse("resume", True, rule, "leave it out")
    return hosts.from_chief(lambda: str(unfinished(name)))


def _warn(name: str, prepared: "Prepared") -> None:
    """Warn of a δ that protects little, and of examples too few to learn from."""
    recipe, budget, public = prepared.recipe, prepared.budget, prepared.public_size
    own = recipes.RECIPES[name].recipe.delta if name in recipes.RECIPES else None
    typed = recipe.delta not in (None, own) and not recipe.non_private
    warned_of = typed and budget.delta * public < 1  # else training warns of it
    if warned_of and (text := delta_warning(budget.delta, public)):
        warnings.warn(text, stacklevel=3)
    if text := accounts.limit_warning(recipe, budget.delta, public):
        warnings.warn(text, stacklevel=3)
    classes = None if recipe.multi_label else len(prepared.dataset.classes)
    unit = "person" if recipe.unit == "group" else "example"
    if text := few_warning(budget.mechanism, public, classes, unit):
        warnings.warn(text, stacklevel=3)


def _describe(console: "Console", name: str, prepared: "Prepared") -> None:
    """Print what will be trained, on what, and under which guarantee."""
    recipe, budget = prepared.recipe, prepared.budget
    of = "persons" if recipe.unit == "group" else "examples"
    examples = f"{prepared.public_size} {of} of {recipe.dataset}"
    console.print(f"{name}: {recipe.model} on {examples}")
    if recipe.dataset == "folder":
        kind = "labels" if recipe.multi_label else "classes"
        console.print(_names(kind, prepared.dataset.classes), soft_wrap=True)
    if recipe.groups is not None and recipe.unit == "example":
        console.print(
            "unit: one image; --groups alone keeps the images of a person together in "
            "the split, and --unit group protects persons",
            soft_wrap=True,
        )
    for field, reason in prepared.reasons.items():
        console.print(f"{field}: {reason}", soft_wrap=True)
    mechanism = budget.mechanism
    steps = f"{mechanism.steps} step{'s' * (mechanism.steps != 1)}"
    if recipe.non_private:
        console.print(f"NOT PRIVATE: no clipping, no noise; {steps}")
    else:
        console.print(
            f"budget: ε = {format_epsilon(budget.epsilon)} at "
            f"δ = {format_delta(budget.delta)} "
            f"({mechanism.adjacency}, {recipe.accountant.upper()}): noise multiplier "
            f"{mechanism.noise_multiplier:.6g}, expected batch {recipe.batch_size}, "
            + steps
        )
    if (counts := budget.class_counts) is not None:
        console.print(
            "class weights: from noisy counts, in this budget: noise of standard "
            f"deviation {deviation_of(counts):.4g} on each count"
        )


@contextlib.contextmanager
def _saying_how_to_resume(given: Recipe, placed: "Prepared") -> Iterator[None]:
    """Say in `KeyboardInterrupt` which command resumes a run that it stopped."""
    try:
        yield
    except KeyboardInterrupt as stopped:
        out, again = str(placed.recipe.out), "run the same command again"
        if any(Path(out).rglob("config.json")):  # else nothing was begun
            if given.out is None:
                again += f" with --out {shlex.quote(out)} to resume"
            else:
                again += f" to resume {out}"
        stopped.args = (again,)
        raise


def _ask(estimate: "Estimate") -> None:
    """Ask a person whether a long run may begin; nothing is charged yet."""
    from tanager.parallel import hosts

    def agreed() -> bool:
        if estimate.seconds <= _LONG_SECONDS or not sys.stdin.isatty():
            return True
        return input("go on? [y/N] ").strip().lower() in ("y", "yes")

    if not hosts.from_chief(agreed):
        raise KeyboardInterrupt


def _as_json(result: "TrainResult") -> dict[str, Any]:
    scores = [f"test_{name}{kind}" for name in HEADLINES for kind in ("", "_ema")]
    names = ("epsilon", "delta", "private", *scores)
    return {
        "run": str(result.out),
        **{name: result.summary[name] for name in names if name in result.summary},
        "seconds": result.summary["seconds"],
        "report": f"{result.out}/report.html",
    }


def _names(kind: str, names: Sequence[str]) -> str:
    shown = [clean(name) for name in names[:_SHOWN]]
    left = [f"and {len(names) - _SHOWN} more"] * (len(names) > _SHOWN)
    return f"{kind} ({len(names)}): {', '.join(shown + left)}"


def _conclusion(result: "TrainResult", averaged: bool) -> str:
    kind = "" if result.summary["private"] else "NOT PRIVATE (see the report): "
    text = f"{kind}ε = {format_epsilon(result.epsilon)} at "
    text += f"δ = {format_delta(result.delta)} was spent"
    for name, words in HEADLINES.items():
        last, average = (result.summary.get(f"test_{name}{k}") for k in ("", "_ema"))
        if last is not None and average is not None:
            text += f"; test {words} {100 * last:.2f} %"
            text += f", average of parameters {100 * average:.2f} %" * averaged
    measures = (result.summary["measures"] or {}).get("average", {})
    balanced = measures.get("balanced_accuracy", {}).get("value")
    if balanced is not None and balanced < measures["accuracy"]["value"] - 0.05:
        text += f"; balanced accuracy only {100 * balanced:.2f} % (see the report)"
    return text


def _print_recipes(json: bool) -> int:
    headings, rows = recipes.listing()
    if json:
        names = ("name", "dataset", "model", "budgets", "source", "accuracy")
        found = [dict(zip(names, row, strict=True)) for row in rows]
        return print_json({"recipes": found})
    console = new_console()
    for row in rows:
        console.print(f"[bold]{row[0]}[/]")
        for heading, value in zip(headings[1:], row[1:], strict=True):
            console.print(f"    {heading + ':':22}{value}", soft_wrap=True)
    return 0
