"""Files of PyTorch's before 1.6: their tensors are read, and nothing is run."""

import collections
import pickle
import struct
from typing import Any

import numpy as np
import pytest

from tanager.models import pytorch


class _Named:
    """Pickles as a name of PyTorch's, called with arguments."""

    def __init__(self, module, name, *arguments):
        self.made = (module, name, arguments)


_PICKLER: Any = pickle._Pickler  # of Python, whose steps can be replaced


class _Pickler(_PICKLER):
    """Write names that cannot be imported here, and ids of storages."""

    def persistent_id(self, obj):
        return obj[1:] if isinstance(obj, tuple) and obj[:1] == ("id",) else None

    def save(self, obj, save_persistent_id=True):
        if not isinstance(obj, _Named):
            return super().save(obj, save_persistent_id)
        module, name, arguments = obj.made
        self.write(f"c{module}\n{name}\n".encode())
        if arguments:
            super().save(arguments)
            self.write(pickle.REDUCE)
        return None


def legacy(path, tensors, storages):
    """Write PyTorch's format before 1.6: `tensors` by name, `storages` by key."""
    with open(path, "wb") as file:
        for head in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True}):
            pickle.dump(head, file, 2)
        _Pickler(file, 2).dump(tensors)
        pickle.dump(list(storages), file, 2)
        for array in storages.values():
            file.write(struct.pack("<q", array.size) + array.tobytes())


def tensor(key, offset, shape, strides, kind="FloatStorage"):
    storage = ("id", "storage", _Named("torch", kind), key, "cpu", 0, None)
    return _Named(
        "torch._utils", "_rebuild_tensor_v2", storage, offset, shape, strides, False, {}
    )


def test_tensors_are_read_with_their_strides(tmp_path):
    numbers = np.arange(12, dtype=np.float32)
    tensors = collections.OrderedDict(
        plain=tensor("1", 0, (3, 4), (4, 1)),
        transposed=tensor("1", 0, (4, 3), (1, 4)),
        late=tensor("1", 10, (2,), (1,)),
        count=tensor("2", 0, (), (), "LongStorage"),
    )
    legacy(tmp_path / "w.pth", tensors, {"1": numbers, "2": np.array([7])})
    found = pytorch.read(tmp_path / "w.pth")
    np.testing.assert_array_equal(found["plain"], numbers.reshape(3, 4))
    np.testing.assert_array_equal(found["transposed"], numbers.reshape(3, 4).T)
    np.testing.assert_array_equal(found["late"], [10, 11])
    assert found["count"] == 7


def test_what_reaches_beyond_its_storage_is_refused(tmp_path):
    legacy(
        tmp_path / "w.pth",
        {"w": tensor("1", 8, (8,), (1,))},
        {"1": np.zeros(12, np.float32)},
    )
    with pytest.raises(ValueError, match="incompatible with shape"):
        pytorch.read(tmp_path / "w.pth")


@pytest.mark.parametrize(
    "name", [("os", "system"), ("builtins", "eval"), ("torch", "load")]
)
def test_other_names_are_never_looked_up(tmp_path, name):
    legacy(tmp_path / "w.pth", {"w": _Named(*name, "touch /tmp/never")}, {})
    with pytest.raises(ValueError, match=rf"names {name[0]}\.{name[1]}, which is not"):
        pytorch.read(tmp_path / "w.pth")
