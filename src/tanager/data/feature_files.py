"""Read the arrays of a file of features, in any of its layouts, without trusting it."""

import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from tanager import _npy
from tanager._reading import AGAIN, refuse_file
from tanager.data.tables import class_names, is_one_of, read_columns


ARGUMENT = "features_from"
SPLITS = ("train", "test")
_FIRST = "train_features.npy"
"""The npy file that stands for all of its folder."""
_LAYOUTS = f"give a .npz file, a .parquet file, or {_FIRST} with its neighbours"


def refuse(file: Path, rule: str, remedy: str = "") -> NoReturn:
    """Refuse a file of features: which, what is wrong, what to do."""
    refuse_file(file, rule, remedy, ARGUMENT)


def read_arrays(
    file: Path, wanted: Sequence[str], groups: str | None, *, labelled: bool
) -> dict[str, np.ndarray]:
    """Return those of the wanted arrays that a file has, or the files beside it.

    A table must have labels if it is `labelled`; else they are read if they are there.
    """
    if not file.exists():
        refuse(file, "does not exist", _LAYOUTS)
    if file.suffix == ".parquet":
        return _parquet(file, groups, labelled)
    if file.is_dir() or file.name == _FIRST:
        folder = file if file.is_dir() else file.parent
        named = {name: folder / f"{name}.npy" for name in wanted}
        return {name: _npy_file(each) for name, each in named.items() if each.exists()}
    if file.suffix != ".npz":
        refuse(file, "is in no layout of features", _LAYOUTS)
    with zipfile.ZipFile(file) as archive:
        found = _npy.members(archive, file.stat().st_size)
        arrays = {}
        for name in wanted:
            if info := found.get(f"{name}.npy"):
                with archive.open(info) as stream:
                    arrays[name] = _array(file, name, stream, info.file_size)
        return arrays


def names_in(file: Path) -> list[str]:
    """Return the names of all arrays of an npz file, or of npy files in a folder."""
    if file.suffix == ".npz":
        with zipfile.ZipFile(file) as archive:
            names = archive.namelist()
    else:
        folder = file if file.is_dir() else file.parent
        names = [each.name for each in folder.glob("*.npy")]
    return sorted(name.removesuffix(".npy") for name in names)


def _array(file: Path, name: str, stream: Any, size: int) -> np.ndarray:
    try:
        return _npy.read_array(stream, size)
    except _npy.ObjectsError:
        remedy = "save numbers, or text as array.astype(str)"
        return refuse(file, f"{name} holds Python objects", remedy)


def _npy_file(file: Path) -> np.ndarray:
    size = file.stat().st_size
    with open(file, "rb") as stream:
        header = _npy.read_header(stream)
        large = len(header.shape) == 2 and header.dtype == np.float32
        if not large or header.by_columns:
            stream.seek(0)
            return _array(file, file.stem, stream, size)
        if stream.tell() + header.nbytes > size:
            refuse(file, "is truncated", AGAIN)
        return np.memmap(file, np.float32, "r", stream.tell(), header.shape)


def _parquet(file: Path, groups: str | None, labelled: bool) -> dict[str, np.ndarray]:
    import pyarrow.compute as pc

    def columns(schema: Any) -> list[str]:
        names = schema.names
        wanted = ["features", "split", *([groups] if groups else [])]
        wanted += ["label"] if labelled or "label" in names else []
        for name in wanted:
            if name not in names:
                found = f"its columns are {names!r:.300}"
                refuse(file, f"has no column {name!r}", found)
        return wanted

    table = read_columns(file, columns)
    found = {name: _whole(file, name, table[name]) for name in table.column_names}
    lists = found.pop("features")
    kind = lists.type
    if not is_one_of(kind, "list", "large_list", "fixed_size_list"):
        refuse(file, f"column 'features' holds {kind!s:.100}", "it must hold lists")
    values = lists.flatten()
    if values.null_count or not len(lists) or len(values) % len(lists):
        refuse(file, "column 'features' has lists of several lengths, or with gaps")
    lengths = np.asarray(pc.call_function("list_value_length", [lists]))
    if lengths.min() != lengths.max():
        refuse(file, "column 'features' has lists of several lengths")
    others = {name: np.array(each.to_pylist()) for name, each in found.items()}
    splits = others.pop("split")
    if unknown := {*np.unique(splits).tolist()} - {*SPLITS}:
        rule = f"column 'split' has {str(min(map(str, unknown)))!r:.100}"
        refuse(file, rule, "it must be train or test")
    features = np.asarray(values).reshape(len(lists), -1)
    arrays = {}
    for split in SPLITS:
        rows = splits == split
        if rows.any():
            arrays[f"{split}_features"] = features[rows]
            for name, each in others.items():
                own = "labels" if name == "label" else name
                arrays[f"{split}_{own}"] = each[rows]
    names = class_names(table)
    return arrays if names is None else arrays | {"classes": np.array(names)}


def _whole(file: Path, name: str, column: Any) -> Any:
    """Return a column as one checked array without gaps."""
    import pyarrow as pa

    array = column.combine_chunks()
    array = pa.concat_arrays(array.chunks) if hasattr(array, "chunks") else array
    # Arrow itself believes the lengths and offsets in a file.
    array.validate(full=True)
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if array.null_count:
        row = array.is_null().to_pylist().index(True)
        refuse(file, f"row {row} has no {name!r}")
    return array
