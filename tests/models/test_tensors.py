import io
import json
import pickle
import re
import shlex
import struct
import zipfile

import ml_dtypes
import numpy as np
import orbax.checkpoint as orbax
import pytest
from safetensors import numpy as safetensors

from tanager.models.tensors import file_in, files_of, read_tensors


ARRAYS = {
    "a/kernel": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": np.asarray([1.5, -2.0], np.float16),
}


def npz(**arrays):
    file = io.BytesIO()
    np.savez_compressed(file, **arrays)
    return file.getvalue()


def zipped(**files):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return file.getvalue()


def header(text):
    return struct.pack("<Q", len(text)) + text


@pytest.mark.parametrize("content", [safetensors.save(ARRAYS), npz(**ARRAYS)])
def test_arrays_come_as_they_are(tmp_path, content):
    path = tmp_path / "weights"  # the name says nothing
    path.write_bytes(content)
    found = read_tensors(path)
    assert found.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array)


def test_bfloat16_is_known(tmp_path):
    array = np.asarray([1.5, -2.0], ml_dtypes.bfloat16)
    path = tmp_path / "model.safetensors"
    path.write_bytes(safetensors.save({"a": array}))
    assert read_tensors(path)["a"].dtype == ml_dtypes.bfloat16


class Bomb:
    """What a pickle may do on being read."""

    def __reduce__(self):
        return (open, ("/tmp/should-not-be-there", "w"))


