"""Trees in pickles: the same arrays come out, and nothing runs."""

import os
import pickle
import re
import shlex
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from haiku._src.data_structures import FlatMap

from tanager.models.tensors import read_tensors


TREE = {
    "net/~/linear": {
        "w": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b": np.asarray([1.5, -2.0], ">f8"),
    },
    "net": {
        "by_columns": np.asfortranarray(np.arange(4).reshape(2, 2)),
        "scalar": np.float32(0.5),
        "from_jax": jnp.asarray([1.0, 2.0]),
    },
}
FLAT = {f"{m}/{n}": leaf for m, of in TREE.items() for n, leaf in of.items()}


@pytest.fixture
def read(tmp_path):
    """Return a function that reads the content of a file."""

    def read(content, name="params.dill"):
        (tmp_path / name).write_bytes(content)
        return read_tensors(tmp_path / name)

    return read


def check(found):
    assert found.keys() == FLAT.keys()
    for name, leaf in FLAT.items():
        assert found[name].dtype.newbyteorder("=") == leaf.dtype.newbyteorder("=")
        np.testing.assert_array_equal(found[name], leaf)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize(
    "tree",
    [TREE, {"params": TREE, "network_state": {}}, {"params": FlatMap(TREE)}],
    ids=["bare", "checkpoint", "old haiku"],
)
def test_every_protocol_gives_the_same_arrays(read, tree, protocol):
    check(read(pickle.dumps(tree, protocol)))


class Dilled:
    """Saves an array as dill does."""

    def __init__(self, array):
        self.array = array

    def __reduce__(self):
        make, args, state = self.array.__reduce__()
        return _create_array, (make, args, state, None)


def _create_array(*_):
    raise AssertionError("a pickle was run")


def test_names_of_other_versions_are_known(read):
    """Names in protocol 2 are text: NumPy's before 2, dill's, and JAX's before 0.4."""
    arrays = {
        module: {name: Dilled(np.asarray(leaf)) for name, leaf in of.items()}
        for module, of in TREE.items()
    }
    content = pickle.dumps(arrays, 2).replace(
        f"c{__name__}\n".encode(), b"cdill._dill\n"
    )
    check(read(content, "F0_haiku.npz"))
    content = pickle.dumps(TREE, 2)
    for new, old in (
        (b"cnumpy._core.", b"cnumpy.core."),
        (b"_src.array\n_reconstruct", b"_src.device_array\nreconstruct_device"),
    ):
        assert new in content
        content = content.replace(new, old)
    check(read(content))


class Calls:
    """Calls a function when it is unpickled."""

    def __init__(self, function, *arguments):
        self.reduced = (function, arguments)

    def __reduce__(self):
        return self.reduced


@pytest.mark.parametrize(
    ("function", "arguments", "named"),
    [
        (os.system, ("touch PLANTED",), "posix.system"),
        (eval, ("open('PLANTED', 'w')",), "eval"),
        (open, ("PLANTED", "w"), ".open"),
        (subprocess.Popen, (["touch", "PLANTED"],), ".Popen"),
        (np.save, ("PLANTED.npy", [1]), "numpy.save"),
        (getattr, ("PLANTED", "upper"), ".getattr"),
    ],
)
@pytest.mark.parametrize("protocol", [2, 4])
def test_nothing_else_is_named_or_run(
    read, tmp_path, monkeypatch, protocol, function, arguments, named
):
    monkeypatch.chdir(tmp_path)
    bomb = Calls(function, *arguments)
    for tree in (bomb, {"params": TREE, "other": bomb}, {"a": {"b": bomb}}):
        message = f"it names .*{re.escape(named)}, which is not an array"
        with pytest.raises(ValueError, match=message) as refused:
            read(pickle.dumps(tree, protocol))
        assert len(str(refused.value).splitlines()) == 1
        assert not [*tmp_path.glob("PLANTED*")]


G = b"\x80\x02cnumpy\ndtype\n"


@pytest.mark.parametrize(
    "attack",
    [
        G + b"}X\x0c\0\0\0__setstate__Nsb.",  # writes into a stand-in …
        G + b"N}X\x08\0\0\0__init__Ns\x86b.",
        b"\x80\x02cdill._dill\n_create_array\nN}X\x0c\0\0\0__defaults__)s\x86b.",
        b"\x80\x02cdill._dill\n_create_array\n(cos\nsystem\n(S'true'\nt}tR.",
        b"\x80\x02(S'true'\nios\nsystem\n.",  # … or uses other ways to a name
        b"\x80\x02\x82\x01.",
        b"\x80\x02S'id'\nQ.",
        b"\x80\x04\x8c\x05numpy\x8c\x0edtype.__init__\x93.",
        b"\x80\x02r\xff\xff\xff\xff.",  # memory for any index
        b"\x80\x04\x95" + b"\xff" * 8 + b"N.",
        b"\x80\x04\x8e" + b"\xff" * 6 + b"\0\0.",
        b"\x80\x02" + b"(" * 100_000 + b"t" * 100_000 + b".",
    ],
)
def test_attacks_are_refused_and_leave_nothing_behind(read, attack):
    for _ in range(2):
        with pytest.raises(ValueError, match=r"weights \(=.*cannot be read as a haiku"):
            read(attack)
        check(read(pickle.dumps(TREE)))


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ([1], "it must hold a dictionary of modules, each one of arrays"),
        ({"params": 3}, "it must hold a dictionary of modules"),
        ({"a": {"b": {"c": np.zeros(1)}}}, "a/b is a dict, and must be an array"),
        ({"a": {1: np.zeros(1)}}, "it must hold a dictionary of modules"),
        ({"a": {"b": np.asarray([{}])}}, "it has numbers of type O8, which are not re"),
        (
            {"a": {"b": np.asarray(["x"])}},
            "it has numbers of type U1, which are not re",
        ),
    ],
)
def test_what_is_no_tree_of_arrays_is_refused(read, tree, message):
    with pytest.raises(ValueError, match=re.escape(message)) as refused:
        read(pickle.dumps(tree))
    assert 'if you trust its author, convert it: python -c "import sys, dill' in str(
        refused.value
    )


def test_an_array_of_another_size_than_its_numbers_is_refused(read):
    content = pickle.dumps({"a": {"b": np.zeros((2, 3), np.float32)}}, 2)
    shape = b"K\x02K\x03"
    assert shape in content
    for wrong in (b"K\x02K\x04", b"J\xff\xff\xff\xffJ\xfa\xff\xff\xff"):
        with pytest.raises(ValueError, match=r"has 24 bytes|one unknown dimension"):
            read(content.replace(shape, wrong))


def test_the_command_for_trusted_files_converts(read, tmp_path, monkeypatch):
    """Here with pickle in dill's place."""
    with pytest.raises(ValueError, match="if you trust its author") as refused:
        read(pickle.dumps({"params": TREE, "step": Calls(complex, 1, 2)}))
    _, _, program, *paths = shlex.split(str(refused.value).partition("convert it: ")[2])
    monkeypatch.setattr("sys.argv", ["-c", *paths])
    monkeypatch.setitem(sys.modules, "dill", pickle)
    exec(program, {})
    check(read_tensors(tmp_path / "params.npz"))
