"""Trees of arrays that haiku's users save by dill or pickle, read without running them.

jax_privacy's and DeepMind's NFNets' released weights are such files. A pickle is a
program that names functions and calls them. Here every name stands for one of a few
stand-ins, which make dictionaries and arrays; any other name is refused.
"""

import functools
import math
import pickle
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np


SUFFIXES = (".dill", ".npz", ".pickle", ".pkl")
"""Of files that may hold such a tree; NFNets' end in npz, although they are pickles."""

_DTYPE = re.compile(r"[?bfiu]\d{0,2}")


def read(path: Path) -> dict[str, np.ndarray]:
    """Return the arrays of a tree of parameters by name, ``module/parameter``.

    A file with an entry ``params`` holds other things beside the parameters, which are
    left out.

    Raises:
        ValueError: the file names something other than dictionaries and arrays, or
            does not hold a dictionary of modules, each a dictionary of arrays.
    """
    with open(path, "rb") as file:
        tree = _Reader(file).load()
    if isinstance(tree, Mapping) and "params" in tree:
        tree = tree["params"]
    found = {}
    for module, parameters in _items(tree):
        for name, parameter in _items(parameters):
            if not isinstance(parameter, _Array):
                kind = type(parameter).__name__
                raise ValueError(f"{module}/{name} is a {kind}, and must be an array")
            found[f"{module}/{name}"] = parameter.array
    return found


def _items(tree: Any) -> list[tuple[str, Any]]:
    if not isinstance(tree, dict) or not all(isinstance(name, str) for name in tree):
        raise ValueError("it must hold a dictionary of modules, each one of arrays")
    return list(tree.items())


class _Dtype:
    """What `numpy.dtype` pickles: a kind and a size, then the order of bytes."""

    def __init__(self, kind: Any, *_: Any):
        if not _DTYPE.fullmatch(kind):
            raise ValueError(f"it has numbers of type {kind:.40}, which are not read")
        self.dtype = np.dtype(kind)

    def __setstate__(self, state: Any) -> None:
        self.dtype = self.dtype.newbyteorder(state[1])


class _Array:
    """What `numpy.ndarray` pickles: nothing, then the numbers."""

    def __init__(self, *_: Any):
        self.array = np.empty(0, np.float32)

    def __setstate__(self, state: Any) -> None:
        _, shape, numbers, by_columns, content = state
        self.fill(content, numbers, shape, "F" if by_columns else "C")

    def fill(self, content: Any, numbers: Any, shape: Any, order: Any) -> "_Array":
        shape = tuple(shape)
        if len(content) != math.prod(shape) * numbers.dtype.itemsize:
            raise ValueError(f"an array of shape {shape} has {len(content):,} bytes")
        flat = np.frombuffer(content, numbers.dtype)
        self.array = flat.reshape(shape, order=order)
        return self


def _stand_ins() -> Mapping[str, Callable[..., Any]]:
    """Return what a file may name; made for each, as a pickle can write into them."""

    def restored(make: Any, args: Any, state: Any, *_: Any) -> Any:
        array = make(*args)
        array.__setstate__(state)
        return array

    known: dict[str, Callable[..., Any]] = {
        "_codecs.encode": functools.cache(lambda text, _: text.encode("latin1")),
        "collections.OrderedDict": dict,
        "haiku._src.data_structures.FlatMapping": dict,
        "numpy.dtype": _Dtype,
        "numpy.ndarray": lambda *_: None,
        "dill._dill._create_array": restored,
        "jax._src.array._reconstruct_array": restored,
        "jax._src.device_array.reconstruct_device_array": restored,
    }
    for core in ("numpy.core", "numpy._core"):  # before NumPy 2, and since
        known |= {
            f"{core}.multiarray._reconstruct": _Array,
            f"{core}.multiarray.scalar": lambda numbers, content: _Array().fill(
                content, numbers, (), "C"
            ),
            f"{core}.numeric._frombuffer": lambda content, numbers, shape, order: (
                _Array().fill(content, numbers, shape, order)
            ),
        }
    return known


# Python's, because the one in C takes memory for any index that a file claims.
class _Reader(pickle._Unpickler):
    """Read dictionaries and arrays; refuse to name anything else."""

    def __init__(self, file: Any):
        super().__init__(file)
        self._known = _stand_ins()

    def find_class(self, module: str, name: str) -> Any:
        """Return the stand-in for a name."""
        full = f"{module}.{name}"
        if full not in self._known:
            raise ValueError(f"it names {full:.80}, which is not an array")
        return self._known[full]
