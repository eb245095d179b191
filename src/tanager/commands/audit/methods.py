"""The attacks of `tanager audit`, each on a recipe; what they found as JSON."""

import dataclasses
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import optax

from tanager import _validate as validate
from tanager._files import make_folder
from tanager._terminal import new_console
from tanager.audit.black_box import audit_one_run
from tanager.audit.bounds import highest_advantage
from tanager.audit.membership import Attack, audit_membership
from tanager.audit.replay import FALSE_ALARM, replay
from tanager.audit.white_box import audit_white_box
from tanager.commands.audit.progress import ModelsProgress
from tanager.data import Dataset, Source, as_source, gather, subset
from tanager.privacy.mechanism import Mechanism
from tanager.privacy.shown import format_delta, format_epsilon
from tanager.recipes import heads, runner, tasks
from tanager.recipes.accounts import account_of
from tanager.recipes.optimizers import optimizer
from tanager.recipes.recipe import Recipe
from tanager.seed import Seed
from tanager.training import charging
from tanager.training.problem import DPSGD, Runtime
from tanager.training.run_folder import RunFolder


if TYPE_CHECKING:
    from tanager.commands.audit.options import Options


_EXAMPLES = {"white-box": 256, "membership": 100, "replay": 24}
"""How many examples an audit trains on by default; all in one run."""
_CANARIES = 2000


def white_box(
    name: str, recipe: Recipe, options: "Options", out: Path
) -> dict[str, Any]:
    """Put gradient canaries into a run of the recipe, and look at every update."""
    folder = out / "run"
    _, task, algorithm = _prepared(name, recipe, folder, options)
    asked, steps = options.audited_steps, algorithm.mechanism.steps
    if asked is not None and asked > steps:
        rule = f"must be at most the mechanism's {steps}"
        validate.refuse("audited_steps", asked, rule)
    canaries = options.canaries or _CANARIES
    found = audit_white_box(
        task.problem,
        algorithm,
        _runtime(recipe, options),
        canaries=canaries,
        examples_each=options.canary_examples,
        confidence=_confidence(options),
        knows_sample=options.knows_sample,
        steps=options.audited_steps,
        out=folder,
        seed=recipe.seed,
    )
    return {
        **_bounds(algorithm.mechanism, found),
        "models": 1,
        "canaries": canaries,
        "knows_sample": options.knows_sample,
        "audited_steps": options.audited_steps,
        "noise_multiplier_not_refuted": found.noise_multiplier,
    }


def one_run(name: str, recipe: Recipe, options: "Options", out: Path) -> dict[str, Any]:
    """Let mislabelled test images join a run of the recipe, and look at its model."""
    folder = out / "run"
    prepared, task, algorithm = _prepared(name, recipe, folder, options)
    canaries = options.canaries or min(_CANARIES, len(task.test))
    if canaries > len(task.test):
        rule = f"must be at most the {len(task.test)} test images that become canaries"
        validate.refuse("canaries", canaries, rule)
    chosen = gather(task.test, np.arange(canaries))
    own = np.asarray(chosen["label"])
    wrong = ((own + 1) % len(prepared.dataset.classes)).astype(own.dtype)
    found = audit_one_run(
        task.problem,
        algorithm,
        {**chosen, "label": wrong},
        _runtime(recipe, options),
        confidence=_confidence(options),
        guessed=options.guessed,
        out=folder,
        seed=recipe.seed,
    )
    return {
        **_bounds(algorithm.mechanism, found),
        "models": 1,
        "canaries": canaries,
        "guesses": found.guesses._asdict(),
    }


def replayed(
    name: str, recipe: Recipe, options: "Options", out: Path
) -> dict[str, Any]:
    """Train a few steps of the recipe again and again, and check all that was done."""
    with tempfile.TemporaryDirectory() as folder:
        _, task, algorithm = _prepared(name, recipe, Path(folder), options)
        make_folder(out, "out")
        findings = replay(
            task.problem,
            algorithm,
            dataclasses.replace(runner.runtime(recipe), physical_batch_size=4),
        )
    return {
        "passed": all(finding.passed for finding in findings),
        "false_alarm": FALSE_ALARM,
        "checks": [finding._asdict() for finding in findings],
    }


