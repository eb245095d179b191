"""What to predict: files of images and folders of them, or a file of features."""

import collections
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tanager import _npy
from tanager import _validate as validate
from tanager._cache import expanded
from tanager._reading import reading
from tanager.data.decoding import SUFFIXES
from tanager.data.feature_files import read_arrays
from tanager.data.layout import ending, walked


_FEATURES = ("features", "test_features")


class Listed(NamedTuple):
    """Files of images, in order, and how many others there are by their ending."""

    files: list[str]
    others: dict[str, int]


def list_images(paths: Sequence[str | os.PathLike[str]]) -> Listed:
    """List files, and the images in folders and in the folders below.

    A file that is named is listed whatever its ending. In folders those are images that
    training reads: hidden files are left out, and DICOM files need no ending.
    """
    files, others = [], collections.Counter()
    for path in map(Path, paths):
        if path.is_dir():
            for folder, images, rest in walked(path):
                files += [str(folder / name) for name in images]
                others.update(ending(name) or "without an ending" for name in rest)
        elif path.exists():
            files.append(str(path))
        else:
            validate.refuse("file", str(path), "does not exist", "check its name")
    if not files:
        rule = f"hold no images ({', '.join(SUFFIXES)})"
        shown = " ".join(map(str, paths))
        validate.refuse("files", shown, rule, "name files, or a folder of them")
    return Listed(files, dict(others))


def read_feature_rows(path: str | os.PathLike[str]) -> np.ndarray:
    """Return float32[n, d], the features of n examples in a file without labels.

    It is an npy file of them, or an npz file with an array ``features``, else
    ``test_features``.
    """
    file = expanded(path)
    remedy = "save them with numpy.savez(FILE, features=…)"
    with reading(file, "has no features that can be read", remedy, "file"):
        if file.suffix == ".npy":
            with open(file, "rb") as stream:
                arrays = {"features": _npy.read_array(stream, file.stat().st_size)}
        else:
            arrays = read_arrays(file, _FEATURES, None, labelled=False)
        found = next((arrays[name] for name in _FEATURES if name in arrays), None)
        if found is None or found.ndim != 2 or found.dtype.kind not in "fiu":
            raise ValueError("it must have an array `features`, numbers[n, d]")
    return found.astype(np.float32)
