"""The fields of a recipe as flags of a command, beside the command's own."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, TypeVar, get_type_hints

import tyro

from tanager.recipes.recipe import Recipe, RecipeEntry


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
        ValueError: a value is out of range.
    """
    recipe, own = _parse(command, entry, entry.recipe, words, options)
    if "epsilon" in typed(words) and recipe.epsilon is not None:
        start = entry.at_epsilon(recipe.epsilon)
        recipe, own = _parse(command, entry, start, words, options)
    return recipe, own


def typed(words: Sequence[str]) -> set[str]:
    """Return the names of the fields and options that a person typed."""
    given = (word for word in words if word.startswith("--"))
    return {flag[2:].partition("=")[0].replace("-", "_") for flag in given}


def _parse(
    command: str,
    entry: RecipeEntry,
    default: Recipe,
    words: Sequence[str],
    options: type[Options],
) -> tuple[Recipe, Options]:
    both = _with_fields(options)
    fields = tyro.cli(
        both,
        prog=f"tanager {command} {entry.name}",
        description=entry.summary,
        default=both(**default.to_json()),
        args=list(words),
    )
    values = dict(vars(fields))
    names = [field.name for field in dataclasses.fields(options)]  # pyright: ignore
    own = {name: values.pop(name) for name in names}
    if values["non_private"]:
        # The recipe's own budget gives way; one that a person typed is refused.
        given = typed(words)
        values |= {
            name: None for name in ("epsilon", "noise_multiplier") if name not in given
        }
    return Recipe(**values), options(**own)


@functools.cache
def _with_fields(options: type) -> Any:
    """Make a `Recipe` that takes any values: what is wrong is said by `Recipe`."""
    types = get_type_hints(Recipe)
    fields = [(field.name, types[field.name]) for field in dataclasses.fields(Recipe)]
    return dataclasses.make_dataclass(
        "Recipe",
        fields,
        bases=(options,),
        frozen=True,
        kw_only=True,
        # What is wrong with the options is said by them, when the rest is known.
        namespace={"__doc__": Recipe.__doc__, "__post_init__": lambda self: None},
    )
