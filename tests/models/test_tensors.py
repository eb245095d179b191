import io
import json
import pickle
import re
import struct
import zipfile

import ml_dtypes
import numpy as np
import pytest
from safetensors import numpy as safetensors

from tanager.models.tensors import read_tensors


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


def test_a_dtype_that_numpy_lacks_is_refused(tmp_path):
    entry = {"dtype": "F8_E4M3", "shape": [2], "data_offsets": [0, 2]}
    path = tmp_path / "m.safetensors"
    path.write_bytes(header(json.dumps({"a": entry}).encode()) + b"\0\0")
    try:
        assert read_tensors(path)["a"].shape == (2,)  # a newer safetensors knows it
    except ValueError as error:
        assert "is cut short or damaged" in str(error)
