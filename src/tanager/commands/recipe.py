"""`tanager recipe`: show a recipe, its published results and its cost."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from rich.table import Table
from tyro.conf import Positional

from tanager import _validate as validate
from tanager import recipes
from tanager._terminal import new_console
from tanager.commands import flags
from tanager.commands.tables import new_table, print_json, print_table
from tanager.privacy import accountant
from tanager.privacy.shown import format_delta, format_epsilon
from tanager.recipes.papers import PublishedRun
from tanager.recipes.recipe import Recipe, RecipeEntry


_KNOWN = {
    "digits": (10, (8, 8, 1), 1437),
    "mnist": (10, (28, 28, 1), 60_000),
    "cifar10": (10, (32, 32, 3), 50_000),
    "cifar100": (100, (32, 32, 3), 50_000),
    "imagenet-32": (1000, (32, 32, 3), 1_281_167),
    "imagenet": (1000, (224, 224, 3), 1_281_167),
    "places365": (365, (224, 224, 3), 1_803_460),
}
"""Classes, shape of an image, and training examples of a data set."""
_UNKNOWN = 1000, (224, 224, 3), None


_PUBLISHED = ("delta", "examples", "batch_size", "noise_multiplier", "steps")
_PUBLISHED += ("learning_rate", "accuracy", "accuracy_std")


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Show a recipe: source, settings, published results, ε recomputed, cost."""

    name: Positional[str]
    """Name of the recipe; `tanager train --list` prints them all."""
    epsilon: float | None = None
    """Privacy budget ε. Default: the recipe's own."""
    examples: int | None = None
    """Number of training examples N. Default: the data set's."""
    json: flags.Json = False


def run(arguments: Sequence[str]) -> int:
    options = flags.read(Arguments, "recipe", arguments)
    entry = recipes.get(options.name)
    if options.epsilon is not None:
        if entry.recipe.non_private:
            rule = "must be left out: this recipe trains without privacy"
            validate.refuse("epsilon", options.epsilon, rule)
        recipe = entry.at_epsilon(options.epsilon)
        entry = dataclasses.replace(entry, recipe=recipe)
    if options.examples is not None:
        validate.whole(examples=options.examples, at_least=1)
        if entry.recipe.dataset == "features":
            rule = "must be left out: the number of features decides too"
            validate.refuse("examples", options.examples, rule)
    with new_console(stderr=True).status("computing ε"):
        shown = _shown(entry) | _run_of(entry.recipe, options.examples)
    if options.epsilon is not None:
        shown["command"] += f" --epsilon {options.epsilon}"
    if options.json:
        return print_json(shown)
    _print(shown)
    return 0


def _run_of(recipe: Recipe, examples: int | None) -> dict[str, Any]:
    """Return the budget of the run on N examples; nothing where it is not known.

    What a recipe leaves open follows from N, and from the features of its model.
    """
    from tanager.recipes import automatic, heads, tasks
    from tanager.recipes.budget import solve_budget

    classes, shape, known = _KNOWN.get(recipe.dataset, _UNKNOWN)
    if known and recipe.classes is not None:  # as many of each
        known, classes = known * len(recipe.classes) // classes, len(recipe.classes)
    examples = examples or recipe.train_examples or known
    if examples is None or recipe.non_private or recipe.dataset == "features":
        return {}
    recipe = automatic.resolved(recipe)
    side, width = recipe.image_size or shape[0], 0
    if recipe.leaves_open:
        width = tasks.head_width(recipe, (side, side, shape[2]))
    recipe = heads.resolved(recipe, examples, width)
    if recipe.batch_size > examples:
        rule = f"must be at least the recipe's batch size, {recipe.batch_size}"
        remedy = "give more, or a smaller --batch-size to tanager train or tanager plan"
        validate.refuse("examples", examples, rule, remedy)
    budget = solve_budget(recipe, examples, classes)
    mechanism = budget.mechanism
    return {
        "steps": mechanism.steps,
        "noise_multiplier": mechanism.noise_multiplier,
        "batch_size": recipe.batch_size,
        "learning_rate": recipe.learning_rate,
        "epsilon": budget.epsilon,
        "delta": budget.delta,
        "examples": examples,
    }


