"""Files that PyTorch before 1.6 saved, read without running them.

Such a file is four pickles (a magic number, a version, the machine, the names), one of
the keys of the storages, and each storage: a count of 8 bytes and its numbers. A pickle
is a program that names functions and calls them. Here tensors are all it can name.
"""

import collections
import io
import pickle
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np


def read(path: Path) -> dict[str, np.ndarray]:
    """Return the tensors of a file by name.

    It is for files of known contents: a forged one could take all memory.
    """
    with open(path, "rb") as file:
        stream = io.BytesIO(file.read())
    for _ in range(3):
        _Tensors(stream).load()
    named, keys = (_Tensors(stream).load() for _ in range(2))
    storages = {}
    for key in keys:
        count = int.from_bytes(stream.read(8), "little")
        storages[key] = (count, stream.tell())
        sizes = {one.dtype.itemsize for one in named.values() if one.storage == key}
        stream.seek(count * sizes.pop(), io.SEEK_CUR)
    return {
        name: _array(stream, one, *storages[one.storage]) for name, one in named.items()
    }


class _Tensor(NamedTuple):
    """Where the numbers of a tensor are; offset and strides count numbers."""

    storage: str
    dtype: np.dtype
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


_DTYPES = {"FloatStorage": np.dtype("<f4"), "LongStorage": np.dtype("<i8")}


def _rebuilt(storage: Any, offset: int, shape: Any, strides: Any, *_: Any) -> _Tensor:
    dtype, key = storage[1:3]
    return _Tensor(key, dtype, offset, tuple(shape), tuple(strides))


class _Tensors(pickle.Unpickler):
    """Read tensors; refuse to name anything else."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        known = {
            ("collections", "OrderedDict"): collections.OrderedDict,
            ("torch._utils", "_rebuild_tensor_v2"): _rebuilt,
        }
        if (module, name) not in known:
            full = f"{module}.{name}"
            raise ValueError(f"it names {full:.80}, which is not a tensor")
        return known[module, name]

    def persistent_load(self, pid: Any) -> Any:
        return pid


def _array(stream: io.BytesIO, one: _Tensor, count: int, start: int) -> np.ndarray:
    size = one.dtype.itemsize
    return np.ndarray(  # refuses what would reach beyond the storage
        one.shape,
        one.dtype,
        stream.getbuffer()[start : start + count * size],
        one.offset * size,
        tuple(stride * size for stride in one.strides),
    ).copy()
