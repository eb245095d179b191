"""Weight files of anyone, opened without trusting them.

Only arrays are read: safetensors, and NumPy's npz without pickled objects. Whatever
else carries weights, and whatever did not arrive whole, is refused by name.
"""

import json
import os
import zipfile
import zlib
from pathlib import Path
from typing import NoReturn

import numpy as np

from tanager import _validate as validate


_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_LARGEST_HEADER = 100_000_000
_AGAIN = "download it again"


def read_tensors(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Return every array of a safetensors or npz file by its name.

    Args:
        path: the file.

    Returns:
        NumPy arrays in the dtypes of the file; bfloat16 as `ml_dtypes.bfloat16`.

    Raises:
        ValueError: there is no such file; it is a pickle, which could run any program
            on being read; it is a Git LFS pointer, is cut short or damaged, or is of
            another kind.
    """
    path = Path(path)
    if not path.is_file():
        _refuse(path, "is not a file", "give a .safetensors or .npz file")
    with open(path, "rb") as file:
        start = file.read(256)
    if start.startswith(b"version https://git-lfs"):
        _refuse(
            path,
            "is a Git LFS pointer, not the weights it points to",
            "run `git lfs pull` in its repository, or download the file itself",
        )
    if not start:
        _refuse(path, "is empty", _AGAIN)
    if start.startswith(b"PK"):
        return _read_npz(path)
    if start[8:9] != b"{":
        _refuse_other(path, start)
    return _read_safetensors(path)


def _refuse(path: Path, rule: str, remedy: str) -> NoReturn:
    validate.refuse("weights", os.fspath(path), rule, remedy)


def _refuse_pickle(path: Path) -> NoReturn:
    _refuse(
        path,
        "is a pickle, which can run any program on being read",
        "take the model.safetensors of the same model; if there is none, convert the "
        "file where you would run its author's code",
    )


def _refuse_other(path: Path, start: bytes) -> NoReturn:
    if path.suffix.lower() in _PICKLES or start[0] == 0x80:
        _refuse_pickle(path)
    if start.lstrip().startswith(b"<"):
        _refuse(
            path,
            "is a web page",
            "the download was answered by a login or error page: follow its link",
        )
    _refuse(
        path,
        "is neither a safetensors nor an npz file, or only a part of one",
        f"other formats must be converted first; if it should be one, {_AGAIN}",
    )


def _read_safetensors(path: Path) -> dict[str, np.ndarray]:
    from safetensors import SafetensorError, safe_open

    size = path.stat().st_size
    with open(path, "rb") as file:
        header_size = int.from_bytes(file.read(8), "little")
        if header_size > _LARGEST_HEADER:
            _refuse(path, "is not a safetensors file", "its header is impossibly long")
        header = file.read(header_size)
    try:
        entries = json.loads(header)
        ends = (entry["data_offsets"][1] for entry in _arrays(entries).values())
        whole = 8 + header_size + max(ends, default=0)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError):
        cut = len(header) < header_size
        rule = "is cut short" if cut else "has a damaged header"
        _refuse(path, rule, _AGAIN)
    if size < whole:
        _refuse(path, f"is cut short: {size} of {whole} bytes", f"{_AGAIN}, or resume")
    try:
        # Unlike safetensors.numpy.load, safe_open knows bfloat16.
        with safe_open(path, framework="numpy") as file:
            return file.get_tensors()
    except (SafetensorError, TypeError, AttributeError, KeyError) as error:
        _refuse(path, f"cannot be read as safetensors ({error})", _AGAIN)


def _arrays(entries: dict) -> dict:
    return {name: entries[name] for name in entries if name != "__metadata__"}


def _read_npz(path: Path) -> dict[str, np.ndarray]:
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
        if any(name.endswith(".pkl") for name in names):
            _refuse_pickle(path)
        strange = [name for name in names if not name.endswith(".npy")]
        if strange:
            _refuse(path, f"is a zip file with {strange[0]}", "an npz holds .npy files")
        with np.load(path, allow_pickle=False) as file:
            arrays = {}
            for name in file.files:
                try:
                    arrays[name] = file[name]
                except ValueError as error:
                    if "allow_pickle" in str(error):
                        _refuse_pickle(path)
                    _refuse(path, f"has a damaged {name} ({error})", _AGAIN)
                if not isinstance(arrays[name], np.ndarray):
                    _refuse(path, f"has a damaged {name}", _AGAIN)
            return arrays
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError) as error:
        _refuse(path, f"is cut short or damaged ({error})", _AGAIN)
