"""Check that a JSON file of tanager's has the required fields before it is used.

A shape is a type (`str`, `bool`, `int` for a whole number from 0, `float` for any
number), a dict of shapes by field, ``[shape]`` for a list, `Each` for a dict with any
names, or `Maybe` of one of these, which may be missing or null. `object` is any value.
"""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from tanager._reading import AGAIN, is_count, read_json, refuse_file


@dataclasses.dataclass(frozen=True)
class Maybe:
    """A value of a shape, that may be missing or null."""

    shape: Any


@dataclasses.dataclass(frozen=True)
class Each:
    """A dict of values of one shape, whatever their names."""

    shape: Any


_LARGEST = 1e300
_WORDS = {
    str: "text",
    bool: "true or false",
    int: "a whole number from 0",
    float: "a number",
    dict: "an object",
    list: "a list",
    object: "there",
}
_MISSING = object()


def read_record(
    file: str | os.PathLike[str],
    shape: Mapping[str, Any],
    remedy: str = AGAIN,
    argument: str = "path",
) -> dict[str, Any]:
    """Return the object in a JSON file that has at least the fields of `shape`.

    Optional fields that are missing are returned as None; other fields are not checked.

    Raises:
        UnreadableFile: as `read_json`, or a field is missing or of another kind; the
            message names it.
    """
    content = read_json(file, remedy, argument)
    check_record(file, content, shape, remedy, argument)
    return content


def check_record(
    file: str | os.PathLike[str],
    content: Any,
    shape: Any,
    remedy: str = AGAIN,
    argument: str = "path",
) -> None:
    """Check that the content of a file has a shape; see `read_record`."""
    found = _misfit(content, shape, "")
    if found is None:
        return
    place, value, wanted = found
    rule = f"has no {place}, which must be {wanted}"
    if value is not _MISSING:
        rule = f"has {place or 'content'} {value!r:.80}, which must be {wanted}"
    refuse_file(file, rule, remedy, argument)


def _misfit(value: Any, shape: Any, place: str) -> tuple[str, Any, str] | None:
    """Return the first place that differs, what is there, and what must be."""
    if isinstance(shape, Maybe):
        if value is None or value is _MISSING:
            return None
        return _misfit(value, shape.shape, place)
    kind = shape
    if isinstance(shape, dict | Each):
        kind = dict
    elif isinstance(shape, list):
        kind = list
    if not _is(value, kind):
        return place, value, _WORDS[kind]
    if isinstance(shape, dict):
        for name, wanted in shape.items():
            if isinstance(wanted, Maybe):
                value.setdefault(name)
        parts = [(name, value.get(name, _MISSING), shape[name]) for name in shape]
    elif isinstance(shape, Each):
        parts = [(name, value[name], shape.shape) for name in value]
    elif isinstance(shape, list):
        parts = [(number, part, shape[0]) for number, part in enumerate(value)]
    else:
        return None
    for name, part, wanted in parts:
        if found := _misfit(part, wanted, f"{place}.{name}".lstrip(".")):
            return found
    return None


def _is(value: Any, kind: type) -> bool:
    if kind is int:
        return is_count(value)
    if kind is float:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return number and abs(value) <= _LARGEST
    return isinstance(value, kind) and value is not _MISSING
