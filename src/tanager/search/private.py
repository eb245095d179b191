"""A search that is private throughout: the best of a secret number of private runs.

    study.json          what is searched, and the distribution of the number of runs
    model.safetensors   of the best run; model-ema.safetensors its parameter average
    result.json, report.html, config.json: the guarantee of the whole search
    private/            mode 0700: the secret, all runs, their exact scores

Hyper-parameters are drawn uniformly, without looking at earlier runs. The runs train at
the recipe's own batch size. A score is the number of held-out examples that a run
classifies correctly, plus noise: it hides a held-out example as well as a run hides a
training example. All runs are compared; a diverged one has a score of 0 plus noise.
Which examples are held out is public; neighbours differ by one training or one held-out
example.

References:
    Papernot and Steinke 2022, arXiv:2110.03620; see `tanager.privacy.selection`.
"""

import dataclasses
import json
import os
import re
import warnings
from pathlib import Path
from typing import Any, NamedTuple

from safetensors.numpy import save_file

from tanager import _validate as validate
from tanager._files import as_json, write_json
from tanager._reading import read_json
from tanager._record import Each, Maybe, read_record
from tanager.data import Dataset
from tanager.gaussian import rounded_normals, scale_of
from tanager.models.tensors import read_tensors
from tanager.privacy.account import Account
from tanager.privacy.charges import Charge
from tanager.privacy.mechanism import LARGE_EPSILON, Adjacency
from tanager.privacy.plan import default_delta
from tanager.privacy.selection import PrivateSearch, Selection
from tanager.privacy.shown import format_epsilon
from tanager.recipes import own_weights, runner
from tanager.recipes.accounts import account_of
from tanager.recipes.recipe import Recipe
from tanager.report import run_page
from tanager.search import jobs
from tanager.search.hidden import hidden, same_times
from tanager.search.settings import check_choices
from tanager.search.space import BUDGET, Space
from tanager.seed import Seed
from tanager.training import charging
from tanager.training.fingerprint import versions
from tanager.training.result import note
from tanager.training.run_folder import RunFolder, seed_of


_ANOTHER = "search into another folder"
_SCORE_GRID = 2.0**-10
"""Scores are multiples of this."""
_FOUND = {"values": Each(object), "noisy_accuracy": float}
_RELEASED = {"epsilon": float, "delta": float, "search": Maybe(_FOUND)}


class Winner(NamedTuple):
    """What a private search releases besides the model.

    Attributes:
        values: the choices of the best run.
        noisy_accuracy: its score over the number of held-out examples; with its noise
            it can be below 0 or above 1.
        epsilon: of the whole search.
        delta: of that ε.
    """

    values: dict[str, Any]
    noisy_accuracy: float
    epsilon: float
    delta: float


@dataclasses.dataclass(frozen=True)
class PrivateSettings:
    """What a private search searches; `calibrate_selection` makes one.

    Attributes:
        name: of the recipe.
        recipe: of each run, with the calibrated noise multiplier.
        space: what varies.
        search: what a run and the whole search spend.
        epsilon: of the whole search.
        delta: of that ε.
        examples: how many each run trains on.
    """

    name: str
    recipe: Recipe
    space: Space
    search: PrivateSearch
    epsilon: float
    delta: float
    examples: int

    def check(self, dataset: Dataset) -> None:
        """Refuse choices that make no run; see `check_choices`."""
        check_choices(self.space, self.recipe, self.search.run.steps, dataset)

    def to_json(self) -> dict[str, Any]:
        """Return what identifies the search."""
        return {
            "versions": versions(),
            "private": True,
            "recipe": {"name": self.name, **self.recipe.to_json(), "out": None},
            "space": self.space.to_json(),
            "selection": dataclasses.asdict(self.search.selection),
            "mechanism": dataclasses.asdict(self.search.run),
            "examples": self.examples,
            "epsilon": self.epsilon,
            "delta": self.delta,
        }


