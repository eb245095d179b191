"""Weight files of anyone, read without trusting them.

Only arrays are read: safetensors, in one file or in several with an index, NumPy's npz
without pickled objects, and haiku's trees in a pickle (`pickled`). Other kinds of
files, and incomplete ones, are refused by name.
"""

import collections
import contextlib
import json
import os
import shlex
import zipfile
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from tanager import _npy
from tanager._reading import read_json, reading, refuse_file
from tanager.models import pickled


SAFETENSORS = "model.safetensors"
"""The file of weights in a folder or a repository on the Hub."""
INDEX = f"{SAFETENSORS}.index.json"
"""The file that names the files of weights, where there are several."""
FLOATS = "float32, float16 or bfloat16 weights of the same model"
"""What to take where numbers are quantised."""

_TORCH = (".bin", ".pt", ".pth", ".ckpt")
_AGAIN = "download it again"
_DTYPES = {"BOOL", "F16", "BF16", "F32", "F64"}
_DTYPES |= {f"{sign}{bits}" for sign in "IU" for bits in (8, 16, 32, 64)}

_CONVERT = """\
import sys, torch
from safetensors.torch import save_file
t = torch.load(sys.argv[1], 'cpu', weights_only=True)
t = t.get('state_dict', t.get('model', t))
save_file({k: v.clone().contiguous() for k, v in t.items()}, sys.argv[2])"""
_SAVE_TREE = """
t = t.get('params', t)
numpy.savez(sys.argv[2], **{f'{m}/{n}': a for m in t for n, a in t[m].items()})"""
_CONVERT_DILL = f"""\
import sys, dill, numpy, pathlib
t = dill.loads(pathlib.Path(sys.argv[1]).read_bytes()){_SAVE_TREE}"""
_CONVERT_ORBAX = f"""\
import os, sys, numpy
from orbax.checkpoint import PyTreeCheckpointer as Reader
t = Reader().restore(os.path.abspath(sys.argv[1])){_SAVE_TREE}"""
_OF_ORBAX = ("_METADATA", "commit_success.txt")


