"""Text of files that others wrote, made safe to print."""

import math
import re
import unicodedata


_PLAIN = re.compile(r"[ -~]*")
_JOINERS = "\u200c\u200d"  # Persian, Hindi and emoji are written with them.
_UNSAFE = ("Cc", "Cf", "Cs", "Zl", "Zp")


def clean(text: object) -> str:
    """Return text on one line, without characters that steer a terminal or a page.

    A line break or a tab becomes a space. Control, escape and direction characters, and
    halves of characters that no file can hold, become U+FFFD.
    """
    text = str(text)
    if _PLAIN.fullmatch(text):
        return text
    return "".join(_safe(character) for character in text)


def in_bytes(size: float) -> str:
    """Return a size in the unit that fits: 12 bytes, 1.5 KiB, 2.0 GiB."""
    if size < 1024:
        return f"{size:.0f} bytes"
    power = min(4, int(math.log2(size)) // 10)
    return f"{size / 1024**power:.1f} {' KMGT'[power]}iB"


def _safe(character: str) -> str:
    if unicodedata.category(character) not in _UNSAFE or character in _JOINERS:
        return character
    return " " if character.isspace() else "\ufffd"
