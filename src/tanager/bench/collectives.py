"""What devices exchange, read out of a compiled program."""

import math
import re


_NAMES = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
_CALL = re.compile(rf"= (.*?) ({_NAMES})(?:-start)?\(")
_ARRAY = re.compile(r"\b(pred|[a-z]+(\d+)\w*)\[([\d,]*)\]")


def exchanged(program: str) -> dict[str, int]:
    """Return the bytes of the results of each kind of collective in optimised HLO.

    What an all-reduce moves over a link depends on its algorithm: in a ring of n,
    2 (n − 1)/n times these bytes. A collective in a loop counts once.
    """
    found: dict[str, int] = {}
    for shapes, name in _CALL.findall(program):
        found[name] = found.get(name, 0) + _bytes(shapes)
    return found


def _bytes(shapes: str) -> int:
    """The bytes of an array, or of all arrays of a tuple, as HLO writes types."""
    total = 0
    for _, bits, sizes in _ARRAY.findall(shapes):
        entries = math.prod(int(size) for size in sizes.split(",") if size)
        total += math.ceil(entries * int(bits or 8) / 8)
    return total
