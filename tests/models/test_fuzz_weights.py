"""Damaged weights and descriptions of models: read, or refused by name."""

import io
import json
import pickle
import struct
import zipfile

import jax
import numpy as np
import pytest
from references import parity
from safetensors import numpy as safetensors

import mutations
from switch import FULL
from tanager import models
from tanager._text import clean
from tanager.models import weights
from tanager.models.tensors import read_tensors


CASES = 600 if FULL else 200
ARRAYS = {
    "a/kernel": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": np.asarray([1.5, -2.0], np.float16),
}


def npz(save):
    file = io.BytesIO()
    save(file, **ARRAYS)
    return file.getvalue()


def fuzz(file, good, read):
    fuzzed = mutations.Fuzz(file.name)
    for content in mutations.of_bytes(good, CASES):
        file.write_bytes(content)
        found = fuzzed(read, file)
        for array in (found or {}).values():
            assert not isinstance(array, np.ndarray) or array.nbytes <= 2 * len(good)
    fuzzed.end()


@pytest.mark.parametrize(
    "good",
    [safetensors.save(ARRAYS), npz(np.savez), npz(np.savez_compressed)],
    ids=["safetensors", "npz", "compressed"],
)
def test_weights(tmp_path, good):
    fuzz(tmp_path / "model.weights", good, read_tensors)


@pytest.mark.parametrize("protocol", [2, 4])
def test_trees_in_pickles(tmp_path, protocol):
    tree = {"params": {"a": ARRAYS}, "step": np.float32(3)}
    fuzz(tmp_path / "params.dill", pickle.dumps(tree, protocol), read_tensors)


def test_indexes_of_safetensors(tmp_path):
    (tmp_path / "a.safetensors").write_bytes(safetensors.save(ARRAYS))
    index = {"weight_map": dict.fromkeys(ARRAYS, "a.safetensors"), "metadata": {}}
    file = tmp_path / "model.safetensors.index.json"
    fuzzed = mutations.Fuzz(str(tmp_path))
    for text in mutations.of_json(index, CASES):
        file.write_bytes(text)
        fuzzed(read_tensors, file)
    fuzzed.end()


def test_headers_of_safetensors(tmp_path):
    file = tmp_path / "model.safetensors"
    whole = safetensors.save(ARRAYS)
    length = int.from_bytes(whole[:8], "little")
    header, numbers = json.loads(whole[8 : 8 + length]), whole[8 + length :]
    fuzzed = mutations.Fuzz(file.name)
    for text in mutations.of_json(header, CASES):
        file.write_bytes(struct.pack("<Q", len(text)) + text + numbers)
        fuzzed(read_tensors, file)
    fuzzed.end()


def header(shape, descr="<f4"):
    text = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}"
    return b"\x93NUMPY\x01\0" + struct.pack("<H", len(text)) + text.encode()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (header((2**60,)), "its header says 4,611,686,018,427,387,904 bytes"),
        (header("("), "it has a header of no plain array"),
        (header("(" * 5000), "it has a header of no plain array"),
        (header((2,), "|O"), "is a pickle"),
        (header((2,), "|S0"), "a.npy: "),
        (header((2,), "f3"), "is cut short or damaged"),
    ],
)
def test_arrays_of_an_npz_that_attack(tmp_path, content, message):
    file = tmp_path / "m.npz"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a.npy", content)
    with pytest.raises(ValueError, match=rf"m\.npz'\) .*{message}"):
        read_tensors(file)


def zip_with(path, **changes):
    """An npz whose directory tells something else of its member than is there."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.npy", header((1,)) + b"\0\0\0\0")
        for name, value in changes.items():
            setattr(archive.infolist()[0], name, value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"file_size": 2**62}, "it unpacks"),
        ({"flag_bits": 1}, "it is encrypted"),
        ({"compress_type": 99}, "is cut short or damaged"),
        ({"header_offset": 2**40}, "is cut short or damaged"),
    ],
)
def test_zips_that_lie(tmp_path, changes, message):
    file = tmp_path / "m.npz"
    zip_with(file, **changes)
    with pytest.raises(ValueError, match=message) as refused:
        read_tensors(file)
    assert "m.npz" in str(refused.value)


def test_a_zip_that_unpacks_to_more_than_memory(tmp_path):
    """Many members that are all the same few bytes of the file."""
    file = tmp_path / "m.npz"
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.npy", bytes(30_000_000))
        (first,) = archive.infolist()
        for number in range(500):
            twin = zipfile.ZipInfo(f"{number}.npy")
            for name in ("CRC", "compress_size", "file_size", "header_offset"):
                setattr(twin, name, getattr(first, name))
            twin.compress_type = first.compress_type
            archive.filelist.append(twin)
    with pytest.raises(ValueError, match="so it is damaged"):
        read_tensors(file)


@pytest.fixture
def exported(tmp_path):
    template = parity.named("linear", (2, 2, 1), classes=3)
    model = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), template)
    weights.save(model, tmp_path / "model.safetensors")
    return tmp_path


CONFIG = {
    "tanager": {
        "model": {"name": "linear", "image_shape": [2, 2, 1], "options": {}},
        "classes": ["a", "b", "c"],
        "preprocessing": {
            "mean": [0.5],
            "std": [0.5],
            "size": [2, 2],
            "interpolation": "bicubic",
            "crop": 1.0,
            "squash": False,
        },
    }
}


def test_descriptions_of_exported_models(exported):
    file = exported / "config.json"
    fuzzed = mutations.Fuzz(str(exported))
    for text in mutations.of_json(CONFIG, CASES // 2):
        file.write_bytes(text)
        found = fuzzed(models.load_pretrained, exported)
        for name in found.classes if found else ():
            assert clean(name) == name
    fuzzed.end()
    file.write_text(json.dumps(CONFIG))
    assert models.load_pretrained(exported).classes == ("a", "b", "c")


@pytest.mark.parametrize("name", ["wrn-6000004-1", "wrn-10-1000000"])
def test_a_model_too_deep_to_be_built(exported, name):
    content = json.dumps(CONFIG).replace("linear", name)
    (exported / "config.json").write_text(content)
    with pytest.raises(ValueError, match="a depth and width up to 1000"):
        models.load_pretrained(exported)
