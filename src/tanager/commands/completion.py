"""`tanager completion`: a script that lets a shell complete commands and flags."""

import dataclasses
from collections.abc import Sequence
from typing import Annotated

import tyro
from tyro.conf import Positional

from tanager import _validate as validate
from tanager import recipes
from tanager.cli import COMMANDS
from tanager.commands import flags
from tanager.commands.train import Options
from tanager.recipes.recipe import Recipe


_OF_RECIPES = ("train", "search", "audit", "recipe", "bench")

_BASH = """\
_tanager() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} words
    case $COMP_CWORD:${{COMP_WORDS[1]}}:$word in
        1:* | 2:help:*) words="{commands}" ;;
        *:--*) words="{flags}" ;;
        {takers}) words="{recipes}" ;;
        *) return ;;
    esac
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _tanager tanager
"""
_ZSH = "autoload -U +X bashcompinit && bashcompinit\n" + _BASH
_FISH = """\
complete -c tanager -n __fish_use_subcommand -f -a "{commands}"
complete -c tanager -n "__fish_seen_subcommand_from help" -f -a "{commands}"
complete -c tanager -n "__fish_seen_subcommand_from {seen}" -a "{recipes}"
complete -c tanager -n "string match -q -- '--*' (commandline -ct)" -f -a "{flags}"
"""


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Print a script that completes commands, recipes and flags of `tanager`.

    bash: eval "$(tanager completion bash)" in ~/.bashrc; zsh: the same in ~/.zshrc;
    fish: tanager completion fish > ~/.config/fish/completions/tanager.fish.
    """

    shell: Positional[Annotated[str, tyro.conf.arg(metavar="{bash,zsh,fish}")]]
    """Your shell."""


def run(arguments: Sequence[str]) -> int:
    options = flags.read(Arguments, "completion", arguments)
    scripts = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}
    validate.one_of(scripts, shell=options.shell)
    fields = (*dataclasses.fields(Recipe), *dataclasses.fields(Options))
    names = [field.name for field in fields if field.init and field.name != "solve_for"]
    print(
        scripts[options.shell].format(
            commands=" ".join([*COMMANDS, "help", "version"]),
            recipes=" ".join(recipes.RECIPES),
            takers="|".join(f"2:{name}:*" for name in _OF_RECIPES),
            seen=" ".join(_OF_RECIPES),
            flags=" ".join(f"--{name.replace('_', '-')}" for name in names),
        ),
        end="",
    )
    return 0
