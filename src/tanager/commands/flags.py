"""The fields of a recipe as flags of a command, beside the command's own."""

import contextlib
import dataclasses
import functools
import inspect
import itertools
import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import tyro
from docstring_parser import parse_from_object
from tyro.conf import Positional

from tanager import _validate as validate
from tanager import recipes
from tanager.recipes.fields import unlike_class_means
from tanager.recipes.recipe import Recipe, RecipeEntry, Solved
from tanager.training.run_folder import begun


Options = TypeVar("Options")
Json = Annotated[bool, tyro.conf.arg(help="Print one JSON object only.")]
USUAL = ("data", "epsilon", "delta", "steps", "batch_size", "seed", "out")
"""Fields of a recipe that every command's help shows."""
_OF_DP_SGD = {"ema_decay", "optimizer_options"}
"""Usual where solvers are compared; typed, they ask for the one that heeds them."""
_POSITIONAL = get_args(Positional[str])[1]


def parse(
    command: str,
    words: Sequence[str],
    options: type[Options],
    entry: RecipeEntry | None = None,
) -> tuple[RecipeEntry, Recipe, Options]:
    """Read a recipe, any field of it overridden, and a command's own options.

    Args:
        command: the words after `tanager`.
        words: after these: the name of a recipe, digits by default, and flags.
        options: a frozen dataclass of defaults with other names than the recipe's. Its
            `SHORT` names the flags that --help shows, its own and a few of the recipe
            by default; --help-all shows every one. `refuse_unused(recipe, given)`, if
            it has one, gets the names of the flags that were typed.
        entry: the recipe to start from, if `words` do not name it.
    """
    if entry is None:
        named = words and not words[0].startswith("-")
        if named and words[0] not in recipes.RECIPES and Path(words[0]).exists():
            rule = "is a path, and not the name of a recipe"
            remedy = f"tanager {command} folder --data {shlex.quote(words[0])}"
            validate.refuse("recipe", words[0], rule, remedy)
        entry = recipes.get(words[0] if named else "digits")
        words = words[1:] if named else words
    elif words and words[0] in recipes.RECIPES:
        rule = "must be left out: --from-study says which recipe"
        validate.refuse("recipe", words[0], rule)
    if words and not words[0].startswith("-"):
        rule = "is not a flag"
        remedy = f"for data of your own, write --data {shlex.quote(words[0])}"
        validate.refuse(f"word after {entry.name}", words[0], rule, remedy)
    values = _parse(command, entry, entry.recipe, words, options)
    flags = [word[2:].partition("=")[0] for word in words if word.startswith("--")]
    typed = {flag.replace("-", "_").removeprefix("no_") for flag in flags}
    given = {name for name in typed if values.get(name) is not None}
    if "epsilon" in given:
        start = entry.at_epsilon(values["epsilon"])
        values = _parse(command, entry, start, words, options)
    own = {field.name: values.pop(field.name) for field in _fields(options)}
    if values["non_private"]:
        # The recipe's own budget gives way; one that a person typed is refused.
        values |= dict.fromkeys({"epsilon", "noise_multiplier"} - given)
    else:
        values["solve_for"] = _solved(given, values)
    of_dp_sgd = any(values[name] for name in _OF_DP_SGD & given)
    open_to_both = values["solver"] == "auto" and not values["learning_rate"]
    if of_dp_sgd and open_to_both and not begun(values["out"]):
        values["solver"] = "dp-sgd"
    recipe = Recipe(**values)
    _refuse_unused(recipe, given)
    # A search may vary what they need, and an older version began runs with them.
    if not (command.startswith("search") or begun(recipe.out)):
        _refuse_alone(recipe, given)
    made = options(**own)
    refuse = getattr(made, "refuse_unused", None)
    if refuse is not None:
        refuse(recipe, given)
    chosen = {recipe.model, recipe.fine_tune, recipe.head_input}
    if command != "train" and "auto" in chosen:
        from tanager.recipes import automatic

        recipe = automatic.resolved(recipe)
    return entry, recipe, made


def _solved(given: Collection[str], values: Mapping[str, Any]) -> Solved | None:
    """Return what is solved for where these of the fields' values were given."""
    if "noise_multiplier" in given:
        if "epsilon" in given:
            return "nothing" if "steps" in given else "steps"
        return "epsilon"
    solvable = values["epsilon"] is not None and values["steps"] is not None
    typed = {"steps", "batch_size"} & set(given)
    return "noise_multiplier" if typed and solvable else None