WHOLE = safetensors.save(ARRAYS)
PICKLED = pickle.dumps(Bomb())


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "m.safetensors",
            b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 9\n",
            "is a Git LFS pointer, not the weights it points to: run `git lfs pull`",
        ),
        ("m.safetensors", b"", "is empty"),
        ("m.safetensors", WHOLE[:-3], "is cut short or damaged"),
        ("m.safetensors", WHOLE[:40], "is cut short or damaged"),
        ("m.safetensors", WHOLE[:8], "or only a part of one"),
        ("m.safetensors", WHOLE + b"more", "is cut short or damaged"),
        ("m.safetensors", header(b"{oops}"), "is cut short or damaged"),
        ("m.safetensors", header(b'{"a": 3}'), "is cut short or damaged"),
        ("m.safetensors", b"\xff" * 8 + b"{", "is cut short or damaged"),
        ("m.safetensors", b"<!DOCTYPE html><p>log in", "is a web page"),
        ("m.npz", npz(**ARRAYS)[:-30], "is cut short or damaged"),
        ("m.npz", npz(a=np.asarray([{"an": "object"}])), "is a pickle"),
        ("m.npz", zipped(**{"a.npy": b"no array"}), "a.npy: it is not an npy file"),
        ("m.npz", zipped(**{"notes.txt": b""}), "is a zip file with notes.txt"),
        ("m.bin", zipped(**{"archive/data.pkl": PICKLED}), "is a pickle"),
        ("m.pth", b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.", "is a pickle"),
        ("m.safetensors", PICKLED, "is a pickle"),
        ("m.PT", b"anything else", "is a pickle"),
        ("m.h5", b"\x89HDF\r\n\x1a\n" + bytes(9), "is neither a safetensors nor"),
    ],
)
def test_what_is_not_safe_or_not_whole_is_refused(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    start = f"weights (={str(path)!r}) "
    with pytest.raises(ValueError, match="^" + re.escape(start)) as refused:
        read_tensors(path)
    assert message in str(refused.value)
    assert path.read_bytes() == content


def test_what_is_not_there_is_refused(tmp_path):
    for path in (tmp_path, tmp_path / "nothing.safetensors"):
        with pytest.raises(ValueError, match="is not a file: give a "):
            read_tensors(path)


def test_quantised_numbers_are_refused_in_one_line(tmp_path):
    entries = {
        f"{name}.weight": {"dtype": dtype, "shape": [2], "data_offsets": [n, n + 2]}
        for n, (name, dtype) in zip(
            (0, 2, 4), (("a", "F8_E4M3"), ("b", "F8_E4M3"), ("c", "I8")), strict=True
        )
    }
    path = tmp_path / "m.safetensors"
    path.write_bytes(header(json.dumps(entries).encode()) + bytes(6))
    message = (
        f"weights (={str(path)!r}) has 2 of 3 tensors in F8_E4M3, which is not read: "
        "take the float32, float16 or bfloat16 weights of the same model"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        read_tensors(path)


INDEX = "model.safetensors.index.json"


@pytest.fixture
def sharded(tmp_path):
    """Return an index of two files, and a function that writes it otherwise."""
    names = {f"model-{n}.safetensors": [name] for n, name in enumerate(ARRAYS)}
    for shard, (name,) in names.items():
        (tmp_path / shard).write_bytes(safetensors.save({name: ARRAYS[name]}))

    def write(**changes):
        mapped = {name: shard for shard, (name,) in names.items()}
        content = {"metadata": {"total_size": 9}, "weight_map": mapped} | changes
        (tmp_path / INDEX).write_text(json.dumps(content))
        return tmp_path / INDEX

    return write


def test_an_index_stands_for_all_its_files(sharded, tmp_path):
    found = read_tensors(sharded())
    assert found.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(found[name], array)
    assert file_in(tmp_path) == tmp_path / INDEX
    assert files_of(tmp_path / INDEX) == [
        tmp_path / INDEX,
        *(tmp_path / f"model-{n}.safetensors" for n in (0, 1)),
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight_map": {"b": "../b.safetensors"}}, "names '../b.safetensors', which"),
        ({"weight_map": {"b": "/etc/passwd"}}, "names '/etc/passwd', which is not a"),
        ({"weight_map": {"b": ".."}}, "names '..', which is not"),
        ({"weight_map": {"b": 3}}, "names 3, which is not a safetensors"),
        ({"weight_map": {"b": INDEX}}, f"names '{INDEX}', which is not a safetensors"),
        ({"weight_map": {"b": []}}, "is not an index of safetensors"),
        ({"weight_map": ["b"]}, "is not an index of safetensors"),
        (
            {"weight_map": {"b": "c.safetensors"}},
            "names c.safetensors, which is not be",
        ),
        (
            {"weight_map": {"c": "model-0.safetensors"}},
            f"does not hold the tensors that {INDEX} says it does: download both again",
        ),
    ],
)
def test_an_index_that_does_not_fit_is_refused(sharded, changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        read_tensors(sharded(**changes))


def test_an_index_alone_is_refused(sharded):
    index = sharded()
    (index.parent / "model-1.safetensors").unlink()
    with pytest.raises(
        ValueError, match=r"names model-1\.safetensors, which is not be"
    ):
        read_tensors(index)
    index.write_text("{}")
    with pytest.raises(ValueError, match="it has no 'weight_map'"):
        files_of(index)


def test_a_folder_without_weights_says_what_to_do(tmp_path):
    for name in "edcba":
        (tmp_path / f"{name}.txt").touch()
    with pytest.raises(
        ValueError, match=r"has no model.safetensors: it holds a\.txt, b"
    ):
        file_in(tmp_path)
    folder = tmp_path / "of mine"
    folder.mkdir()
    (folder / "pytorch_model.bin").write_bytes(PICKLED)
    with pytest.raises(ValueError, match="is a pickle, which can run any") as refused:
        file_in(folder)
    command = str(refused.value).partition("nothing but tensors: ")[2]
    assert command.startswith(
        'python -c "import sys, torch; from safetensors.torch imp'
    )
    _, option, program, *paths = shlex.split(command)
    assert option == "-c" and "weights_only=True" in program
    compile(program, "command", "exec")
    assert paths == [
        str(folder / n) for n in ("pytorch_model.bin", "model.safetensors")
    ]
    (folder / "model.safetensors").write_bytes(WHOLE)
    assert file_in(folder) == folder / "model.safetensors"


def test_a_folder_of_orbax_is_converted_by_the_command(tmp_path, monkeypatch):
    """As jax_privacy releases its networks since version 0.3."""
    arrays = {"net/conv": {"w": ARRAYS["a/kernel"]}, "net": {"b": ARRAYS["b"]}}
    folder = tmp_path / "wrn"
    orbax.PyTreeCheckpointer().save(folder, {"params": arrays, "network_state": {}})
    with pytest.raises(
        ValueError, match="is a checkpoint of orbax: convert"
    ) as refused:
        file_in(folder)
    _, _, program, *paths = shlex.split(str(refused.value).partition("it: ")[2])
    monkeypatch.setattr("sys.argv", ["-c", *paths])
    exec(program, {})
    found = read_tensors(tmp_path / "wrn.npz")
    assert found.keys() == {"net/conv/w", "net/b"}
    np.testing.assert_array_equal(found["net/conv/w"], ARRAYS["a/kernel"])
