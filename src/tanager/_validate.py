"""Checks of arguments: one message that names argument, value, rule and remedy.

Values arrive as keyword arguments, so the message gets the argument's name for free:

    validate.positive(clip_norm=clip_norm, remedy="the papers use 1.0")

raises ``ValueError: clip_norm (=-1.0) must be positive: the papers use 1.0``.
"""

import dataclasses
import difflib
import math
import numbers
import sys
from collections.abc import Callable, Collection, Iterable
from pathlib import PurePath
from types import FunctionType
from typing import Any, NoReturn

from tanager._text import clean


_MOST = 8  # names in a list after a suggestion, and values of settings
_LONGEST, _LONGEST_TEXT = 200, 1000  # characters of a value, and of a text or path
_LARGEST = 2**63 - 1
_SETTINGS = (str, numbers.Number, PurePath, range, type, FunctionType)


def refuse(argument: str, value: object, rule: str, remedy: str = "") -> NoReturn:
    """Raise the one `ValueError` that says what is wrong and what to do about it."""
    raise ValueError(message(argument, value, rule, remedy))


def message(argument: str, value: object, rule: str, remedy: str = "") -> str:
    """Return what `refuse` says, on one line and safe to print."""
    ending = f": {remedy}" if remedy else ""
    return f"{argument} (={shown(value)}) {clean(rule + ending)}"


def refuse_type(argument: str, value: object, rule: str, remedy: str = "") -> NoReturn:
    """Raise the `ValueError` that names the type of a value, and prints no value."""
    ending = f": {remedy}" if remedy else ""
    kind = type(value).__name__
    raise ValueError(f"{argument} (of type {kind}) {clean(rule + ending)}")


def shown(value: Any) -> str:
    """Return a value as a message shows it: settings in full, and nothing of data.

    Arrays, long containers and objects of other classes may hold private examples:
    dtype and shape, or the type, say enough.
    """
    if isinstance(value, str | PurePath):
        text, most = repr(value), _LONGEST_TEXT
    elif _values(value) <= _MOST:
        text, most = _setting(value), _LONGEST
    elif hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"{value.dtype}[{', '.join(map(str, value.shape))}]"
    elif isinstance(value, Collection):
        return f"{type(value).__name__} of {len(value)}"
    else:
        return type(value).__name__
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _setting(value: object) -> str:
    if isinstance(value, int) and value.bit_length() > 1000:
        return f"a number of {value.bit_length()} bits"
    return repr(value)


def _values(value: object) -> float:
    """Return how many settings a value holds; infinity if it may hold anything else."""
    if value is None or isinstance(value, _SETTINGS):
        return 1
    if dataclasses.is_dataclass(value):
        fields = [getattr(value, own.name, None) for own in dataclasses.fields(value)]
        return 1 if all(_values(each) <= _MOST for each in fields) else math.inf
    if not isinstance(value, tuple | list | set | frozenset | dict):
        return math.inf
    each = [*value.items()] if isinstance(value, dict) else value
    return sum(map(_values, each)) if len(value) <= _MOST else math.inf


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        rule = "must be a number"
        refuse(name, value, rule, _of_array("iuf", f"float({name})", value))
    try:
        number = float(value)
    except OverflowError:
        number = math.inf  # of either sign: no range holds it
    if math.isnan(number):
        refuse(name, value, "must be a number", "it is not-a-number")
    return number


def _of_array(kinds: str, number: str, value: Any) -> str:
    """Return what to give in place of an array of a single number."""
    kind = getattr(getattr(value, "dtype", None), "kind", "O")  # JAX's keys have none
    alone = getattr(value, "shape", None) == () and kind in kinds
    return f"give {number}" if alone else ""


def _range(rule: str, inside: Callable[[float], bool]) -> Callable[..., None]:
    def check(*, remedy: str = "", **values: float) -> None:
        for name, value in values.items():
            if not inside(_number(name, value)):
                refuse(name, value, rule, remedy)

    return check


positive = _range("must be positive and finite", lambda value: 0 < value < math.inf)
not_negative = _range(
    "must be finite and not negative", lambda value: 0 <= value < math.inf
)
fraction = _range("must be above 0 and at most 1", lambda value: 0 < value <= 1)
probability = _range("must be strictly between 0 and 1", lambda value: 0 < value < 1)


def clipping_norm(clip_norm: float) -> None:
    """Refuse a clipping norm that is not positive, or whose square float32 loses."""
    remedy = "the papers use 1.0"
    positive(clip_norm=clip_norm, remedy=remedy)
    if not 1e-12 <= clip_norm <= 1e12:
        rule = "must be from 1e-12 to 1e12, for squares of norms to hold in float32"
        refuse("clip_norm", clip_norm, rule, remedy)