def membership(
    name: str, recipe: Recipe, options: "Options", out: Path
) -> dict[str, Any]:
    """Train many models of the recipe's network under its ε and δ."""
    if recipe.epsilon is None or recipe.delta is None:
        missing = "delta" if recipe.epsilon is not None else "epsilon"
        rule = "must be given for membership"
        remedy = "the noise of each setting is solved for from epsilon and delta"
        validate.refuse(missing, None, rule, remedy)
    if recipe.solve_for not in (None, "noise_multiplier"):
        rule = "must be left out for membership: it is solved for"
        validate.refuse("noise_multiplier", recipe.noise_multiplier, rule)
    if recipe.clipping == "adaptive":
        rule = "must be clip or automatic for membership, whose settings have one norm"
        remedy = "or audit by --method replay or white-box"
        validate.refuse("clipping", recipe.clipping, rule, remedy)
    epsilon, delta = recipe.epsilon, recipe.delta
    console = new_console(stderr=True, quiet=options.json)
    console.print(
        f"{name}: attack on ε = {format_epsilon(epsilon)} at δ = "
        f"{format_delta(delta)}, by {options.models} models and those of "
        "phase I; reading the data"
    )
    dataset = runner.load(recipe)
    recipe = runner.sized(recipe, dataset)
    tasks.check_augmentation(recipe, dataset)
    tasks.warn_of_preprocessing(recipe)
    recipe, chosen = _chosen(recipe, dataset, options)
    secret = RunFolder(out).seed(recipe.seed)
    canaries = _canaries(dataset, options.canary_kinds, secret)
    stacked = jax.tree.map(lambda *each: np.stack(each), *canaries.values())
    task = _task(recipe, dataset, out, options, as_source(stacked))
    seen = {name: task.test[place] for place, name in enumerate(canaries)}
    account = account_of(recipe, dataset, "audit")
    attack = Attack(
        epsilon,
        delta,
        style=recipe.style,
        augmentation_multiplicity=recipe.augmentation_multiplicity,
        confidence=_confidence(options),
        **chosen,
    )
    shown = ModelsProgress(console)
    with shown.bar:
        found = audit_membership(
            dataclasses.replace(task.problem, account=account),
            attack,
            seen,
            models=options.models,
            sweep_models=options.sweep_models,
            strategy=recipe.strategy_and_memory[0],
            models_at_once=options.models_at_once,
            out=out,
            seed=recipe.seed,
            on_models=shown.tell,
        )
    return {
        **_bounds(found.mechanism, found),
        "highest_provable": found.highest_provable,
        "models": found.models,
        "setting": found.setting._asdict(),
        "tried": [
            {
                **each.setting._asdict(),
                "models": each.models,
                "total_variation": each.total_variation,
            }
            for each in found.tried
        ],
    }


def _prepared(
    name: str, recipe: Recipe, folder: Path, options: "Options"
) -> tuple[runner.Prepared, tasks.Task, DPSGD]:
    prepared = runner.prepare(name, recipe)
    runner.require_workers(prepared)
    mechanism, delta = prepared.budget.mechanism, prepared.budget.delta
    new_console(stderr=True).print(
        f"{name}: claims ε = {format_epsilon(prepared.budget.epsilon)} at δ = "
        f"{format_delta(delta)}: sample rate {mechanism.sample_rate:.4g}, noise "
        f"multiplier {mechanism.noise_multiplier:.6g} and {mechanism.steps} steps"
    )
    account = None
    if options.method != "replay":
        account = account_of(recipe, prepared.dataset, "audit")
        run = mechanism
        if options.method == "white-box" and options.audited_steps:
            run = dataclasses.replace(mechanism, steps=options.audited_steps)
        charging.require_room(account, [run], delta, folder, recipe.seed)
    task = _task(prepared.recipe, prepared.dataset, folder, options)
    algorithm = runner.algorithm(prepared, task.problem.size())
    problem = dataclasses.replace(task.problem, account=account)
    return prepared, task._replace(problem=problem), algorithm


def _chosen(
    recipe: Recipe, dataset: Dataset, options: "Options"
) -> tuple[Recipe, dict[str, Any]]:
    """Return what an attacker chooses from, and the recipe with its solver chosen.

    Where a solver computes the head, only z is left to choose.
    """
    examples = _audited(recipe, dataset, options)
    chosen: dict[str, Any] = {}
    if recipe.batch_size == 0:
        chosen["batch_size"] = examples
    if recipe.leaves_open or recipe.solver != "dp-sgd":
        width = tasks.head_width(recipe, tasks.seen_shape(recipe, dataset))
        solved = heads.resolved(recipe, examples, width)
        assert solved.steps is not None
        made = optimizer(dataclasses.replace(solved, learning_rate=1.0), solved.steps)
        chosen = {
            "batch_size": solved.batch_size,
            "steps": (solved.steps,),
            "learning_rates": (solved.learning_rate,),
            "clip_norms": (solved.clip_norm,),
            "optimizer": lambda learning_rate: optax.chain(
                made, optax.scale(learning_rate)
            ),
        }
        recipe = solved
    asked = {
        "batch_size": options.audited_batch_size,
        "steps": options.update_counts,
        "learning_rates": options.learning_rates,
        "clip_norms": options.clip_norms,
    }
    chosen |= {k: v for k, v in asked.items() if v is not None}
    batch_size = chosen.get("batch_size", Attack.batch_size)
    if batch_size > examples:
        rule = f"must be at most the {examples} audited examples"
        validate.refuse("audited_batch_size", batch_size, rule)
    return recipe, chosen