def read_tensors(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Return every array of a file of weights by its name, in its dtype.

    That is a safetensors file, an index of several, an npz file, or a haiku tree.

    Raises:
        ValueError: there is no such file; it is a pickle of another kind, and reading
            one can run any program; its numbers are quantised; it is a Git LFS pointer,
            is cut short or damaged, or is of another kind.
    """
    path = Path(path)
    if path.name.endswith(INDEX):
        return _read_shards(path)
    if not path.is_file():
        _refuse(path, "is not a file", "give a .safetensors or .npz file")
    with _reading(path, "cannot be read"), open(path, "rb") as file:
        start = file.read(256)
    if start.startswith(b"version https://git-lfs"):
        rule = "is a Git LFS pointer, not the weights it points to"
        remedy = "run `git lfs pull` in its repository, or download the file itself"
        _refuse(path, rule, remedy)
    if not start:
        _refuse(path, "is empty", _AGAIN)
    if start.startswith(b"PK"):
        return _read_npz(path)
    if start[0] == 0x80 and path.suffix.lower() in pickled.SUFFIXES:
        convert = _command(_CONVERT_DILL, path, ".npz")
        remedy = f"if you trust its author, convert it: {convert}"
        rule = "cannot be read as a haiku tree of arrays"
        with reading(path, rule, remedy, argument="weights"):
            return pickled.read(path)
    if start[8:9] != b"{":
        _refuse_other(path, start)
    return _read_safetensors(path)


def note_in(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return what tanager noted in a safetensors file of a run; nothing in others.

    Raises:
        ValueError: it is not such a file.
    """
    from safetensors import safe_open

    with _reading(Path(path), "cannot be read"), safe_open(path, "numpy") as file:
        return {**json.loads((file.metadata() or {}).get("tanager", "{}"))}


def _refuse(path: Path, rule: str, remedy: str) -> NoReturn:
    refuse_file(path, rule, remedy, argument="weights")


def _reading(path: Path, rule: str) -> contextlib.AbstractContextManager[None]:
    return reading(path, rule, _AGAIN, argument="weights")


def _refuse_pickle(path: Path, remedy: str = "") -> NoReturn:
    convert = _command(_CONVERT, path, ".safetensors")
    remedy = remedy or (
        f"take the {SAFETENSORS} of the same model, or make one with torch 2.6 or "
        f"later, which here reads nothing but tensors: {convert}"
    )
    _refuse(path, "is a pickle, which can run any program when it is read", remedy)


def _command(program: str, path: Path, suffix: str) -> str:
    """Return the command that runs a program on a file to write one beside it."""
    goal = path.with_suffix(suffix)
    if goal == path:
        goal = path.with_suffix(f".converted{suffix}")
    if goal.name == "pytorch_model.safetensors":
        goal = goal.with_name(SAFETENSORS)
    program = "; ".join(program.splitlines())
    return f'python -c "{program}" {shlex.quote(str(path))} {shlex.quote(str(goal))}'


def _refuse_other(path: Path, start: bytes) -> NoReturn:
    if path.suffix.lower() in _TORCH or start[0] == 0x80:
        _refuse_pickle(path)
    if start.lstrip().startswith(b"<"):
        remedy = "the download was answered by a login or error page: follow its link"
        _refuse(path, "is a web page", remedy)
    rule = "is neither a safetensors nor an npz file, or only a part of one"
    remedy = f"other formats must be converted first; if it should be one, {_AGAIN}"
    _refuse(path, rule, remedy)


def _read_safetensors(path: Path) -> dict[str, np.ndarray]:
    from safetensors import safe_open

    # Unlike safetensors.numpy.load, safe_open knows bfloat16.
    with (
        _reading(path, "is cut short or damaged"),
        safe_open(path, framework="numpy") as file,
    ):
        kinds = collections.Counter(
            file.get_slice(name).get_dtype()
            for name in file.keys()  # noqa: SIM118 (it is no mapping)
        )
        for kind in kinds.keys() - _DTYPES:
            count = f"{kinds[kind]} of {kinds.total()} tensors"
            rule = f"has {count} in {kind}, which is not read"
            _refuse(path, rule, f"take the {FLOATS}")
        return file.get_tensors()


def files_of(path: Path) -> list[Path]:
    """Return the files that make up weights: one, or an index and what it names."""
    if not path.name.endswith(INDEX):
        return [path]
    return [path, *(path.parent / shard for shard in sorted(_shards(path)))]


def file_in(folder: Path) -> Path:
    """Return the file of weights in a folder, or the index of several."""
    for name in (SAFETENSORS, INDEX):
        if (folder / name).is_file():
            return folder / name
    if (folder / "pytorch_model.bin").is_file():
        _refuse_pickle(folder / "pytorch_model.bin")
    if any((folder / name).is_file() for name in _OF_ORBAX):
        convert = _command(_CONVERT_ORBAX, folder, ".npz")
        _refuse(folder, "is a checkpoint of orbax", f"convert it: {convert}")
    others = sorted(file.name for file in folder.iterdir() if file.is_file())
    more = ["…"] if len(others) > 4 else []
    held = ", ".join(others[:4] + more) or "no file"
    _refuse(folder, f"has no {SAFETENSORS}", f"it holds {held}: name a file of weights")


def _shards(index: Path) -> dict[str, set[str]]:
    """Return the tensors of each file that an index names."""
    named = collections.defaultdict(set)
    with _reading(index, "is not an index of safetensors"):
        for tensor, shard in read_json(index, _AGAIN, "weights")["weight_map"].items():
            named[shard].add(tensor)
    for shard in named:
        # A path could name any file of this machine.
        beside = isinstance(shard, str) and Path(shard).name == shard
        if not beside or not shard.endswith(".safetensors"):
            rule = f"names {shard!r:.80}, which is not a safetensors file beside it"
            _refuse(index, rule, _AGAIN)
    return named


def _read_shards(index: Path) -> dict[str, np.ndarray]:
    found = {}
    for shard, names in sorted(_shards(index).items()):
        path = index.parent / shard
        if not path.is_file():
            rule = f"names {shard}, which is not beside it"
            _refuse(index, rule, "download that file too")
        tensors = read_tensors(path)
        if tensors.keys() != names:
            rule = f"does not hold the tensors that {index.name} says it does"
            _refuse(path, rule, "download both again")
        found |= tensors
    return found


def _read_npz(path: Path) -> dict[str, np.ndarray]:
    with _reading(path, "is cut short or damaged"), zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        if any(name.endswith(".pkl") for name in names):
            _refuse_pickle(path)  # torch's
        strange = [name for name in names if not name.endswith(".npy")]
        if strange:
            rule = f"is a zip file with {strange[0]:.80}"
            _refuse(path, rule, "an npz holds .npy files")
        try:
            return dict(_npy.arrays(archive, path.stat().st_size))
        except _npy.ObjectsError:
            _refuse_pickle(path, "save it again without objects, as plain arrays")