def _refuse_unused(recipe: Recipe, given: Collection[str]) -> None:
    if "examples_per_group" in given and recipe.unit != "group":
        value = recipe.examples_per_group
        rule = "needs --unit group, which protects persons"
        validate.refuse("examples_per_group", value, rule, "add it, or leave this out")
    if recipe.solver == "class-means":
        for name in unlike_class_means(recipe):
            if name in given:
                rule = "does not apply to solver class-means, one sum of all examples"
                remedy = "leave it out, or give --solver dp-sgd"
                validate.refuse(name, getattr(recipe, name), rule, remedy)
    for name in sorted({"crop_padding", "padding_mode", "flip"} & set(given)):
        from tanager.data.augment import KINDS

        kind = KINDS[recipe.augmentation]
        value = getattr(recipe, name)
        if value and name not in {field.name for field in _fields(kind)}:
            rule = f"does not apply to augmentation {recipe.augmentation}"
            validate.refuse(name, value, rule, "leave it out")


def _refuse_alone(recipe: Recipe, given: Collection[str]) -> None:
    """Refuse flags that do nothing without another one, or with --non-private."""
    if recipe.non_private:
        for name in ("accountant", "adjacency", "clip_norm"):
            if name in given:
                rule = "does not apply without privacy"
                validate.refuse(name, getattr(recipe, name), rule, "leave it out")
    views = recipe.augmentation_multiplicity or recipe.test_views or recipe.crop_size
    weights = recipe.weights is not None or recipe.model == "auto"
    needed: dict[str, tuple[str, bool | int | None]] = {
        "lora_rank": ("--fine-tune lora", recipe.fine_tune == "lora"),
        "head": ("--weights", weights or recipe.head != "load"),
    }
    for name in ("augmentation", "crop_padding", "padding_mode", "flip"):
        needed[name] = ("--augmentation-multiplicity, 1 or more", views)
    for name, (flag, there) in needed.items():
        value = getattr(recipe, name)
        if name in given and not there and value not in ("none", 0):
            validate.refuse(name, value, f"needs {flag}", "add it, or leave this out")
    for name in ("normalisation_order", "weight_standardisation"):
        if name in given and recipe.model != "auto":
            from tanager import models

            if not models.find(recipe.model).has_norm_options:
                rule = f"does not apply to model {recipe.model}"
                validate.refuse(name, getattr(recipe, name), rule, "leave it out")


def _parse(
    command: str,
    entry: RecipeEntry,
    default: Recipe,
    words: Sequence[str],
    options: type,
) -> dict[str, Any]:
    short = None
    if {"-h", "--help"} & set(words) and "--help-all" not in words:
        own = (field.name for field in _fields(options))
        short = getattr(options, "SHORT", (*own, *USUAL))
    both = described(options, Recipe, short=short)
    purpose = (inspect.getdoc(options) or "").partition("\n\nRaises:")[0]
    names = "--help-all explains every flag, and tanager train --list every recipe."
    words = ["--help" if word == "--help-all" else word for word in words]
    prog = f"tanager {command} {entry.name}"
    require_flags(words, f"{prog} --help-all", options, Recipe)
    shown = default.to_json()
    del shown["solve_for"]
    found, unknown = tyro.cli(
        both,
        prog=prog,
        description=f"{purpose}\n\nRecipe {entry.name}: {entry.summary}\n\n{names}",
        default=both(**shown),
        args=list(words),
        return_unknown_args=True,
    )
    if unknown[:1] and unknown[0] in recipes.RECIPES:
        rule = "comes after a flag"
        remedy = f"name the recipe first: tanager {command} {unknown[0]} --…"
        validate.refuse("recipe", unknown[0], rule, remedy)
    _require_all_known(unknown, f"{prog} --help-all")
    return vars(found)


def read(options: type[Options], command: str, words: Sequence[str]) -> Options:
    """Read the options of a command that takes no recipe."""
    kind, prog = described(options), f"tanager {command}"
    require_flags(words, f"{prog} --help", options)
    given: Any = {"prog": prog, "args": list(words), "return_unknown_args": True}
    found, unknown = tyro.cli(kind, **given)
    _require_all_known(unknown, f"{prog} --help")
    return options(**vars(found))