def calibrate_selection(
    name: str, recipe: Recipe, space: Space, selection: Selection, examples: int
) -> PrivateSettings:
    """Choose the noise of each run so that the whole search spends at most ε.

    The recipe has ε of the whole search, steps and batch size; its noise multiplier is
    replaced. Each run trains on `examples`, without those held out.

    Raises:
        ValueError: ε or the steps are missing, no examples are held out, or no noise
            multiplier meets ε.
    """
    if recipe.epsilon is None or recipe.steps is None or recipe.non_private:
        rule = "and steps must be given: the noise multiplier is calibrated"
        remedy = "epsilon is that of the whole search"
        validate.refuse("epsilon", recipe.epsilon, rule, remedy)
    recipe.require_batches()
    validate.whole(validation_examples=recipe.validation_examples, at_least=1)
    for of_budget in BUDGET:
        if of_budget in space.values:
            rule = "is not supported by private searches, whose runs spend alike"
            validate.refuse("vary", of_budget, rule, "leave it out")
    if recipe.adjacency != Adjacency.ZERO_OUT:
        rule, remedy = "is not supported by private searches", "use zero-out"
        validate.refuse("adjacency", recipe.adjacency, rule, remedy)
    if recipe.unit != "example":
        rule = "is not supported by private searches, which score held-out images"
        validate.refuse("unit", recipe.unit, rule, "use unit example")
    if recipe.seed is not None:
        rule = "makes a search NOT private"
        validate.refuse("seed", recipe.seed, rule, "leave it out")
    if recipe.epsilon >= LARGE_EPSILON:
        shown = format_epsilon(recipe.epsilon)
        warnings.warn(f"ε = {shown} protects almost nothing", stacklevel=2)
    size = recipe.public_size(examples)
    delta = recipe.delta or default_delta(size)
    search = PrivateSearch.calibrate(
        selection,
        epsilon=recipe.epsilon,
        delta=delta,
        sample_rate=min(1.0, recipe.batch_size / size),
        steps=recipe.steps,
    )
    recipe = dataclasses.replace(
        recipe,
        epsilon=None,
        solve_for=None,
        delta=delta,
        noise_multiplier=search.run.noise_multiplier,
        # Accuracies on held-out examples are private: one at the end is enough.
        evaluate_every=recipe.steps,
    )
    epsilon = search.epsilon(delta)
    return PrivateSettings(name, recipe, space, search, epsilon, delta, examples)


def search_privately(folder: str | os.PathLike, settings: PrivateSettings) -> Winner:
    """Run a private search, and release the best of its runs.

    The same call resumes a search that was killed: the secret fixes the number of runs,
    their choices and their noise from the beginning. There is no guarantee if you look
    into `private/` and stop when a run is good enough.

    The number of runs is secret. So nothing is printed during the runs, and all files
    outside `private/` get the time at which the search began. Anyone who watches how
    long the call takes can still guess the number.

    Raises:
        ValueError: the number of runs cannot be drawn; the folder holds another search
            or a run; the search cannot be charged to the account of its data; or the
            number of runs is 0, which poisson allows, and nothing is released.
        KeyboardInterrupt: after a checkpoint was written.
    """
    settings.search.selection.check_drawn()
    folder, content = Path(folder), as_json(settings.to_json())
    _refuse_another(folder, content)
    runner.require_apart(settings.recipe, folder)
    account = None
    if not (folder / "result.json").exists():
        account = account_of(settings.recipe, jobs.load(settings.recipe), "search")
    if account is not None:
        secret = seed_of(folder) or Seed.from_os()
        account.require_room(_charge(account, folder, settings, secret))
    run_folder = RunFolder(folder, of_search=True)
    if not (folder / "study.json").exists():
        write_json(folder / "study.json", content)
    try:
        if not run_folder.result.exists():
            _search(run_folder, settings, account)
        winner = _released(run_folder)
        if not (run_folder.path / "report.html").exists():  # killed between the two
            run_page.write_report(run_folder.path)
        return winner
    finally:
        same_times(run_folder.path, run_folder.path / "study.json")


def _charge(
    account: Account | None, folder: Path, settings: PrivateSettings, secret: Seed
) -> Charge:
    """Return what the whole search is charged: its runs would tell how many."""
    search = settings.search
    spent = [search.run], settings.delta, folder, secret, search.selection
    return charging.charge_of(account, *spent)


def _search(
    run_folder: RunFolder, settings: PrivateSettings, account: Account | None
) -> None:
    seed = run_folder.seed(None)
    own = _charge(account, run_folder.path, settings, seed)
    charging.charge(account, own)
    runs = run_folder.private / "runs"
    runs.mkdir(exist_ok=True)
    run_folder.seed_is_used()
    held_out = settings.recipe.validation_examples
    notes = own_weights.remarks(settings.recipe.weights, account)
    runs_made = []
    for number in range(settings.search.selection.draw(seed)):
        random = seed.generator("choices", number)
        values = settings.space.draw(random, settings.recipe)
        recipe = settings.space.recipe(settings.recipe, values)
        folder = runs / f"{number:04d}"
        with hidden(run_folder.private):
            right = _right(folder, recipe, settings)
        score = noisy_count(round(right * held_out), settings.search, seed, number)
        runs_made.append((score, folder, values))
    if not runs_made:
        raise ValueError(
            "the number of runs that was drawn is 0, so nothing is released; another "
            "search spends another budget: geometric makes at least one run"
        )
    score, best, values = max(runs_made, key=lambda run: run[0])
    total = charging.total(account, own)
    _release(run_folder, best, settings, values, score / held_out, total, notes)


def noisy_count(right: int, search: PrivateSearch, seed: Seed, number: int) -> float:
    """Add noise to how many held-out examples run `number` classifies correctly.

    The result is on a grid, as sums of gradients are, so that the set of possible
    values does not depend on the count, `right`, which is private.
    """
    scale = scale_of(search.score_noise, _SCORE_GRID)

    def more(_: int, taken: int) -> int:
        return int.from_bytes(seed.derive("score bits", number, taken, size=8))

    (drawn,) = rounded_normals(seed.words(1, "score", number), scale, more)
    return (right / _SCORE_GRID + int(drawn)) * _SCORE_GRID


