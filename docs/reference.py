"""The parts of the site that are read from the code: commands, public names."""

import ast
import contextlib
import dataclasses
import importlib
import inspect
import re
import types
from collections.abc import Iterator
from unittest import mock

import tyro
from sphinx.pycode import ModuleAnalyzer

import tanager
from tanager.cli import COMMANDS, main
from tanager.recipes.recipe import Recipe


MORE = {
    "train": ["train digits"],
    "search": [
        "search digits",
        *(
            f"search {word} digits"
            for word in ("budget", "privacy", "data", "ablation")
        ),
        "search norms",
    ],
    "audit": ["audit digits"],
    "account": ["account", "account limit", "account add", "account accept"],
    "runs": ["runs", "runs compare"],
    "bench": [
        f"bench {word}"
        for word in ("step", "memory", "throughput", "scaling", "explain")
    ],
}
"""Command lines whose help is shown, where a command has more than one."""
PACKAGES = (
    "tanager",
    "tanager.clipping",
    "tanager.models",
    "tanager.data",
    "tanager.recipes",
)
"""Packages with public names; a name is linked to the first that has it."""
_RECIPE = {field.name for field in dataclasses.fields(Recipe) if field.init}


class _Read(Exception):
    """The command line reached its parser."""


def _parser(line: str):
    """Return the text and the argparse actions of what a command line is read by."""
    words, found = line.split(), {}

    def cli(kind, **options):
        found.update(options, kind=kind)
        raise _Read

    def of_several(kinds, **options):
        found.update(options, kind=kinds[words[1]])
        raise _Read

    with (
        mock.patch.object(tyro, "cli", cli),
        mock.patch.object(tyro.extras, "subcommand_cli_from_dict", of_several),
        contextlib.suppress(_Read),
    ):
        main([*words, "--help-all"])
    taken = {name: found[name] for name in ("kind", "default") if name in found}
    parser = tyro.extras.get_parser(taken.pop("kind"), **taken)
    text = inspect.cleandoc(found.get("description") or "")
    if not text or line.startswith("bench"):
        text = inspect.getdoc(found["kind"]) or ""
    return text.partition("\n\nRecipe ")[0], parser._actions


def _with_code(text: str) -> str:
    """Set flags as code, outside of what is code already."""
    code = r"(`[^`]*`|^    .*)"
    parts = re.split(code, text, flags=re.MULTILINE)
    flag = r"(?<!\w)--[a-z][a-z-]*"
    parts[::2] = [re.sub(flag, r"`\g<0>`", part) for part in parts[::2]]
    return "".join(parts)


def _row(action) -> str:
    flag = " ".join(action.option_strings) or action.dest
    value = re.sub(r"\[(\S.*?) \[\1 \.\.\.\]\]", r"\1 …", action.metavar or "")
    value = re.sub(r"{([^{},]*)}", r"\1", value.replace("{None}|", ""))
    text = (action.help or "").strip().replace("\n", " ")
    text = re.sub(r"\s*\(recipe: .*\)$", "", text).replace("(required)", "Required.")
    text = _with_code(re.sub(r"\(default: (.*)\)$", r"Default: \1.", text))
    if re.fullmatch(r"{[^{}]*}", value):
        text += " Choices: " + ", ".join(f"`{x}`" for x in value[1:-1].split(",")) + "."
    elif action.option_strings and " --no-" not in flag:
        flag = f"{flag} {value}".strip()
    if text[0].isascii():
        text = f"{text[0].upper()}{text[1:]}"
    return "| `{}` | {} |".format(*(cell.replace("|", r"\|") for cell in (flag, text)))


def _table(rows) -> list[str]:
    return ["| flag | meaning |", "|:---|:---|", *rows, ""] if rows else []


def commands() -> str:
    """Write the command reference as Markdown."""
    lines: list[str] = []
    of_recipe: dict[str, str] = {}
    for command in COMMANDS:
        lines += [f"## `tanager {command}`", ""]
        for line in MORE.get(command, [command]):
            text, actions = _parser(line)
            shown = line.replace(" digits", " RECIPE")
            if len(MORE.get(command, "1")) > 1:
                lines += [f"### `tanager {shown}`", ""]
            lines += [_with_code(text), ""]
            own = []
            for action in actions:
                if action.dest == "help":
                    continue
                if "RECIPE" in shown and action.dest.replace("-", "_") in _RECIPE:
                    of_recipe[action.dest] = _row(action)
                else:
                    own.append(_row(action))
            lines += _table(own)
            if "RECIPE" in shown:
                lines += [
                    "It takes the [flags of a recipe](#flags-of-a-recipe) too.",
                    "",
                ]
    lines += [
        "## Flags of a recipe",
        "",
        "Each replaces one setting of the recipe. `tanager recipe NAME` shows them.",
        "",
    ]
    return "\n".join([*lines, *_table(list(of_recipe.values()))])


def public_names() -> dict[str, str]:
    """Return the public name of each object, by the place where it is defined."""
    found: dict[str, str] = {}
    for package in PACKAGES:
        for name, value in _public_of(package):
            found.setdefault(f"{_home(value)}.{value.__name__}", f"{package}.{name}")
    return found


def _home(value: object) -> str:
    return getattr(value, "__module__", "")


def _public_of(package: str) -> Iterator[tuple[str, object]]:
    module = importlib.import_module(package)
    names = tanager.__all__ if package == "tanager" else dir(module)
    for name in names:
        value = getattr(module, name)
        local = _home(value).startswith("tanager.") and not name.startswith("_")
        if local and isinstance(value, type | types.FunctionType):
            yield name, value


def documented(package: str, names: list[str]) -> str:
    """Write what autodoc makes of public names, after a table of them, as Markdown."""
    table, entries = [], []
    for name in names:
        value = getattr(importlib.import_module(package), name)
        full = f"{package}.{name}"
        if isinstance(value, type) or callable(value):
            kind = "class" if isinstance(value, type) else "function"
            text = inspect.getdoc(value) or ""
            entries.append(f".. auto{kind}:: {full}\n")
        else:
            kind, text = "data", _written_below(package, name)
            entries.append(f".. data:: {full}\n\n   {text}{_values(value)}\n")
        summary = text.partition("\n\n")[0].replace("\n", " ").replace("|", "\\|")
        role = {"function": "func"}.get(kind, kind)
        table.append(f"| {{py:{role}}}`{full}` | {summary} |")
    body = ["```{eval-rst}", *entries, "```"]
    return "\n".join(["| name | what it is |", "|:---|:---|", *table, "", *body])


def _values(value: object) -> str:
    """List the names that a dictionary or a tuple holds, if these are few."""
    if not isinstance(value, dict | tuple) or not all(
        isinstance(x, str) for x in value
    ):
        return ""
    if isinstance(value, tuple) or not all(isinstance(x, str) for x in value.values()):
        return "\n\n   " + ", ".join(f"``{name}``" for name in value)
    return "\n\n" + "\n".join(f"   - ``{name}``: {value[name]}" for name in value)


def _written_below(package: str, name: str) -> str:
    """Return the text below the assignment of a value, where it is defined."""
    home = package
    for node in ast.parse(inspect.getsource(importlib.import_module(package))).body:
        if isinstance(node, ast.ImportFrom) and name in [x.name for x in node.names]:
            home = node.module or package
    if home != package:
        return _written_below(home, name)
    lines = ModuleAnalyzer.for_module(home).find_attr_docs()["", name]
    return re.sub(r"(?<!`)`(?!`)", "``", " ".join(lines).strip())