def require_flags(words: Sequence[str], shows: str, *kinds: type) -> None:
    """Refuse a flag that no kind of options has, and a value that it does not take.

    tyro's own messages are boxes. `shows` is the command that explains the flags.
    """
    if {"-h", "--help", "--help-all"} & set(words):
        return
    known = {field.name for kind in kinds for field in _fields(kind)} - {"solve_for"}
    if Recipe in kinds:
        switches = (f.name for f in _fields(Recipe) if isinstance(f.default, bool))
        known |= {f"no_{name}" for name in switches}
    for word in words:
        flag = word.partition("=")[0]
        name = flag[2:].replace("-", "_")
        if flag.startswith("--") and name not in known:
            near = (validate.nearest(name, known) or "").replace("_", "-")
            remedy = f"did you mean --{near}? " * bool(near)
            remedy += f"`{shows}` explains every flag"
            validate.refuse("flag", flag, "is unknown", remedy)
    _require_values(words, shows, *kinds)


def _require_all_known(unknown: Sequence[str], shows: str) -> None:
    for word in unknown:
        rule = "belongs to no flag"
        validate.refuse("word", word, rule, f"`{shows}` explains every flag")


def _require_values(words: Sequence[str], shows: str, *kinds: type) -> None:
    """Refuse a flag without its value, and a word that a flag does not take."""
    hints = {k: v for kind in kinds for k, v in get_type_hints(kind).items()}
    several, of_recipe = set[str](), Recipe in kinds
    free = [word for word in words if not word.startswith("--")]
    for place, word in enumerate(words):
        flag, equals, value = word.partition("=")
        if not flag.startswith("--"):
            continue
        more = itertools.takewhile(lambda each: each[:2] != "--", words[place + 1 :])
        given = [value] * bool(equals) + [*more]
        hint = hints.get(flag[2:].replace("-", "_"), bool)
        parts, step, switch = _parts(hint), _names(hint), hint is bool
        most = len(given) if ... in parts or step == 2 else int(not switch)
        if not switch and given[:1] in ([], [""]):
            validate.refuse(flag, "", "needs a value", f"`{shows}` explains it")
        if switch and equals:
            validate.refuse(flag, value, "takes no value", f"write {flag} alone")
        if of_recipe and given[most:] and given[most] not in recipes.RECIPES:
            rule = f"takes {'no' if switch else 'one'} value"
            validate.refuse(flag, " ".join(given), rule, f"`{shows}` explains it")
        if step:
            _require_once(flag, given, given[::step], several)
        if step == 2:
            _require_pairs(flag, given, "balanced" in parts)
        elif not {str, Path}.intersection(parts):
            for each in given[:most]:
                _require_kind(flag, each, parts)
        del free[: len(given[:most]) - bool(equals)]
    if not of_recipe:
        _require_all_given(words, len(free), *kinds)


def _parts(hint: Any) -> list[Any]:
    """Return the classes and words that a type is made of."""
    return [each for part in get_args(hint) for each in _parts(part)] or [hint]


def _require_all_given(words: Sequence[str], free: int, *kinds: type) -> None:
    """Refuse to go on without what has no default; `free` words are of no flag."""
    if "" in words:
        validate.refuse("word", "", "is empty", "name a file or folder")
    typed = {word[2:].partition("=")[0].replace("-", "_") for word in words}
    for kind in kinds:
        hints, texts = get_type_hints(kind, include_extras=True), _texts(kind)
        for field in _fields(kind):
            name, text = field.name, texts.get(field.name, "").rstrip(".")
            positional = _POSITIONAL in get_args(hints[name])
            given = free if positional else name in typed
            if field.default is dataclasses.MISSING and not given:
                flag = name if positional else f"--{name.replace('_', '-')}"
                remedy = text[:1].lower() + text[1:]
                validate.refuse(flag, None, "must be given", remedy)


def _require_pairs(flag: str, given: list[str], or_balanced: bool) -> None:
    if or_balanced and given == ["balanced"]:
        return
    rule, remedy = "must be names, each with a number", f"such as {flag} momentum 0.9"
    if or_balanced:
        rule = "must be balanced, or a name and a number for each class"
        remedy = f"such as {flag} rare 5"
    if or_balanced and given[:1] == ["balanced"] and not _is(float, given[1]):
        rule = "must be balanced alone, or a name and a number for each class"
        remedy = f"give a recipe's name first: tanager train RECIPE {flag} …"
        validate.refuse(flag, " ".join(given), rule, remedy)
    if len(given) % 2:
        validate.refuse(flag, " ".join(given), rule, remedy)
    for each in given[1::2]:
        _require_number(flag, each, float, "a number after each name")


def _names(hint: Any) -> int:
    """Return 1 for a list of names, 2 for names that each have a value, else 0."""
    kinds = [each for each in (hint, *get_args(hint)) if get_origin(each)]
    of = {get_origin(each): get_args(each)[0] for each in kinds}
    if dict in of:
        return 2
    return int(of.get(tuple, int) not in (int, float))


