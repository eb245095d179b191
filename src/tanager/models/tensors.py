"""Weight files of anyone, read without trusting them.

Only arrays are read: safetensors, and NumPy's npz without pickled objects. Other kinds
of files, and incomplete ones, are refused by name.
"""

import contextlib
import os
import zipfile
from pathlib import Path
from typing import NoReturn

import numpy as np

from tanager import _npy
from tanager._reading import reading, refuse_file


_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_AGAIN = "download it again"


def read_tensors(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Return every array of a safetensors or npz file by its name, in its dtype.

    Raises:
        ValueError: there is no such file; it is a pickle, which can run any program
            when it is read; it is a Git LFS pointer, is cut short or damaged, or is of
            another kind.
    """
    path = Path(path)
    if not path.is_file():
        _refuse(path, "is not a file", "give a .safetensors or .npz file")
    with _reading(path, "cannot be read"), open(path, "rb") as file:
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
    refuse_file(path, rule, remedy, argument="weights")


def _reading(path: Path, rule: str) -> contextlib.AbstractContextManager[None]:
    return reading(path, rule, _AGAIN, argument="weights")


def _refuse_pickle(path: Path) -> NoReturn:
    _refuse(
        path,
        "is a pickle, which can run any program when it is read",
        "take the model.safetensors of the same model; if there is none, convert the "
        "file where you would run its author's code",
    )


def _refuse_other(path: Path, start: bytes) -> NoReturn:
    if path.suffix.lower() in _PICKLES or start[0] == 0x80:
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
        return file.get_tensors()


def _read_npz(path: Path) -> dict[str, np.ndarray]:
    with (
        _reading(path, "is cut short or damaged"),
        zipfile.ZipFile(path) as archive,
    ):
        names = archive.namelist()
        if any(name.endswith(".pkl") for name in names):
            _refuse_pickle(path)
        strange = [name for name in names if not name.endswith(".npy")]
        if strange:
            rule = f"is a zip file with {strange[0]:.80}"
            _refuse(path, rule, "an npz holds .npy files")
        try:
            return dict(_npy.arrays(archive, path.stat().st_size))
        except _npy.ObjectsError:
            _refuse_pickle(path)
