"""From our names of tensors to another library's, by rules.

A letter in braces stands for a number: ``{i}``, and ``{i1}`` for the number plus 1 in
their name.
"""

import functools
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from tanager.models.foreign.layouts import (
    CONV,
    GAIN,
    LINEAR,
    SAME,
    Foreign,
    Layout,
    Table,
)
from tanager.models.weights import named_tensors


class Rule(NamedTuple):
    """Their name for tensors of ours; several, joined by ``|``, are parts of one."""

    ours: str
    theirs: str
    layout: Layout


def table(rules: Iterable[Rule], model: Any) -> Table:
    """Return the table of a model: for each of our tensors, the first rule that fits.

    ``{b}`` is a block of a normaliser-free network, ``{stage}`` and ``{place}`` its
    place in theirs, where every stage counts its blocks from 0; ``{haiku}`` is what
    haiku adds to the name of a block. ``{flat}`` counts the blocks of all stages, where
    ours, ``{i}.{j}``, start at 0 in each.
    """
    found = {}
    for name in named_tensors(model):
        for rule in rules:
            match = _pattern(rule.ours).fullmatch(name)
            if match is None:
                continue
            numbers = {letter: int(text) for letter, text in match.groupdict().items()}
            if "b" in numbers:
                blocks = model.blocks[: numbers["b"] + 1]
                starts = [n for n, b in enumerate(blocks) if b.shortcut is not None]
                numbers |= {
                    "stage": len(starts) - 1,
                    "place": numbers["b"] - starts[-1],
                }
            if "j" in numbers:
                before = model.stages[: numbers.get("i", 0)]
                numbers["flat"] = sum(map(len, before)) + numbers["j"]
            numbers |= {f"{letter}1": n + 1 for letter, n in numbers.items()}
            haiku = f"_{numbers['b']}" if numbers.get("b") else ""
            names = rule.theirs.format(**numbers, haiku=haiku).split("|")
            found[name] = Foreign(tuple(names), rule.layout)
            break
    return found


@functools.cache
def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"\\{(\w)\\}", r"(?P<\1>\\d+)", re.escape(name)))


def conv(ours: str, theirs: str, gain: Layout = GAIN) -> list[Rule]:
    """Return the rules of a convolution's weight, gain and bias."""
    return [
        Rule(f"{ours}.weight", f"{theirs}.weight", CONV),
        Rule(f"{ours}.gain", f"{theirs}.gain", gain),
        Rule(f"{ours}.bias", f"{theirs}.bias", SAME),
    ]


def linear(ours: str, theirs: str, layout: Layout = LINEAR) -> list[Rule]:
    """Return the rules of a linear layer's weight and bias."""
    return [
        Rule(f"{ours}.weight", f"{theirs}.weight", layout),
        Rule(f"{ours}.bias", f"{theirs}.bias", SAME),
    ]


def norm(ours: str, theirs: str) -> list[Rule]:
    """Return the rules of a norm's scale and bias."""
    return [
        Rule(f"{ours}.scale", f"{theirs}.weight", SAME),
        Rule(f"{ours}.bias", f"{theirs}.bias", SAME),
    ]