def _require_once(
    flag: str, given: list[str], names: list[str], before: set[str]
) -> None:
    """Refuse names that are given twice: tyro takes the last of them."""
    text, flag = " ".join(given), flag.replace("_", "-")
    if flag in before:
        validate.refuse(flag, text, "is given again", f"give all after one {flag}")
    before.add(flag)
    for name in names:
        if names.count(name) > 1:
            validate.refuse(flag, text, f"names {name} twice", "give it once")


def _require_kind(flag: str, value: str, parts: list[Any]) -> None:
    """Refuse a word that is neither a number nor one of the words of a type."""
    words = [part for part in parts if isinstance(part, str)]
    words += ["True", "False"] * (bool in parts) + ["None"] * (type(None) in parts)
    if value in words:
        return
    for kind, what in ((int, "a whole number"), (float, "a number")):
        if kind in parts:
            named = [f" or {word}" for word in words if word != "None"]
            _require_number(flag, value, kind, what + "".join(named))
            return
    validate.one_of([word for word in words if word != "None"], **{flag: value})


def _require_number(flag: str, value: str, kind: type, what: str) -> None:
    if not _is(kind, value):
        thousands = re.fullmatch(r"\d{1,3}(,\d{3})+", value)
        ways = [value.replace(",", "")] if thousands else []
        ways += [value.replace(",", ".")] if value.count(",") == 1 else []
        remedy = " or ".join(f"write {way}" for way in ways if _is(kind, way))
        validate.refuse(flag, value, f"must be {what}", remedy)


def _is(kind: type, text: str) -> bool:
    with contextlib.suppress(ValueError):
        kind(text)
        return True
    return False


@functools.cache
def described(*kinds: type, short: tuple[str, ...] | None = None) -> Any:
    """Join dataclasses into one for tyro, with short help and without checks.

    Help names the default of an option where there is one, and shows only those that
    `short` names, in its order. The classes themselves say what is wrong with a value.
    """
    fields = []
    for kind in kinds:
        hints = get_type_hints(kind, include_extras=True)
        texts = _texts(kind)
        for each in _fields(kind):
            if each.name != "solve_for":
                hint = hints[each.name]
                if get_origin(hint) is dict:
                    hint |= None  # else tyro has a flag for each key of a default
                shown: Any = Annotated[hint, _short(hint, kind, texts.get(each.name))]
                if hint in (bool, Json) and kind is not Recipe:
                    shown = tyro.conf.FlagCreatePairsOff[shown]
                if short is not None and each.name not in short:
                    shown = tyro.conf.Suppress[shown]
                default = dataclasses.field(
                    default=each.default, default_factory=each.default_factory
                )
                fields.append((each.name, shown, default))
    if short is not None:
        rank = {name: place for place, name in enumerate(short)}
        fields.sort(key=lambda field: rank.get(field[0], len(rank)))
    return dataclasses.make_dataclass(
        kinds[0].__name__,
        fields,
        bases=kinds[:1],
        frozen=True,
        kw_only=True,
        namespace={
            "__doc__": inspect.getdoc(kinds[-1]),
            "__post_init__": lambda self: None,
        },
    )


def _texts(kind: type) -> dict[str, str]:
    """Return the help of each field; tyro itself would keep some line breaks in it."""
    kinds = filter(dataclasses.is_dataclass, reversed(kind.__mro__))
    docs = (doc for each in kinds for doc in parse_from_object(each).params)
    return {doc.arg_name: " ".join((doc.description or "").split()) for doc in docs}


def _short(hint: Any, kind: type, text: str | None) -> Any:
    # tyro itself would say {None}|INT.
    optional = {int: "INT", float: "FLOAT", str: "TEXT", bool: "{True,False}"}
    optional |= {Path: "PATH", tuple[str, ...]: "TEXT [TEXT ...]"}
    optional |= {dict[str, float]: "[TEXT FLOAT [TEXT FLOAT ...]]"}
    metavar = {each | None: text for each, text in optional.items()}.get(hint)
    word = "recipe" if kind is Recipe else "default"

    def default(text: str) -> str:
        return "" if text in ("", "None", "False") else f"({word}: {text})"

    return tyro.conf.arg(help=text, metavar=metavar, help_behavior_hint=default)


def _fields(kind: Any) -> tuple[dataclasses.Field, ...]:
    return dataclasses.fields(kind)
