"""Damaged and hostile copies of good files, the same ones at every run."""

import copy
import json
import random
import resource
import struct
import unicodedata
import warnings


_NUMBERS = (0, 1, 0x7F, 0xFF, 0x7FFF, 0xFFFF, 2**31 - 2, 2**31, 2**32 - 1, 2**60, 2**63)
_NUMBERS += (2**64 - 1,)
_FORMS = ("<H", ">H", "<I", ">I", "<Q", ">Q", "B")
_TEXTS = ("", "x", "\x1b[31mred", "two\nlines", "\ud800", "\u202egnp", "1e9", "<b>$^$")
VALUES = (None, True, False, -1, 0, 2, 10**30, -(10**30), 1e308, -1e-300, [], {}, [[]])
VALUES += (*_TEXTS, ["a", 1], {"a": 1}, [1e308, -5], 2**53, 0.5)
RAW = ("NaN", "-Infinity", "1e999", "9" * 5000, "[" * 50_000, '{"a":' * 50_000, "nul")


def of_bytes(content, count, seed=0):
    """Yield copies of a file's bytes with bits, numbers or whole parts changed."""
    rng = random.Random(seed)
    yield b""
    for _ in range(count):
        new = bytearray(content)
        for _ in range(rng.choice((1, 1, 1, 2, 5))):
            _change(rng, new)
        yield bytes(new)


def _change(rng, content):
    if not content:
        return
    # Headers, at both ends, are where it hurts.
    near = min(len(content), 400)
    place = rng.choice(
        (
            rng.randrange(len(content)),
            rng.randrange(near),
            len(content) - 1 - rng.randrange(near),
        )
    )
    end = place + rng.choice((1, 2, 4, 8, 30, 300))
    match rng.randrange(7):
        case 0 | 1:
            content[place] ^= 1 << rng.randrange(8)
        case 2:
            form = rng.choice(_FORMS)
            size = struct.calcsize(form)
            number = rng.choice(_NUMBERS) % (1 << 8 * size)
            content[place : place + size] = struct.pack(form, number)
        case 3:
            del content[place:]
        case 4:
            del content[place:end]
        case 5:
            content[place:place] = content[rng.randrange(len(content)) :][:300]
        case 6:
            content[place:end] = rng.randbytes(end - place)


def of_json(content, count, seed=0):
    """Yield texts of JSON with values, names or whole parts changed."""
    rng = random.Random(seed)
    text = json.dumps(content)
    yield from (b"", b"[]", b"null", b"{}", b"3", b"\xff\xfe", b'"\\ud800"')
    yield from (raw.encode() for raw in RAW)
    for _ in range(count):
        match rng.randrange(8):
            case 0:
                own = rng.randrange(1 << 30)
                yield list(of_bytes(text.encode(), 1, own))[1]
            case 1:
                raw = rng.choice(RAW)
                changed = json.dumps(_replaced(rng, content, "?here?"))
                yield changed.replace('"?here?"', raw, 1).encode()
            case 2:
                names = [name for name in content if isinstance(content, dict)]
                name = json.dumps(rng.choice(names or ["a"]))
                yield text.replace("{", f"{{{name}: 1, ", 1).encode()
            case 3:
                yield json.dumps(_removed(rng, content)).encode()
            case _:
                yield json.dumps(_replaced(rng, content, rng.choice(VALUES))).encode()


def _places(content, found=None):
    found = [] if found is None else found
    if isinstance(content, dict | list):
        keys = content if isinstance(content, dict) else range(len(content))
        for key in keys:
            found.append((content, key))
            _places(content[key], found)
    return found


def _replaced(rng, content, value):
    content = copy.deepcopy(content)
    part, key = rng.choice(_places(content))
    part[key] = value
    return content


def _removed(rng, content):
    content = copy.deepcopy(content)
    part, key = rng.choice(_places(content))
    del part[key]
    return content


class Fuzz:
    """Counts what was read and what was refused, and insists on how.

    Args:
        name: that every message must hold: the name of the file that was changed.
    """

    def __init__(self, name):
        self.name = name
        self.read = self.refused = 0
        self._memory = _peak()

    def __call__(self, read, *arguments):
        """Return what is read; None where it is refused as it must be."""
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            try:
                found = read(*arguments)
            except ValueError as error:
                self._check(error)
                self.refused += 1
                return None
        assert not [str(warning.message) for warning in warned]
        self.read += 1
        return found

    def _check(self, error):
        kind = type(error)
        assert kind is ValueError or kind.__module__.startswith("tanager"), kind
        message = str(error)
        assert self.name in message, message
        lines = message.replace("\n", "")
        assert not [c for c in lines if unicodedata.category(c) in ("Cc", "Cs")]
        assert len(message) < 5000

    def end(self, most=400):
        """Check that memory was bounded, and that the changes did something."""
        assert self.refused
        assert _peak() - self._memory < most << 20


def _peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
