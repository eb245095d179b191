"""Read files that others wrote, without trusting them.

`reading` turns whatever goes wrong into one error that names the file. JSON is read
with bounds: on its size, and on what numbers and texts it may hold.
"""

import contextlib
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from tanager import _validate as validate
from tanager._text import clean


AGAIN = "get the file again"
"""The remedy for a file that was damaged on its way."""
LARGEST_JSON = 1 << 28
"""Bytes of JSON that are read at most: a file of metrics has some hundred per line."""
_OTHER_KINDS = (KeyError, TypeError, AttributeError)
MALFORMED = (ValueError, OverflowError, RecursionError, *_OTHER_KINDS)
"""Errors of code that reads JSON whose content is not what was written."""
_LONGEST_REASON = 1000
_MOST_DIGITS = 40
_Kind = TypeVar("_Kind", dict, list)


class UnreadableFile(ValueError):
    """A file that cannot be read, or does not hold what it should."""


def refuse_file(
    file: str | os.PathLike[str], rule: str, remedy: str = "", argument: str = "path"
) -> NoReturn:
    """Raise the one message about a file: which, what is wrong, what to do."""
    raise UnreadableFile(validate.message(argument, os.fspath(file), rule, remedy))


@contextlib.contextmanager
def reading(
    file: str | os.PathLike[str],
    rule: str = "cannot be read",
    remedy: str = AGAIN,
    argument: str = "path",
) -> Iterator[None]:
    """Turn whatever is raised in the block into one error that names the file.

    The library's reason follows the rule in brackets.

    Raises:
        UnreadableFile: something was raised.
    """
    try:
        yield
    except UnreadableFile:
        raise
    except Exception as error:  # Libraries raise nearly anything.
        if isinstance(error, PermissionError):
            remedy = "give yourself the right to read it, or ask its owner"
        why = f"{rule} ({reason(error)})"
        text = validate.message(argument, os.fspath(file), why, remedy)
        raise UnreadableFile(text) from error


def reason(error: Exception) -> str:
    """Return in one short line why a library could not read something."""
    match error:
        case MemoryError():
            return "it needs more memory than there is"
        case RecursionError():
            return "it is nested too deeply"
        case KeyError():
            return f"it has no {clean(error)[:_LONGEST_REASON]}"
        case OSError() if error.strerror:
            return clean(error.strerror)
        case ValueError() | OSError():
            text = clean(error)
        case _:
            text = f"{type(error).__name__}: {clean(error)}"
    return text[:_LONGEST_REASON] or type(error).__name__


def read_json(
    file: str | os.PathLike[str],
    remedy: str = AGAIN,
    argument: str = "path",
    kind: type[_Kind] = dict,
) -> _Kind:
    """Return the object (or the list) in a JSON file, all its texts safe to print.

    Raises:
        UnreadableFile: it cannot be read, is too large, is not JSON in UTF-8, is
            nested too deeply, names a field twice, holds a number that is not finite,
            or is of another kind.
    """
    with reading(file, "cannot be read as JSON", remedy, argument):
        content = parse_json(_bounded(file, remedy, argument))
    if not isinstance(content, kind):
        wanted = "an object" if kind is dict else "a list"
        found = type(content).__name__
        refuse_file(file, f"holds {found}, and must hold {wanted}", remedy, argument)
    return content


def read_json_lines(
    file: Path, has: tuple[str, ...] = (), remedy: str = "delete that line"
) -> list[dict[str, Any]]:
    """Return the objects of a JSON lines file; an empty list if it does not exist.

    An incomplete last line, without a line break, is ignored. Every line must have the
    fields `has`, whole numbers from 0.

    Raises:
        UnreadableFile: a line is not such an object; the message counts it from 1.
    """
    if not file.exists():
        return []
    with reading(file):
        complete = _bounded(file, AGAIN, "path").rpartition(b"\n")[0]
    lines = []
    for number, line in enumerate(complete.split(b"\n"), 1):
        if not line:
            continue
        with reading(file, f"line {number} cannot be read as JSON", remedy):
            content = parse_json(line)
        if not isinstance(content, dict):
            refuse_file(file, f"line {number} must be a JSON object", remedy)
        for name in has:
            if not is_count(content.get(name)):
                found = f"line {number} has {name} {content.get(name)!r:.80}"
                rule = f"{found}, and must have a whole number from 0"
                refuse_file(file, rule, remedy)
        lines.append(content)
    return lines


def parse_json(text: bytes) -> Any:
    """Return the content of JSON text, all its texts made safe to print.

    Raises:
        ValueError: it is not JSON in UTF-8, names a field twice, or holds a number that
            is not finite.
        RecursionError: it is nested too deeply.
    """
    return _cleaned(
        json.loads(
            text.decode(),
            parse_float=_finite,
            parse_int=_whole,
            parse_constant=_refuse_number,
            object_pairs_hook=_once,
        )
    )


def is_count(value: object) -> bool:
    """Return whether a value of a file is a whole number that can count something."""
    if isinstance(value, bool) or not isinstance(value, int):
        return False
    return 0 <= value < 1 << 53


def _bounded(file: str | os.PathLike[str], remedy: str, argument: str) -> bytes:
    with open(file, "rb") as stream:
        content = stream.read(LARGEST_JSON + 1)
    if len(content) > LARGEST_JSON:
        rule = f"is larger than {LARGEST_JSON >> 20} MiB, which is the most"
        refuse_file(file, rule, remedy, argument)
    return content


def _finite(digits: str) -> float:
    number = float(digits)
    return number if math.isfinite(number) else _refuse_number(digits)


def _whole(digits: str) -> int:
    return int(digits) if len(digits) <= _MOST_DIGITS else _refuse_number(digits)


def _refuse_number(digits: str) -> NoReturn:
    raise ValueError(f"{digits:.40} is not a finite number")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"it has {twice!r:.80} more than once")
    return content


def _cleaned(content: Any) -> Any:
    match content:
        case str():
            return clean(content)
        case dict():
            return {clean(name): _cleaned(value) for name, value in content.items()}
        case list():
            return [_cleaned(value) for value in content]
        case _:
            return content
