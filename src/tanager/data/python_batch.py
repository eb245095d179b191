"""The "python version" of CIFAR-10 and CIFAR-100: pickles, read without unpickling.

A pickle is a program: Python's own reader runs whatever it asks for, and NumPy follows
pointers that it holds. Here the few instructions that these files consist of are read
into dicts, lists, numbers, texts and arrays of bytes. Everything else is refused.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tanager._reading import reading
from tanager.data.formats import (
    Arrays,
    bounded_bytes,
    check_labels,
    refuse_file,
    same_count,
)


LARGEST = 1 << 30
"""Bytes of a file at most: CIFAR-100 has 155 million."""
_MOST_INSTRUCTIONS = 4_000_000  # CIFAR-100 has about 300 000.

# What an array of bytes is made of, under the names of NumPy 1 and 2.
_ARRAY, _DTYPE, _MAKE_ARRAY = "numpy.ndarray", "numpy.dtype", "_reconstruct"
_NAMES = {
    ("numpy", "ndarray"): _ARRAY,
    ("numpy", "dtype"): _DTYPE,
    ("numpy.core.multiarray", "_reconstruct"): _MAKE_ARRAY,
    ("numpy._core.multiarray", "_reconstruct"): _MAKE_ARRAY,
}


def read_python_batch(
    file: Path, label_key: str, shape: tuple[int, int, int], classes: int
) -> Arrays:
    """Read a "python version" batch file of CIFAR-10 or CIFAR-100.

    Args:
        file: such as ``data_batch_1``.
        label_key: such as ``labels`` (CIFAR-10) or ``fine_labels`` (CIFAR-100).
        shape: (H, W, C); the rows of the file hold C planes of H × W pixels.
        classes: labels must be from 0 to `classes` − 1.

    Raises:
        UnreadableFile: the file asks for more than arrays of bytes, is corrupt or too
            large, or does not hold such images and labels.
    """
    content = bounded_bytes(file, LARGEST)
    with reading(file, "cannot be read as a batch of arrays"):
        batch = parse(content)
    for name in ("data", label_key):
        if name not in batch:
            refuse_file(file, f"has no {name!r}", f"it has {sorted(batch)!r:.300}")
    rows, labels = batch["data"], batch[label_key]
    width = math.prod(shape)
    if not isinstance(rows, np.ndarray) or rows.ndim != 2 or rows.shape[1] != width:
        array = isinstance(rows, np.ndarray)
        found = f"uint8{list(rows.shape)}" if array else type(rows).__name__
        refuse_file(file, f"has images as {found}", f"they must be uint8[N, {width}]")
    if not isinstance(labels, list) or any(type(label) is not int for label in labels):
        refuse_file(file, "has labels that are no list of integers", "get another file")
    height, width, channels = shape
    planes = rows.reshape(-1, channels, height, width)
    images = np.ascontiguousarray(planes.transpose(0, 2, 3, 1))
    numbers = np.asarray(labels, np.int64)
    same_count(file, len(images), numbers)
    return images, check_labels(file, numbers, classes)


def parse(content: bytes) -> dict[str, Any]:
    """Return the dict that a pickle of arrays of bytes holds, its keys as text.

    Args:
        content: a pickle of protocol 2, 3 or 4.

    Raises:
        ValueError: it holds, or asks for, anything else.
    """
    machine = _Machine(content)
    found = machine.run()
    if not isinstance(found, dict):
        raise ValueError(f"it holds {type(found).__name__}, and must hold a dict")
    return {key: _finished(value) for key, value in found.items()}


class _Array:
    """An array of bytes in the making: `value` is None until its state is told."""

    value: np.ndarray | None = None


class _Bytes:
    """The dtype uint8."""


class _Name(str):
    """A function or class that an array of bytes is made of."""


def _finished(value: Any) -> Any:
    if isinstance(value, _Array):
        return np.empty(0, np.uint8) if value.value is None else value.value
    return value


class _Machine:
    def __init__(self, content: bytes):
        self._content = content
        self._position = 0
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memory: dict[int, Any] = {}

    def run(self) -> Any:
        for _ in range(_MOST_INSTRUCTIONS):
            code = self._take(1)
            if code == b".":
                return self._pop()
            if code not in _INSTRUCTIONS:
                at = self._position - 1
                raise ValueError(
                    f"byte {at} is {code!r}, which no batch of arrays has; write it "
                    "again with pickle.dump(batch, file, protocol=4)"
                )
            _INSTRUCTIONS[code](self)
        raise ValueError(f"it has more than {_MOST_INSTRUCTIONS:,} instructions")

    def _take(self, count: int) -> bytes:
        end = self._position + count
        if not 0 <= count <= len(self._content) - self._position:
            raise ValueError("it is cut short")
        part = self._content[self._position : end]
        self._position = end
        return part

    def number(self, size: int, signed: bool = False) -> int:
        return int.from_bytes(self._take(size), "little", signed=signed)

    def raw(self, size: int, signed: bool = False) -> bytes:
        return self._take(self.number(size, signed))

    def line(self) -> str:
        end = self._content.find(b"\n", self._position, self._position + 100)
        if end < 0:
            raise ValueError("it is damaged: a name does not end")
        text = self._take(end - self._position).decode()
        self._take(1)
        return text

    def push(self, value: Any) -> None:
        self._stack.append(value)

    def _pop(self) -> Any:
        if len(self._stack) <= (self._marks[-1] if self._marks else 0):
            raise ValueError("it is damaged: a value is missing")
        return self._stack.pop()

    def mark(self) -> None:
        self._marks.append(len(self._stack))

    def _since_mark(self) -> list[Any]:
        if not self._marks:
            raise ValueError("it is damaged: a mark is missing")
        start = self._marks.pop()
        values = self._stack[start:]
        del self._stack[start:]
        return values

    def remember(self, place: int | None = None) -> None:
        value = self._pop()
        self._memory[len(self._memory) if place is None else place] = value
        self.push(value)

    def recall(self, place: int) -> None:
        if place not in self._memory:
            raise ValueError("it is damaged: it asks for what it never kept")
        self.push(self._memory[place])

    def tuple_of(self, count: int | None = None) -> None:
        if count is None:
            values = self._since_mark()
        else:
            values = [self._pop() for _ in range(count)][::-1]
        self.push(tuple(values))

    def append(self, values: list[Any]) -> None:
        target = self._pop()
        if not isinstance(target, list):
            raise ValueError("it is damaged: it appends to what is no list")
        target += values
        self.push(target)

    def append_one(self) -> None:
        value = self._pop()
        self.append([value])

    def append_all(self) -> None:
        self.append(self._since_mark())

    def set_one(self) -> None:
        value, key = self._pop(), self._pop()
        self._set([key, value])

    def set_all(self) -> None:
        self._set(self._since_mark())

    def _set(self, items: list[Any]) -> None:
        target = self._pop()
        if not isinstance(target, dict) or len(items) % 2:
            raise ValueError("it is damaged: it sets items of what is no dict")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if type(key) not in (bytes, str):
                raise ValueError("a dict has a key that is no text")
            text = key.decode(errors="replace") if isinstance(key, bytes) else key
            target[text] = value
        self.push(target)

    def name(self, module: Any, name: Any) -> None:
        if (module, name) not in _NAMES:
            raise ValueError(
                f"it asks for {module!s:.100}.{name!s:.100}, and only arrays of bytes "
                "are read"
            )
        self.push(_Name(_NAMES[module, name]))

    def name_of_stack(self) -> None:
        name, module = self._pop(), self._pop()
        if type(name) is not str or type(module) is not str:
            raise ValueError("it is damaged: a name is no text")
        self.name(module, name)

    def call(self) -> None:
        arguments, function = self._pop(), self._pop()
        if isinstance(function, _Name) and isinstance(arguments, tuple):
            if function == _MAKE_ARRAY and _is_empty_array(arguments):
                return self.push(_Array())
            if function == _DTYPE and arguments[:1] in ((b"u1",), ("u1",)):
                return self.push(_Bytes())
        raise ValueError("it holds an array of other numbers than bytes (uint8)")

    def build(self) -> None:
        state, target = self._pop(), self._pop()
        if isinstance(target, _Array) and target.value is None:
            target.value = _array(state)
        elif not isinstance(target, _Bytes):
            raise ValueError("it gives a state to what is no array")
        self.push(target)


def _is_empty_array(arguments: tuple[Any, ...]) -> bool:
    return (
        len(arguments) == 3
        and isinstance(arguments[0], _Name)
        and arguments[0] == _ARRAY
        and arguments[1] == (0,)
    )


def _array(state: Any) -> np.ndarray:
    """Return an array of bytes from NumPy's (version, shape, dtype, order, content)."""
    match state:
        case (int(), tuple() as shape, _Bytes(), (False | 0), bytes() as content):
            whole = all(type(size) is int and size >= 0 for size in shape)
            if whole and len(shape) <= 4 and math.prod(shape) == len(content):
                return np.frombuffer(content, np.uint8).reshape(shape)
    raise ValueError("it has an array that is damaged, or not of bytes in rows")


