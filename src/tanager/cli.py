"""The `tanager` command and its subcommands."""

import contextlib
import importlib
import logging
import os
import re
import sys
import warnings
from collections.abc import Sequence
from dataclasses import fields
from typing import NoReturn

from tanager import __version__
from tanager import _validate as validate
from tanager._heap import keep_freed_memory
from tanager._terminal import escape_unprintable
from tanager._text import clean
from tanager.training.interrupt import noting


COMMANDS = {
    "plan": "plan a privacy budget: solve for noise, steps, batch size or ε",
    "train": "train a model privately, from a recipe",
    "search": "search hyper-parameters at small batch size; predict the full run",
    "audit": "attack the training code; bound the ε that it spends from below",
    "predict": "predict the classes of new images: CSV or JSON lines",
    "evaluate": "measure a model on labelled images: accuracy, AUROC, intervals",
    "account": "show what all runs on the same data spent; limit what they may",
    "runs": "list the runs in a folder, or compare some on one page",
    "report": "make the page of a finished run again",
    "export": "write a finished run's model and model card into a folder",
    "recipe": "show a recipe: settings, published results, ε recomputed, cost",
    "models": "list the models: parameters, FLOPs, public weights, source",
    "bench": "measure the cost of privacy: seconds, memory, scaling, each tap",
    "completion": "print a script with which bash, zsh or fish completes words",
}

_OF_RECIPES = {"train", "search", "audit", "plan"}
"""Commands whose flags are fields of a recipe, beside their own."""

_USAGE = "\n".join(
    [
        "usage: tanager COMMAND [OPTIONS]",
        "",
        *(f"  {name:<12}{summary}" for name, summary in COMMANDS.items()),
        "",
        "tanager help COMMAND explains its options; tanager version.",
        "Exit status: 0 done, 1 failed, 2 bad input, 130 stopped.",
        "Set TANAGER_TRACEBACK=1 to print the traceback of an error.",
    ]
)


_UNFINISHED: list[BaseException] = []
"""The interrupt, and with it what its frames hold: a thread may still compile it."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0, 1 failed, 2 refused, 130 stopped.

    The arguments are the words after `tanager`, by default those of the command line.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["help"] and len(words) > 1:
        words = [*words[1:], "--help"]
    if not words or words[0] in ("-h", "--help", "help"):
        print(_USAGE)
        return 0 if words else 2
    if words[0] in ("--version", "version"):
        print(f"tanager {__version__}")
        return 0
    keep_freed_memory()
    escape_unprintable()
    with noting(), warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = _show_warning
        try:
            validate.one_of(COMMANDS, command=words[0])
            command = importlib.import_module(f"tanager.commands.{words[0]}")
            return command.run(words[1:])
        except KeyboardInterrupt as stopped:
            _UNFINISHED[:] = [stopped]
            more = str(stopped)
            if words[0] in ("search", "audit"):
                more = "run the same command again to resume"
            _say(f"stopped{': ' + more if more else ''}")
            return 130
        except BrokenPipeError:  # `tanager … | head` has read enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
        except (ValueError, OSError, FloatingPointError) as error:
            if os.environ.get("TANAGER_TRACEBACK"):
                raise
            _say(f"error: {_with_flag(words, str(error))}")
            return 2 if isinstance(error, ValueError) else 1
        except Exception as error:
            if os.environ.get("TANAGER_TRACEBACK") or not _lacks_memory(error):
                raise
            first = (str(error) or type(error).__name__).splitlines()[0]
            _say(
                f"error: not enough memory ({first}): give a lower "
                "--physical-batch-size, or, at 1, smaller images or a smaller model"
            )
            return 1


def process() -> NoReturn:
    """Be the `tanager` command: run `main`, and end this process with its status."""
    # The command moves data to devices in many places, all of them intended.
    os.environ["JAX_TRANSFER_GUARD"] = "allow"
    # Without a home that can be written, it warns of its own cache at every figure.
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    status = main()
    jax = sys.modules.get("jax")
    if status == 130 and jax is not None and not jax.distributed.is_initialized():
        # A thread may still compile, and would crash over what JAX frees at exit.
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


def _lacks_memory(error: Exception) -> bool:
    # By name: most commands never import JAX.
    if type(error).__name__ == "JaxRuntimeError":
        from tanager.compiling import is_out_of_memory

        return is_out_of_memory(error)
    return isinstance(error, MemoryError)


def _with_flag(words: Sequence[str], message: str) -> str:
    """Return a message with the fields that it names written as their flags."""
    typed = (word[2:].partition("=")[0] for word in words if word.startswith("--"))
    flags = {flag.replace("-", "_") for flag in typed}
    if words[0] in _OF_RECIPES:
        from tanager.recipes.recipe import Recipe

        command = importlib.import_module(f"tanager.commands.{words[0]}")
        kinds = [Recipe, getattr(command, "Options", None) or command.Arguments]
        if words[0] == "search":
            kinds += command.experiments.TABLES.values()
        flags |= {each.name for kind in kinds for each in fields(kind)}
    flags -= {"solve_for"}
    name, mark, rest = message.partition(" (=")
    if name == "source":  # of `tanager.use.load`
        return f"model{mark}{rest}"
    if name == "path":  # The rest may name what is in that file or folder.
        return f"--data{mark}{rest}" if "data" in flags else message
    if mark and name in flags:
        message = f"{_flag(name)}{mark}{rest}"
    # A name of several words is a field's, except in a path, a value or Python code.
    return re.sub(
        r"(?<!\w)'[^']*'|\"[^\"]*\"|(?<![\w./-])[a-z]+_[a-z_]+(?![\w./=-]| \(--)",
        lambda found: _flag(found[0]) if found[0] in flags else found[0],
        message,
    )


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _show_warning(message, category, filename, lineno, file=None, line=None) -> None:
    _say(f"warning: {message}")


def _say(text: str) -> None:
    lines = map(clean, text.split("\n"))
    print("tanager: " + "\n".join(lines), file=sys.stderr)