def _shown(entry: RecipeEntry) -> dict[str, Any]:
    recipe = entry.recipe
    command = f"tanager train {entry.name}"
    if recipe.dataset == "features":
        command += " --features-from FILE"
    elif recipe.dataset != "digits":
        command += " --data PATH"
    if entry.pretrained_on and recipe.weights is None:
        command += " --weights FILE"
    return {
        "name": entry.name,
        "summary": entry.summary,
        "source": entry.source,
        "pretrained_on": entry.pretrained_on or None,
        "expected_accuracy": entry.expected_accuracy,
        "command": command,
        "recipe": recipe.to_json(),
        "published": [_row(row) for row in entry.published],
        "cost": _cost(entry),
    }


def _row(row: PublishedRun) -> dict[str, Any]:
    return {
        "epsilon": row.epsilon,
        "epsilon_rdp": accountant.epsilon(row.mechanism, row.delta, "rdp"),
        "epsilon_pld": accountant.epsilon(row.mechanism, row.delta),
        **{name: getattr(row, name) for name in _PUBLISHED},
        "note": row.note or None,
    }


def _cost(entry: RecipeEntry) -> dict[str, Any] | None:
    from tanager.recipes import cost

    recipe = entry.recipe
    if recipe.steps is None or recipe.dataset == "features":
        return None  # It follows from the number of features.
    classes, shape, _ = _KNOWN.get(recipe.dataset, _UNKNOWN)
    if recipe.classes is not None:
        classes = len(recipe.classes)
    side = recipe.crop_size or recipe.image_size
    if side:
        shape = (side, side, shape[2])
    found = cost.estimate(recipe, recipe.steps, classes, shape)
    return {**found._asdict(), "gpu": cost.GPU, "flops_per_second": cost.SUSTAINED}


def _print(shown: dict[str, Any]) -> None:
    console = new_console()
    console.print(f"[bold]{shown['name']}[/]: {shown['summary']}")
    console.print(f"source: {shown['source']}")
    if shown["pretrained_on"]:
        console.print(f"pretrained on: {shown['pretrained_on']}")
    console.print(f"accuracy: {shown['expected_accuracy']}")
    console.print(f"command: {shown['command']}\n")
    default = {field.name: field.default for field in dataclasses.fields(Recipe)}
    for name, value in shown["recipe"].items():
        if value is not None and value != default[name] and value != {}:
            console.print(f"  {name:27}{value}", markup=False)
    if "steps" in shown:
        console.print(
            f"\non N = {shown['examples']:,}: ε = {format_epsilon(shown['epsilon'])} "
            f"at δ = {format_delta(shown['delta'])}: noise multiplier "
            f"{shown['noise_multiplier']:.6g}, expected batch {shown['batch_size']}, "
            f"{shown['steps']} steps"
        )
        for row in shown["published"]:
            fewer = row["examples"] < shown["examples"]
            if fewer and row["epsilon"] == shown["recipe"]["epsilon"]:
                console.print(
                    f"published for fewer examples: --train-examples {row['examples']} "
                    f"gives its noise multiplier, {row['noise_multiplier']:g}"
                )
    if shown["published"]:
        print_table(_table(shown["published"]))
        for note in dict.fromkeys(row["note"] for row in shown["published"]):
            if note:
                console.print(f"note: {note}")
    if (cost := shown["cost"]) is not None:
        from tanager.training.estimate import duration

        seconds = 3600 * cost["hours"]
        if seconds < 1:
            time = "less than a second"
        elif seconds < 3600:
            time = f"about {duration(seconds)}"
        else:
            time = f"{cost['hours']:.2g} hours"
        console.print(
            f"\n{cost['parameters']:,} parameters; {cost['flops']:.2g} operations, "
            f"{time} on one {cost['gpu']} that sustains "
            f"{cost['flops_per_second'] / 1e12:g} TFLOP/s (an assumption)"
        )


def _table(rows: Sequence[dict[str, Any]]) -> Table:
    table = new_table(
        *("ε", "by RDP", "by PLD", "δ", "N"),
        *("σ", "batch", "steps", "rate", "accuracy %"),
        rows=[
            (
                f"{row['epsilon']:g}",
                format_epsilon(row["epsilon_rdp"]),
                format_epsilon(row["epsilon_pld"]),
                format_delta(row["delta"]),
                f"{row['examples']:,}",
                f"{row['noise_multiplier']:g}",
                str(row["batch_size"]),
                str(row["steps"]),
                f"{row['learning_rate']:g}",
                "–"
                if row["accuracy"] is None
                else str(row["accuracy"])
                + ("" if row["accuracy_std"] is None else f" ± {row['accuracy_std']}"),
            )
            for row in rows
        ],
    )
    table.title, table.title_justify = "\npublished, and its ε recomputed", "left"
    return table
