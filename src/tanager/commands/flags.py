"""The fields of a recipe as flags of a command, beside the command's own."""

import dataclasses
import functools
from collections.abc import Collection, Sequence
from typing import Any, TypeVar, get_type_hints

import tyro

from tanager import _validate as validate
from tanager.recipes.recipe import Recipe, RecipeEntry, Solved


Options = TypeVar("Options")


def parse(
    command: str, entry: RecipeEntry, words: Sequence[str], options: type[Options]
) -> tuple[Recipe, Options]:
    """Read a recipe, any field of it overridden, and a command's own options.

    Args:
        command: the word after `tanager`.
        entry: the recipe to start from; another ε brings its published row.
        words: after the recipe's name.
        options: a frozen dataclass of defaults with other names than the recipe's.

    Raises:
        ValueError: a value is out of range, or a field does not apply.
    """
    values = _parse(command, entry, entry.recipe, words, options)
    flags = [word[2:].partition("=")[0] for word in words if word.startswith("--")]
    typed = {flag.replace("-", "_") for flag in flags}
    given = {name for name in typed if values.get(name) is not None}
    if "epsilon" in given:
        start = entry.at_epsilon(values["epsilon"])
        values = _parse(command, entry, start, words, options)
    own = {field.name: values.pop(field.name) for field in _fields(options)}
    if values["non_private"]:
        # The recipe's own budget gives way; one that a person typed is refused.
        values |= dict.fromkeys({"epsilon", "noise_multiplier"} - given)
    else:
        values["solve_for"] = _solved(given)
    recipe = Recipe(**values)
    _refuse_unused(recipe, given)
    return recipe, options(**own)


def _solved(given: Collection[str]) -> Solved | None:
    """Return what is solved for where these fields were given."""
    if "noise_multiplier" in given:
        if "epsilon" in given:
            return "nothing" if "steps" in given else "steps"
        return "epsilon"
    return "noise_multiplier" if {"steps", "batch_size"} & set(given) else None


def _refuse_unused(recipe: Recipe, given: Collection[str]) -> None:
    for name in sorted({"crop_padding", "flip"} & set(given)):
        from tanager.data.augment import KINDS

        kind = KINDS[recipe.augmentation]
        value = getattr(recipe, name)
        if value and name not in {field.name for field in _fields(kind)}:
            validate.refuse(
                name,
                value,
                f"does not apply to augmentation {recipe.augmentation}",
                "leave it out",
            )


def _parse(
    command: str,
    entry: RecipeEntry,
    default: Recipe,
    words: Sequence[str],
    options: type,
) -> dict[str, Any]:
    both = _with_fields(options)
    shown = default.to_json()
    del shown["solve_for"]
    return vars(
        tyro.cli(
            both,
            prog=f"tanager {command} {entry.name}",
            description=entry.summary,
            default=both(**shown),
            args=list(words),
        )
    )


def _fields(kind: Any) -> tuple[dataclasses.Field, ...]:
    return dataclasses.fields(kind)


@functools.cache
def _with_fields(options: type) -> Any:
    """Make a `Recipe` that takes any values: what is wrong is said by `Recipe`."""
    types = get_type_hints(Recipe)
    names = [field.name for field in _fields(Recipe) if field.name != "solve_for"]
    return dataclasses.make_dataclass(
        "Recipe",
        [(name, types[name]) for name in names],
        bases=(options,),
        frozen=True,
        kw_only=True,
        # What is wrong with the options is said by them, when the rest is known.
        namespace={"__doc__": Recipe.__doc__, "__post_init__": lambda self: None},
    )