def _audited(recipe: Recipe, dataset: Dataset, options: "Options") -> int:
    """Return how many examples or persons are trained on."""
    whole = tasks.size(recipe, dataset)
    examples = options.audited_examples
    if examples is None:
        examples = min(_EXAMPLES.get(options.method, whole), whole)
    if examples > whole:
        rule = f"must be at most the {whole} training {recipe.unit}s"
        validate.refuse("audited_examples", examples, rule)
    return examples


def _task(
    recipe: Recipe,
    dataset: Dataset,
    folder: Path,
    options: "Options",
    test: Source | None = None,
) -> tasks.Task:
    """Return the task on the audited examples; `test` takes the test images' place."""
    examples = _audited(recipe, dataset, options)
    cut = examples < tasks.size(recipe, dataset)
    if cut:
        numbers = dataset.units()[0]
        if recipe.unit == "example":
            numbers = np.arange(len(dataset.train))
        dataset = dataset.only(numbers < examples)
        if options.method != "one-run":  # the others look at no test image
            dataset = dataclasses.replace(dataset, test=subset(dataset.test, [0]))
    if test is not None:
        dataset = dataclasses.replace(dataset, test=test)
    if cut or test is not None:
        recipe = dataclasses.replace(recipe, features=None)  # of all examples
    secret = RunFolder(folder).seed(recipe.seed)
    return tasks.make(recipe, dataset, secret, folder, not options.json)


def _runtime(recipe: Recipe, options: "Options") -> Runtime:
    return dataclasses.replace(runner.runtime(recipe), progress=not options.json)


def _confidence(options: "Options") -> float:
    if options.confidence is not None:
        return options.confidence
    return 0.999 if options.method == "membership" else 0.95


def _bounds(mechanism: Mechanism, found: Any) -> dict[str, Any]:
    """Return what every audit says: the claim, the bound on it, and the scores."""
    attack, errors = getattr(found, "audit", found), {}
    if attack is not found:
        errors = {"threshold": attack.threshold, "errors": attack.errors._asdict()}
    return {
        "claimed_epsilon": found.claimed_epsilon,
        "delta": found.delta,
        "highest_advantage": highest_advantage(found.claimed_epsilon, found.delta),
        "mechanism": dataclasses.asdict(mechanism),
        "epsilon_lower_bound": found.epsilon_lower_bound,
        "trade_off_bound": found.trade_off_bound,
        "confidence": found.confidence,
        "violated": found.violated,
        "auc": attack.auc,
        "advantage": attack.advantage,
        "scores": {
            "inside": found.inside.tolist(),
            "outside": found.outside.tolist(),
        },
        **errors,
    }


def _canaries(
    dataset: Dataset, kinds: Collection[str], secret: Seed
) -> dict[str, dict[str, np.ndarray]]:
    """Return the canaries of Table 8: raw images, or feature vectors, with a label."""
    like = dataset.train[0]
    name = "image" if "image" in like else "features"
    value = np.asarray(like[name])
    dtype = np.asarray(like["label"]).dtype
    random = secret.generator("canary")

    def example(value: np.ndarray, of_class: int) -> dict[str, np.ndarray]:
        return {**like, name: value, "label": np.asarray(of_class, dtype)}

    found = {}
    if "blank" in kinds and name == "image":  # constant features have no gradient
        found["blank"] = example(np.zeros_like(value), 0)
    if "noise" in kinds:
        drawn = random.integers(0, 256, value.shape)
        if name == "features":
            drawn = random.standard_normal(value.shape)
        found["noise"] = example(drawn.astype(value.dtype), 0)
    if "mislabelled" in kinds:
        names, wanted = dataset.classes, {7: 8, 6: 7, 0: 1}
        for index in range(min(len(dataset.test), 10_000)):
            if not wanted:
                break
            shown = dataset.test[index]
            other = wanted.get(own := int(shown["label"]), len(names))
            if other < len(names):
                del wanted[own]  # the first of each class
                title = f"{names[own]} as {names[other]}"
                found[title] = example(np.asarray(shown[name]), other)
    if not found:
        rule = "make no canary of these data"
        if name == "features":
            rule = "make no canary of these kinds on features"
        validate.refuse("canary_kinds", " ".join(kinds), rule, "add noise")
    return found