def share(**values: float) -> None:
    """Refuse a value outside [0, 1]."""
    not_negative(**values)
    for name, value in values.items():
        if value > 1:
            refuse(name, value, "must be at most 1")


def ema_decay(ema_decay: float) -> None:
    """Refuse a decay of the parameter average outside [0, 1)."""
    not_negative(ema_decay=ema_decay)
    if ema_decay >= 1:
        refuse("ema_decay", ema_decay, "must be below 1", "the papers use 0.9999")


def whole(*, at_least: int, remedy: str = "", **values: int) -> None:
    """Refuse a value that is not a whole number of 64 bits, of at least `at_least`."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, numbers.Integral):
            ending = _of_array("iu", f"int({name})", value) or remedy
            refuse(name, value, "must be a whole number", ending)
        if value < at_least:
            refuse(name, value, f"must be at least {at_least}", remedy)
        if value > _LARGEST:
            refuse(name, value, f"must be at most {_LARGEST}", remedy)


def size_or_auto(**values: Any) -> None:
    """Refuse a value that is neither "auto" nor a whole number of at least 1."""
    for name, value in values.items():
        if isinstance(value, str) and value != "auto":
            refuse(name, value, "must be a whole number or auto", "give 256, or auto")
        if value != "auto":
            whole(at_least=1, **{name: value})


def channels_last(image_shape: tuple[int, ...]) -> None:
    """Refuse the shape of an image that has its channels first, as in NCHW arrays."""
    shape = tuple(image_shape)
    if len(shape) == 3 and shape[0] in (1, 3) and shape[2] not in (1, 3):
        rule = "must be (height, width, channels), and has its channels first (NCHW)"
        remedy = "move them: numpy.moveaxis(images, 1, -1), of one numpy.moveaxis(image"
        refuse("image shape", shape, rule, f"{remedy}, 0, -1)")


_MADE = {
    "Account": "tanager.Account(path), or None",
    "AdaptiveClipping": "AdaptiveClipping(), or None",
    "ClippedGrad": "tanager.clipped_grad(loss, clip_norm=1.0)",
    "GaussianNoise": "GaussianNoise(mechanism, grad_fn.sensitivity, seed, params, …)",
    "Groups": "tanager.groups.Groups(owners), or None",
    "Ledger": "tanager.Ledger(path), or None",
    "Mechanism": "tanager.calibrate(…), or tanager.Mechanism(…)",
    "Seed": "tanager.Seed.from_os()",
    "Style": 'clip, automatic, or tanager.clipping.Style("automatic", gamma)',
}


def instance(kind: type, remedy: str = "", **values: object) -> None:
    """Refuse what is not of a class, and say how one is made; no value is printed."""
    for name, value in values.items():
        if not isinstance(value, kind):
            wanted = kind.__name__
            rule = f"must be of type {wanted}"
            refuse_type(name, value, rule, remedy or _MADE[wanted])


def instance_or_none(kind: type, **values: object) -> None:
    """Refuse what is neither None nor of a class."""
    for name, value in values.items():
        if value is not None:
            instance(kind, "", **{name: value})


def function_or_none(**values: object) -> None:
    """Refuse what is neither None nor a function; no value is printed."""
    for name, value in values.items():
        if not (value is None or callable(value)):
            refuse_type(name, value, "must be a function, or None")


def one_of(choices: Iterable[str], *, remedy: str = "", **values: str) -> None:
    """Refuse a name that is not among `choices`, and offer the nearest one first."""
    choices = tuple(choices)
    for name, value in values.items():
        if value not in choices:
            if near := nearest(str(value), choices):
                more = f" and {len(choices) - _MOST} more" * (len(choices) > _MOST)
                listed = f"It must be one of {', '.join(choices[:_MOST])}{more}"
                refuse(name, value, f"is unknown: did you mean {near}? {listed}")
            refuse(name, value, f"must be one of {', '.join(choices)}", remedy)


def nearest(name: str, choices: Iterable[str]) -> str | None:
    """Return the choice spelt most like `name`, or None when none is close."""
    choices = tuple(choices)
    # Of short words, as val and all, half of the letters agree by chance.
    alike = difflib.get_close_matches(name, choices, n=3, cutoff=0.5)
    closer = difflib.get_close_matches(name, choices, n=3, cutoff=0.7)
    near = [each for each in alike if each[:1] == name[:1] or each in closer]
    return near[0] if near else None


def not_traced(what: str, remedy: str) -> None:
    """Refuse a call while JAX traces: what it returns would be the same in every run.

    Without JAX, which this does not load, nothing is traced.
    """
    if "jax" not in sys.modules:
        return
    from jax._src.core import trace_state_clean

    if not trace_state_clean():
        rule = "must be called outside jax.jit, vmap and lax.scan"
        why = "they call it once, when they trace, and repeat what it returned"
        raise ValueError(f"{what} {rule}: {why}; {remedy}")
