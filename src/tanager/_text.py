"""Text of files that others wrote, made safe to print."""

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


def _safe(character: str) -> str:
    if unicodedata.category(character) not in _UNSAFE or character in _JOINERS:
        return character
    return " " if character.isspace() else "\ufffd"
