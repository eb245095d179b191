"""`tanager bench`: what privacy costs on this machine."""

import datetime
import math
import shlex
import time
from collections.abc import Callable, Sequence
from typing import Any

import tyro

from tanager import _validate as validate
from tanager._heap import run_in_place
from tanager._terminal import new_console
from tanager.commands import flags
from tanager.commands.bench.measured import STOPPED
from tanager.commands.bench.one_batch import Explain, Memory, Step
from tanager.commands.bench.scaling import Scaling
from tanager.commands.bench.throughput import Throughput
from tanager.commands.tables import print_json


_SECONDS_BETWEEN = 10.0
_COMMANDS = {
    "step": Step,
    "memory": Memory,
    "throughput": Throughput,
    "scaling": Scaling,
    "explain": Explain,
}


def run(arguments: Sequence[str]) -> int:
    """Run the command; `arguments` are the words after `tanager bench`.

    Returns:
        0; 1 when nothing could be measured; 130 when stopped, after what was measured.
    """
    words = list(arguments)
    if {"-h", "--help"}.intersection(words[:1]):
        tyro.extras.subcommand_cli_from_dict(
            {name: flags.described(kind) for name, kind in _COMMANDS.items()},
            prog="tanager bench",
            description="Measure what privacy costs on this machine.",
            args=words,
        )
    word = words[0] if words else ""
    validate.one_of(_COMMANDS, **{"what to measure": word})
    options = flags.read(_COMMANDS[word], f"bench {word}", words[1:])
    run_in_place()
    screen = new_console(stderr=True)
    # Redrawn rarely: a spinner takes time from what is being timed.
    with screen.status("starting", refresh_per_second=1) as status:
        log = new_console(stderr=True, quiet=options.json, markup=False)
        report = status.update if screen.is_terminal else _seldom(log.print)
        record, lines, code = options.measure(report)
    if options.json:
        print_json(record | _circumstances(words))
    else:
        console = new_console(width=1000)  # A narrow terminal cuts no number.
        for line in lines:
            console.print(line, markup=False, soft_wrap=isinstance(line, str))
    if code == STOPPED:
        screen.print("tanager: stopped: this is what was measured before")
    return code


def _seldom(
    show: Callable[[str], None], clock: Callable[[], float] = time.monotonic
) -> Callable[[str], None]:
    """Show the first line in a log or a pipe, and at most one each 10 s."""
    said = -math.inf

    def report(text: str) -> None:
        nonlocal said
        if clock() - said >= _SECONDS_BETWEEN:
            said = clock()
            show(text)

    return report


def _circumstances(words: list[str]) -> dict[str, Any]:
    from tanager.bench import machine

    now = datetime.datetime.now(datetime.UTC)
    return {
        "machine": machine.machine(),
        "versions": machine.versions(),
        "command": shlex.join(["tanager", "bench", *words]),
        "date": now.isoformat(timespec="seconds"),
    }