def _refuse_another(folder: Path, content: dict[str, Any]) -> None:
    """Check that a folder holds this search, or nothing that it would overwrite."""
    path = folder / "study.json"
    begun, rule = path.exists(), ""
    if begun and read_json(path, _ANOTHER) != content:
        rule = "holds a search with other settings"
    of_runs = ["ledger.jsonl", "config.json", "result.json", "private"]
    for name in of_runs[:1] if begun else of_runs:
        other = folder / name
        # A search that is killed as it begins leaves empty folders.
        if any(other.iterdir()) if other.is_dir() else other.exists():
            rule = f"holds {name}, which is not of a search"
    if rule:
        validate.refuse("out", str(folder), rule, _ANOTHER)


def _right(folder: Path, recipe: Recipe, settings: PrivateSettings) -> float:
    """Return the accuracy of a run on the held-out examples. Private."""
    result = folder / "result.json"
    diverged = folder / "diverged"
    if not result.exists() and not diverged.exists():
        features = jobs.features_of(recipe, folder.parents[1] / "features")
        recipe = dataclasses.replace(recipe, out=str(folder), features=features)
        prepared = runner.prepare(settings.name, recipe, dataset=jobs.load(recipe))
        spent = prepared.budget.mechanism
        if spent != settings.search.run:
            raise ValueError(
                f"a run would spend {spent} where the search accounts for "
                f"{settings.search.run}: the data differ from those it was planned for"
            )
        try:
            # What one run measured would change how the next ones clip and round.
            links = {"private_search": True}
            runner.run(prepared, progress=False, fast=True, links=links)
        except FloatingPointError:
            diverged.touch()
        except (ValueError, OSError) as error:
            kind = ValueError if isinstance(error, ValueError) else OSError
            # The name of a run's folder says how many runs came before.
            raise kind(re.sub(r"(private/runs)/\d+", r"\1", str(error))) from None
    if diverged.exists():
        return 0.0
    return read_record(result, {"test_accuracy_ema": float})["test_accuracy_ema"]


# What depends neither on held-out examples nor on a clock, nor on which run it was: of
# a run's result.json, and of its config.json.
_PUBLIC = ("adjacency", "steps", "batch_size", "sample_rate", "clip_norm")
_PUBLIC += ("noise_multiplier", "examples", "unreadable", "eta", "eta_step")
_PUBLIC += ("total_noise", "unit", "versions")
_SETTINGS = ("recipe", "model", "architecture", "preprocessing", "weights", "dataset")
_SETTINGS += ("reading", "classes", "multi_label", "optimizer", "automatic", "unit")
_SETTINGS += ("chosen_from", "unreadable", "mechanism", "examples", "batch_size")
_SETTINGS += ("clip_norm", "clip_gamma", "adaptive_clipping", "delta")
_SETTINGS += ("augmentation_multiplicity", "ema_decay", "accountant", "parameters")
_SETTINGS += ("frozen_parameters", "versions")


def _release(
    folder: RunFolder,
    best: Path,
    settings: PrivateSettings,
    values: dict[str, Any],
    noisy_accuracy: float,
    total: dict[str, Any] | None,
    notes: list[str],
) -> None:
    """Copy the public part of the best run, under the guarantee of the search."""
    if (best / "diverged").exists():
        raise ValueError(
            "the best run diverged, so nothing is released; the budget is spent: "
            "search lower learning rates"
        )
    selection = settings.search.selection
    of_run = read_record(best / "result.json", dict.fromkeys(_PUBLIC, object))
    result = {name: of_run[name] for name in _PUBLIC} | {
        "private": True,
        "epsilon": settings.epsilon,
        "delta": settings.delta,
        "accountant": "rdp",
        "search": {
            "mean": selection.mean,
            "shape": selection.shape,
            "values": values,
            "noisy_accuracy": noisy_accuracy,
            "score_noise": settings.search.score_noise,
            "held_out_examples": settings.recipe.validation_examples,
        },
    }
    if total is not None:
        result["account"] = total
    charge = charging.id_of(folder.path, folder.seed(None))
    metadata = {"tanager": json.dumps(note(result, {"charge": charge}))}
    for name in ("model.safetensors", "model-ema.safetensors"):
        save_file(read_tensors(best / name), folder.path / name, metadata)
    of_run = read_record(best / "config.json", {"recipe": Each(object)})
    config = {name: of_run[name] for name in _SETTINGS}
    config["recipe"]["out"] = None
    config["charge"] = charge
    if notes:
        config["weights"]["changes"] += notes
    write_json(folder.config, config)
    write_json(folder.result, result)


def _released(folder: RunFolder) -> Winner:
    result = read_record(folder.result, _RELEASED)
    found = result["search"]
    if found is None:
        rule = "holds result.json, which is not of a search"
        validate.refuse("out", str(folder.path), rule, _ANOTHER)
    return Winner(
        found["values"], found["noisy_accuracy"], result["epsilon"], result["delta"]
    )