_INSTRUCTIONS: dict[bytes, Callable[[_Machine], Any]] = {
    b"\x80": lambda m: m.number(1),  # PROTO
    b"\x95": lambda m: m.number(8),  # FRAME
    b"}": lambda m: m.push({}),
    b"]": lambda m: m.push([]),
    b")": lambda m: m.push(()),
    b"N": lambda m: m.push(None),
    b"\x88": lambda m: m.push(True),
    b"\x89": lambda m: m.push(False),
    b"K": lambda m: m.push(m.number(1)),
    b"M": lambda m: m.push(m.number(2)),
    b"J": lambda m: m.push(m.number(4, signed=True)),
    b"\x8a": lambda m: m.push(int.from_bytes(m.raw(1), "little", signed=True)),
    b"U": lambda m: m.push(m.raw(1)),  # SHORT_BINSTRING
    b"T": lambda m: m.push(m.raw(4, signed=True)),  # BINSTRING
    b"C": lambda m: m.push(m.raw(1)),  # SHORT_BINBYTES
    b"B": lambda m: m.push(m.raw(4)),  # BINBYTES
    b"X": lambda m: m.push(m.raw(4).decode()),  # BINUNICODE
    b"\x8c": lambda m: m.push(m.raw(1).decode()),  # SHORT_BINUNICODE
    b"(": lambda m: m.mark(),
    b"t": lambda m: m.tuple_of(),
    b"\x85": lambda m: m.tuple_of(1),
    b"\x86": lambda m: m.tuple_of(2),
    b"\x87": lambda m: m.tuple_of(3),
    b"a": lambda m: m.append_one(),
    b"e": lambda m: m.append_all(),
    b"s": lambda m: m.set_one(),
    b"u": lambda m: m.set_all(),
    b"q": lambda m: m.remember(m.number(1)),  # BINPUT
    b"r": lambda m: m.remember(m.number(4)),  # LONG_BINPUT
    b"\x94": lambda m: m.remember(),  # MEMOIZE
    b"h": lambda m: m.recall(m.number(1)),  # BINGET
    b"j": lambda m: m.recall(m.number(4)),  # LONG_BINGET
    b"c": lambda m: m.name(m.line(), m.line()),  # GLOBAL
    b"\x93": lambda m: m.name_of_stack(),  # STACK_GLOBAL
    b"R": lambda m: m.call(),  # REDUCE
    b"b": lambda m: m.build(),  # BUILD
}
